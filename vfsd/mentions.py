"""Which of many sha256 digests are mentioned in bytes: in files, databases, streams of any kind.

A digest counts as mentioned where one half of it stands: a block or page of a file system or database may end within
it, and one of the two halves is then still whole. So what is said to be mentioned nowhere is mentioned nowhere, and now
and then one is kept that nobody needs. What is compressed or encrypted can't be seen. Pure but for ``read_file``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

_HALF = 32
_HEX = re.compile(rb"[0-9a-fA-F]{32,}")
_PIECE = 1 << 20


class Mentions:
    """Looks for ``names``, digests of 64 hex digits each; ``found`` are those seen so far."""

    def __init__(self, names: Iterable[str]) -> None:
        self.found: set[str] = set()
        self._halves: dict[bytes, list[str]] = {}
        for name in names:
            for half in (name[:_HALF], name[_HALF:]):
                self._halves.setdefault(half.encode(), []).append(name)

    def look(self, data: bytes) -> None:
        """A text that is whole."""
        for run in _HEX.finditer(data):
            digits = run[0].lower()
            for at in range(len(digits) - _HALF + 1):
                if digits[at : at + _HALF] in self._halves:
                    self.found.update(self._halves[digits[at : at + _HALF]])

    def look_through(self, pieces: Iterable[bytes]) -> None:
        """A text in pieces that follow one another."""
        tail = b""
        for piece in pieces:
            data = tail + piece
            self.look(data)
            tail = data[-_HALF + 1 :]

    def read_file(self, path: str | os.PathLike[str]) -> None:
        """All that is written in a file; holes are passed over. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            end, at = os.fstat(fd).st_size, 0
            while at < end:
                try:
                    at = os.lseek(fd, at, os.SEEK_DATA)
                    stop = os.lseek(fd, at, os.SEEK_HOLE)
                except OSError:  # ENXIO: nothing but a hole is left
                    return
                self.look_through(_part(fd, at, stop))
                at = stop
        finally:
            os.close(fd)


def _part(fd: int, at: int, stop: int) -> Iterable[bytes]:
    while at < stop and (piece := os.pread(fd, min(_PIECE, stop - at), at)):
        yield piece
        at += len(piece)
