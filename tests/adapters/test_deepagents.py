"""VfsBackend called as Deep Agents and programs call it, on a real mount."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import inspect
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import Mount

pytest.importorskip("deepagents")

from deepagents.backends import CompositeBackend, FilesystemBackend
from deepagents.backends import utils as upstream
from deepagents.backends.protocol import BackendProtocol, SandboxBackendProtocol
from deepagents.backends.sandbox import BaseSandbox

from agenttools.deepagents import VfsBackend
from agenttools.deepagents.answers import MEDIA
from agenttools.text import EMPTY_REMINDER, MAX_PAGE_BYTES

mounted = pytest.mark.mount

FILES = ("ls", "read", "write", "edit", "delete", "grep", "glob", "upload_files", "download_files")
OPERATIONS = (*FILES, "execute", "execute_with_offload")

CALLS: dict[str, tuple[Any, ...]] = {
    "ls": ("/",),
    "read": ("/f",),
    "write": ("/f", "x"),
    "edit": ("/f", "x", "y"),
    "delete": ("/f",),
    "grep": ("x",),
    "glob": ("*",),
    "upload_files": ([("/f", b"x")],),
    "download_files": (["/f"],),
}


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``call(backend, "read", ...)`` in both ways, which must answer alike."""

    def sync(backend: Any, operation: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(backend, operation)(*args, **kwargs)

    def concurrent_(backend: Any, operation: str, *args: Any, **kwargs: Any) -> Any:
        async def main() -> Any:
            return await getattr(backend, f"a{operation}")(*args, **kwargs)

        return asyncio.run(main())

    return sync if request.param == "sync" else concurrent_


@pytest.fixture
def backend(mount: Mount) -> Iterator[VfsBackend]:
    backend = VfsBackend(socket=mount.socket)
    yield backend
    backend.close()


@pytest.fixture(params=["root", "mount"])
def viewed(request: pytest.FixtureRequest, mount: Mount) -> Iterator[VfsBackend]:
    """The backend in each view."""
    # The view of the mount has no namespaces to confine a command in.
    profile: Any = "open" if request.param == "mount" else None
    backend = VfsBackend(socket=mount.socket, view=request.param, profile=profile)
    yield backend
    backend.close()


# ---------------------------------------------------------------------- what it is


def test_every_operation_is_its_own() -> None:
    """None is left to what Deep Agents makes out of shell scripts and threads."""
    own = {*OPERATIONS, *(f"a{name}" for name in OPERATIONS)}
    assert own <= set(vars(VfsBackend))
    there = {name for name, _ in inspect.getmembers(BaseSandbox, inspect.isfunction) if not name.startswith("_")}
    assert there == own
    assert all(inspect.iscoroutinefunction(getattr(VfsBackend, f"a{name}")) for name in OPERATIONS)


def test_what_deep_agents_looks_for() -> None:
    assert issubclass(VfsBackend, SandboxBackendProtocol) and issubclass(VfsBackend, BaseSandbox)
    assert VfsBackend.enable_capture_offload
    assert "timeout" in inspect.signature(VfsBackend.execute).parameters
    assert "max_count" in inspect.signature(VfsBackend.grep).parameters
    assert "max_count" in inspect.signature(VfsBackend.agrep).parameters
    assert VfsBackend.delete is not BackendProtocol.delete
    backend = VfsBackend("work")
    assert {backend: 1}[backend] == 1


def test_media_are_those_of_deep_agents() -> None:
    assert frozenset({*upstream._EXTENSION_TO_FILE_TYPE, *upstream._VIDEO_EXTRA_EXTENSIONS}) == MEDIA


def test_options_that_contradict() -> None:
    with pytest.raises(ValueError, match="socket="):
        VfsBackend(socket="/s", thread="t")
    with pytest.raises(ValueError, match="view must be"):
        VfsBackend(view="chroot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="config="):
        VfsBackend(config="vfsd.toml")
    with pytest.raises(ValueError, match="profile must be open, tree or offline, not banana"):
        VfsBackend(profile="banana")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout must be a number of seconds"):
        VfsBackend(timeout=-1)


@pytest.mark.parametrize("operation", CALLS)
def test_without_a_daemon(operation: str, tmp_path: Path, call: Callable[..., Any]) -> None:
    backend = VfsBackend(socket=tmp_path / "none.sock")
    result = call(backend, operation, *CALLS[operation])
    error = (result[0] if isinstance(result, list) else result).error
    assert f"no daemon on {tmp_path}/none.sock; start one with: vfsd mount" in error


def test_execute_without_a_daemon(tmp_path: Path, call: Callable[..., Any]) -> None:
    result = call(VfsBackend(socket=tmp_path / "none.sock"), "execute", "true")
    assert result.exit_code == 1 and "no daemon on" in result.output


@mounted
def test_pickled(mount: Mount, backend: VfsBackend) -> None:
    backend.write("/pickled", "kept")
    copy = pickle.loads(pickle.dumps(backend))
    assert (copy.id, repr(copy)) == (backend.id, repr(backend)) and mount.socket in copy.id
    assert copy.download_files(["/pickled"])[0].content == b"kept"
    assert len({backend, copy}) == 2
    copy.close()


@mounted
def test_many_threads_and_tasks(backend: VfsBackend) -> None:
    backend.write("/counter", "0\n" * 200)

    def work(number: int) -> None:
        for i in range(10):
            path = f"/many/{number}/{i}"
            assert backend.write(path, path).error is None
            assert backend.read(path).file_data == {"content": path, "encoding": "utf-8"}
            assert backend.edit("/counter", "0\n", f"{number}.{i}\n", replace_all=False).error is not None

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))

    async def main() -> None:
        async def work(number: int) -> None:
            for i in range(10):
                assert (await backend.aread(f"/many/{number}/{i}")).error is None

        await asyncio.gather(*(work(n) for n in range(16)))

    asyncio.run(main())
    found = backend.glob("*", "/many")
    assert found.matches is not None and len(found.matches) == 160


