"""Which parts of a volume's data file are free, and which of them is given out next.

Must not know files or the host. All numbers are bytes, multiples of BLOCK.
"""

from __future__ import annotations

from collections.abc import Iterable

from sortedcontainers import SortedDict

BLOCK = 4096
_WINDOW = 256 * BLOCK


def joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as sorted runs that do not touch; the given ones must not overlap."""
    out: list[tuple[int, int]] = []
    for start, length in sorted(runs):
        if out and sum(out[-1]) == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return out


class FreeSpace:
    """The free runs of the host file: bytes, multiples of BLOCK; ``end`` is where it was never used."""

    def __init__(self) -> None:
        self.runs: SortedDict[int, int] = SortedDict()
        self.end = 0
        self._start = self._left = 0

    def leave(self, used: Iterable[tuple[int, int]]) -> None:
        """At the start: free is what lies between these runs, sorted by where they begin."""
        for start, length in used:
            if start > self.end:
                self.give(self.end, start - self.end)
            self.end = max(self.end, start + length)

    def take(self, length: int) -> list[tuple[int, int]]:
        """Give out ``length`` bytes as few (start, length) runs.

        Small requests are carved from a window, so that files written one after another lie one after another. The
        lowest free runs go first, so that the end of the file gets free and can be cut off.
        """
        out: list[tuple[int, int]] = []
        while length:
            if not self._left:
                self._open_window(length)
            n = min(length, self._left)
            if out and out[-1][0] + out[-1][1] == self._start:
                out[-1] = (out[-1][0], out[-1][1] + n)
            else:
                out.append((self._start, n))
            self._start += n
            self._left -= n
            length -= n
        return out

    def _open_window(self, length: int) -> None:
        if self.runs:
            self._start, self._left = self.runs.popitem(0)
        else:
            self._start, self._left = self.end, max(length, _WINDOW)
            self.end += self._left

    def take_all(self) -> list[tuple[int, int]]:
        """Every free run, taken."""
        if self._left:
            self.give(self._start, self._left)
            self._left = 0
        runs = list(self.runs.items())
        self.runs.clear()
        return runs

    def tail(self) -> int:
        """Bytes free at the end, or fewer, which ``trim`` would cut off once the window is given back."""
        start = self.end
        if self.runs and sum(self.runs.peekitem(-1)) == start:
            start = self.runs.peekitem(-1)[0]
        if self._left and self._start + self._left == start:
            start = self._start
        return self.end - start

    def trim(self) -> None:
        """Lower ``end`` to the last byte that is not free."""
        if self.runs:
            start, length = self.runs.peekitem(-1)
            if start + length == self.end:
                del self.runs[start]
                self.end = start

    def give(self, start: int, length: int) -> None:
        """Take back a run."""
        runs = self.runs
        i = runs.bisect_left(start)
        if i < len(runs):
            after, n = runs.peekitem(i)
            if after == start + length:
                length += n
                del runs[after]
        if i:
            before, n = runs.peekitem(i - 1)
            if before + n == start:
                start, length = before, n + length
                del runs[before]
        runs[start] = length
