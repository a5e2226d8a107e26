"""What a command sees, which view it gets, and programs on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from shell_world import Attached, Daemon

from agenttools import shell, views
from agenttools.shell import ExecuteResult, View, ViewUnavailable, execute, run_interactive

# ------------------------------------------------------------------ what the command sees


def test_directories_made_on_first_use(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    result = run('cd "$HOME" && echo h > h && cd "$TMPDIR" && echo t > t')
    assert result.exit_code == 0, result.output
    assert (daemon.root / "tmp/t").read_text() == "t\n"
    assert (daemon.root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert len(list(daemon.root.glob("home/**/h"))) == 1


def test_root_view_is_the_tree(daemon: Daemon) -> None:
    (daemon.root / "plan.md").write_text("plan\n")
    result = execute(daemon, "pwd; cat /plan.md; echo made > /made; echo no > /usr/no", view="root")
    assert result.output.startswith("/\nplan\n")
    assert "Read-only file system" in result.output
    assert (daemon.root / "made").read_text() == "made\n"


def test_root_view_names_the_same_files_by_the_mountpoint(daemon: Daemon) -> None:
    assert execute(daemon, f"echo x > {daemon.root}/made && cat /made", view="root").output == "x\n"


def test_root_view_has_the_callers_python_and_git(daemon: Daemon) -> None:
    command = f"{sys.executable} -c 'import sys, pytest; print(sys.prefix)' && git init -q /g && ls /g/.git/HEAD"
    result = execute(daemon, command, view="root")
    assert result.output == f"{sys.prefix}\n/g/.git/HEAD\n"


def test_root_view_has_the_callers_network(daemon: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('localhost', {port})).send(b'hi')"
        assert execute(daemon, f'{sys.executable} -c "{code}"', view="root").exit_code == 0
        with server.accept()[0] as connection:
            assert connection.recv(2) == b"hi"


def test_root_view_makes_nothing_in_the_tree_without_a_stub(daemon: Daemon) -> None:
    class Forgetful(Attached):
        def call(self, op: str, /, **params: Any) -> Mapping[str, Any]:
            return {} if op == "stub" else super().call(op, **params)

    before = set(os.listdir(daemon.root))
    assert execute(Forgetful(str(daemon.root)), "echo fine", view="root").output == "fine\n"
    assert set(os.listdir(daemon.root)) - before == {"tmp", "home"}


def test_a_stub_that_cannot_be_made_costs_only_its_own_directory(daemon: Daemon) -> None:
    class Strict(Attached):
        def call(self, op: str, /, **params: Any) -> Mapping[str, Any]:
            if op == "stub" and os.fsencode(sys.prefix) in params["paths"]:
                raise NotADirectoryError
            return super().call(op, **params)

    result = execute(Strict(str(daemon.root)), f"test -d {daemon.root} && test -e {sys.prefix} || echo no", view="root")
    assert result.output == ("" if sys.prefix.startswith("/usr") else "no\n")


def test_mount_view_is_the_host_with_the_tree_as_directory(daemon: Daemon) -> None:
    result = execute(daemon, f"pwd; ls -d {Path(__file__)}", view="mount", profile="open")
    assert result.output == f"{daemon.root}\n{Path(__file__)}\n"


def test_cwd(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    (daemon.root / "a/b").mkdir(parents=True)
    assert run("pwd", cwd="/a/../a/b").output.endswith("/a/b\n")
    with pytest.raises(FileNotFoundError):
        run("pwd", cwd="/nowhere")
    (daemon.root / "file").touch()
    with pytest.raises(NotADirectoryError):
        run("pwd", cwd="/file")


def test_a_command_that_cannot_be_passed(daemon: Daemon) -> None:
    with pytest.raises(ValueError, match="NUL"):
        execute(daemon, "a\0b")
    with pytest.raises(ValueError, match="131071 bytes"):
        execute(daemon, "#" * 131_072)
    assert execute(daemon, "true" + " " * 131_067).exit_code == 0


# ------------------------------------------------------------------ interactive


def test_interactive_exit_code_and_directory(daemon: Daemon) -> None:
    (daemon.root / "file").touch()
    both: tuple[View, ...] = ("root", "mount")
    for view in both:
        assert run_interactive(daemon, ["/bin/sh", "-c", "echo x > made; exit 9"], view=view) == 9
        (daemon.root / "made").unlink()
        assert run_interactive(daemon, ["no-such-program"], view=view) == 127
        assert run_interactive(daemon, ["/etc/hostname"], view=view) == 126
        with pytest.raises(FileNotFoundError):
            run_interactive(daemon, ["true"], view=view, cwd="/nowhere")
        with pytest.raises(NotADirectoryError):
            run_interactive(daemon, ["true"], view=view, cwd="/file")


def test_interactive_has_the_terminal_and_gets_its_interrupt(daemon: Daemon) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from shell_world import Attached; from agenttools import shell\n"
        "sys.exit(shell.run_interactive(Attached(sys.argv[2]), ['/bin/sh', '-c', sys.argv[3]]))"
    )
    script = "trap 'echo caught; exit 6' INT; tty; echo ready; sleep 30"
    master, slave = pty.openpty()
    argv = [sys.executable, "-c", code, str(Path(__file__).parent), str(daemon.root), script]
    # setsid makes the pty the controlling terminal, so that ^C is a signal to the group in its foreground
    process = subprocess.Popen(
        ["setsid", "-c", "-w", *argv], stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "SHELL": "/bin/sh"}
    )
    os.close(slave)
    try:
        seen = b""
        while b"ready" not in seen:
            seen += os.read(master, 4096)
        os.write(master, b"\x03")
        with contextlib.suppress(OSError):  # EIO: all ends of it are closed
            while data := os.read(master, 4096):
                seen += data
        assert process.wait(10) == 6
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert b"/dev/pts/" in seen
    assert b"caught" in seen


# ------------------------------------------------------------------ which view


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shell, "_root_view_works", False)
    monkeypatch.setattr(shell, "_root_view_fails", "")
    yield


def test_auto_is_the_root_view(daemon: Daemon, fresh: None) -> None:
    assert execute(daemon, "true").view == "root"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "program", ["", '#!/bin/sh\necho "bwrap: No permissions to create new namespace" >&2; exit 1\n']
)
def test_without_bubblewrap(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    bwrap = tmp_path / "bwrap"
    if program:
        bwrap.write_text(program)
        bwrap.chmod(0o755)
    monkeypatch.setattr(views, "find_bwrap", lambda: str(bwrap) if program else None)
    with pytest.raises(ViewUnavailable, match="No permissions" if program else "apt install bubblewrap"):
        execute(daemon, "true", view="root", profile="open")
    for _ in range(2):
        result = execute(daemon, "echo once >> log", profile="open")
        assert result.view == "mount"
        assert str(daemon.root) in result.notices[0]
    assert (daemon.root / "log").read_text() == "once\nonce\n"
    remarks: list[str] = []
    assert run_interactive(daemon, ["true"], remark=remarks.append) == 0
    (remark,) = remarks
    assert remark.startswith(f"runs in the mount view, in the directory {daemon.root}")
    with pytest.raises(ValueError, match="view"):
        execute(daemon, "true", view="other")  # type: ignore[arg-type]


def test_tree_that_is_not_mounted_here(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(ViewUnavailable, match="not mounted there"):
        execute(daemon, "true", mountpoint=str(tmp_path))
    with pytest.raises(ViewUnavailable, match="No such file"):
        execute(daemon, "true", mountpoint=str(tmp_path / "gone"))


# ------------------------------------------------------------------ the toolchain


def test_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for directory in (
        "bin",
        ".cargo/bin",
        ".pyenv/shims",
        ".pyenv/versions",
        ".local/bin",
        ".local/lib",
        ".local/share",
    ):
        (home / directory).mkdir(parents=True)
    uv = home / ".local/share/uv/cpython-3.12.4"
    (uv / "bin").mkdir(parents=True)
    (uv / "lib").mkdir()
    (uv / "bin/python3.12").touch()
    (uv.parent / "cpython-3.12").symlink_to(uv.name)
    (home / ".local/bin/python3.12").symlink_to(uv.parent / "cpython-3.12/bin/python3.12")
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(uv.parent / "cpython-3.12/bin/python3.12")
    path = f"{home}/bin:{home}/.cargo/bin:{home}/.pyenv/shims:{home}/.local/bin:/usr/bin:{tmp_path}/tree/bin:relative"
    found = set(views.toolchain(path, str(venv), str(tmp_path / "tree")))
    mine = {directory.replace(str(home), "~") for directory in found if directory.startswith(str(home))}
    assert mine == {
        "~/bin",
        "~/.cargo/bin",
        "~/.pyenv",
        "~/.local/bin",
        "~/.local/lib",
        "~/.local/share/uv/cpython-3.12",
        "~/.local/share/uv/cpython-3.12.4",
    }
    assert str(venv) in found
    assert not any(directory.startswith(("/usr", str(tmp_path / "tree"))) for directory in found)
