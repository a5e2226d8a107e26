"""Large contents, written to free blocks in a thread before the commit that gives them to a file.

So the loop only has the map to change. Must not know which file it will be. Invariant: blocks being laid are in no map
and not free; after a crash they are free, for no record names them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from vfsd.backends.durable import Durable
from vfsd.backends.freespace import BLOCK, FreeSpace
from vfsd.core.changes import Laid

_STRETCH = 256 << 10
"""Bytes written at once: the kernel holds off others' writes to the data file for as long as that takes."""


class Laying:
    """A part of ``ExtentFile``."""

    fd: int
    file: Durable
    free: FreeSpace

    def release(self, runs: Iterable[tuple[int, int]], *, punched: bool = True) -> None:
        """Make runs free to use."""
        raise NotImplementedError

    def begin(self, pieces: Sequence[bytes]) -> Laid:
        """Take blocks for content that ``lay`` is to put there; ``leave`` must follow."""
        laid = Laid(pieces)
        laid.runs = self.free.take(-(-laid.size // BLOCK) * BLOCK)
        return laid

    def lay(self, laid: Laid) -> None:
        """Write the content to its blocks; for any thread. Raises OSError (ENOSPC, EIO)."""
        runs = iter(laid.runs)
        disk = left = 0
        for piece in (*laid.pieces, bytes(-laid.size % BLOCK)):
            view = memoryview(piece)
            while view:
                if not left:
                    disk, left = next(runs)
                stretch = view[: min(left, _STRETCH)]
                self.file.expect(disk + len(stretch))
                n = os.pwrite(self.fd, stretch, disk)
                view, disk, left = view[n:], disk + n, left - n

    def leave(self, laid: Laid) -> None:
        """Its blocks are free again, unless a file has them by now."""
        self.release(laid.runs, punched=False)
        laid.runs = []
