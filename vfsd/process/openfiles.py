"""Which files of one mount programs have open, asked of the kernel (proc(5)): for a mount that hears of no opens.

Reads links and tables below /proc only, so that nothing here waits for a file system. Sees what /proc shows us: as an
ordinary user one's own processes, and none above our pid namespace.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vfsd.process.mountpoint import mounts, namespace


def open_files(device: int) -> dict[int, bool]:
    """Inode numbers of the device that other processes have open or mapped, True: for writing."""
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
    spaces = {space: pid for pid in pids if (space := namespace(pid))}
    major, minor = os.major(device), os.minor(device)
    ids = {mount.id for pid in spaces.values() for mount in mounts(pid) if mount.dev == f"{major}:{minor}"}
    shown = f"{major:02x}:{minor:02x}"
    found: dict[int, bool] = {}
    for pid in pids:
        for ino, writes in [*_descriptors(pid, ids), *_mappings(pid, shown)]:
            found[ino] = found.get(ino, False) or writes
    return found


def _descriptors(pid: str, ids: set[str]) -> Iterator[tuple[int, bool]]:
    base = Path("/proc", pid, "fdinfo")
    for fd in _listed(base):
        fields = dict(line.split(":", 1) for line in _text(base / fd).splitlines() if ":" in line)
        if fields.get("mnt_id", "").strip() in ids and "ino" in fields:
            flags = int(fields["flags"], 8)
            if not flags & os.O_PATH:
                yield int(fields["ino"]), flags & os.O_ACCMODE != os.O_RDONLY


def _mappings(pid: str, shown: str) -> Iterator[tuple[int, bool]]:
    text = _text(Path("/proc", pid, "maps"))
    if f" {shown} " in text:
        for line in text.splitlines():
            _, permissions, _, dev, ino, *_ = line.split(maxsplit=5)
            if dev == shown:
                yield int(ino), "w" in permissions and permissions.endswith("s")


def _listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape")
    except OSError:
        return ""
