"""A mount that has another path than at its start, since a directory above it was renamed, is unmounted like any."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import World
from mounted import Mounted

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
NOBODY = 65534


def below(path: Path) -> list[str]:
    """What is mounted there."""
    table = Path("/proc/self/mounts").read_text().splitlines()
    return [at for line in table if (at := line.split()[1].replace("\\040", " ")).startswith(f"{path}/")]


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that everybody may enter."""
    made = Path(tempfile.mkdtemp(prefix="vfsd-"))
    made.chmod(0o755)
    yield made
    for path in below(made):
        subprocess.run(["umount", "-l", path], check=False)
    shutil.rmtree(made)


@pytest.mark.parametrize("user", [None, pytest.param(NOBODY, marks=as_root)])
@pytest.mark.parametrize("how", ["close", "cancel"])
def test_an_engine_unmounts_where_it_is_now(base: Path, engine: str, user: int | None, how: str) -> None:
    if user and os.stat("/dev/fuse").st_mode & 0o006 != 0o006:
        pytest.skip("/dev/fuse is closed to ordinary users here")
    point = base / "before/mnt"
    point.mkdir(parents=True)
    os.chown(point, user or 0, user or 0)
    tree = Mounted(point, engine, user=user)
    try:
        (base / "before").rename(base / "now here")
        tree.send(how)
        tree.process.wait(20)
        assert below(base) == []
    finally:
        tree.stop()


def test_another_mount_that_has_the_path_now_stays(base: Path, engine: str) -> None:
    point = base / "before/mnt"
    point.mkdir(parents=True)
    moved = Mounted(point, engine)
    (base / "before").rename(base / "now")
    point.mkdir(parents=True)
    other = Mounted(point, engine)
    try:
        moved.send("close")
        moved.process.wait(20)
        assert below(base) == [str(point)]
        other.tool("write", "/f", "x")
    finally:
        moved.process.kill()
        moved.stop()
        other.stop()


@pytest.mark.parametrize("by", ["SIGTERM", "umount"])
def test_a_daemon_ends_with_nothing_left(world: World, engine: str, by: str) -> None:
    point = world.base / "before/mnt"
    point.mkdir(parents=True)
    world.vfsd("mount", point, "--engine", engine)
    pid = world.status()["pid"]
    (world.base / "before").rename(world.base / "now")
    if by == "umount":
        world.vfsd("umount", "default")
    else:
        os.kill(pid, signal.SIGTERM)
        world.wait(lambda: not Path(f"/proc/{pid}").exists())
    assert world.mounts() == []
    log = (world.base / "state/vfsd/default/vfsd.log").read_text()
    assert "cutting off" not in log and " unmounted " in log
