"""A volume on a disk without a free byte: it opens, and files can be deleted from it."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from makers import ME, open_volume

from vfsd.backends.base import VolumeError
from vfsd.backends.sqlite import SqliteBackend
from vfsd.check import check_volume
from vfsd.core.types import SetAttr
from vfsd.volume import TreeVolume


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True, timeout=20)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True, timeout=20)


def fill(disk: Path) -> None:
    with open(disk / "filler", "ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    assert os.statvfs(disk).f_bavail == 0


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_a_volume_on_a_full_disk_opens_again(killed: bool, disk: Path) -> None:
    place = disk / "volume"
    pid = os.fork()
    if pid == 0:
        volume = open_volume("state", place)
        for i in range(50):
            volume.create_file(volume.root_ino, b"f%d" % i, 0o644, b"%d" % i * 20_000, ME)
        fill(disk)
        if not killed:
            volume.close()
            fill(disk)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

    volume = open_volume("state", place)
    ino = volume.lookup(volume.root_ino, b"f7").ino
    assert bytes(volume.read(ino, 0, 0, 1 << 20)) == b"7" * 20_000
    for i in range(50):
        volume.unlink(volume.root_ino, b"f%d" % i, ME)
    volume.close()
    assert check_volume(place) == []


def test_a_new_volume_on_a_full_disk_is_refused_with_the_reason(disk: Path) -> None:
    fill(disk)
    with pytest.raises(VolumeError, match=r"the disk is full|No space left"):
        open_volume("state", disk / "volume")


def killed_with_the_ballast_gone(disk: Path, *, closed: bool) -> Path:
    """A volume whose ballast other programs took when it was given up, and all other room too."""
    place = disk / "volume"
    pid = os.fork()
    if pid == 0:
        volume = open_volume("state", place)
        for i in range(300):
            volume.create_file(volume.root_ino, b"f%d" % i, 0o644, b"%d" % i * 5_000, ME)
        volume.setxattr(volume.lookup(volume.root_ino, b"f7").ino, b"user.a", b"b", 0, ME)
        unlinked = volume.create_file(volume.root_ino, b"unlinked", 0o644, b"u", ME)
        volume.open(unlinked.ino, os.O_RDONLY, ME)
        volume.unlink(volume.root_ino, b"unlinked", ME)
        if closed:
            volume.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    (place / "ballast").unlink()
    fill(disk)
    return place


def names(volume: TreeVolume) -> list[bytes]:
    fh = volume.opendir(volume.root_ino, ME)
    return [entry.name for entry in volume.readdir(volume.root_ino, fh, 0)]


def problem(volume: TreeVolume) -> str | None:
    assert isinstance(volume.backend, SqliteBackend)
    return volume.backend.problem


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
def test_without_the_room_to_open_it_it_is_read_only_until_there_is(
    closed: bool, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = killed_with_the_ballast_gone(disk, closed=closed)
    for turn in range(2):  # what is read is in the journal still, and stays there
        volume = open_volume("state", place)
        root = volume.root_ino
        assert "the disk is full" in str(problem(volume))
        assert "the disk is full" in caplog.text
        ino = volume.lookup(root, b"f7").ino
        assert bytes(volume.read(ino, 0, 0, 1 << 20)) == b"7" * 5_000
        assert volume.getxattr(ino, b"user.a") == b"b"
        assert len(names(volume)) == 300
        with pytest.raises(OSError, match="Read-only"):
            volume.unlink(root, b"f7", ME)
        trio.run(volume.maintain)
        with pytest.raises(OSError, match="Read-only"):
            volume.create_file(root, b"new", 0o644, b"n", ME)
        # What was acknowledged is there, and needs no room to become durable.
        trio.run(volume.fsync, ino, 0, False)
        trio.run(volume.syncfs)
        if turn == 0:
            volume.close()
    (disk / "filler").unlink()
    trio.run(volume.maintain)
    assert problem(volume) is None
    assert "writable again" in caplog.text
    assert bytes(volume.read(ino, 0, 0, 1 << 20)) == b"7" * 5_000
    volume.create_file(root, b"new", 0o644, b"n", ME)
    volume.unlink(root, b"f8", ME)
    trio.run(volume.maintain)
    volume.close()
    volume = open_volume("state", place)
    assert len(names(volume)) == 300
    assert bytes(volume.read(volume.lookup(volume.root_ino, b"new").ino, 0, 0, 9)) == b"n"
    volume.close()
    assert check_volume(place) == []


def test_a_sync_that_fails_while_it_waits_for_room_is_for_good(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    volume = open_volume("state", killed_with_the_ballast_gone(disk, closed=False))
    ino = volume.lookup(volume.root_ino, b"f7").ino

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(OSError, match="Input/output error"):
            trio.run(volume.fsync, ino, 0, False)
    (disk / "filler").unlink()
    trio.run(volume.maintain)
    assert "a sync failed" in str(problem(volume))
    with pytest.raises(OSError, match="Input/output error"):
        trio.run(volume.fsync, ino, 0, False)
    volume.close()


def write_and_delete(place: Path, disk: Path) -> None:
    volume = open_volume("state", place)
    root = volume.root_ino
    for i in range(20):
        volume.create_file(root, b"f%d" % i, 0o644, b"x", ME)
    fill(disk)
    for i in range(19):
        with contextlib.suppress(OSError):
            for turn in range(100_000):
                volume.setattr(root, SetAttr(mtime_ns=turn), ME)
        with contextlib.suppress(OSError):
            for turn in range(100_000):
                volume.create_file(root, b"new%d-%d" % (i, turn), 0o644, bytes(100_000), ME)
        volume.unlink(root, b"f%d" % i, ME)


def test_what_is_held_for_deleting_goes_to_nothing_else(disk: Path) -> None:
    """Programs go on writing on a full disk after each file deleted; the next can be deleted all the same."""
    place = disk / "volume"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            write_and_delete(place, disk)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    volume = open_volume("state", place)
    assert bytes(volume.read(volume.lookup(volume.root_ino, b"f19").ino, 0, 0, 10)) == b"x"
    volume.unlink(volume.root_ino, b"f19", ME)
    volume.close()
