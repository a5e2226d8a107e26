"""A volume on a disk without a free byte: it opens, and files can be deleted from it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from makers import ME, open_volume

from vfsd.backends.base import VolumeError
from vfsd.check import check_volume
from vfsd.core.types import SetAttr


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


def test_without_the_room_to_open_it_the_reason_is_named(disk: Path) -> None:
    place = disk / "volume"
    open_volume("state", place).close()
    (place / "ballast").unlink()
    fill(disk)
    with pytest.raises(VolumeError, match="the disk is full"):
        open_volume("state", place)


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
