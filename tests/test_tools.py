"""The tools through a client and the daemon's socket door, on memory volumes."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tool_server import serving

from agenttools import tools
from agenttools.client import Client
from agenttools.results import Entry, ExecuteResult, Match
from agenttools.schema import TOOLS


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(tmp_path / "s", b"/memories/"), Client(socket=tmp_path / "s") as client:
        yield client


def content(client: Client, path: str) -> bytes:
    data = client.call("read", path=os.fsencode(path), offset=0, length=8 << 20)["data"]
    assert isinstance(data, bytes)
    return data


def put(client: Client, path: str, data: bytes | str) -> None:
    assert tools.write(client, path, data).error is None


# ---------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/x", b"/x"),
        ("x", b"/x"),
        ("//a/./b//c/", b"/a/b/c"),
        ("", b"/"),
        (".", b"/"),
        ("/", b"/"),
        ("/foo..bar", b"/foo..bar"),
        ("/~x", b"/~x"),
        ("a\\b", b"/a\\b"),
        ("/mnt/tree/x", b"/x"),
        ("/mnt/tree", b"/"),
        ("/mnt/treetop", b"/mnt/treetop"),
        ("mnt/tree/x", b"/mnt/tree/x"),
        ("/caf\u00e9\udcff", b"/caf\xc3\xa9\xff"),
    ],
)
def test_tree_path(path: str, expected: bytes) -> None:
    assert tools.tree_path(path, b"/mnt/tree")[0] == expected


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("../x", "Path traversal not allowed: ../x"),
        ("/a/../b", "Path traversal not allowed: /a/../b"),
        ("~/x", "Path traversal not allowed: ~/x"),
        (
            "C:/x",
            "Windows absolute paths are not supported: C:/x. "
            "Please use virtual paths starting with / (e.g., /workspace/file.txt)",
        ),
        ("/a\0", "Path holds a NUL character: '/a\\x00'"),
        ("/\ud800", "Path is not valid Unicode text: '/\\ud800'"),
    ],
)
def test_every_tool_refuses_bad_paths(client: Client, path: str, sentence: str) -> None:
    results: list[Any] = [
        tools.ls(client, path),
        tools.read(client, path),
        tools.write(client, path, "x"),
        tools.edit(client, path, "a", "b"),
        tools.delete(client, path),
        tools.glob(client, "*", path),
        tools.grep(client, "x", path),
    ]
    for result in results:
        assert result.error is not None and result.error.removeprefix("Error: ") == sentence
        assert result.text == f"Error: {sentence}"


def test_one_file_by_all_its_names(client: Client) -> None:
    for path in ("/d/f", "d/f", "/mnt/tree/d/f"):
        assert tools.write(client, path, path).path == path
        assert content(client, "/d/f").decode() == path
        assert tools.read(client, path).content == path
    assert [match.path for match in tools.glob(client, "f", "/mnt/tree/d").matches or []] == ["/mnt/tree/d/f"]
    assert [match.path for match in tools.glob(client, "f", "d").matches or []] == ["/d/f"]
    assert [match.path for match in tools.grep(client, "tree", "/mnt/tree").matches or []] == ["/mnt/tree/d/f"]
    assert [entry.path for entry in tools.ls(client, "/mnt/tree/d").entries or []] == ["/mnt/tree/d/f"]
    assert [entry.path for entry in tools.ls(client, "d/").entries or []] == ["/d/f"]


# ---------------------------------------------------------------------- ls


def test_ls(client: Client) -> None:
    put(client, "/d/b.txt", "12345")
    put(client, "/d/.hidden", "")
    put(client, "/d/a/x", "")
    result = tools.ls(client, "/d")
    assert result.error is None and result.entries is not None
    assert [entry[:3] for entry in result.entries] == [
        ("/d/.hidden", False, 0),
        ("/d/a", True, 0),
        ("/d/b.txt", False, 5),
    ]
    assert all(entry.mtime_ns > 10**18 for entry in result.entries)
    assert result.text == "['/d/.hidden', '/d/a', '/d/b.txt']"
    assert tools.ls(client, "/d", slash=True).text == "['/d/.hidden', '/d/a/', '/d/b.txt']"
    assert tools.ls(client, "/memories").text == "No files found"
    assert tools.ls(client).text == "['/d', '/memories']"
    assert tools.ls(client, "/none").error == "Path '/none': path_not_found"
    assert tools.ls(client, "/none").text == "Error: Path '/none': path_not_found"
    assert tools.ls(client, "/d/b.txt").error == "Path '/d/b.txt': not_a_directory"


def test_ls_of_a_directory_larger_than_a_reply(client: Client) -> None:
    for i in range(2600):
        client.call("write", path=b"/d/%04d" % i + b"n" * 200, data=b"")
    entries = tools.ls(client, "/d").entries
    assert entries is not None and len(entries) == len({entry.path for entry in entries}) == 2600


def test_names_that_are_no_text(client: Client) -> None:
    client.call("write", path=b"/d/\xff\n", data=b"x\n")
    (entry,) = tools.ls(client, "/d").entries or []
    assert entry.path == "/d/\udcff\n"
    assert tools.read(client, entry.path).content == "x\n"
    for text in (
        tools.ls(client, "/d").text,
        tools.glob(client, "*").text,
        tools.grep(client, "x", output_mode="content").text,
        tools.read(client, "/none\udcff").text,
        tools.edit(client, entry.path, "x", "y").text,
        tools.delete(client, entry.path).text,
    ):
        assert text.encode()


# ---------------------------------------------------------------------- read


def test_read_pages(client: Client) -> None:
    put(client, "/f", "".join(f"line {i}\n" for i in range(1, 251)))
    first = tools.read(client, "/f")
    assert (first.start_line, first.end_line, first.total_lines, first.next_offset) == (1, 100, 250, 100)
    assert first.text.startswith("@@ lines 1-100 of 250 | next offset 100 @@\nline 1\n")
    last = tools.read(client, "/f", 200, 100)
    assert (last.start_line, last.end_line, last.next_offset) == (201, 250, None)
    assert last.content.endswith("line 250\n")
    assert last.text.startswith("@@ lines 201-250 of 250 @@\n") and last.text.endswith("line 250")
    assert tools.read(client, "/f", 250).error == "File '/f': Line offset 250 exceeds file length (250 lines)"
    assert tools.read(client, "/f", -3, 1).text == (
        "[There is no offset -3; this is from line 1 on.]\n@@ lines 1-1 of 250 | next offset 1 @@\nline 1"
    )
    nothing = tools.read(client, "/f", 0, 0)
    assert nothing.no_lines_requested and nothing.content == "" and nothing.start_line is None
    assert "no lines were read" in nothing.text


def test_read_says_what_is_no_file(client: Client) -> None:
    put(client, "/d/f", "x")
    assert tools.read(client, "/none").error == "File '/none': file_not_found"
    assert tools.read(client, "/d/f/x").error == "File '/d/f/x': file_not_found"
    assert tools.read(client, "/d").error == "File '/d': not_a_file"
    client.call("mknod", path=b"/fifo", mode=0o010644)
    assert tools.read(client, "/fifo").error is not None
    assert tools.edit(client, "/fifo", "a", "b").error is not None


def test_read_of_an_empty_file(client: Client) -> None:
    put(client, "/f", "")
    for limit in (100, 0):
        result = tools.read(client, "/f", 0, limit)
        assert result.error is None and result.content == "" and not result.no_lines_requested
        assert result.text == "@@ lines 1-1 @@\nSystem reminder: File exists but has empty contents"


def test_read_of_a_binary_file(client: Client) -> None:
    data = bytes(range(256)) * 2000
    put(client, "/f.txt", data)
    result = tools.read(client, "/f.txt", 5, 1)
    assert result.encoding == "base64" and base64.b64decode(result.content) == data
    assert result.total_lines is None
    assert result.text == "'/f.txt' is a binary file of 512000 bytes and is not shown as text."
    for more in (data + b"x", data * 4):
        put(client, "/f.txt", more)
        assert tools.read(client, "/f.txt").error == (
            "File '/f.txt': Binary file exceeds maximum preview size of 512000 bytes"
        )
    put(client, "/text.png", "only text\n")
    assert tools.read(client, "/text.png").content == "only text\n"


def test_read_of_a_file_of_many_pieces(client: Client) -> None:
    lines = [f"{i} \u20ac\U0001f600 {'x' * (i % 50)}\r\n" for i in range(60_000)]
    put(client, "/f", "".join(lines))
    assert client.call("stat", path=b"/f")["attr"]["size"] > 2 << 20
    for offset in (0, 31_234, 59_990):
        result = tools.read(client, "/f", offset, 20)
        assert result.content == "".join(lines[offset : offset + 20]).replace("\r\n", "\n")
        assert result.total_lines == 60_000
        assert result.next_offset == (offset + 20 if offset < 59_980 else None)
    assert tools.read(client, "/f", 60_000).error == "File '/f': Line offset 60000 exceeds file length (60000 lines)"


def test_a_page_of_a_very_large_file_comes_without_a_total(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MAX_COUNTED", 1 << 20)
    put(client, "/f", "some line of text\n" * 200_000)
    result = tools.read(client, "/f", 10, 2)
    assert result.text == "@@ lines 11-12 | next offset 12 @@\nsome line of text\nsome line of text"


# ---------------------------------------------------------------------- write


def test_write(client: Client) -> None:
    made = tools.write(client, "/new/dir/f", "a\r\nb\n\u20ac")
    assert made == tools.WriteResult("/new/dir/f", True, 8)
    assert made.text == "Updated file /new/dir/f"
    assert content(client, "/new/dir/f") == b"a\r\nb\n\xe2\x82\xac"
    client.call("chmod", path=b"/new/dir/f", perm=0o755)
    before = client.call("stat", path=b"/new/dir/f")["attr"]
    assert tools.write(client, "/new/dir/f", b"\xff\0").created is False
    after = client.call("stat", path=b"/new/dir/f")["attr"]
    assert (after["ino"], after["mode"], after["size"]) == (before["ino"], before["mode"], 2)


@pytest.mark.parametrize(
    ("path", "data", "why"),
    [
        ("/d", "x", "is_directory"),
        ("/d/f/x", "x", "invalid_path"),
        ("/" + "n" * 256, "x", "File name too long"),
        ("/f", "\ud83d", "content is not valid Unicode text (character 0)"),
    ],
)
def test_write_refusals(client: Client, path: str, data: str, why: str) -> None:
    put(client, "/d/f", "x")
    result = tools.write(client, path, data)
    assert result.error == result.text == f"Failed to write file '{path}': {why}"


def test_write_of_more_than_a_frame(client: Client) -> None:
    data = os.urandom(1 << 20) * 20
    put(client, "/f", data)
    assert client.call("stat", path=b"/f")["attr"]["size"] == len(data)
    assert client.call("read", path=b"/f", offset=19 << 20, length=1 << 20)["data"] == data[: 1 << 20]


# ---------------------------------------------------------------------- edit


def test_edit(client: Client) -> None:
    put(client, "/f", "one two two\n")
    assert tools.edit(client, "/f", "one", "1").text == "Successfully replaced 1 instance(s) of the string in '/f'"
    assert tools.edit(client, "/f", "two", "2", True).occurrences == 2
    assert content(client, "/f") == b"1 2 2\n"
    assert tools.edit(client, "/f", "2", "2", True).occurrences == 2


def test_edit_refusals(client: Client) -> None:
    put(client, "/f", "two two")
    put(client, "/data", b"\0")
    put(client, "/d/f", "")
    errors = {
        ("/f", ""): "Error: old_string cannot be empty. Provide the exact text to replace.",
        ("/none", "x"): "Error: File '/none' not found",
        ("/f", "x"): "Error: String not found in file: 'x'",
        ("/f", "two"): "Error: String 'two' appears multiple times. Use replace_all=True to replace all occurrences. "
        "It appears 2 times in file; or provide a more specific string with surrounding context.",
        ("/data", "x"): "Error: File '/data' is not a text file",
        ("/d", "x"): "Error: '/d' is not a regular file",
    }
    for (path, old), sentence in errors.items():
        result = tools.edit(client, path, old, "y")
        assert result.error == result.text == sentence
    assert content(client, "/f") == b"two two"


def test_edit_keeps_line_endings_mode_and_links(client: Client) -> None:
    put(client, "/f", b"\xef\xbb\xbfa\r\nb\r\nc\r\n")
    client.call("chmod", path=b"/f", perm=0o755)
    client.call("link", old=b"/f", new=b"/hard")
    client.call("symlink", target=b"/f", path=b"/soft")
    before = client.call("stat", path=b"/f")["attr"]
    shown = tools.read(client, "/soft").content
    assert shown == "a\nb\nc\n"
    assert tools.edit(client, "/soft", "b\nc", "B\nnew\nc").error is None
    assert content(client, "/hard") == b"\xef\xbb\xbfa\r\nB\r\nnew\r\nc\r\n"
    after = client.call("stat", path=b"/f")["attr"]
    assert (after["ino"], after["mode"], after["nlink"]) == (before["ino"], before["mode"], before["nlink"])
    assert client.call("readlink", path=b"/soft")["target"] == b"/f"


def test_edit_of_a_file_of_many_pieces(client: Client) -> None:
    data = "some line\n" * 1_800_000 + "here\n"
    put(client, "/f", data)
    assert tools.edit(client, "/f", "here", "there").error is None
    assert client.call("stat", path=b"/f")["attr"]["size"] == len(data) + 1
    assert client.call("read", path=b"/f", offset=len(data) - 5, length=100)["data"] == b"there\n"


def test_edits_at_once_lose_none(client: Client) -> None:
    names = [f"w{i}" for i in range(6)]
    put(client, "/f", "".join(f"{name}=0\n" for name in names))
    failures: list[str] = []

    def work(name: str) -> None:
        for i in range(40):
            result = tools.edit(client, "/f", f"{name}={i}\n", f"{name}={i + 1}\n")
            if result.error is not None:
                failures.append(result.error)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert content(client, "/f").decode() == "".join(f"{name}=40\n" for name in names)


class _Busy:
    """A client before whose every write somebody else changes the file."""

    def __init__(self, client: Client, changes: int) -> None:
        self._client = client
        self._changes = changes
        self.hello = client.hello

    def call(self, op: str, /, **params: Any) -> dict[str, Any]:
        if op == "write" and self._changes:
            self._changes -= 1
            old = content(self._client, "/f")
            self._client.call("write", path=b"/f", data=old + b"+")
        return self._client.call(op, **params)


def test_edit_starts_over_and_gives_up_in_the_end(client: Client) -> None:
    put(client, "/f", "x\r\n")
    assert tools.edit(_Busy(client, 3), "/f", "x\n", "y\n").occurrences == 1
    assert content(client, "/f") == b"y\r\n+++"
    result = tools.edit(_Busy(client, -1), "/f", "y\n", "z\n")
    assert result.error == "Error: File '/f' kept changing while it was edited; read it and try again."
    assert content(client, "/f").startswith(b"y\r\n++++")


class _Counting:
    """A client that says what was asked."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.hello = client.hello
        self.asked: list[str] = []

    def call(self, op: str, /, **params: Any) -> dict[str, Any]:
        self.asked.append(op)
        return self._client.call(op, **params)


