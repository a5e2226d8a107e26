"""How a mount ends: by a crash that the next mount recovers from, by the command, by force, by others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_world import World

from vfsd.process import registry

pytestmark = pytest.mark.mount


def comm() -> str:
    return Path("/proc/self/comm").read_text().strip()


# -- after a crash


def test_dead_mount_is_recovered(world: World) -> None:
    world.vfsd("mount", world.mp)
    (world.mp / "f").write_text("kept")
    os.listdir(world.mp)
    pid = world.kill()
    row = world.status()
    assert row["state"] == "dead" and row["pid"] == pid and row["fix"] == "vfsd umount default"
    said = world.vfsd("mount", world.mp).stderr
    assert said == f"vfsd: {world.mp} was left dead by a crash (Transport endpoint is not connected): replaced it\n"
    assert (world.mp / "f").read_text() == "kept"
    assert world.mounts() == [str(world.mp)]
    assert world.vfsd("check").stdout.endswith(": clean\n")


def test_dead_mount_elsewhere_is_recovered(world: World) -> None:
    world.vfsd("mount", world.mp)
    world.kill()
    other = world.directory("other")
    assert "cleaned up" in world.vfsd("mount", other).stderr
    assert world.mounts() == [str(other)]


@pytest.mark.parametrize("by", ["name", "mountpoint", "unregistered"])
def test_umount_of_a_dead_mount(world: World, by: str) -> None:
    world.vfsd("mount", world.mp)
    world.kill()
    if by == "unregistered":
        (world.run_dir / "vfsd/default.json").unlink()
    world.vfsd("umount", "default" if by == "name" else world.mp)
    assert world.mounts() == [] and world.vfsd("status", "--json").stdout.strip() == "[]"


# -- umount


def test_umount_of_nothing(world: World) -> None:
    assert world.refused("umount", "nobody").startswith("no vfsd mount is called 'nobody'")
    assert world.refused("umount", world.mp).startswith("no vfsd mount is called ")


def test_umount_busy_names_who(world: World) -> None:
    world.vfsd("mount", world.mp)
    sleeper = subprocess.Popen(["sleep", "60"], cwd=world.mp)
    try:
        said = world.refused("umount", "default")
        assert said == f"{world.mp} is busy: pid {sleeper.pid} (sleep, cwd); end them, or use --lazy or --force"
        (world.mp / "still").write_text("works")
        said = world.vfsd("umount", "--lazy", "default").stdout
        assert said.startswith(f"detached {world.mp}") and world.mounts() == []
        assert world.status()["state"] == "running"
    finally:
        sleeper.kill()
        sleeper.wait()
    world.wait(lambda: world.vfsd("status", "--json").stdout.strip() == "[]")


def test_umount_names_a_mount_inside(world: World) -> None:
    world.vfsd("mount", world.mp)
    inner = world.mp / "inner"
    inner.mkdir()
    world.vfsd("mount", inner, "--name", "inner")
    said = world.refused("umount", "default")
    assert said == f"{world.mp} is busy: {inner} is mounted in it; end them, or use --lazy or --force"
    world.vfsd("umount", "inner")
    world.vfsd("umount", "default")


def test_umount_while_a_program_opens_files_again_and_again(world: World) -> None:
    """Between two of its files the mount is free; and nobody can be named who had one open for a moment."""
    world.vfsd("mount", world.mp)
    (world.mp / "d").mkdir()
    code = "import sys\nwhile True:\n    open(sys.argv[1], 'w').close()"
    program = subprocess.Popen([sys.executable, "-c", code, world.mp / "d/f"], stderr=subprocess.DEVNULL)
    try:
        world.wait((world.mp / "d/f").exists)
        done = world.vfsd("umount", "default", code=None)
        assert done.returncode == 0 or f"pid {program.pid}" in done.stderr or "come and go" in done.stderr
    finally:
        program.kill()
        program.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace")
def test_a_mount_namespace_keeps_no_mount_busy(world: World) -> None:
    """As systemd gives to many of its services: each has a copy of the mount."""
    world.vfsd("mount", world.mp)
    own = os.readlink("/proc/self/ns/mnt")
    with subprocess.Popen(["unshare", "-m", "--propagation", "slave", "cat"], stdin=subprocess.PIPE) as other:
        world.wait(lambda: os.readlink(f"/proc/{other.pid}/ns/mnt") != own)
        with (world.mp / "f").open("w"):
            said = world.refused("umount", "default")
        assert (
            said == f"{world.mp} is busy: pid {os.getpid()} ({comm()}, open file); end them, or use --lazy or --force"
        )
        other.communicate()
    world.vfsd("umount", "default")


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace")
def test_umount_says_whom_it_waits_for(world: World) -> None:
    world.vfsd("mount", world.mp)
    other = subprocess.Popen(["unshare", "-m", "--propagation", "private", "cat"], stdin=subprocess.PIPE)
    assert other.stdin is not None
    try:
        own = os.readlink("/proc/self/ns/mnt")
        world.wait(lambda: os.readlink(f"/proc/{other.pid}/ns/mnt") != own)
        command = [sys.executable, "-m", "vfsd", "umount", "default"]
        umount = subprocess.Popen(command, env=world.env, stderr=subprocess.PIPE, text=True)
        assert umount.stderr is not None
        said = umount.stderr.readline()
        assert said.startswith("vfsd: waiting up to 60 s for 'default' (pid ")
        assert f"these still use it: pid {other.pid} (" in said and said.endswith(", mount namespace)\n")
    finally:
        other.communicate()
    assert umount.wait(30) == 0
    umount.stderr.close()


def test_umount_by_force(world: World) -> None:
    world.vfsd("mount", world.mp)
    with (world.mp / "f").open("w") as held:
        assert "open file" in world.refused("umount", world.mp)
        assert world.vfsd("umount", "--force", world.mp).stdout == f"unmounted {world.mp}\n"
        with pytest.raises(OSError):
            os.pread(held.fileno(), 1, 0)


def test_umount_by_force_of_a_daemon_that_hangs(world: World) -> None:
    world.vfsd("mount", world.mp)
    (world.mp / "f").write_text("kept")
    os.kill(world.status()["pid"], signal.SIGSTOP)
    said = world.vfsd("umount", "--force", "default").stderr
    assert "did not end within 5 s: killed; what it acknowledged is kept" in said
    assert world.mounts() == []
    world.vfsd("mount", world.mp)
    assert (world.mp / "f").read_text() == "kept"


def test_umount_of_a_stopped_daemon_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.vfsd("mount", world.mp)
    pid = world.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    how = f"let it go on with kill -CONT {pid}, or end it with vfsd umount --force default"
    try:
        began = time.monotonic()
        said = world.refused("umount", "default")
        assert said == f"'default' (pid {pid}) is stopped: {world.mp} is still mounted; {how}"
        assert time.monotonic() - began < 30  # of the 60 s it is given to write
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(world.run_dir))
        assert not registry.wait_gone("default", 60, pid)
        assert time.monotonic() - began < 45
        row = world.status()
        assert (row["state"], row["fix"]) == ("stopped", how)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert world.vfsd("umount", "default").stdout == f"unmounted {world.mp}\n"


def test_umount_from_inside(world: World) -> None:
    world.vfsd("mount", world.mp)
    assert world.vfsd("umount", ".", cwd=world.mp).stdout == f"unmounted {world.mp}\n"


def test_unmounted_by_others(world: World) -> None:
    world.vfsd("mount", world.mp)
    pid = world.status()["pid"]
    subprocess.run(["fusermount3", "-u", str(world.mp)], check=True)
    world.wait(lambda: not Path(f"/proc/{pid}").exists())
    assert world.vfsd("status", "--json").stdout.strip() == "[]"
