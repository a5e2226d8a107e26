"""Daemons started by the command, in directories of the tests' own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SECONDS = 40


@dataclass
class Mount:
    """A running daemon."""

    world: World
    name: str
    point: str
    socket: str

    def stop(self) -> None:
        self.world.vfsd("umount", "--force", self.name)


class World:
    """State and runtime directories, and the daemons that live in them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        for name in ("run", "state"):
            (base / name).mkdir(mode=0o700)
        self.environ = {"XDG_RUNTIME_DIR": str(base / "run"), "XDG_STATE_HOME": str(base / "state")}

    def vfsd(self, *args: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "vfsd", *args],
            env=os.environ | self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def mount(self, name: str, *options: str) -> Mount:
        point = self.base / f"mnt-{name}"
        point.mkdir(exist_ok=True)
        self.vfsd("mount", "--name", name, *options, str(point))
        return Mount(self, name, str(point), str(self.base / f"run/vfsd/{name}.sock"))

    def names(self) -> set[str]:
        """The running mounts."""
        rows = json.loads(self.vfsd("status", "--json"))
        return {row["name"] for row in rows if row["state"] == "running"}

    def clean(self) -> None:
        for row in json.loads(self.vfsd("status", "--json", check=False) or "[]"):
            self.vfsd("umount", "--force", row["name"], check=False)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            path = line.split()[1]
            if path.startswith(f"{self.base}/"):
                with contextlib.suppress(OSError):
                    number = os.minor(os.stat(path).st_dev)
                    Path(f"/sys/fs/fuse/connections/{number}/abort").write_text("1")
                subprocess.run(["umount", "-l", path], capture_output=True, check=False, timeout=SECONDS)
