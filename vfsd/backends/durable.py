"""A host file and whether it has anything that power loss would take.

fdatasync(2) of a file without news still has the disk flush its cache (ext4, Linux 6.18: as long as one with news), so
asking whether there is any halves what an fsync of a program costs.
"""

from __future__ import annotations

import errno
import os


class Durable:
    """One descriptor. ``written`` is raised by whoever has written to it, after the write."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.written = 0
        self._synced = 0

    def sync(self) -> None:
        """All that ``written`` counts survives power loss; for any thread, and several at once. Raises OSError.

        EIO for a file that was deleted: the kernel would sync it, and nobody find it again.
        """
        if not os.fstat(self.fd).st_nlink:
            path = os.readlink(f"/proc/self/fd/{self.fd}").removesuffix(" (deleted)")
            raise OSError(errno.EIO, f"{path} was deleted")
        written = self.written
        if written != self._synced:
            os.fdatasync(self.fd)
            self._synced = max(self._synced, written)
