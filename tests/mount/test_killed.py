"""kill -9 of a real daemon at commits of a shell session: what write(2) and its like returned for is there again."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemons import Daemon
from trees import watched

from vfsd.check import check_volume

pytestmark = pytest.mark.timeout(120)
PROGRAM = Path(__file__).with_name("killed_daemon.py")
Tree = dict[str, tuple[int, int, bytes]]


def session(point: Path) -> list[Callable[[], object]]:
    """Steps of one or two commits each."""
    fds: list[int] = []

    def write(name: str, data: bytes, flags: int) -> None:
        fd = os.open(point / name, os.O_WRONLY | flags, 0o644)
        fds.append(fd)
        os.write(fd, data)

    return [
        lambda: os.mkdir(point / "d"),
        lambda: write("d/f", b"one" * 3000, os.O_CREAT),
        lambda: write("d/f", b"more", os.O_APPEND),
        lambda: os.rename(point / "d/f", point / "g"),
        lambda: write("g", b"anew", os.O_TRUNC),
        lambda: os.link(point / "g", point / "d/h"),
        lambda: write("new", b"x" * 100_000, os.O_CREAT),
        lambda: os.rename(point / "new", point / "g"),
        lambda: os.symlink("d/h", point / "l"),
        lambda: os.chmod(point / "d/h", 0o4711),
        lambda: os.truncate(point / "g", 50_000),
        lambda: os.unlink(point / "l"),
        lambda: os.setxattr(point / "d", "user.a", b"1"),
        lambda: [os.close(fd) for fd in fds],
        lambda: os.unlink(point / "g"),
    ]


def tree(point: Path) -> Tree:
    found: Tree = {}
    for directory, names, files in os.walk(point):
        for name in names + files:
            path = Path(directory, name)
            st = path.lstat()
            content = (
                os.fsencode(os.readlink(path)) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
            )
            found[str(path.relative_to(point))] = (st.st_mode, st.st_nlink, content)
    return found


def records(base: Path) -> tuple[list[Tree], int]:
    """(the tree after each step, journal records of the whole session)."""
    daemon = Daemon(base)
    try:
        daemon.start()
        with watched(daemon.point):
            states = [tree(daemon.point)]
            counters = daemon.client.call("status")["counters"]
            for step in session(daemon.point):
                step()
                states.append(tree(daemon.point))
            commits = daemon.client.call("status")["counters"]["commits"] - counters["commits"]
        daemon.stop()
    finally:
        daemon.abort()
    return states, commits


def test_killed_at_commits(tmp_path: Path) -> None:
    states, commits = records(tmp_path / "whole")
    assert commits >= 15
    reached = set()
    # The first records make the tree itself; then every third of the session's.
    for n in range(2, commits + 4, 3):
        daemon = Daemon(tmp_path / str(n))
        plain = daemon.command
        daemon.command = [sys.executable, str(PROGRAM), str(n), *plain[3:]]
        try:
            done = 0
            try:
                daemon.start()
            except AssertionError:
                pass  # it did not live to say so
            else:
                with watched(daemon.point):
                    try:
                        for step in session(daemon.point):
                            step()
                            done += 1
                    except OSError as error:
                        assert error.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO), error
            assert daemon.process is not None
            daemon.process.wait(30) if done < len(states) - 1 else daemon.process.send_signal(signal.SIGKILL)
            daemon.kill()
            assert check_volume(daemon.volume) == []
            daemon.command = plain
            daemon.start()
            with watched(daemon.point):
                assert tree(daemon.point) in states[done : done + 2] or _half(tree(daemon.point), states, done)
            daemon.stop()
            reached.add(done)
        finally:
            daemon.abort()
    assert len(reached) > 5


def _half(found: Tree, states: list[Tree], done: int) -> bool:
    """A step of several calls may be done in part: each file is as before, as after, or made and still empty."""
    before, after = states[done], states[min(done + 1, len(states) - 1)]
    return all(
        value in (before.get(path), after.get(path)) or value[2] == b"" for path, value in found.items()
    ) and set(found) >= set(before) & set(after)


RULE = """
[[rules]]
operations = ["write"]
paths = ["/d/x"]
mode = "interrupt"
[rules_options]
approval_seconds = 60
"""


def guard_of(pid: int) -> int:
    """The process beside daemon ``pid`` that looks after its end."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (guard,) = [
        int(child) for child in children if Path(f"/proc/{child}/cmdline").read_bytes().endswith(b"\0vfsd-guard\0")
    ]
    return guard


@pytest.mark.parametrize("again", ["nothing", "umount", "mount"])
def test_killed_while_a_notification_waits(again: str, tmp_path: Path) -> None:
    """A program holds a directory and waits for the daemon, whose notification of that directory waits for the program:
    so the process would outlive its kill, and its mount with it. A guard cuts the connection; where that was killed
    too, the next command does."""
    config = tmp_path / "vfsd.toml"
    config.write_text(RULE)
    daemon = Daemon(tmp_path / "d")
    daemon.command[4:4] = ["--config", str(config)]
    try:
        daemon.start()
        (daemon.point / "d").mkdir()
        assert not (daemon.point / "d/y").exists()  # which the kernel remembers
        with subprocess.Popen(["mkdir", daemon.point / "d/x"], stderr=subprocess.DEVNULL) as program:
            assert daemon.client.call("approvals", wait=20)["pending"]
            daemon.client.call("write", path=b"/d/y", data=b"kept")
            assert daemon.process is not None
            if again != "nothing":
                os.kill(guard_of(daemon.process.pid), signal.SIGKILL)
            daemon.process.kill()
            if again == "nothing":
                daemon.process.wait(20)
            elif again == "umount":
                done = daemon.vfsd("umount", "test")
                assert done.returncode == 0 and "had died" in done.stderr + done.stdout
            else:
                killed = daemon.process
                daemon._reap()
                daemon.start()
                killed.wait(20)
                assert (daemon.point / "d/y").read_bytes() == b"kept"
            assert program.wait(20) != 0
    finally:
        daemon.abort()
    assert check_volume(daemon.volume) == []