@mounted
def test_edits_at_once_lose_nothing(backend: VfsBackend) -> None:
    backend.write("/shared", "".join(f"<{n}>\n" for n in range(64)))

    async def main() -> None:
        edits = (backend.aedit("/shared", f"<{n}>", f"[{n}]") for n in range(64))
        assert [r.error for r in await asyncio.gather(*edits)] == [None] * 64

    asyncio.run(main())
    assert backend.download_files(["/shared"])[0].content == "".join(f"[{n}]\n" for n in range(64)).encode()


# ---------------------------------------------------------------------- the dialect


@mounted
def test_ls(mount: Mount, backend: VfsBackend, call: Callable[..., Any]) -> None:
    backend.upload_files([("/ls/b", b"12345"), ("/ls/a/x", b"")])
    result = call(backend, "ls", "/ls")
    assert [{k: v for k, v in e.items() if k != "modified_at"} for e in result.entries] == [
        {"path": "/ls/a", "is_dir": True, "size": 0},
        {"path": "/ls/b", "is_dir": False, "size": 5},
    ]
    assert all(e["modified_at"].startswith("2") and e["modified_at"].endswith("+00:00") for e in result.entries)
    slashed = call(VfsBackend(socket=mount.socket, ls_trailing_slash=True), "ls", "/ls")
    assert [e["path"] for e in slashed.entries] == ["/ls/a/", "/ls/b"]
    assert call(backend, "ls", "/nowhere").error == "Path '/nowhere': path_not_found"
    assert call(backend, "ls", "/ls/b").error == "Path '/ls/b': not_a_directory"


@mounted
def test_read_pages(backend: VfsBackend, call: Callable[..., Any]) -> None:
    backend.write("/five", "1\n2\n3\n4\n5\n")
    page = call(backend, "read", "/five", 1, 2)
    assert page.file_data == {"content": "2\n3", "encoding": "utf-8"}
    backend.write("/crlf", "1\r\n2\r\n3\r\n")
    page = call(backend, "read", "/crlf", 0, 2)
    assert page.file_data["content"] == "1\n2\n"
    assert call(backend, "edit", "/crlf", page.file_data["content"], "one\n2\n").error is None
    assert call(backend, "download_files", ["/crlf"])[0].content == b"one\r\n2\r\n3\r\n"
    page = call(backend, "read", "/five", 1, 2)
    assert (page.start_line, page.end_line, page.total_lines, page.next_offset) == (2, 3, 5, 3)
    last = call(backend, "read", "/five", 3, 9)
    assert (last.file_data["content"], last.end_line, last.next_offset) == ("4\n5\n", 5, None)
    assert call(backend, "read", "/five", -3, 1).start_line == 1
    assert call(backend, "read", "/five", 0, 0).no_lines_requested
    assert call(backend, "read", "/five", 9).error == "File '/five': Line offset 9 exceeds file length (5 lines)"
    assert call(backend, "read", "/none").error == "File '/none': file_not_found"
    assert call(backend, "read", "/").error == "File '/': not_a_file"
    assert call(backend, "read", "/a/../b").error == "Path traversal not allowed: /a/../b"


