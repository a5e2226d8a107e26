"""Where the bytes of one file are: its extents, and the search in them."""

from __future__ import annotations

from bisect import bisect_right

Extent = tuple[int, int, int, int]
"""(offset in the file, length, offset in the host file, epoch); the first three in bytes, multiples of BLOCK.

The epoch is the one the blocks were given out in; see ``ExtentFile.frozen``."""


class FileMap:
    """The extents of one file, sorted by offset, and the bytes they take."""

    __slots__ = ("extents", "used")

    def __init__(self, extents: list[Extent]) -> None:
        self.extents = extents
        self.used = sum(e[1] for e in extents) if extents else 0

    def index(self, offset: int) -> int:
        """Index of the first extent that ends after ``offset``."""
        extents = self.extents
        i = bisect_right(extents, (offset, 1 << 62, 0))
        if i and extents[i - 1][0] + extents[i - 1][1] > offset:
            return i - 1
        return i
