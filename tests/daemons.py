"""A real daemon in a process of its own, on a mount of its own; whatever happens, nothing is left that could hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agenttools.client import Client
from vfsd.check import check_volume
from vfsd.doors import engines

SECONDS = 30.0
"""How long a daemon may take to start or end."""

EXPECTED_WARNINGS = ("cutting off",)


class Daemon:
    """``vfsd mount`` of one route at ``/``; ``root`` is its kind. Start it again after ``kill`` or ``stop``."""

    def __init__(self, base: Path, engine: str = "native", root: str = "state", extra: tuple[str, ...] = ()) -> None:
        self.base = base
        self.point = base / "mnt"
        self.point.mkdir(parents=True)
        self.host = base / "host"
        self.volume = base / "volume"
        (base / "run").mkdir(mode=0o700)
        route = f"/={root}"
        if root == "local":
            self.host.mkdir()
            route += f":{self.host}"
        elif root == "state":
            route += f":{self.volume}"
        self.root = root
        self.environ = {**os.environ, "XDG_STATE_HOME": str(base / "state"), "XDG_RUNTIME_DIR": str(base / "run")}
        self.command = [sys.executable, "-m", "vfsd", "mount", "--foreground", "--name", "test", "--engine", engine]
        self.command += ["--route", route, *extra, str(self.point)]
        self.socket = base / "run/vfsd/test.sock"
        self.client = Client(socket=self.socket)
        self.process: subprocess.Popen[str] | None = None
        self._log = base / "log"

    def start(self) -> None:
        """Return once it is mounted."""
        with open(self._log, "a") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environ, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("mounted "), f"{line}{self.log()}"

    def vfsd(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Another command of the program, with this daemon's directories."""
        return subprocess.run(
            [sys.executable, "-m", "vfsd", *args], env=self.environ, timeout=SECONDS, capture_output=True, text=True
        )

    def status(self) -> dict[str, object]:
        found: list[dict[str, object]] = json.loads(self.vfsd("status", "test", "--json").stdout)
        return found[0]

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def unexpected(self) -> list[str]:
        """Lines of the log that a sound daemon would not have written."""
        return [
            line
            for line in self.log().splitlines()
            if any(word in line for word in (" WARNING ", " ERROR ", " CRITICAL ", "Traceback"))
            and not any(word in line for word in EXPECTED_WARNINGS)
        ]

    def kill(self) -> None:
        """kill -9; the mount stays, dead."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(SECONDS)
        self._reap()

    def _reap(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        self.client.close()
        self.client = Client(socket=self.socket)

    def stop(self) -> None:
        """A clean end, and nothing wrong: exit status 0, a log without surprises, a sound volume."""
        assert self.process is not None
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.abort()
            raise
        self._reap()
        assert status == 0, self.log()
        assert engines.mounted(str(self.point)) is None
        assert self.unexpected() == []
        if self.root == "state":
            assert check_volume(self.volume) == []

    def abort(self) -> None:
        """End it by force, whatever state it is in."""
        if engines.mounted(str(self.point)) is not None:
            engines.abort(str(self.point))
        if self.process is not None:
            self.process.kill()
            self.process.wait(SECONDS)
            self._reap()
        self.client.close()
        while engines.mounted(str(self.point)) is not None:
            engines.unmount(str(self.point), lazy=True)
            time.sleep(0.01)