@mounted
def test_read_empty(backend: VfsBackend, call: Callable[..., Any]) -> None:
    backend.upload_files([("/empty", b""), ("/empty.png", b"")])
    for path in ("/empty", "/empty.png"):
        for limit in (10, 0):
            result = call(backend, "read", path, 0, limit)
            assert result.file_data == {"content": EMPTY_REMINDER, "encoding": "utf-8"}
            assert result.start_line is None and not result.no_lines_requested


@mounted
def test_read_large(backend: VfsBackend, call: Callable[..., Any]) -> None:
    line = "x" * 99
    backend.write("/large", f"{line}\n" * 20_000)
    page = call(backend, "read", "/large", 0, 20_000)
    assert len(page.file_data["content"].encode()) <= MAX_PAGE_BYTES
    assert page.next_offset == page.end_line < page.total_lines == 20_000
    assert call(backend, "read", "/large", page.next_offset, 1).file_data["content"] == line


@mounted
def test_read_binary(backend: VfsBackend, call: Callable[..., Any]) -> None:
    backend.upload_files([("/b.dat", b"\xff\0"), ("/b.png", b"no picture"), ("/B.PNG", b"x"), ("/b.svg", b"<svg/>")])
    for path, data in (("/b.dat", b"\xff\0"), ("/b.png", b"no picture"), ("/B.PNG", b"x")):
        result = call(backend, "read", path)
        assert result.file_data["encoding"] == "base64" and result.start_line is None
        assert base64.b64decode(result.file_data["content"]) == data
    assert call(backend, "read", "/b.svg").file_data["content"] == "<svg/>"


@mounted
def test_write_edit_delete(mount: Mount, backend: VfsBackend, call: Callable[..., Any]) -> None:
    assert call(backend, "write", "/w/e", "a\r\nb\r\n").path == "/w/e"
    assert call(backend, "edit", "/w/e", "a\nb\n", "c\nd\n").occurrences == 1
    assert Path(f"{mount.point}/w/e").read_bytes() == b"c\r\nd\r\n"
    assert "appears multiple times" in call(backend, "edit", "/w/e", "\n", "x").error
    assert call(backend, "edit", "/w/e", "", "x").error.startswith("Error: old_string cannot be empty")
    assert call(backend, "edit", "/w/n", "a", "x").error == "Error: File '/w/n' not found"
    assert call(backend, "edit", "/w", "a", "x").error == "Error: '/w' is not a regular file"
    assert "not valid Unicode" in call(backend, "write", "/w/u", "\ud800").error
    assert call(backend, "delete", "/w").path == "/w"
    assert call(backend, "delete", "/w").error == "Error: '/w' not found"


@mounted
def test_grep_and_glob(backend: VfsBackend, call: Callable[..., Any]) -> None:
    backend.upload_files([("/g/a.py", b"one\ntwo\none\n"), ("/g/.h/b.py", b"one"), ("/g/.git/c", b"one")])
    matches = call(backend, "grep", "one", "/g").matches
    assert sorted((m["path"], m["line"], m["text"]) for m in matches) == [
        ("/g/.h/b.py", 1, "one"),
        ("/g/a.py", 1, "one"),
        ("/g/a.py", 3, "one"),
    ]
    for count, truncated in ((3, False), (2, True)):
        result = call(backend, "grep", "one", "/g", max_count=count)
        assert (len(result.matches), result.truncated) == (count, truncated)
    assert call(backend, "grep", "one", "/g", "*.txt").matches == []
    assert call(backend, "grep", "one", "/none").matches == []
    assert [m["path"] for m in call(backend, "glob", "*.py", "/g").matches] == ["/g/.h/b.py", "/g/a.py"]
    assert call(backend, "glob", "*", "/none").error == "Path '/none': path_not_found"
    assert call(backend, "glob", "../*").error


@mounted
def test_upload_and_download(mount: Mount, backend: VfsBackend, call: Callable[..., Any]) -> None:
    files = [
        ("/u/a", b"\0\xff"),
        ("rel", b""),
        ("/u/a/x", b""),
        ("/u", b""),
        ("/u/../v", b""),
        ("/u/big", b"b" * (9 << 20)),
    ]
    uploaded = call(backend, "upload_files", files)
    assert [(r.path, r.error) for r in uploaded] == [
        ("/u/a", None),
        ("rel", "invalid_path"),
        ("/u/a/x", "invalid_path"),
        ("/u", "is_directory"),
        ("/u/../v", "invalid_path"),
        ("/u/big", None),
    ]
    Path(f"{mount.point}/u/loop").unlink(missing_ok=True)
    Path(f"{mount.point}/u/loop").symlink_to("loop")
    down = call(backend, "download_files", ["/u/a", "rel", "/u/a/x", "/u", "/none", "/u/loop", "/u/big"])
    assert [r.content for r in down] == [b"\0\xff", None, None, None, None, None, b"b" * (9 << 20)]
    assert [r.error for r in down[1:6]] == [
        "invalid_path",
        "invalid_path",
        "is_directory",
        "file_not_found",
        "invalid_path",
    ]


