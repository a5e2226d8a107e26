"""Space kept in hand on a volume's disk, so that files can be deleted when it is full (each record takes some)."""

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
