"""A daemon killed under a supervisor: the mount is back at its path, and only what was open has lost its connection.

The supervisor here does what systemd does with ``systemd/user/vfsd@.service``, by the commands in that file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cli_world import World

from agenttools.client import Client
from vfsd.doors import engines

pytestmark = pytest.mark.timeout(120)

UNIT = Path(__file__).parents[2] / "systemd/user/vfsd@.service"
SECONDS_DOWN = 2.0


class Supervisor:
    """Starts the instance ``test`` of the unit, and again whenever its daemon dies, as ``Restart=on-failure`` says."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.home = world.base / "home"
        self.point = self.home / "vfs/test"
        program = self.home / ".local/bin/vfsd"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m vfsd "$@"\n')
        program.chmod(0o755)
        config = self.home / ".config/vfsd/test.toml"
        config.parent.mkdir(parents=True)
        config.write_text('[routes."/"]\nkind = "state"\n')
        unit = UNIT.read_text().replace("/usr/bin/vfsd", str(program)).replace("${MOUNTPOINT}", str(self.point))
        unit = unit.replace("%E", "%h/.config").replace("%h", str(self.home)).replace("%i", "test")
        assert "\nRestart=on-failure\n" in unit
        self.commands = [shlex.split(line) for line in re.findall(r"^ExecStart(?:Pre)?=(.*)$", unit, re.M)]
        self.commands[-1].remove("--foreground")  # ready when the command returns, instead of by a message
        found = re.search(r"^RestartSec=(\d+)(ms)?$", unit, re.M)
        assert found is not None
        self.pause = int(found[1]) / (1000 if found[2] else 1)
        self.said = ""
        self.pid = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._supervise)

    def __enter__(self) -> Supervisor:
        self._start()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _start(self) -> None:
        for command in self.commands:
            optional = command[0].startswith("-")
            done = subprocess.run(
                [command[0].lstrip("-"), *command[1:]], env=self.world.env, timeout=30, capture_output=True, text=True
            )
            self.said += done.stdout + done.stderr
            assert optional or done.returncode == 0, self.said
        found = re.findall(r"\(pid (\d+), socket", self.said)
        self.pid = int(found[-1])

    def _supervise(self) -> None:
        while not self._over.wait(0.01):
            if not Path(f"/proc/{self.pid}").exists() or _is_zombie(self.pid):
                time.sleep(self.pause)
                self._start()


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def back_after(supervisor: Supervisor, errors: set[int | None]) -> float:
    """Kill the daemon; seconds until its path answers again. What a look at the path raised until then is added."""
    begun, pid = time.monotonic(), supervisor.pid
    os.kill(pid, 9)
    while True:
        try:
            # Not an open or a stat, which the kernel may answer from what it has of the dead mount.
            os.statvfs(supervisor.point)
            if (supervisor.point / "kept").read_bytes() == b"kept":
                break
        except OSError as error:
            errors.add(error.errno)
        assert time.monotonic() - begun < 20, supervisor.said
        time.sleep(0.005)
    seconds = time.monotonic() - begun
    supervisor.world.wait(lambda: supervisor.pid != pid)
    return seconds


def test_the_mount_is_back_at_its_path(world: World) -> None:
    with Supervisor(world) as supervisor, Client(socket=world.run_dir / "vfsd/test.sock") as client:
        point = supervisor.point
        (point / "kept").write_bytes(b"kept")
        client.call("write", path=b"/tool", data=b"by a tool")
        (point / "d").mkdir()
        errors: set[int | None] = set()
        times = []
        for turn in range(3):
            held = os.open(point / "kept", os.O_RDWR)
            directory = os.open(point / "d", os.O_RDONLY)
            written = f"turn {turn}".encode()
            client.call("write", path=b"/tool", data=written)
            (point / f"d/{turn}").write_bytes(written)
            times.append(back_after(supervisor, errors))
            # What has a path is there, with all that was written; clients find the new daemon by themselves.
            assert (point / f"d/{turn}").read_bytes() == written
            assert client.call("read", path=b"/tool")["data"] == written
            client.call("write", path=b"/tool", data=b"again")
            assert (point / "tool").read_bytes() == b"again"
            # What was open belongs to the daemon that died, but for what the kernel answers by itself from its caches.
            for call in (
                lambda fd=held: os.write(fd, b"x"),
                lambda fd=held: os.fsync(fd),
                lambda fd=directory: os.listdir(fd),
                lambda fd=directory: os.stat("0", dir_fd=fd),
            ):
                with pytest.raises(OSError) as caught:
                    call()
                assert caught.value.errno == errno.ENOTCONN
            # The first close of all that the kernel opened by itself still tells the daemon.
            with contextlib.suppress(OSError):
                os.close(held)
            os.close(directory)
            assert (point / "kept").read_bytes() == b"kept"

        assert min(times) < SECONDS_DOWN, times
        assert errors <= {errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT}, errors
        assert engines.mounted(str(point)) is not None
    assert world.vfsd("umount", "test").stdout == f"unmounted {point}\n"
    # Nothing was written beside the tree, and no dead mount lies below.
    assert os.listdir(point) == []
    assert world.vfsd("check", "test").stdout.endswith(": clean\n")


def test_a_daemon_that_cannot_start_leaves_the_dead_mount(world: World) -> None:
    """Else programs would go on in the bare directory, and what they write there would be hidden later."""
    world.vfsd("mount", world.mp)
    (world.mp / "f").write_text("kept")
    world.kill()
    database = next((world.base / "state").rglob("tree.db"))
    good = database.read_bytes()
    database.write_bytes(b"nonsense" * 1000)
    said = world.vfsd("mount", world.mp, code=1).stderr
    assert "is corrupt" in said
    with pytest.raises(OSError) as caught:
        (world.mp / "g").write_text("lost")
    assert caught.value.errno == errno.ENOTCONN
    database.write_bytes(good)
    world.vfsd("mount", world.mp)
    assert (world.mp / "f").read_text() == "kept"