@mounted
def test_names_that_are_no_text(mount: Mount, backend: VfsBackend, call: Callable[..., Any]) -> None:
    """They come back so that they can be named again, and nothing in an error keeps it from being sent to a model."""
    raw = f"{mount.point}/raw".encode()
    Path(mount.point, "raw").mkdir(exist_ok=True)
    with open(raw + b"/\xff", "wb") as file:
        file.write(b"needle")
    (entry,) = call(backend, "ls", "/raw").entries
    assert call(backend, "download_files", [entry["path"]])[0].content == b"needle"
    assert [m["path"] for m in call(backend, "glob", "*", "/raw").matches] == [entry["path"]]
    (match,) = call(backend, "grep", "needle", "/raw").matches
    assert match["path"] == "/raw/\\udcff"
    call(backend, "read", "/none\udcff").error.encode()


# ---------------------------------------------------------------------- commands


@mounted
def test_a_path_that_a_command_prints_is_a_path_of_the_tools(viewed: VfsBackend, call: Callable[..., Any]) -> None:
    viewed.upload_files([("/job/boom.py", b"import sys\n1/0\n"), ("/job/x.c", b"int main( {\n")])
    here = call(viewed, "execute", "cd job && pwd").output.strip()
    assert sorted(e["path"] for e in call(viewed, "ls", here).entries) == [f"{here}/boom.py", f"{here}/x.c"]
    said = call(viewed, "execute", f"python {here}/boom.py; true").output
    shown = said.split('File "')[1].split('"')[0]
    assert call(viewed, "read", shown).file_data["content"] == "import sys\n1/0\n"
    assert call(viewed, "edit", shown, "1/0", "print(7)").error is None
    assert call(viewed, "execute", f"python {shown}").output == "7\n"
    assert [m["path"] for m in call(viewed, "grep", "print", here).matches] == [shown]
    assert [m["path"] for m in call(viewed, "glob", "*.py", here).matches] == [shown]


@mounted
def test_execute_results(backend: VfsBackend, call: Callable[..., Any]) -> None:
    good = call(backend, "execute", "echo out; echo err >&2")
    assert (good.output, good.exit_code, good.truncated) == ("out\nerr\n", 0, False)
    assert call(backend, "execute", "exit 7").exit_code == 7
    started = time.monotonic()
    late = call(backend, "execute", "echo begun; sleep 30", timeout=1)
    assert time.monotonic() - started < 10
    assert (late.output, late.exit_code) == ("begun\n[Command timed out after 1 seconds]", 124)
    bad = call(backend, "execute", "true", timeout=-1)
    assert bad.exit_code == 1 and bad.output.startswith("Error: Invalid parameter.")
    assert call(backend, "execute", "printf '\\377'").output == "\ufffd"


@mounted
def test_timeout_of_the_backend(mount: Mount, call: Callable[..., Any]) -> None:
    backend = VfsBackend(socket=mount.socket, timeout=0.5)
    assert call(backend, "execute", "sleep 30").exit_code == 124
    assert call(backend, "execute", "sleep 1", timeout=0).exit_code == 0


@mounted
def test_cancelled(backend: VfsBackend) -> None:
    async def main() -> None:
        task = asyncio.create_task(backend.aexecute("sleep 987654"))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())
    assert "987654" not in backend.execute("ps ax -o args | grep -v 'grep\\|ps ax' || true").output


# ---------------------------------------------------------------------- capture


def offload(call: Callable[..., Any], backend: VfsBackend, command: str, path: str = "/large/x", **options: Any) -> Any:
    return call(backend, "execute_with_offload", command, path, **{"max_inline_bytes": 1000, **options})


@mounted
def test_capture_small(backend: VfsBackend, call: Callable[..., Any]) -> None:
    backend.delete("/large")
    result = offload(call, backend, "head -c 1000 /dev/zero | tr '\\0' x; exit 3")
    assert not result.offloaded and not result.preview_has_truncation_marker
    assert (result.response.output, result.response.exit_code) == ("x" * 1000, 3)
    assert backend.ls("/large").error is not None


