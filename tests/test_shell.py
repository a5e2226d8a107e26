"""execute through its public door, on a plain directory that stands in for the mount (``mount/test_execute.py`` has the
real one): the directory holds what the daemon keeps hidden, the stubs of the host's system directories.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from agenttools import capture, shell, views
from agenttools.processes import end_all
from agenttools.shell import (
    Cancellation,
    Cancelled,
    ExecuteResult,
    View,
    ViewUnavailable,
    aexecute,
    execute,
    run_interactive,
)


class Daemon:
    """What execute needs of the daemon, over a plain directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hello: Mapping[str, Any] = {"mountpoint": os.fsencode(root)}
        for name in (*views.SYSTEM, "dev", "proc", "sys", "run"):
            host = Path("/", name)
            if host.is_symlink():
                (root / name).symlink_to(host.readlink())
            elif host.is_dir():
                (root / name).mkdir()

    def call(self, op: str, /, **params: Any) -> Mapping[str, Any]:
        if op == "stat":
            found = os.stat(os.fsencode(self.root) + params["path"])
            return {"attr": {"ino": found.st_ino, "mode": found.st_mode}}
        assert op == "stub"
        for path in params["paths"]:
            os.makedirs(os.fsencode(self.root) + path, exist_ok=True)
        return {}


