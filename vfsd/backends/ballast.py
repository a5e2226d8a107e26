"""Space kept in hand on a volume's disk: when that is full, the volume can be opened and files deleted nevertheless."""

from __future__ import annotations

import os
from pathlib import Path

from vfsd.backends.extents import host_fallocate

_BYTES = 4 << 20


def fill(directory: Path) -> None:
    """Have it, unless there is no room."""
    path = directory / "ballast"
    if path.exists():
        return
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            host_fallocate(fd, 0, 0, _BYTES)
        finally:
            os.close(fd)
    except OSError:
        path.unlink(missing_ok=True)


def give_up(directory: Path) -> bool:
    """Give it to who needs it now; False when it is given up already."""
    try:
        os.unlink(directory / "ballast")
    except FileNotFoundError:
        return False
    return True


def lend(directory: Path) -> None:
    """Give it up if there is not as much room besides: a volume that opens may have a whole journal to fold."""
    host = os.statvfs(directory)
    if host.f_bavail * host.f_frsize < _BYTES:
        give_up(directory)