@mounted
def test_capture_large(viewed: VfsBackend, call: Callable[..., Any]) -> None:
    result = offload(call, viewed, "seq 100000; exit 3")
    assert result.offloaded and result.preview_has_truncation_marker
    assert (result.response.exit_code, result.response.truncated) == (3, False)
    assert (
        result.response.output == "1\n2\n3\n4\n5\n... [99990 lines truncated] ...\n99996\n99997\n99998\n99999\n100000"
    )
    page = call(viewed, "read", "/large/x", 50_000, 1)
    assert (page.file_data["content"], page.total_lines) == ("50001", 100_000)


@mounted
def test_capture_of_long_lines(backend: VfsBackend, call: Callable[..., Any]) -> None:
    result = offload(
        call, backend, "python -c 'for i in range(40): print(str(i % 10) * 1500)'", max_inline_bytes=10_000
    )
    head, tail = result.response.output.split("\n... [30 lines truncated] ...\n")
    assert head.startswith("0" * 1500 + "\n" + "1" * 499 + "\n... [") and tail.endswith("9" * 1500)
    one = offload(call, backend, "head -c 9000 /dev/zero | tr '\\0' x")
    assert one.offloaded and not one.preview_has_truncation_marker
    assert one.response.output == "x" * 1000 + "\n... [cut here; 9000 bytes were printed] ..."


@mounted
def test_capture_has_a_limit(backend: VfsBackend, call: Callable[..., Any]) -> None:
    result = offload(call, backend, "head -c 9000 /dev/zero | tr '\\0' x; exit 4", max_capture_bytes=5000)
    assert (result.offloaded, result.response.truncated, result.response.exit_code) == (True, True, 4)
    assert backend.download_files(["/large/x"])[0].content == b"x" * 5000


@mounted
def test_capture_to_where_no_file_can_be(backend: VfsBackend, call: Callable[..., Any]) -> None:
    backend.write("/file", "in the way")
    result = offload(call, backend, "head -c 9000 /dev/zero | tr '\\0' x", "/file/x")
    assert not result.offloaded and result.response.truncated
    assert result.response.output.startswith("x" * 1000 + "\n[Output truncated at 1000 bytes; ")


@mounted
def test_capture_switched_off(mount: Mount, call: Callable[..., Any]) -> None:
    backend = VfsBackend(socket=mount.socket)
    backend.enable_capture_offload = False
    result = offload(call, backend, "seq 1000")
    assert not result.offloaded and len(result.response.output) == 3893


# ---------------------------------------------------------------------- in a CompositeBackend


@mounted
def test_as_default_of_a_composite(backend: VfsBackend, tmp_path: Path, call: Callable[..., Any]) -> None:
    composite = CompositeBackend(default=backend, routes={"/disk/": FilesystemBackend(tmp_path, virtual_mode=True)})
    assert call(composite, "write", "/c/one", "tree").error is None
    assert call(composite, "write", "/disk/two", "disk").error is None
    assert (tmp_path / "two").read_text() == "disk"
    assert call(composite, "execute", "cat /c/one").output == "tree"
    assert {"/c", "/disk/"} <= {e["path"] for e in call(composite, "ls", "/").entries}
    assert [r.content for r in call(composite, "download_files", ["/disk/two", "/c/one"])] == [b"disk", b"tree"]
    assert [m["path"] for m in call(composite, "grep", "tree", "/c").matches] == ["/c/one"]
    assert call(composite, "delete", "/c/one").error is None


@mounted
def test_as_route_of_a_composite(backend: VfsBackend, tmp_path: Path, call: Callable[..., Any]) -> None:
    disk = FilesystemBackend(tmp_path, virtual_mode=True)
    composite = CompositeBackend(default=disk, routes={"/tree/": backend})
    assert call(composite, "write", "/tree/r/one", "in the tree").path == "/tree/r/one"
    assert backend.read("/r/one").file_data == {"content": "in the tree", "encoding": "utf-8"}
    assert call(composite, "edit", "/tree/r/one", "in", "on").error is None
    assert [m["path"] for m in call(composite, "glob", "*", "/tree/r").matches] == ["/tree/r/one"]
    assert [m["path"] for m in call(composite, "grep", "on the", "/tree/r").matches] == ["/tree/r/one"]
    files = [("/tree/r/up", b"1"), ("/down", b"2")]
    assert [r.error for r in call(composite, "upload_files", files)] == [None, None]
    assert call(composite, "delete", "/tree/r").error is None