class Attached(Daemon):
    """The same for a directory that is laid out already."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.hello = {"mountpoint": os.fsencode(root)}


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    root = tmp_path / "tree"
    root.mkdir()
    return Daemon(root)


@pytest.fixture(params=["root", "mount"])
def run(request: pytest.FixtureRequest, daemon: Daemon) -> Callable[..., ExecuteResult]:
    """execute in each view, which the result confirms."""

    def call(command: str, **options: Any) -> ExecuteResult:
        try:
            result = execute(daemon, command, view=request.param, **options)
        except ViewUnavailable as error:
            pytest.skip(str(error))
        assert result.view == request.param
        return result

    return call


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids(directory: Path, *names: str) -> list[int]:
    return [int((directory / name).read_text()) for name in names]


# ------------------------------------------------------------------ what comes back


def test_output_is_combined_in_order(run: Callable[..., ExecuteResult]) -> None:
    result = run("echo one; echo two >&2; echo three")
    assert (result.output, result.exit_code, result.truncated) == ("one\ntwo\nthree\n", 0, False)
    assert not result.timed_out
    assert 0 < result.duration < 5


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -9 $$", 128 + signal.SIGKILL),
        ("kill -TERM $$", 128 + signal.SIGTERM),
        ("no-such-program-here", 127),
        ("kill -9 0", 128 + signal.SIGKILL),
    ],
)
def test_exit_code(run: Callable[..., ExecuteResult], command: str, code: int) -> None:
    assert run(command).exit_code == code


def test_stdin_is_empty(run: Callable[..., ExecuteResult]) -> None:
    assert run("cat; readlink /proc/self/fd/0").output == "/dev/null\n"


def test_no_descriptor_of_the_caller_is_inherited(run: Callable[..., ExecuteResult]) -> None:
    with open("/dev/zero", "rb") as held:
        os.set_inheritable(held.fileno(), True)
        assert "/dev/zero" not in run("ls -l /proc/self/fd").output


def test_bytes_that_are_not_utf8_are_replaced(run: Callable[..., ExecuteResult]) -> None:
    assert run(r"printf 'a\377b\303'").output == "a\ufffdb\ufffd"


def test_command_and_output_hold_any_character(run: Callable[..., ExecuteResult]) -> None:
    assert run("printf '%s' 'grüße 🌍'; printf %s '\udcff' | wc -c").output == "grüße 🌍1\n"


def test_environment_is_small_and_has_no_secret(
    run: Callable[..., ExecuteResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("LC_TIME", "C")
    result = run("env", env={"GIVEN": "yes", "LANG": "POSIX"})
    found = dict(line.split("=", 1) for line in result.output.splitlines())
    assert "SECRET_TOKEN" not in found
    assert (found["GIVEN"], found["LANG"], found["LC_TIME"]) == ("yes", "POSIX", "C")
    assert set(found) - {"GIVEN"} <= {
        *views.PASSED,
        "LC_TIME",
        "HOME",
        "TMPDIR",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        views.MARKER,
    }


# ------------------------------------------------------------------ large output


def test_output_is_cut_between_characters_and_kept_whole(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    printed = "x" + "é" * 100_000
    (daemon.root / "large").write_text(printed)
    result = run("cat large", call_id="call.1/2")
    assert result.truncated
    assert result.output == printed[: (shell.MAX_OUTPUT - 1) // 2 + 1]
    assert result.output_file == "/large_tool_results/call_1_2"
    assert (daemon.root / "large_tool_results/call_1_2").read_text() == printed
    assert "/large_tool_results/call_1_2" in result.notices[0]


@pytest.mark.parametrize("size", [99_999, 100_000, 100_001])
def test_limit_is_exact(run: Callable[..., ExecuteResult], daemon: Daemon, size: int) -> None:
    result = run(f"head -c {size} /dev/zero | tr '\\0' x")
    assert len(result.output) == min(size, 100_000)
    assert result.truncated == (size > 100_000)
    assert (result.output_file is not None) == result.truncated
    assert not list(daemon.root.glob("large_tool_results/*")) or result.truncated


def test_replacement_characters_count_as_what_they_are(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    result = run(r"head -c 60000 /dev/zero | tr '\0' '\377'")
    assert result.output == "\ufffd" * 33_333
    assert result.output_file is not None
    assert (daemon.root / result.output_file[1:]).read_bytes() == b"\xff" * 60_000


def test_large_output_that_cannot_be_kept_is_told(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    (daemon.root / "large_tool_results").write_text("a file in the way")
    result = run("head -c 200000 /dev/zero; exit 3")
    assert (result.exit_code, len(result.output), result.output_file) == (3, 100_000, None)
    assert "File exists" in result.notices[0]


def test_a_runaway_output_does_not_fill_the_disk(
    run: Callable[..., ExecuteResult], daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_KEPT", 1 << 20)
    result = run("head -c 5000000 /dev/zero", call_id="x" * 200)
    assert result.exit_code == 0
    assert result.output_file is not None
    assert result.output_file.startswith("/large_tool_results/call-")
    assert 1 << 20 <= (daemon.root / result.output_file[1:]).stat().st_size < 2 << 20
    assert "1 MiB" in result.notices[0]


# ------------------------------------------------------------------ time limit and processes

STUBBORN = """
sleep 311 & echo $! > plain
(trap '' TERM HUP INT; sleep 312; sleep 312) & echo $! > deaf
setsid sh -c 'echo $$ > own; sleep 313; true' &
(setsid sh -c 'echo $$ > orphan; exec sleep 314' &)
(setsid env -i /bin/sh -c 'echo $$ > unmarked; exec /bin/sleep 315' &)
while [ ! -s unmarked ] || [ ! -s orphan ] || [ ! -s own ]; do sleep 0.01; done
"""


def test_timeout_ends_every_process(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    names = ["plain", "deaf", "own", "orphan"]
    started = time.monotonic()
    result = run(f"echo before; {STUBBORN} sleep 316", timeout=1)
    assert time.monotonic() - started < 5
    assert (result.exit_code, result.timed_out, result.output) == (124, True, "before\n")
    assert result.notices == ("Command timed out after 1 seconds",)
    if result.view == "root":  # without a namespace, one that sheds session, parent and environment is lost sight of
        names.append("unmarked")
    left = [pid for pid in pids(daemon.root, *names) if alive(pid)]
    for pid in pids(daemon.root, "unmarked"):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    assert not left


def test_timeout_ends_a_shell_that_forks_all_the_time(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    result = run("while :; do (sleep 0.05; sleep 317) & sleep 0.002; done", timeout=0.5)
    assert result.timed_out
    assert subprocess.run(["pgrep", "-xf", "sleep 317"], stdout=subprocess.PIPE).stdout == b""


def test_timeout_counts_while_the_command_prints(run: Callable[..., ExecuteResult]) -> None:
    result = run("yes", timeout=0.5)
    assert (result.timed_out, result.truncated) == (True, True)
    assert result.duration < 4


def test_no_timeout(run: Callable[..., ExecuteResult]) -> None:
    assert run("sleep 0.3; echo done", timeout=0).output == "done\n"


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_bad_timeout(daemon: Daemon, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        execute(daemon, "true", timeout=timeout)


@pytest.mark.parametrize("child", ["sleep 40", "while :; do echo tick; sleep 0.05; done", "yes"])
def test_background_child_does_not_hold_the_call_and_lives_on(
    run: Callable[..., ExecuteResult], daemon: Daemon, child: str
) -> None:
    result = run(f"({child}) & echo $! > pid; echo done", timeout=30)
    (pid,) = pids(daemon.root, "pid")
    try:
        assert (result.exit_code, result.timed_out) == (0, False)
        assert "done\n" in result.output
        assert result.duration < 3
        time.sleep(0.3)
        assert alive(pid)  # it did not die of SIGPIPE, and its pid is the one the command saw
    finally:
        os.kill(pid, signal.SIGKILL)


def test_late_output_of_a_child_is_there(run: Callable[..., ExecuteResult]) -> None:
    assert run("(sleep 0.03; echo late) & echo soon").output == "soon\nlate\n"


def test_next_call_after_a_timeout(run: Callable[..., ExecuteResult]) -> None:
    run("sleep 60", timeout=0.2)
    assert run("echo fine").output == "fine\n"


def test_end_all_leaves_others_alone(daemon: Daemon) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    victim = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        end_all([victim.pid], "no-such-marker", None)
        assert victim.wait(5) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


# ------------------------------------------------------------------ cancelling, threads, event loops


def test_cancel_from_another_thread(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    cancellation = Cancellation()
    timer = threading.Timer(0.4, cancellation.cancel)
    timer.start()
    with pytest.raises(Cancelled):
        run("sleep 318 & echo $! > pid; sleep 318", cancellation=cancellation)
    timer.join()
    assert not alive(*pids(daemon.root, "pid"))


def test_many_at_once(daemon: Daemon) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda n: execute(daemon, f"echo {n}; exit {n}"), range(48)))
    assert [(result.output, result.exit_code) for result in results] == [(f"{n}\n", n) for n in range(48)]


def test_descriptors_are_given_back(run: Callable[..., ExecuteResult]) -> None:
    run("true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run("true")
        run("sleep 9", timeout=0.05)
    assert len(os.listdir("/proc/self/fd")) == before


def test_asyncio(daemon: Daemon) -> None:
    async def main() -> list[ExecuteResult]:
        return await asyncio.gather(*(aexecute(daemon, f"sleep 0.2; exit {n}") for n in range(12)))

    started = time.monotonic()
    assert [result.exit_code for result in asyncio.run(main())] == list(range(12))
    assert time.monotonic() - started < 2


def test_asyncio_cancel_ends_the_processes(daemon: Daemon) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aexecute(daemon, "echo $$ > pid; sleep 319"), 0.4)

    asyncio.run(main())
    assert not alive(*pids(daemon.root, "pid"))


def test_trio_and_its_cancel(daemon: Daemon) -> None:
    async def main() -> None:
        assert (await aexecute(daemon, "exit 5")).exit_code == 5
        with pytest.raises(ValueError, match="timeout"):
            await aexecute(daemon, "true", timeout=-1)
        with trio.move_on_after(0.4) as scope:
            await aexecute(daemon, "echo $$ > pid; sleep 320")
        assert scope.cancelled_caught

    trio.run(main)
    assert not alive(*pids(daemon.root, "pid"))


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
    result = execute(daemon, f"pwd; ls -d {Path(__file__)}", view="mount")
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
        "import sys; sys.path.insert(0, sys.argv[1]); from test_shell import Attached; from agenttools import shell\n"
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
        execute(daemon, "true", view="root")
    for _ in range(2):
        result = execute(daemon, "echo once >> log")
        assert result.view == "mount"
        assert str(daemon.root) in result.notices[0]
    assert (daemon.root / "log").read_text() == "once\nonce\n"
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
