"""The agenttools command: what it prints, where, and how it exits."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tool_server import serving

from agenttools import cli, tools, wire
from agenttools.results import ExecuteResult


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run the command in this process against a server; ``stdin`` is bytes."""
    with serving(tmp_path / "s"):

        def call(*argv: str, stdin: bytes = b"", socket: str = str(tmp_path / "s")) -> Ran:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            try:
                code = cli.main(["--socket", socket, *argv])
            except SystemExit as exited:
                code = int(exited.code or 0)
            sys.stdout.flush()
            out, err = capfdbinary.readouterr()
            return Ran(code, out.decode(errors="surrogateescape"), err.decode())

        yield call


def test_a_session(run: Run) -> None:
    assert run("write", "/d/f.py", stdin=b"one\r\ntwo\n") == (0, "Updated file /d/f.py\n", "")
    assert run("ls") == (0, "/d\n", "")
    assert run("ls", "-F") == (0, "/d/\n", "")
    assert run("read", "/d/f.py") == (0, "one\ntwo\n", "")
    assert run("edit", "/d/f.py", "two", "2") == (
        0,
        "Successfully replaced 1 instance(s) of the string in '/d/f.py'\n",
        "",
    )
    assert run("glob", "*.py") == (0, "/d/f.py\n", "")
    assert run("grep", "2") == (0, "/d/f.py:2:2\n", "")
    assert run("grep", "2", "--mode", "files_with_matches") == (0, "/d/f.py\n", "")
    assert run("grep", "n", "/d", "--mode", "count", "--glob", "*.py") == (0, "/d/f.py:1\n", "")
    assert run("delete", "/d") == (0, "Deleted /d\n", "")
    assert run("ls") == (0, "", "")


def test_a_tool_error_is_exit_1_and_goes_to_stderr(run: Run) -> None:
    assert run("read", "/none") == (1, "", "agenttools: File '/none': file_not_found\n")
    assert run("edit", "/none", "a", "b") == (1, "", "agenttools: File '/none' not found\n")
    assert run("ls", "../x") == (1, "", "agenttools: Path traversal not allowed: ../x\n")
    assert run("glob", "*") == (0, "", "")
    assert run("grep", "x") == (1, "", "")


def test_remarks_go_to_stderr(run: Run) -> None:
    run("write", "/f", stdin=b"x\n" * 5)
    ran = run("read", "/f", "--offset", "1", "--limit", "2")
    assert ran == (0, "x\nx\n", "[lines 2-3 of 5; go on with --offset 3]\n")
    assert run("grep", "x", "--max-count", "1") == (0, "/f:1:x\n", "[there are more matches than these]\n")


def test_bytes_come_and_go_as_they_are(run: Run) -> None:
    data = bytes(range(256))
    name = os.fsdecode(b"/\xff")
    assert run("write", name, stdin=data).code == 0
    ran = run("read", name)
    assert ran.out.encode(errors="surrogateescape") == data
    assert run("ls").out == "/\udcff\n"


def test_json(run: Run) -> None:
    run("write", "/f", stdin=b"x\n")
    for argv in (["--json", "ls"], ["ls", "--json"]):
        ran = run(*argv)
        listed = json.loads(ran.out)
        assert ran.code == 0 and listed["tool"] == "ls" and listed["error"] is None and listed["text"] == "['/f']"
        (entry,) = listed["entries"]
        assert entry == {"path": "/f", "is_dir": False, "size": 2, "mtime_ns": entry["mtime_ns"]}
    assert json.loads(run("grep", "x", "--json").out)["matches"] == [{"path": "/f", "line": 1, "text": "x"}]
    page = json.loads(run("read", "/f", "--json").out)
    assert (page["content"], page["total_lines"], page["next_offset"]) == ("x\n", 1, None)
    failed = run("read", "/none", "--json")
    assert failed.code == 1 and json.loads(failed.out)["error"] == "File '/none': file_not_found"


def test_usage_errors_are_exit_2(run: Run) -> None:
    for argv in ([], ["paint"], ["read"], ["read", "/f", "--limit", "many"], ["--name", "x", "ls"]):
        ran = run(*argv)
        assert ran.code == 2 and "usage: agenttools" in ran.err and ran.out == ""
    assert run("--help").code == 0


