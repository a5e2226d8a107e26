"""A person's world for the tests of the command line: its own directories, and mounts that don't outlive the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 30
"""No command takes longer."""


class World:
    """A home, a state and a runtime directory of its own, and mounts that are gone when the test is."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.mp = self.directory("mnt")
        for name in ("home", "state"):
            self.directory(name)
        self.run_dir = self.directory("run")
        self.run_dir.chmod(0o700)
        self.env = os.environ | {
            "HOME": str(base / "home"),
            "XDG_STATE_HOME": str(base / "state"),
            "XDG_RUNTIME_DIR": str(self.run_dir),
        }

    def directory(self, name: str) -> Path:
        path = self.base / name
        path.mkdir()
        return path

    def vfsd(
        self, *args: str | Path, code: int | None = 0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "vfsd", *map(str, args)],
            env=self.env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert code is None or done.returncode == code, done
        return done

    def refused(self, *args: str | Path) -> str:
        """The one sentence with which a command that must fail fails."""
        done = self.vfsd(*args, code=1)
        lines = done.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("vfsd: "), done
        return lines[0].removeprefix("vfsd: ")

    def status(self, name: str = "default") -> dict[str, Any]:
        (row,) = json.loads(self.vfsd("status", name, "--json").stdout)
        assert isinstance(row, dict)
        return row

    def kill(self, name: str = "default") -> int:
        pid = int(json.loads((self.run_dir / f"vfsd/{name}.json").read_text())["pid"])
        os.kill(pid, signal.SIGKILL)
        self.wait(lambda: not Path(f"/proc/{pid}").exists())
        self.wait(lambda: self.status(name)["state"] == "dead")
        return pid

    def mounts(self) -> list[str]:
        return [
            p
            for line in Path("/proc/self/mounts").read_text().splitlines()
            if (p := line.split()[1]).startswith(str(self.base))
        ]

    @staticmethod
    def wait(condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.02)

    def clean(self) -> None:
        """End every daemon and mount of this world, also when the command itself is broken."""
        try:
            if any(self.run_dir.glob("vfsd/*.json")):
                for row in json.loads(self.vfsd("status", "--json").stdout):
                    self.vfsd("umount", "--force", row["name"], code=None)
        finally:
            for path in reversed(self.mounts()):
                subprocess.run(["fusermount3", "-uz", path], capture_output=True, check=False)
                subprocess.run(["umount", "-l", path], capture_output=True, check=False)