def test_one_round_trip_for_each_tool(client: Client) -> None:
    counting = _Counting(client)
    assert tools.write(counting, "/d/f", "one two two\n").error is None
    assert tools.read(counting, "/d/f").content == "one two two\n"
    assert tools.edit(counting, "/d/f", "one", "1").occurrences == 1
    assert tools.edit(counting, "/d/f", "two", "2", replace_all=True).occurrences == 2
    assert tools.edit(counting, "/d/f", "1", "1").occurrences == 1
    assert "appears multiple times" in (tools.edit(counting, "/d/f", "2", "3").error or "")
    assert "String not found" in (tools.edit(counting, "/d/f", "3", "4").error or "")
    assert tools.ls(counting, "/d").error is None
    assert tools.glob(counting, "*", "/d").error is None
    assert tools.grep(counting, "2 2", "/d").matches
    assert tools.delete(counting, "/d/f").error is None
    assert counting.asked == ["write", "read", *["edit"] * 5, "list", "glob", "grep", "delete"]


# ---------------------------------------------------------------------- delete


def test_delete(client: Client) -> None:
    put(client, "/d/a/b", "x")
    put(client, "/kept", "x")
    client.call("symlink", target=b"/kept", path=b"/d/link")
    client.call("symlink", target=b"/none", path=b"/dangling")
    assert tools.delete(client, "/d/link").text == "Deleted /d/link"
    assert tools.delete(client, "/dangling/").error is None
    assert tools.delete(client, "/d").error is None
    assert content(client, "/kept") == b"x"
    assert tools.ls(client).text == "['/kept', '/memories']"
    for path in ("/d", "/none", "/kept/x"):
        assert tools.delete(client, path).text == f"Error: '{path}' not found"
    for path in ("/", "/memories"):
        assert (tools.delete(client, path).error or "").startswith(f"Error deleting file '{path}': ")
    assert tools.ls(client).text == "['/kept', '/memories']"


