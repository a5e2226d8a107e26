"""Where the bytes of a volume's files live: extents of one host file, given out in blocks of 4 KiB.

Owns the host file's descriptor, its free space and the map of each file. Must not know names, modes or SQLite: it
yields the rows of its maps that a data change alters, and its owner commits them.

Invariants:
- A block belongs to one file or to none. A freed block is handed out again only after ``release``, which the owner
  calls once the commit that freed it can no longer be undone by power loss; else a synced file could be overwritten
  through a map that a lost commit had freed.
- Bytes past a file's size are undefined; whatever makes them readable zeroes or writes them first (``Zero`` in
  core.changes). So a truncate never touches bytes that an undone commit would still show.
- Between ``begin`` and ``end`` every map edit can be undone.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable

from sortedcontainers import SortedDict

BLOCK = 4096
_WINDOW = 256 * BLOCK
_MAPS = 100_000
_PUNCH = 0x03
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""

Extent = tuple[int, int, int]
"""(offset in the file, length, offset in the host file), each in bytes and a multiple of BLOCK."""

Row = tuple[int, int, int | None, int | None]
"""(node, offset, length, disk): the map row that now stands; length None where it is gone."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def host_fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2) with a mode, which os.posix_fallocate lacks. Raises OSError."""
    if _libc.fallocate(fd, mode, offset, length):
        err = ctypes.get_errno()
        raise OSError(err, os.strerror(err))


class FileMap:
    """The extents of one file, sorted by offset, and the bytes they take."""

    __slots__ = ("extents", "used")

    def __init__(self, extents: list[Extent]) -> None:
        self.extents = extents
        self.used = sum(e[1] for e in extents)

    def index(self, offset: int) -> int:
        """Index of the first extent that ends after ``offset``."""
        extents = self.extents
        i = bisect_right(extents, (offset, 1 << 62, 0))
        if i and extents[i - 1][0] + extents[i - 1][1] > offset:
            return i - 1
        return i


