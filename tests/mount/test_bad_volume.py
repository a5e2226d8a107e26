"""A volume that turns bad under a mount: read-only with a line in the log, never a daemon that dies."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon
from trees import ENGINES, watched

from agenttools import tools
from vfsd.check import check_volume

pytestmark = pytest.mark.timeout(120)
PROGRAM = Path(__file__).with_name("failing_daemon.py")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_disk_that_fails_makes_the_mount_read_only(engine: str, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "d", engine)
    plain, flag = daemon.command, tmp_path / "flag"
    daemon.command = [sys.executable, str(PROGRAM), str(flag), *plain[3:]]
    try:
        daemon.start()
        point = daemon.point
        with watched(point):
            (point / "f").write_bytes(b"f" * 50_000)
            (point / "d").mkdir()
            fd = os.open(point / "f", os.O_RDWR)
            flag.touch()
            for _ in range(2):
                # The second time too: the kernel has forgotten what it could not write.
                with pytest.raises(OSError) as caught:
                    os.fsync(fd)
                assert caught.value.errno == errno.EIO
            flag.unlink()
            call = daemon.client.call
            for change in (
                lambda: os.write(fd, b"x"),
                lambda: (point / "g").write_bytes(b"g"),
                lambda: os.rename(point / "f", point / "h"),
                lambda: os.rmdir(point / "d"),
                lambda: call("write", path=b"/tool", data=b"t"),
                lambda: call("checkpoint", action="create", label="no"),
            ):
                with pytest.raises(OSError) as caught:
                    change()
                assert caught.value.errno == errno.EROFS
            assert (point / "f").read_bytes() == b"f" * 50_000
            assert call("read", path=b"/f")["size"] == 50_000
            assert sorted(os.listdir(point)) == ["d", "f"]
            os.close(fd)
        lines = [line for line in daemon.log().splitlines() if " ERROR " in line]
        assert len(lines) == 1 and "Traceback" not in daemon.log()
        said = "is read-only from now on: a sync failed (Input/output error); mount it again once the cause is gone"
        assert lines[0].endswith(f"volume {daemon.volume} {said}")

        # Mounted again, it has all there was and takes more.
        assert daemon.vfsd("umount", "test").returncode == 0
        assert daemon.process is not None
        daemon.process.wait(30)
        daemon._reap()
        assert check_volume(daemon.volume) == []
        daemon.command = plain
        daemon.start()
        with watched(point):
            assert (point / "f").read_bytes() == b"f" * 50_000
            (point / "g").write_bytes(b"g")
    finally:
        daemon.abort()


def _until_read_only(daemon: Daemon) -> str:
    """What the status says once a look has found the volume wanting."""
    for _ in range(300):
        routes: Any = daemon.status()["routes"]
        if "problem" in routes[0]:
            return str(routes[0]["problem"])
        time.sleep(0.1)
    raise AssertionError("nobody saw it")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_data_file_cut_off_loses_what_it_lost_and_no_more(engine: str, tmp_path: Path) -> None:
    """No zeros for the bytes that are gone, by either door, now or after another mount; all else is read."""
    daemon = Daemon(tmp_path / "d", engine)
    point, call = daemon.point, lambda *args, **more: daemon.client.call(*args, **more)

    def judge() -> None:
        assert (point / "first").read_bytes() == (b"1" * 49 + b"\n") * 1000
        assert call("read", path=b"/first")["size"] == 50_000
        for lost in ("last", "both"):
            fd = os.open(point / lost, os.O_RDONLY | os.O_DIRECT)
            with pytest.raises(OSError) as caught:
                while os.readv(fd, [mmap.mmap(-1, 1 << 16)]):
                    pass
            os.close(fd)
            assert caught.value.errno == errno.EIO
            with pytest.raises(OSError) as caught:
                call("read", path=f"/{lost}".encode())
            assert caught.value.errno == errno.EIO
        searched = call("grep", pattern=b"11111")
        assert (searched["truncated"], searched["reason"]) == (True, "unreadable")
        assert {match[0] for match in searched["matches"]} == {b"/first"}
        assert "some files could not be read" in tools.grep(daemon.client, "nowhere").text
        assert "Input/output error" in tools.grep(daemon.client, "nowhere", "/last").text
        with pytest.raises(OSError) as caught:
            (point / "new").write_bytes(b"n" * (4 << 20))
        assert caught.value.errno in (errno.EIO, errno.EROFS)

    try:
        daemon.start()
        with watched(point):
            (point / "first").write_bytes((b"1" * 49 + b"\n") * 1000)
            (point / "both").write_bytes(b"b" * 50_000)
            (point / "last").write_bytes(b"2" * 50_000)
            call("checkpoint", action="create", label="c")
            os.truncate(daemon.volume / "data", 13 * 4096 + 4096)
            judge()
            assert _until_read_only(daemon) == "its data file has been cut off"
            judge()
            assert any("the data file has" in problem for problem in check_volume(daemon.volume))
        assert "Traceback" not in daemon.log()
        assert daemon.vfsd("umount", "test").returncode == 0
        assert daemon.process is not None
        daemon.process.wait(30)
        daemon._reap()
        daemon.start()
        with watched(point):
            judge()
            assert _until_read_only(daemon) == "its data file has been cut off"
    finally:
        daemon.abort()


@pytest.mark.parametrize("name", ["tree.db", "tree.db-wal", "data"])
def test_a_file_of_the_volume_removed_under_the_mount(name: str, tmp_path: Path) -> None:
    """What is written from then on would be lost, so nothing is; what there is can still be saved."""
    daemon = Daemon(tmp_path / "d")
    try:
        daemon.start()
        with watched(daemon.point):
            (daemon.point / "f").write_bytes(b"f" * 50_000)
            daemon.client.call("checkpoint", action="create", label="c")
            (daemon.volume / name).unlink()
            assert _until_read_only(daemon) == f"its file {name} has been removed or replaced"
            with pytest.raises(OSError) as caught:
                (daemon.point / "g").write_bytes(b"g")
            assert caught.value.errno == errno.EROFS
            said = daemon.vfsd("gc", "--name", "test")
            assert said.returncode == 1 and f"its file {name} has been removed" in said.stderr
            assert daemon.vfsd("export", str(tmp_path / "saved.tar"), "--name", "test").returncode == 0
            with tarfile.open(tmp_path / "saved.tar") as saved:
                content = saved.extractfile("./f")
                assert content is not None and content.read() == b"f" * 50_000
        lines = [line for line in daemon.log().splitlines() if " ERROR " in line]
        assert len(lines) == 1 and "Traceback" not in daemon.log()
        assert lines[0].endswith("removed or replaced; save what is still here (vfsd export) before you unmount it")
    finally:
        daemon.abort()


def _syncfs(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(fd):
        raise OSError(ctypes.get_errno(), "syncfs")


def _by_handle(daemon: Daemon) -> None:
    fh = daemon.client.call("open", path=b"/f", flags=os.O_RDWR)["fh"]
    daemon.client.call("fsync", fh=fh)


def _on(name: str, sync: Callable[[int], object]) -> Callable[[Daemon], None]:
    def call(daemon: Daemon) -> None:
        fd = os.open(daemon.point / name, os.O_RDONLY)
        try:
            sync(fd)
        finally:
            os.close(fd)

    return call


SYNCS: dict[str, Callable[[Daemon], object]] = {
    "fsync": _on("f", os.fsync),
    "fdatasync": _on("f", os.fdatasync),
    "fsyncdir": _on("d", os.fsync),
    "tool fsync": _by_handle,
    "tool sync": lambda daemon: daemon.client.call("sync"),
}


@pytest.mark.parametrize("name", SYNCS)
def test_every_way_to_sync_reaches_the_disk(name: str, tmp_path: Path) -> None:
    """And waits for it: a disk that fails is seen."""
    daemon, flag = Daemon(tmp_path / "d"), tmp_path / "flag"
    daemon.command = [sys.executable, str(PROGRAM), str(flag), *daemon.command[3:]]
    try:
        daemon.start()
        with watched(daemon.point):
            (daemon.point / "f").write_bytes(b"f")
            (daemon.point / "d").mkdir()
            SYNCS[name](daemon)
            (daemon.point / "f").write_bytes(b"news")  # without any there is nothing to ask the disk for
            flag.touch()
            with pytest.raises(OSError) as caught:
                SYNCS[name](daemon)
            assert caught.value.errno == errno.EIO
    finally:
        daemon.abort()


def test_syncfs_is_not_told_to_us(tmp_path: Path) -> None:
    """The kernel has FUSE_SYNCFS for virtiofs and block devices only (fs/fuse/inode.c); see docs/durability.md."""
    daemon, flag = Daemon(tmp_path / "d"), tmp_path / "flag"
    daemon.command = [sys.executable, str(PROGRAM), str(flag), *daemon.command[3:]]
    try:
        daemon.start()
        with watched(daemon.point):
            (daemon.point / "f").write_bytes(b"f")
            flag.touch()
            _on("f", _syncfs)(daemon)
            (daemon.point / "f").write_bytes(b"still taken")
    finally:
        daemon.abort()
