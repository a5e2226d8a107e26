"""glob and grep over an in-memory tree, against the matcher's own library and plain Python."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_server import memory_vfs
from wcmatch import glob as wcglob

from vfsd import search
from vfsd.core.types import Caller, SetAttr
from vfsd.paths import Paths

ROOT = Caller(0, 0)
USER = Caller(1000, 1000)


def searching(files: Mapping[str, bytes | str], what: Callable[[Paths], Any], *prefixes: bytes) -> Any:
    """Make ``files`` in a new tree and run the search ``what`` on it."""

    async def run() -> Any:
        paths = Paths(memory_vfs(*prefixes))
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            await paths.write_file(path.encode(), data, ROOT)
        return await what(paths)

    return trio.run(run)


def glob(files: list[str], pattern: str, path: str = "/", **more: Any) -> list[str]:
    found = searching(
        dict.fromkeys(files, b"x\n"), lambda paths: search.glob(paths, pattern, path.encode(), ROOT, **more)
    )
    assert not found.truncated and found.reason is None
    return [match.path.decode() for match in found.matches]


def grep(files: Mapping[str, bytes | str], pattern: str, path: str = "/", **more: Any) -> list[tuple[str, int, str]]:
    found = searching(files, lambda paths: search.grep(paths, pattern.encode(), path.encode(), ROOT, **more))
    assert not found.truncated
    return [(hit.path.decode(), hit.line, hit.text.decode()) for hit in found.matches]


TREE = [
    "/top.py",
    "/src/app/main.py",
    "/src/app/main.ts",
    "/src/x.md",
    "/.github/workflows/ci.yml",
    "/a.yml",
    "/d/.env",
    "/.env",
    "/app/.kimi/skills/report/report.md",
    "/test1.txt",
    "/testa.txt",
    "/pkg/[...slug]/page.tsx",
    "/src/.hidden.py",
    "/dir.py/inside",
    "/caf\u00e9.txt",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", ["/src/app/main.py", "/top.py"]),
        ("**/*.py", ["/src/app/main.py", "/top.py"]),
        ("/*.py", ["/top.py"]),
        ("src/**/*.py", ["/src/app/main.py"]),
        ("*.yml", ["/.github/workflows/ci.yml", "/a.yml"]),
        ("**/*.yml", ["/a.yml"]),
        (".github/**", ["/.github/workflows/ci.yml"]),
        (".env", ["/.env", "/d/.env"]),
        ("*.{py,ts}", ["/src/app/main.py", "/src/app/main.ts", "/top.py"]),
        ("src/app/*.{py,t{s,sx}}", ["/src/app/main.py", "/src/app/main.ts"]),
        ("{src/app,pkg/*}/*.ts*", ["/pkg/[...slug]/page.tsx", "/src/app/main.ts"]),
        ("test[0-9].txt", ["/test1.txt"]),
        ("test[!0-9].txt", ["/testa.txt"]),
        ("test[^0-9].txt", ["/testa.txt"]),
        ("?op.py", ["/top.py"]),
        ("**/report.md", []),
        ("app/.kimi/**/report.md", ["/app/.kimi/skills/report/report.md"]),
        ("report.md", ["/app/.kimi/skills/report/report.md"]),
        ("nothing*", []),
        (".*.py", ["/src/.hidden.py"]),
        ("src/*", ["/src/x.md"]),
        ("page.tsx", ["/pkg/[...slug]/page.tsx"]),
        ("caf?.txt", ["/caf\u00e9.txt"]),
        ("[a-", []),
        ("*.{py", []),
        ("dir.py/", []),
    ],
)
def test_glob(pattern: str, expected: list[str]) -> None:
    assert glob(TREE, pattern) == expected


def test_glob_is_below_its_path_and_names_files_whole() -> None:
    assert glob(TREE, "*.py", "/src") == ["/src/app/main.py"]
    assert glob(TREE, "/app/*.py", "/src/") == ["/src/app/main.py"]
    assert glob(TREE, "*.ts", "src//./app") == ["/src/app/main.ts"]


def test_paths_come_in_byte_order() -> None:
    files = ["/a/b", "/a.c", "/a-d/e", "/a0", "/a/a/z", "/Z"]
    assert glob(files, "*") == sorted(files)
    assert [path for path, _, _ in grep(dict.fromkeys(files, "x"), "x")] == sorted(files)


NAMES = st.sampled_from(["a", "b.py", ".h", ".h.py", "src", "x.ts", "[q]", "a b"])
SEGMENTS = st.sampled_from(
    [
        "*",
        "**",
        "*.py",
        "?",
        "a",
        "src",
        ".h",
        ".*",
        "[ab]*",
        "[!a]*",
        "{a,src}",
        "*.{py,ts}",
        "b.py",
        "[.]h",
        "{a/b,src}",
    ]
)


@settings(max_examples=150)
@given(
    st.lists(st.lists(NAMES, min_size=1, max_size=4).map("/".join), min_size=1, max_size=12, unique=True),
    st.lists(SEGMENTS, min_size=1, max_size=4).map("/".join),
    st.sampled_from(["", "/"]),
)
@pytest.mark.slow
def test_glob_finds_what_the_matcher_library_says(files: list[str], pattern: str, anchor: str) -> None:
    files = [f for f in files if not any(other.startswith(f + "/") for other in files)]
    compiled = wcglob.compile(pattern, flags=wcglob.BRACE | wcglob.GLOBSTAR)
    whole = "/" in anchor + pattern
    expected = [f for f in files if compiled.match(f if whole else PurePosixPath(f).name)]
    assert glob([f"/{f}" for f in files], anchor + pattern) == sorted(f"/{f}" for f in expected)


@pytest.mark.parametrize("pattern", ["../*.py", "a/../b", "..", "a\\..\\b", "{a,b}" * 12, "{1..100000}"])
def test_refused_patterns(pattern: str) -> None:
    for what in (
        lambda paths: search.glob(paths, pattern, b"/", ROOT),
        lambda paths: search.grep(paths, b"x", b"/", ROOT, glob=pattern),
    ):
        with pytest.raises(OSError) as refused:
            searching({}, what)
        assert refused.value.errno == errno.EINVAL
        assert "glob pattern" in str(refused.value)


@pytest.mark.parametrize(
    ("path", "number"), [(b"/none", errno.ENOENT), (b"/f", errno.ENOTDIR), (b"/f/x", errno.ENOTDIR)]
)
def test_glob_needs_a_directory(path: bytes, number: int) -> None:
    with pytest.raises(OSError) as refused:
        searching({"/f": b""}, lambda paths: search.glob(paths, "*", path, ROOT))
    assert refused.value.errno == number


def test_links_are_not_followed_below_the_root_but_the_root_may_be_one() -> None:
    async def run(paths: Paths) -> Any:
        place = await paths.place_for(b"/link", ROOT)
        await paths.vfs.symlink(place.parent.ino, b"link", b"/dir", ROOT)
        await paths.vfs.symlink(place.parent.ino, b"file", b"/dir/f", ROOT)
        return [
            await search.glob(paths, "*", b"/", ROOT),
            await search.grep(paths, b"x", b"/", ROOT),
            await search.glob(paths, "*", b"/link", ROOT),
            await search.grep(paths, b"x", b"/file", ROOT),
        ]

    found = searching({"/dir/f": b"x\n"}, run)
    assert [[match.path for match in one.matches] for one in found] == [
        [b"/dir/f"],
        [b"/dir/f"],
        [b"/link/f"],
        [b"/file"],
    ]


def test_routes_are_entered_and_the_system_is_not() -> None:
    files = {"/memories/note": "word\n", "/own": "word\n"}
    found = searching(files, lambda paths: search.grep(paths, b"word", b"/", ROOT), b"/memories/")
    assert [hit.path for hit in found.matches] == [b"/memories/note", b"/own"]
    found = searching({}, lambda paths: search.glob(paths, "passwd", b"/etc", ROOT))
    assert b"/etc/passwd" in [match.path for match in found.matches]


@pytest.mark.parametrize(
    ("content", "pattern", "expected"),
    [
        ("one\ntwo\nthree two\n", "two", [(2, "two"), (3, "three two")]),
        ("x two two\n", "two", [(1, "x two two")]),
        ("a.c\nabc\n", "a.c", [(1, "a.c")]),
        ("Two\n", "two", []),
        ("no end", "end", [(1, "no end")]),
        ("a\r\nb x\r\n", "x", [(2, "b x")]),
        ("a\rb x\rc x", "x", [(2, "b x"), (3, "c x")]),
        ("a\nb\n", "a\nb", []),
        ("a\n\nb", "", [(1, "a"), (2, ""), (3, "b")]),
        ("\ufeffx\n", "x", [(1, "\ufeffx")]),
        ("caf\u00e9 \u20ac\n", "\u00e9 \u20ac", [(1, "caf\u00e9 \u20ac")]),
        (b"x\0\n", "x", []),
        (b"x\n\xff\n", "x", []),
        (b"", "", []),
    ],
)
def test_grep_lines(content: bytes | str, pattern: str, expected: list[tuple[int, str]]) -> None:
    assert grep({"/f": content}, pattern) == [("/f", line, text) for line, text in expected]


def test_grep_looks_into_hidden_and_ignored_files_but_not_git() -> None:
    files = {"/.h": "x", "/.gitignore": "x", "/w/.git/config": "x", "/w/.github/y": "x", "/w/build/ignored": "x"}
    assert [path for path, _, _ in grep(files, "x")] == ["/.gitignore", "/.h", "/w/.github/y", "/w/build/ignored"]
    assert [path for path, _, _ in grep(files, "x", "/w/.git")] == ["/w/.git/config"]


def test_grep_with_a_glob() -> None:
    files = dict.fromkeys(TREE, "x")
    assert [path for path, _, _ in grep(files, "x", glob="*.py")] == ["/src/app/main.py", "/top.py"]
    assert [path for path, _, _ in grep(files, "x", "/src", glob="app/*")] == ["/src/app/main.py", "/src/app/main.ts"]
    assert grep(files, "x", "/top.py", glob="*.md") == []
    assert [path for path, _, _ in grep(files, "x", "/top.py", glob="*.py")] == ["/top.py"]


@pytest.mark.parametrize(("count", "truncated"), [(1, True), (5, True), (6, False), (7, False), (None, False)])
def test_max_count_is_exact(count: int | None, truncated: bool) -> None:
    files: Mapping[str, bytes | str] = {"/a": "x\nx\n", "/b": b"x\n\0", "/c": "x\nx\nx\nx\n"}
    found = searching(files, lambda paths: search.grep(paths, b"x", b"/", ROOT, max_count=count))
    lines = [(b"/a", 1), (b"/a", 2), (b"/c", 1), (b"/c", 2), (b"/c", 3), (b"/c", 4)]
    assert [(hit.path, hit.line) for hit in found.matches] == lines[:count]
    assert found.truncated is truncated


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_grep_in_a_file_of_many_pieces(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(search, "_PIECE", 1000)
    lines = [f"line {i} \u20ac{'needle' if i % 7 == 0 else ''}" for i in range(1000)]
    expected = [("/f", i + 1, line) for i, line in enumerate(lines) if i % 7 == 0]
    assert grep({"/f": ending.join(lines)}, "needle") == expected
    assert grep({"/f": ending.join(lines) + "\0"}, "needle") == []
    assert grep({"/f": ending.join(lines).encode() + b"\xff"}, "needle") == []
    found = searching(
        {"/f": ending.join(lines)}, lambda paths: search.grep(paths, b"needle", b"/f", ROOT, max_count=20)
    )
    assert len(found.matches) == 20 and found.truncated
    # What a binary file adds before it is seen to be one counts nowhere.
    files: Mapping[str, bytes | str] = {"/a": ending.join(lines) + "\0", "/b": "needle\n", "/c": "needle\n"}
    found = searching(files, lambda paths: search.grep(paths, b"needle", b"/", ROOT, max_count=2))
    assert [hit.path for hit in found.matches] == [b"/b", b"/c"] and not found.truncated


def test_a_long_line_is_cut_on_a_character() -> None:
    (hit,) = grep({"/f": "\u20ac" * 10_000}, "\u20ac")
    assert hit[2] == "\u20ac" * (search.MAX_LINE_SHOWN // 3)


def test_searches_stop_with_what_they_have() -> None:
    files: Mapping[str, bytes | str] = {f"/d{i % 50}/f{i}": "x\n" * 20 for i in range(4000)}

    async def run(paths: Paths) -> tuple[search.GlobFound, search.GrepFound]:
        return (
            await search.glob(paths, "*", b"/", ROOT, budget_s=0),
            await search.grep(paths, b"x", b"/", ROOT, budget_s=0),
        )

    globbed, grepped = searching(files, run)
    assert globbed.truncated and globbed.reason == "budget" and 0 < len(globbed.matches) < 4000
    assert grepped.truncated and 0 < len(grepped.matches) < 80_000


def test_a_reply_stays_below_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_REPLY_BYTES", 1000)
    files: Mapping[str, bytes | str] = {f"/f{i:03}": "x\n" for i in range(2000)}

    async def run(paths: Paths) -> tuple[search.GlobFound, search.GrepFound]:
        return await search.glob(paths, "*", b"/", ROOT), await search.grep(paths, b"x", b"/", ROOT)

    globbed, grepped = searching(files, run)
    assert globbed.truncated and globbed.reason == "budget" and len(globbed.matches) < 2000
    assert grepped.truncated and len(grepped.matches) < 100


def test_others_run_while_a_search_does() -> None:
    """A search of 5,000 files gives others a turn at least once in a hundred."""
    files: Mapping[str, bytes | str] = {f"/d{i % 50}/f{i}": "some text\n" * 100 for i in range(5000)}

    async def run(paths: Paths) -> int:
        turns = 0
        async with trio.open_nursery() as nursery:

            async def turn() -> None:
                nonlocal turns
                while True:
                    await trio.lowlevel.checkpoint()
                    turns += 1

            nursery.start_soon(turn)
            await search.grep(paths, b"text", b"/", ROOT)
            nursery.cancel_scope.cancel()
        return turns

    assert searching(files, run) >= 50


def test_a_large_directory_is_sorted_and_whole() -> None:
    files: Mapping[str, bytes | str] = {f"/{(i * 7919) % 3001:05}": "x" for i in range(3001)}
    assert glob(list(files), "*") == sorted(files)


def test_what_a_user_may_not_read_is_left_out() -> None:
    async def run(paths: Paths) -> Any:
        for path, perm in ((b"/closed", 0o700), (b"/open/secret", 0o600)):
            attr = await paths.resolve(path, ROOT)
            await paths.vfs.setattr(attr.ino, SetAttr(perm=perm), ROOT)
        return (
            await search.glob(paths, "*", b"/", USER),
            await search.grep(paths, b"x", b"/", USER),
            await search.glob(paths, "*", b"/", ROOT),
        )

    files: Mapping[str, bytes | str] = {"/closed/f": "x", "/open/secret": "x", "/open/f": "x"}
    globbed, grepped, all_of_it = searching(files, run)
    assert [match.path for match in globbed.matches] == [b"/open/f", b"/open/secret"]
    assert globbed.truncated and globbed.reason == "unreadable"
    assert [hit.path for hit in grepped.matches] == [b"/open/f"]
    assert len(all_of_it.matches) == 3 and not all_of_it.truncated
    for what in (
        lambda paths: search.glob(paths, "*", b"/closed", USER),
        lambda paths: search.grep(paths, b"x", b"/closed", USER),
    ):

        async def closed(paths: Paths, what: Callable[[Paths], Any] = what) -> Any:
            attr = await paths.resolve(b"/closed", ROOT)
            await paths.vfs.setattr(attr.ino, SetAttr(perm=0o700), ROOT)
            return await what(paths)

        with pytest.raises(PermissionError):
            searching(files, closed)


def test_files_that_vanish_during_a_search_are_no_error() -> None:
    async def run(paths: Paths) -> Any:
        async with trio.open_nursery() as nursery:

            async def remove() -> None:
                for i in range(0, 50, 2):
                    await paths.delete(b"/d%d" % i, ROOT)
                    await trio.lowlevel.checkpoint()

            nursery.start_soon(remove)
            return await search.grep(paths, b"x", b"/", ROOT)

    files: Mapping[str, bytes | str] = {f"/d{i % 50}/f{i}": "x\n" for i in range(3000)}
    found = searching(files, run)
    assert 1500 <= len(found.matches) <= 3000


def test_directories_in_a_pattern_do_not_multiply_its_time() -> None:
    """``**`` four times, a path of 300 names: at every place in turn, that took minutes in which nothing else ran."""
    deep = "/" + "/".join("a" * 300)
    assert glob([deep], "**/a/" * 3 + "**/b/*") == []
    assert glob([deep, "/a/x/a/b/c"], "**/a/" * 2 + "**/b/*") == ["/a/x/a/b/c"]


def test_a_search_gives_way_between_names_however_slow_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes a millisecond a look: a directory of 200 names takes many turns."""
    looks = itertools.count()
    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: next(looks) / 1000))
    turns = 0

    async def run(paths: Paths) -> Any:
        async def beside() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside)
            found = await search.glob(paths, "*[0-9]", b"/", ROOT)
            nursery.cancel_scope.cancel()
        return found

    found = searching({f"/f{i}": "x" for i in range(200)}, run)
    assert len(found.matches) == 200
    assert turns > 50
