"""What is measured side by side: a host directory, vfsd by engine, other FUSE file systems where they are installed.

Each column is a directory to work in and a way to make its caches cold; all live below one scratch directory and are
taken down when the run ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

OWN = ("native", "unaudited", "ruled", "pyfuse3")
"""Columns of vfsd itself."""


class Column:
    """One file system to measure. ``path`` is an empty directory in it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    def cold(self) -> None:
        """Drop the kernel's caches (as root; else what follows is warm, and the report says so)."""
        os.sync()
        with contextlib.suppress(PermissionError):
            Path("/proc/sys/vm/drop_caches").write_text("3\n")


def _run(*command: str | Path, **options: object) -> None:
    subprocess.run([str(c) for c in command], check=True, stdout=subprocess.DEVNULL, **options)  # type: ignore[call-overload]


def rules(count: int) -> str:
    """``count`` rules for a configuration, half of them for reading, that match nothing which a benchmark does."""
    lines = []
    for i in range(count):
        lines += ["[[rules]]", f'operations = ["{"read" if i % 2 else "write"}"]', 'mode = "deny"']
        lines += [f'paths = ["/policy{i}/**", "/*/kept{i}.{{txt,md}}"]']
    return "\n".join(lines)


@contextlib.contextmanager
def _vfsd(scratch: Path, engine: str, also: str = "", settings: str = "") -> Iterator[Column]:
    name = f"bench-{engine}{also}"
    point, config = scratch / name, scratch / f"{name}.toml"
    point.mkdir()
    config.write_text(f'[routes."/"]\nkind = "state"\nlocation = "{scratch / name}-volume"\n{settings}\n')
    vfsd = [sys.executable, "-m", "vfsd"]
    _run(*vfsd, "mount", "--name", name, "--engine", engine, "--config", config, point)
    try:
        yield Column(f"vfsd {engine}{also}", point)
    finally:
        _run(*vfsd, "umount", name)


@contextlib.contextmanager
def _bindfs(scratch: Path) -> Iterator[Column]:
    point, source = scratch / "bindfs", scratch / "bindfs-source"
    point.mkdir()
    source.mkdir()
    _run("bindfs", source, point)
    try:
        yield Column("bindfs", point)
    finally:
        _run("fusermount3", "-uz", point)


@contextlib.contextmanager
def _rclone(scratch: Path) -> Iterator[Column]:
    point, source = scratch / "rclone", scratch / "rclone-source"
    point.mkdir()
    source.mkdir()
    command = ["rclone", "mount", source, point, "--vfs-cache-mode=full", f"--cache-dir={scratch / 'rclone-cache'}"]
    server = subprocess.Popen([str(c) for c in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_mounted(point)
        yield Column("rclone", point)
    finally:
        _run("fusermount3", "-uz", point)
        server.wait(30)


@contextlib.contextmanager
def _juicefs(scratch: Path) -> Iterator[Column]:
    point, meta = scratch / "juicefs", f"sqlite3://{scratch / 'juicefs.db'}"
    point.mkdir()
    quiet = {"stderr": subprocess.DEVNULL}
    _run("juicefs", "format", "--storage=file", f"--bucket={scratch / 'juicefs-data'}/", meta, "bench", **quiet)
    _run(
        "juicefs", "mount", "-d", "--no-usage-report", f"--cache-dir={scratch / 'juicefs-cache'}", meta, point, **quiet
    )
    try:
        yield Column("juicefs", point)
    finally:
        _run("juicefs", "umount", "--force", point, **quiet)


def _wait_mounted(point: Path) -> None:
    for _ in range(200):
        if os.path.ismount(point):
            return
        time.sleep(0.05)
    raise TimeoutError(f"{point} was not mounted within 10 s")


@contextlib.contextmanager
def columns(scratch: Path, wanted: list[str]) -> Iterator[list[Column]]:
    """The columns asked for (none: all that are installed), mounted; the host directory first."""
    host = scratch / "host"
    host.mkdir()
    makers = {
        "native": lambda: _vfsd(scratch, "native"),
        "unaudited": lambda: _vfsd(scratch, "native", "-no-audit", "[audit]\nenabled = false"),
        "ruled": lambda: _vfsd(scratch, "native", "-100-rules", rules(100)),
        "pyfuse3": lambda: _vfsd(scratch, "pyfuse3"),
        "bindfs": lambda: _bindfs(scratch),
        "juicefs": lambda: _juicefs(scratch),
        "rclone": lambda: _rclone(scratch),
    }
    unknown = set(wanted) - makers.keys()
    if unknown:
        raise SystemExit(f"unknown column {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
    with contextlib.ExitStack() as stack:
        found = [Column("host", host)]
        for name, make in makers.items():
            if name in wanted or (not wanted and (name in OWN or shutil.which(name))):
                found.append(stack.enter_context(make()))
        yield found