# ---------------------------------------------------------------------- glob and grep


def test_glob(client: Client) -> None:
    put(client, "/d/a.py", "12")
    put(client, "/b.py", "")
    result = tools.glob(client, "*.py")
    assert result.matches is not None and not result.truncated
    assert [match[:3] for match in result.matches] == [("/b.py", False, 0), ("/d/a.py", False, 2)]
    assert isinstance(result.matches[0], Entry)
    assert result.text == "['/b.py', '/d/a.py']"
    assert tools.glob(client, "*.md").text == "No files found"
    assert tools.glob(client, "../x").text == "Error: Path traversal not allowed in glob pattern '../x'"
    assert tools.glob(client, "*", "/none").error == "Path '/none': path_not_found"
    assert tools.glob(client, "*", "/b.py").error == "Path '/b.py': not_a_directory"


def test_grep(client: Client) -> None:
    put(client, "/d/a.py", "word one\r\nnone\nword two\n")
    put(client, "/b.md", "a word\n")
    result = tools.grep(client, "word")
    assert result.matches == [
        Match("/b.md", 1, "a word"),
        Match("/d/a.py", 1, "word one"),
        Match("/d/a.py", 3, "word two"),
    ]
    assert result.text == "/b.md\n/d/a.py"
    assert tools.grep(client, "word", output_mode="count").text == "/b.md: 1\n/d/a.py: 2"
    assert tools.grep(client, "word", "/d", output_mode="content").text == "/d/a.py:\n  1: word one\n  3: word two"
    assert tools.grep(client, "word", glob="*.md").text == "/b.md"
    capped = tools.grep(client, "word", max_count=2)
    assert capped.truncated and len(capped.matches or []) == 2 and "Note: there is more" in capped.text
    assert not tools.grep(client, "word", max_count=3).truncated
    assert tools.grep(client, "Word").text == "No matches found"
    assert tools.grep(client, "w.*d").text.startswith("No matches found\n\nNote: the pattern is taken literally")
    assert tools.grep(client, "word", "/none").matches == []
    assert tools.grep(client, "x", glob="../*").text == "Path traversal not allowed in glob pattern '../*'"
    assert tools.grep(client, "x", max_count=0).error == "Error: max_count must be at least 1."
    assert tools.grep(client, "\ud83d").error == "Error: pattern is not valid Unicode text (character 0)."


