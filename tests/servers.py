"""Real servers for routes that wait, and mounts of such routes; all on sockets and directories of their own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60.0


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first true value of a condition; a missing file or a refusal counts as false."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            value = condition()
            if value:
                return value
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


class Postgres:
    """A PostgreSQL server that listens on a socket in its own directory, as user postgres when we are root."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bin = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
        self.data = home / "data"
        self.uri = f"postgresql://postgres@/postgres?host={home}"
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            os.chown(home, account.pw_uid, account.pw_gid)
        home.chmod(0o755)
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "-N")
        self.start()

    def _run(self, program: str, *args: str) -> None:
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"] if os.geteuid() == 0 else []
        done = subprocess.run(
            [*user, str(self.bin / program), *args],
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout

    def start(self) -> None:
        options = f"-k {self.home} -c listen_addresses='' -c fsync=off -c max_connections=50"
        self._run("pg_ctl", "-D", str(self.data), "-o", options, "-l", str(self.home / "log"), "-w", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-m", "immediate", "-w", "stop")

    def sql(self, query: str, *values: Any) -> Any:
        """Run one statement; its first row where it has one."""
        import psycopg

        with psycopg.connect(self.uri, autocommit=True) as db:
            cursor = db.execute(query, values)
            return cursor.fetchone() if cursor.description else None


class World:
    """Mounts of one test: environment, mountpoints, the command line."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = os.environ | {
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_RUNTIME_DIR": str(home / "run"),
            "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent / "routes"), str(Path(__file__).parents[1]))),
        }
        (home / "run").mkdir(mode=0o700)
        self._names: list[str] = []

    def vfsd(self, *args: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "vfsd", *map(str, args)],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert code is None or done.returncode == code, done
        return done

    def mount(self, *routes: str, name: str = "one", root: str = "/=memory") -> Path:
        """A mount with these routes beside a root in memory; its directory."""
        point = self.home / f"mnt-{name}"
        point.mkdir(exist_ok=True)
        args = [arg for route in (root, *routes) for arg in ("--route", route)]
        self.said = self.vfsd("mount", point, "--name", name, *args).stderr
        self._names.append(name)
        return point

    def log(self, name: str = "one") -> str:
        return (self.home / "state" / "vfsd" / name / "vfsd.log").read_text()

    def socket(self, name: str = "one") -> Path:
        return self.home / "run" / "vfsd" / f"{name}.sock"

    def umount(self, name: str = "one") -> None:
        self._names.remove(name)
        self.vfsd("umount", name)

    def close(self) -> None:
        for name in self._names:
            self.vfsd("umount", "--force", name, code=None)
        for point in self.home.glob("mnt-*"):
            if os.path.ismount(point):
                subprocess.run(["umount", "-l", str(point)], check=False, timeout=SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    pytest.importorskip("psycopg")
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("PostgreSQL is not installed: scripts/setup.sh")
    # Not under pytest's directory: a socket's path is short, and user postgres must get there.
    home = Path(tempfile.mkdtemp(prefix="vfsd-pg-", dir="/tmp"))
    server = None
    try:
        server = Postgres(home)
        yield server
    finally:
        if server is not None:
            with contextlib.suppress(AssertionError):
                server.stop()
        shutil.rmtree(home, ignore_errors=True)