class FreeSpace:
    """The free runs of the host file: bytes, multiples of BLOCK; ``end`` is where it was never used."""

    def __init__(self) -> None:
        self.runs: SortedDict[int, int] = SortedDict()
        self.end = 0
        self._start = self._left = 0

    def take(self, length: int) -> list[tuple[int, int]]:
        """Give out ``length`` bytes as few (start, length) runs.

        Small requests are carved from a window, so that files written one after another lie one after another.
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
            self._start, self._left = self.runs.popitem(-1)
        else:
            self._start, self._left = self.end, max(length, _WINDOW)
            self.end += self._left

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


class ExtentFile:
    """File contents over one host descriptor.

    ``fetch(node)`` gives the stored extents of a file whose map is not in memory; ``keeps(node)`` is true while the
    store does not have them all, and the map must stay.
    """

    def __init__(self, fd: int, fetch: Callable[[int], list[Extent]], keeps: Callable[[int], bool]) -> None:
        self.fd = fd
        self._keeps = keeps
        self.free = FreeSpace()
        self._fetch = fetch
        self._maps: dict[int, FileMap] = {}
        self._undo: list[tuple[FileMap, int, int, list[Extent]]] = []
        self._taken: list[tuple[int, int]] = []
        self._freed: list[tuple[int, int]] = []
        self._dropped: list[int] = []
        self._quarantine: list[tuple[int, int]] = []
        self.rows: list[Row] = []

    def map(self, node: int) -> FileMap:
        """The map of a file, fetched when not in memory."""
        found = self._maps.get(node)
        if found is None:
            if len(self._maps) >= _MAPS and not self._undo:
                for old in list(self._maps)[: _MAPS // 2]:
                    if not self._keeps(old):
                        del self._maps[old]
            found = self._maps[node] = FileMap(self._fetch(node))
        return found

    def new(self, node: int) -> None:
        """A file just created: it has no extents, so there is nothing to fetch."""
        self._maps[node] = FileMap([])

    # -- reading

    def read(self, node: int, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``, zeros where nothing is mapped. The caller clips to the file's size."""
        file = self._maps.get(node) or self.map(node)
        extents = file.extents
        end = offset + length
        i = file.index(offset)
        if i >= len(extents):
            return bytes(length)
        start, size, disk = extents[i]
        if start <= offset and end <= start + size:
            data = os.pread(self.fd, length, disk + offset - start)
            return data if len(data) == length else data + bytes(length - len(data))
        out = bytearray(length)
        view = memoryview(out)
        while i < len(extents) and extents[i][0] < end:
            start, size, disk = extents[i]
            lo, hi = max(start, offset), min(start + size, end)
            os.preadv(self.fd, [view[lo - offset : hi - offset]], disk + lo - start)
            i += 1
        return bytes(out)

    def seek(self, node: int, size: int, offset: int, hole: bool) -> int | None:
        """lseek(2) SEEK_HOLE or SEEK_DATA below ``size``; None when there is no data (ENXIO)."""
        file = self.map(node)
        for start, length, _ in file.extents[file.index(offset) :]:
            if start > offset:
                return offset if hole else (start if start < size else None)
            if not hole:
                return offset
            offset = start + length
        return min(offset, size) if hole else None

    # -- changing

    def end(self, ok: bool) -> None:
        """Finish the edits since the last ``end``: keep them, or undo each."""
        if ok:
            self._quarantine += self._freed
            for node in self._dropped:
                self._maps.pop(node, None)
        else:
            for file, i, n, old in reversed(self._undo):
                file.used += sum(e[1] for e in old) - sum(e[1] for e in file.extents[i : i + n])
                file.extents[i : i + n] = old
            for start, length in self._taken:
                self.free.give(start, length)
        if self._undo or self._taken or self._dropped:
            self._undo = []
            self._taken = []
            self._freed = []
            self._dropped = []
            self.rows = []

    def drain(self) -> list[tuple[int, int]]:
        """The runs freed by ended edits, taken out of quarantine; ``punch`` may follow, ``release`` must."""
        runs, self._quarantine = self._quarantine, []
        return runs

    def release(self, runs: Iterable[tuple[int, int]]) -> None:
        """Make drained runs free to use."""
        for start, length in runs:
            self.free.give(start, length)

    def quarantined(self) -> int:
        """Bytes freed but not yet drained."""
        return sum(n for _, n in self._quarantine)

    def punch(self, runs: Iterable[tuple[int, int]]) -> None:
        """Give the host the space of drained runs back, before their release (PUNCH_HOLE; ignored where it can't)."""
        try:
            for start, length in runs:
                host_fallocate(self.fd, _PUNCH, start, length)
        except OSError:
            return

    def write(self, node: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Store ``data`` at ``offset``: in place where mapped, else in new blocks.

        Raises OSError (ENOSPC, EIO); the caller then ends with ok=False.
        """
        length = len(data)
        if not length:
            return
        file = self._maps.get(node) or self.map(node)
        extents = file.extents
        end = offset + length
        i = file.index(offset)
        if i < len(extents):
            start, size, disk = extents[i]
            if start <= offset and end <= start + size:
                self._pwrite(data, disk + offset - start)
                return
        view = memoryview(data)
        at = offset
        while at < end:
            i = file.index(at)
            if i < len(extents) and extents[i][0] <= at:
                start, size, disk = extents[i]
                stop = min(end, start + size)
                self._pwrite(view[at - offset : stop - offset], disk + at - start)
            else:
                stop = min(end, extents[i][0]) if i < len(extents) else end
                self._fill_hole(file, node, i, at, view[at - offset : stop - offset])
            at = stop

    def _fill_hole(self, file: FileMap, node: int, i: int, at: int, data: memoryview) -> None:
        first = at - at % BLOCK
        stop = at + len(data)
        new: list[Extent] = []
        head = at - first
        offset, taken = first, 0
        for disk, n in self._take(-(-(stop - first) // BLOCK) * BLOCK):
            part = data[max(0, taken - head) : max(0, taken + n - head)]
            pad = head if not taken else 0
            tail = n - pad - len(part)
            self._pwritev(([bytes(pad)] if pad else []) + [part] + ([bytes(tail)] if tail else []), disk)
            new.append((offset, n, disk))
            offset += n
            taken += n
        self._splice(file, node, i, i, new)

    def _take(self, length: int) -> list[tuple[int, int]]:
        runs = self.free.take(length)
        self._taken += runs
        return runs

    def _splice(self, file: FileMap, node: int, i: int, j: int, new: list[Extent]) -> None:
        """Put ``new`` in place of extents i..j, joined to a neighbour it continues on disk."""
        extents = file.extents
        if new and i:
            start, size, disk = extents[i - 1]
            if start + size == new[0][0] and disk + size == new[0][2]:
                new = [(start, size + new[0][1], disk), *new[1:]]
                i -= 1
        old = extents[i:j]
        self._undo.append((file, i, len(new), old))
        extents[i:j] = new
        file.used += sum(e[1] for e in new) - sum(e[1] for e in old)
        kept = {e[0] for e in new}
        rows = self.rows
        for e in old:
            if e[0] not in kept:
                rows.append((node, e[0], None, None))
        for e in new:
            if e not in old:
                rows.append((node, *e))

    def zero(self, node: int, offset: int, end: int | None) -> None:
        """Unmap the whole blocks of a range and zero its parts of blocks; with end None nothing past it is kept."""
        file = self.map(node)
        if end is None:
            first, last = -(-offset // BLOCK) * BLOCK, 1 << 62
        else:
            first, last = -(-offset // BLOCK) * BLOCK, end - end % BLOCK
            if first > last:
                self._zero_mapped(file, offset, end)
                return
            self._zero_mapped(file, offset, first)
            self._zero_mapped(file, last, end)
        i = j = file.index(first)
        extents = file.extents
        new: list[Extent] = []
        while j < len(extents) and extents[j][0] < last:
            start, size, disk = extents[j]
            lo, hi = max(start, first), min(start + size, last)
            if start < lo:
                new.append((start, lo - start, disk))
            if hi < start + size:
                new.append((hi, start + size - hi, disk + hi - start))
            self._freed.append((disk + lo - start, hi - lo))
            j += 1
        if j > i:
            self._splice(file, node, i, j, new)

    def _zero_mapped(self, file: FileMap, offset: int, end: int) -> None:
        if offset < end:
            i = file.index(offset)
            if i < len(file.extents) and file.extents[i][0] <= offset:
                start, size, disk = file.extents[i]
                self._pwrite(bytes(min(end, start + size) - offset), disk + offset - start)

    def reserve(self, node: int, offset: int, end: int) -> None:
        """Map every block of a range; new ones read as zeros. Raises ENOSPC."""
        file = self.map(node)
        at = offset - offset % BLOCK
        end = -(-end // BLOCK) * BLOCK
        while at < end:
            i = file.index(at)
            extents = file.extents
            if i < len(extents) and extents[i][0] <= at:
                at = extents[i][0] + extents[i][1]
                continue
            stop = min(end, extents[i][0]) if i < len(extents) else end
            new: list[Extent] = []
            for disk, n in self._take(stop - at):
                host_fallocate(self.fd, _PUNCH, disk, n)
                host_fallocate(self.fd, 0, disk, n)
                new.append((at, n, disk))
                at += n
            self._splice(file, node, i, i, new)

    def drop(self, node: int) -> None:
        """Free all of a file's blocks; the caller deletes its rows by node, none are listed."""
        self._dropped.append(node)
        self._freed += [(disk, n) for _, n, disk in self.map(node).extents]

    def _pwrite(self, data: bytes | bytearray | memoryview, disk: int) -> None:
        n = os.pwrite(self.fd, data, disk)
        while n < len(data):
            data, disk = memoryview(data)[n:], disk + n
            n = os.pwrite(self.fd, data, disk)

    def _pwritev(self, parts: list[bytes | memoryview], disk: int) -> None:
        if len(parts) == 1:
            self._pwrite(parts[0], disk)
            return
        want = sum(map(len, parts))
        if os.pwritev(self.fd, parts, disk) != want:
            self._pwrite(b"".join(parts), disk)
