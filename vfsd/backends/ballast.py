"""Space kept in hand on a volume's disk: when that is full, the volume can be opened and files deleted nevertheless."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vfsd.backends.fallocate import host_fallocate
from vfsd.core.changes import Change, Dentry, Drop, NoDentry, Reserve, Write, Zero

_BYTES = 4 << 20


class Ballast:
    """The file ``ballast`` of a volume's directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ballast"
        self.owed = False
        """It was given up and is not back: what room there is is for deleting, or else the next file couldn't be."""

    def fill(self) -> bool:
        """Have it; False when there is no room."""
        if not self._path.exists():
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    host_fallocate(fd, 0, 0, _BYTES)
                finally:
                    os.close(fd)
            except OSError:
                self._path.unlink(missing_ok=True)
                return False
        self.owed = False
        return True

    def give_up(self) -> bool:
        """Give it to who needs it now; False when it is given up already."""
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            return False
        self.owed = True
        return True

    def lend(self) -> None:
        """Give it up if there is not as much room besides: a volume that opens may have a whole journal to fold."""
        if not self._room(_BYTES):
            self.give_up()

    def has_room(self) -> bool:
        """Whether a volume that could not be opened for want of room can be, with a ballast besides."""
        return self._room(2 * _BYTES)

    def _room(self, size: int) -> bool:
        host = os.statvfs(self._path.parent)
        return host.f_bavail * host.f_frsize >= size


def deletes(changes: Sequence[Change]) -> bool:
    """The commit deletes or cuts off: only such a one gets the ballast, or else a program that touches files again and
    again would use it up."""
    return not any(type(c) in (Write, Reserve, Dentry) for c in changes) and any(
        type(c) in (NoDentry, Drop) or (type(c) is Zero and c.end is None) for c in changes
    )