def test_a_word_too_many_is_one_sentence(run: Run) -> None:
    assert run("ls", "/", "more") == (2, "", "agenttools: 'more' is one word too many: see agenttools ls --help\n")
    assert run("ls", "--no") == (2, "", "agenttools: there is no option '--no': see agenttools ls --help\n")


def test_output_that_goes_nowhere() -> None:
    for where, code, said in ((">&-", 0, ""), (">/dev/full", 1, "agenttools: No space left on device\n")):
        command = f"exec {sys.executable} -m agenttools schema {where}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_grep_says_when_there_is_nothing_to_look_in(run: Run) -> None:
    assert run("grep", "x", "/none") == (2, "", "agenttools: /none: No such file or directory\n")
    ran = run("grep", "x", "/none", "--json")
    assert ran.code == 2 and json.loads(ran.out)["missing"] is True


def test_a_relative_runtime_directory_is_ignored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "here")
    assert run("ls") == (0, "", "agenttools: XDG_RUNTIME_DIR is ignored: 'here' is not an absolute path\n")
    assert wire.runtime_dir().startswith("/")


def test_version_and_help_of_every_command(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])
    assert exited.value.code == 0 and capfd.readouterr().out.startswith("agenttools 0.")
    todo = [cli._parser()]
    while todo:
        parser = todo.pop()
        assert parser.description, parser.prog
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()
            else:
                assert action.help, (parser.prog, action.dest)


def test_no_daemon_is_exit_3(run: Run, tmp_path: Path) -> None:
    ran = run("ls", socket=str(tmp_path / "none"))
    assert ran.code == 3 and ran.out == ""
    assert ran.err.startswith("agenttools: no daemon on ") and "vfsd mount" in ran.err


def test_a_bad_name_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["--name", "a/b", "ls"])
    assert exited.value.code == 2
    assert "not a name for a mount" in capfd.readouterr().err


def test_execute_exits_as_the_command_did(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def execute(client: object, command: str, timeout: float | None, **more: object) -> ExecuteResult:
        asked.append((command, timeout, more))
        return ExecuteResult("out\n", 7, "mount", notices=("a note",))

    monkeypatch.setattr(tools, "execute", execute)
    assert run("execute", "exit 7", "--timeout", "5", "--view", "mount") == (7, "out\n", "[a note]\n")
    assert asked == [("exit 7", 5.0, {"view": "mount", "cwd": "/", "profile": None})]
    shown = json.loads(run("execute", "exit 7", "--json").out)
    assert (shown["exit_code"], shown["notices"]) == (7, ["a note"])
    monkeypatch.setattr(tools, "execute", lambda *a, **k: ExecuteResult(error="Error: no view"))
    assert run("execute", "true") == (1, "", "agenttools: no view\n")


def test_schema_needs_no_daemon() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "agenttools.cli", "schema"], capture_output=True, timeout=30, check=True
    )
    schemas = json.loads(ran.stdout)
    assert [tool["name"] for tool in schemas][:2] == ["ls", "read"]
    assert all(tool["parameters"]["type"] == "object" for tool in schemas)


def test_a_reader_that_leaves_early_is_no_traceback(tmp_path: Path) -> None:
    with serving(tmp_path / "s"):
        command = [sys.executable, "-m", "agenttools.cli", "--socket", str(tmp_path / "s")]
        subprocess.run(
            [*command, "write", "/f"], input=b"x" * 99 + b"\n", timeout=30, check=True, stdout=subprocess.DEVNULL
        )
        read, write = os.pipe()
        os.close(read)
        ran = subprocess.run([*command, "read", "/f"], stdout=write, stderr=subprocess.PIPE, timeout=30, check=False)
        os.close(write)
    assert ran.returncode == 1 and ran.stderr == b""


def test_an_empty_socket_is_wrong_usage(run: Run) -> None:
    sentence = "agenttools: socket is empty: give the path of a daemon's socket, or leave it out"
    for command, code in (("ls", 2), ("mcp", 1)):
        ran = run(command, socket="")
        assert (ran.code, ran.err.splitlines()[-1]) == (code, sentence)