# ---------------------------------------------------------------------- all


def test_no_daemon_is_an_error_of_every_tool(tmp_path: Path) -> None:
    with Client(socket=tmp_path / "none") as client:
        results: list[Any] = [
            tools.ls(client, "/"),
            tools.read(client, "/f"),
            tools.write(client, "/f", ""),
            tools.edit(client, "/f", "a", "b"),
            tools.delete(client, "/f"),
            tools.glob(client, "*"),
            tools.grep(client, "x"),
            tools.execute(client, "true"),
        ]
    for result in results:
        assert result.error is not None and "no daemon on" in result.error


def test_execute_says_what_it_cannot_run(client: Client) -> None:
    assert tools.execute(client, "true", -1).text.startswith("Error: Invalid parameter. ")
    assert tools.execute(client, "a\0b").text.startswith("Error: Invalid parameter. ")
    assert tools.execute(client, "true", view="mount").error is not None  # nothing is mounted there


def test_execute_text() -> None:
    done = ExecuteResult("hi", 0, "root")
    assert done.text == "hi\n[Command succeeded with exit code 0]"
    failed = ExecuteResult("", 7, "root", truncated=True, notices=("a note",))
    assert failed.text == (
        "<no output>\n[a note]\n[Command failed with exit code 7]\n[Output was truncated due to size limits]"
    )


def test_schemas_name_the_arguments_of_the_functions() -> None:
    import inspect

    names = [tool["name"] for tool in TOOLS]
    assert names == ["ls", "read", "write", "edit", "delete", "glob", "grep", "execute"]
    for tool in TOOLS:
        parameters = inspect.signature(getattr(tools, tool["name"])).parameters
        properties = tool["parameters"]["properties"]
        assert set(properties) <= set(parameters)
        for name, schema in properties.items():
            default = parameters[name].default
            assert (name in tool["parameters"]["required"]) == (default is inspect.Parameter.empty)
            assert default in (inspect.Parameter.empty, None, schema.get("default"))
