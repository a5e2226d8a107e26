"""A disk that is full, for every operation of the shell and of the tools: ENOSPC or done, nothing in between; and after
space is made, which can be done from inside, all works again."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import EXPECTED_WARNINGS, Daemon
from trees import ENGINES, watched

from vfsd.backends.fallocate import host_fallocate

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
Tree = dict[str, tuple[Any, ...]]


@pytest.fixture(params=ENGINES)
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose volume is on a disk of 24 MiB, with a few files in it and no room left."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=True, timeout=20)
    daemon = Daemon(tmp_path / "d", request.param)
    daemon.command[daemon.command.index(f"/=state:{daemon.volume}")] = f"/=state:{disk}/volume"
    daemon.volume = disk / "volume"
    try:
        daemon.start()
        with watched(daemon.point):
            prepare(daemon.point)
            fill(disk)
            yield daemon
    finally:
        daemon.abort()
        subprocess.run(["umount", disk], check=True, timeout=20)


def prepare(point: Path) -> None:
    (point / "f").write_bytes(b"f" * 100_000)
    (point / "g").write_bytes(b"g" * 10)
    (point / "x").write_bytes(b"x" * 10)
    (point / "d").mkdir()
    (point / "d/e").write_bytes(b"e" * 5000)
    os.setxattr(point / "f", "user.a", b"1")
    (point / "big").write_bytes(b"b" * 4 * MIB)


def fill(disk: Path) -> None:
    """Take all the room there is, from outside, but for what the volume holds in hand."""
    fd = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for piece in (MIB, 4096):
        with contextlib.suppress(OSError):
            while os.write(fd, bytes(piece)) == piece:
                pass
    os.close(fd)


def tree(point: Path) -> Tree:
    found: Tree = {}
    for directory, names, files in os.walk(point):
        for name in names + files:
            path = Path(directory, name)
            st = path.lstat()
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            xattrs = tuple((n, os.getxattr(path, n)) for n in os.listxattr(path)) if not path.is_symlink() else ()
            found[str(path.relative_to(point))] = (st.st_mode, st.st_nlink, st.st_size, content, xattrs)
    return found


def pwrite(path: Path, data: bytes, offset: int, flags: int = 0) -> None:
    fd = os.open(path, os.O_WRONLY | flags, 0o644)
    try:
        assert os.pwrite(fd, data, offset) == len(data)
    finally:
        os.close(fd)


def fallocate(path: Path, offset: int, length: int) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        host_fallocate(fd, 0, offset, length)
    finally:
        os.close(fd)


def operations(daemon: Daemon) -> dict[str, Callable[[], object]]:
    """Each is one change, so that it is done or not."""
    point, call = daemon.point, daemon.client.call
    return {
        "create": lambda: os.close(os.open(point / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
        "mkdir": lambda: os.mkdir(point / "newdir"),
        "symlink": lambda: os.symlink("f", point / "l"),
        "link": lambda: os.link(point / "f", point / "hard"),
        "rename": lambda: os.rename(point / "g", point / "d/moved"),
        "rename over": lambda: os.rename(point / "x", point / "d/e"),
        "write in place": lambda: pwrite(point / "f", b"here", 1),
        "append": lambda: pwrite(point / "big", b"a" * 100_000, 0, os.O_APPEND),
        "write far": lambda: pwrite(point / "f", b"far" * 2000, 10 * MIB),
        "grow": lambda: os.truncate(point / "big", 30 * MIB),
        "fallocate": lambda: fallocate(point / "f", 0, 8 * MIB),
        "chmod": lambda: os.chmod(point / "f", 0o600),
        "setxattr": lambda: os.setxattr(point / "f", "user.b", b"2" * 1000),
        "removexattr": lambda: os.removexattr(point / "f", "user.a"),
        "mkfifo": lambda: os.mkfifo(point / "p"),
        "tool write": lambda: call("write", path=b"/tool", data=b"t" * 300_000),
        "tool write over": lambda: call("write", path=b"/f", data=b"F" * 300_000),
        "tool mkdir": lambda: call("mkdir", path=b"/tooldir", perm=0o755),
        "truncate": lambda: os.truncate(point / "big", 3 * MIB),
    }


def exhaust(daemon: Daemon) -> None:
    """Use up what the journal has set aside, so that nothing at all is to be had."""
    with contextlib.suppress(OSError):
        for turn in range(20_000):
            os.utime(daemon.point / "d", ns=(turn, turn))


@pytest.mark.parametrize("exhausted", [False, True], ids=["some-journal", "no-journal"])
def test_every_operation_is_done_or_refused(full: Daemon, exhausted: bool) -> None:
    point = full.point
    if exhausted:
        exhaust(full)
        with pytest.raises(OSError, match="No space"):
            os.utime(point / "d")
    refused = set()
    for name, operation in operations(full).items():
        before = tree(point)
        try:
            operation()
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP and name == "fallocate":
                continue  # an engine that has none
            assert error.errno == errno.ENOSPC, (name, error)
            refused.add(name)
            assert tree(point) == before, name
    assert {"append", "tool write", "tool write over", "write far"} <= refused
    assert "truncate" not in refused
    there = tree(point)

    # Deleting works, and makes room for what comes next, without a restart.
    os.unlink(point / "big")
    del there["big"]
    (point / "after").write_bytes(b"a" * 2 * MIB)
    assert (point / "after").read_bytes() == b"a" * 2 * MIB
    os.unlink(point / "after")
    full.client.call("write", path=b"/after", data=b"t" * 300_000)
    os.unlink(point / "after")
    fd = os.open(point / "g" if (point / "g").exists() else point / "d", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert tree(point) == there

    # Nothing of it is lost when the daemon dies now, nor when it ends on a disk that is still as good as full.
    full.kill()
    full.start()
    assert tree(point) == there
    full.process.send_signal(15)  # type: ignore[union-attr]
    assert full.process.wait(30) == 0  # type: ignore[union-attr]
    full._reap()
    full.start()
    assert tree(point) == there
    expected = (*EXPECTED_WARNINGS, "not folded yet", "No space", "maintenance of", "disk I/O", "full")
    assert [line for line in full.unexpected() if not any(word in line for word in expected)] == []


def test_checkpoints_on_a_full_disk(full: Daemon) -> None:
    """One that can't be taken is an error, one there already can be gone back to once there is room."""
    point = full.point
    os.unlink(point / "big")
    made = full.client.call("checkpoint", action="create", label="one")["result"]
    there = tree(point)
    (point / "f").write_bytes(b"F" * 50_000)
    fill(full.volume.parent)
    exhaust(full)
    with contextlib.suppress(OSError):
        full.client.call("checkpoint", action="create", label="two")
    (full.volume.parent / "filler").unlink()
    full.client.call("checkpoint", action="restore", ref=made["id"])
    assert tree(point) == there


