"""A host file: whether it has anything that power loss would take, and whether it is as long as it was left.

fdatasync(2) of a file without news still has the disk flush its cache (ext4, Linux 6.18: as long as one with news), so
asking whether there is any halves what an fsync of a program costs.
"""

from __future__ import annotations

import errno
import os


def lost() -> OSError:
    """For bytes that are no more."""
    return OSError(errno.EIO, os.strerror(errno.EIO))


class Durable:
    """One descriptor. ``written`` is raised by whoever has written to it, after the write."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.written = 0
        self._synced = 0
        self.size = os.fstat(fd).st_size
        """Bytes it is known to have; with fewer somebody else has cut it off."""

    def is_whole(self) -> bool:
        """Whether it is still as long as it was."""
        return os.fstat(self.fd).st_size >= self.size

    def expect(self, end: int) -> None:
        """Before it comes to have ``end`` bytes: were it cut off, what is lost would read as zeros. Raises EIO."""
        if end > self.size and not self.is_whole():
            raise lost()

    def reached(self, end: int) -> None:
        """Bytes were written up to ``end``."""
        self.written += 1
        if end > self.size:
            self.size = end

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
