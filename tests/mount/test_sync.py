"""sync(2) on the machine is enough: what a power failure would leave of the disk, right after it, has everything."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon
from makers import ME, open_volume
from trees import watched

from vfsd.check import check_volume
from vfsd.volume import TreeVolume

pytestmark = pytest.mark.mount


@contextlib.contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", image, place], check=True, timeout=20)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True, timeout=20)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control") or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root, loop devices and mkfs.ext4")
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=20)
    return image


def contents(volume: TreeVolume) -> dict[bytes, bytes]:
    fh = volume.opendir(volume.root_ino, ME)
    names = [entry.name for entry in volume.readdir(volume.root_ino, fh, 0) if entry.name.startswith(b"f")]
    return {name: bytes(volume.read(volume.lookup(volume.root_ino, name).ino, 0, 0, 1 << 20)) for name in names}


def test_sync_of_the_machine_is_enough(image: Path, tmp_path: Path) -> None:
    """Nothing that was acknowledged is held in the daemon: its records and contents are the host's dirty pages."""
    expected = {b"f%d" % i: b"%d" % i * (i * 100) for i in range(40)}
    with mounted(image, tmp_path / "disk") as disk:
        daemon = Daemon(tmp_path / "d")
        daemon.command[daemon.command.index(f"/=state:{daemon.volume}")] = f"/=state:{disk}/volume"
        try:
            daemon.start()
            with watched(daemon.point):
                for name, content in expected.items():
                    if int(name[1:]) % 2:
                        (daemon.point / os.fsdecode(name)).write_bytes(content)
                    else:
                        daemon.client.call("write", path=b"/" + name, data=content)
                os.unlink(daemon.point / "f7")
                del expected[b"f7"]
                os.sync()
                # What is in the image is what has reached the device; what is only in the cache above it is not.
                shutil.copyfile(image, tmp_path / "left")
        finally:
            daemon.abort()
    with mounted(tmp_path / "left", tmp_path / "after") as after:
        with contextlib.closing(open_volume("state", after / "volume")) as volume:
            assert contents(volume) == expected
        assert check_volume(after / "volume") == []