def test_killed_on_a_full_disk_whose_last_room_others_took(full: Daemon) -> None:
    """It comes up, shows everything, says why it is read-only, and is writable again once there is room."""
    point, disk = full.point, full.volume.parent
    full.environ["XDG_STATE_HOME"] = str(disk / "state")
    exhaust(full)
    there = tree(point)
    full.kill()
    (full.volume / "ballast").unlink()
    fill(disk)
    full.start()
    assert tree(point) == there
    for refused in (lambda: os.unlink(point / "big"), lambda: (point / "new").touch()):
        with pytest.raises(OSError, match="Read-only file system"):
            refused()
    with pytest.raises(OSError, match="Read-only file system"):
        full.client.call("write", path=b"/tool", data=b"t")
    assert full.client.call("read", path=b"/g", offset=0, length=99)["data"] == b"g" * 10
    assert "the disk is full" in full.vfsd("status", "test").stdout
    assert "until there is room it is read-only" in full.log()
    (disk / "filler").unlink()
    deadline = time.monotonic() + 20
    while not does(lambda: (point / "new").write_bytes(b"new")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    there["new"] = tree(point)["new"]
    assert tree(point) == there
    assert "problem" not in str(full.status()["routes"])
    assert "writable again" in full.log()
    full.kill()
    full.start()
    assert tree(point) == there


def does(operation: Callable[[], object]) -> bool:
    try:
        operation()
    except OSError:
        return False
    return True
