"""Where the bytes of a volume's files live: extents of one host file, given out in blocks of 4 KiB.

Owns the host file's descriptor, its free space and the map of each file. Must not know names, modes or SQLite: it
yields the rows of its maps that a data change alters, and its owner commits them.

Invariants:
- A block belongs to one file or to none. A freed block is handed out again only after ``release``, which the owner
  calls once the commit that freed it can no longer be undone by power loss; else a synced file could be overwritten
  through a map that a lost commit had freed.
- Bytes past a file's size are undefined; whatever makes them readable zeroes or writes them first (``Zero`` in
  core.changes). So a truncate never touches bytes that an undone commit would still show.
- Blocks of an epoch that a checkpoint holds are neither written nor freed: a write there goes to new blocks.
- Every map edit since the last ``end`` can be undone.
- A new block that takes over bytes which a write leaves as they were is written to the log as well (``patches``), with
  all that comes to it until the log is emptied: else power loss could keep the map's edit and lose those bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from vfsd.backends.durable import Durable, lost
from vfsd.backends.fallocate import host_fallocate
from vfsd.backends.filemap import Extent, FileMap
from vfsd.backends.freespace import BLOCK, FreeSpace, joined
from vfsd.backends.laying import Laying
from vfsd.core.changes import Laid

_MAPS = 25_000
"""Maps that ``forget_maps`` leaves in memory: some 300 bytes each."""


_PUNCH = 0x03
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""

Row = tuple[int, int, int | None, int | None, int | None]
"""(node, offset, length, disk, epoch): the map row that now stands; length None where it is gone."""


class ExtentFile(Laying):
    """File contents over one host descriptor.

    ``fetch(node)`` gives the stored extents of a file whose map is not in memory; ``keeps(node)`` is true while the
    store does not have them all, and the map must stay.
    """

    def __init__(self, fd: int, fetch: Callable[[int], list[Extent]], keeps: Callable[[int], bool]) -> None:
        self.fd = fd
        self.file = Durable(fd)
        self._keeps = keeps
        self.epoch = 1
        """What new blocks are marked with."""
        self.frozen = 0
        """The newest epoch that a checkpoint holds, 0 for none. A checkpoint of epoch N shows blocks of epochs up to N
        that were mapped when it was taken; so a mapped block is shown by one if its epoch is at most this."""
        self._thawing = 0
        """What ``frozen`` will be once the newest checkpoint, which is being dropped, is gone for good."""
        self.free = FreeSpace()
        self._fetch = fetch
        self._maps: dict[int, FileMap] = {}
        self._undo: list[tuple[FileMap, int, int, list[Extent]]] = []
        self._taken: list[tuple[int, int]] = []
        self._freed: list[tuple[int, int]] = []
        self._dropped: list[int] = []
        self._laid: list[Laid] = []
        self._let_go: list[tuple[int, int]] = []
        self._withheld: list[tuple[int, int]] = []
        """Runs that only the checkpoint being dropped still shows."""
        self._quarantine: list[tuple[int, int]] = []
        self._unpunched = 0
        self.rows: list[Row] = []
        self.patches: list[tuple[int, bytes]] = []
        """(offset in the host file, bytes) that the owner logs with the rows, for a start to write again in order."""
        self._logged: set[int] = set()
        self._logged_before: set[int] = set()
        """Offsets of the blocks that the log has bytes of, in its present part and in the one being emptied."""

    def map(self, node: int) -> FileMap:
        """The map of a file, fetched when not in memory."""
        found = self._maps.get(node)
        if found is None:
            found = self._maps[node] = FileMap(self._fetch(node))
        return found

    def forget_maps(self, count: int) -> bool:
        """Look at up to ``count`` maps above what is left in memory, the oldest first, and let go of those that can be
        fetched again; True when some were. For who runs between operations."""
        maps, went = self._maps, False
        for node in list(islice(maps, max(0, min(count, len(maps) - _MAPS)))):
            file = maps.pop(node)
            if self._keeps(node):
                maps[node] = file
            else:
                went = True
        return went

    def new(self, node: int) -> None:
        """A file just created: it has no extents, so there is nothing to fetch."""
        self._maps[node] = FileMap([])

    # -- reading

    def read(self, node: int, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``, zeros where nothing is mapped. The caller clips to the file's size.

        Raises EIO where the host file has been cut off.
        """
        return self.read_map(self._maps.get(node) or self.map(node), offset, length)

    def read_map(self, file: FileMap, offset: int, length: int) -> bytes:
        """``read`` by a given map."""
        extents = file.extents
        end = offset + length
        i = file.index(offset)
        if i >= len(extents):
            return bytes(length)
        start, size, disk, _ = extents[i]
        if start <= offset and end <= start + size:
            data = os.pread(self.fd, length, disk + offset - start)
            if len(data) != length:
                raise lost()
            return data
        out = bytearray(length)
        view = memoryview(out)
        while i < len(extents) and extents[i][0] < end:
            start, size, disk, _ = extents[i]
            lo, hi = max(start, offset), min(start + size, end)
            if os.preadv(self.fd, [view[lo - offset : hi - offset]], disk + lo - start) != hi - lo:
                raise lost()
            i += 1
        return bytes(out)

    def contents(self, node: int) -> Callable[[int, int], bytes]:
        """What reads the content by the map as it is now; for any thread."""
        file = FileMap(list(self.map(node).extents))
        return lambda offset, length: self.read_map(file, offset, length)

    def seek(self, node: int, size: int, offset: int, hole: bool) -> int | None:
        """lseek(2) SEEK_HOLE or SEEK_DATA below ``size``; None when there is no data (ENXIO)."""
        return self.seek_map(self.map(node), size, offset, hole)

    @staticmethod
    def seek_map(file: FileMap, size: int, offset: int, hole: bool) -> int | None:
        """``seek`` by a given map."""
        for start, length, _, _ in file.extents[file.index(offset) :]:
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
            self._withheld += self._let_go
            for node in self._dropped:
                self._maps.pop(node, None)
            for laid in self._laid:
                laid.runs = []
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
            self._let_go = []
            self._dropped = []
            self._laid = []
            self.rows = []
        if self.patches:
            self.patches = []

    def turn_log(self) -> None:
        """The log goes on in a new part."""
        self._logged_before, self._logged = self._logged, set()

    def log_emptied(self) -> None:
        """The part before is no more, for all that was written to these blocks is durable."""
        self._logged_before = set()

    def freeze(self, epoch: int) -> None:
        """A checkpoint of this epoch is the newest there is (0: there is none)."""
        self.frozen = self._thawing = epoch

    def begin_thaw(self, epoch: int) -> None:
        """The newest checkpoint is being dropped, and this epoch will be the newest; until then it stays as it is."""
        self._thawing = epoch

    def end_thaw(self, done: bool) -> None:
        """It is gone for good, and what it alone still showed is free after the next sync; or it stays."""
        if done:
            self._quarantine += self._withheld
        self.freeze(self._thawing if done else self.frozen)
        self._withheld = []

    def _unmap(self, disk: int, length: int, epoch: int) -> None:
        """A run is no longer in the file's map."""
        if epoch > self.frozen:
            self._freed.append((disk, length))
        elif epoch > self._thawing:
            self._let_go.append((disk, length))

    def drain(self) -> list[tuple[int, int]]:
        """The runs freed by ended edits, taken out of quarantine; ``punch`` may follow, ``release`` must."""
        runs, self._quarantine = self._quarantine, []
        return runs

    def release(self, runs: Iterable[tuple[int, int]], *, punched: bool = True) -> None:
        """Make drained runs free to use."""
        for start, length in runs:
            self.free.give(start, length)
            if not punched:
                self._unpunched += length

    def slack(self) -> int:
        """Bytes that ``free_runs`` is for: about as many, for some may be in use again."""
        return self._unpunched + self.free.tail()

    @contextlib.contextmanager
    def free_runs(self) -> Iterator[list[tuple[int, int]]]:
        """All free runs, out of use inside, to be punched; then the host file is cut off where nothing is in use."""
        runs = self.free.take_all()
        unpunched, self._unpunched = self._unpunched, 0
        try:
            yield runs
        except BaseException:
            self._unpunched += unpunched
            raise
        finally:
            self.release(runs)
        self.free.trim()
        if os.fstat(self.fd).st_size > self.free.end:
            os.ftruncate(self.fd, self.free.end)
        self.file.size = min(self.file.size, self.free.end)

    def requeue(self, runs: list[tuple[int, int]]) -> None:
        """Put drained runs back into quarantine: what freed them could not be made durable."""
        self._quarantine += runs

    def quarantined(self) -> int:
        """Bytes freed but not yet drained."""
        return sum(n for _, n in self._quarantine)

    def punch(self, runs: Iterable[tuple[int, int]]) -> None:
        """Give the host the space of drained runs back, before their release (PUNCH_HOLE; ignored where it can't)."""
        try:
            for start, length in joined(runs):
                host_fallocate(self.fd, _PUNCH, start, length)
        except OSError:
            return

    def write(self, node: int, offset: int, data: bytes | bytearray | memoryview | Laid) -> None:
        """Store ``data`` at ``offset``: in place where mapped and not frozen, else in new blocks.

        Raises OSError (ENOSPC, EIO); the caller then ends with ok=False.
        """
        if isinstance(data, Laid):
            self._take_laid(node, data)
            return
        length = len(data)
        if not length:
            return
        file = self._maps.get(node) or self.map(node)
        extents = file.extents
        end = offset + length
        i = file.index(offset)
        if i < len(extents):
            start, size, disk, epoch = extents[i]
            if start <= offset and end <= start + size and epoch > self.frozen:
                self._pwrite(data, disk + offset - start)
                return
        view = memoryview(data)
        in_place: list[tuple[memoryview, int]] = []
        at = offset
        while at < end:
            i = file.index(at)
            if i < len(extents) and extents[i][0] <= at:
                start, size, disk, epoch = extents[i]
                stop = min(end, start + size)
                part = view[at - offset : stop - offset]
                if epoch > self.frozen:
                    in_place.append((part, disk + at - start))
                else:
                    self._replace_frozen(file, node, i, at, part)
            else:
                stop = min(end, extents[i][0]) if i < len(extents) else end
                part = view[at - offset : stop - offset]
                head, tail = at % BLOCK, -stop % BLOCK
                # A tail with nothing behind it is most often past the end of the file, where nothing is promised.
                keep = (bool(head), bool(tail) and i < len(extents))
                self._splice(file, node, i, i, self._put(at - head, [bytes(head), part, bytes(tail)], keep))
            at = stop
        # Last: a full disk refuses new blocks only, and what is written over can't be had back.
        for part, disk in in_place:
            self._pwrite(part, disk)

    def _replace_frozen(self, file: FileMap, node: int, i: int, at: int, data: memoryview) -> None:
        """Write within extent ``i``, which a checkpoint shows: whole blocks anew, the rest of the extent as it is."""
        start, size, disk, epoch = file.extents[i]
        stop = at + len(data)
        first, last = at - at % BLOCK, stop + -stop % BLOCK
        head = os.pread(self.fd, at - first, disk + first - start)
        tail = os.pread(self.fd, last - stop, disk + stop - start)
        new = self._put(first, [head, data, tail], (bool(head), bool(tail)))
        if start < first:
            new.insert(0, (start, first - start, disk, epoch))
        if last < start + size:
            new.append((last, start + size - last, disk + last - start, epoch))
        self._splice(file, node, i, i + 1, new)
        self._unmap(disk + first - start, last - first, epoch)

    def _take_laid(self, node: int, laid: Laid) -> None:
        """Give the file what was laid, in place of all it has."""
        self.zero(node, 0, None)
        self._splice(self.map(node), node, 0, 0, self._extents(0, laid.runs))
        self._laid.append(laid)
        self.file.reached(max((start + n for start, n in laid.runs), default=0))
        for block in sorted(self._logged | self._logged_before):
            if any(start <= block < start + n for start, n in laid.runs):
                self._log(memoryview(os.pread(self.fd, BLOCK, block)), block, BLOCK)

    def _put(self, offset: int, parts: list[bytes | memoryview], keep: tuple[bool, bool]) -> list[Extent]:
        """Write ``parts``, whole blocks together, to new blocks; returns those as extents from ``offset``.

        ``keep``: the first and the last block have bytes that must not be lost when the caller's are.
        """
        runs = self.free.take(sum(map(len, parts)))
        self._taken += runs
        if keep[0]:
            self._logged.add(runs[0][0])
        if keep[1]:
            self._logged.add(runs[-1][0] + runs[-1][1] - BLOCK)
        parts = [part for part in parts if part]
        data = parts[0] if len(parts) == 1 else None
        if len(runs) == 1 and data is None:
            self._pwritev(parts, runs[0][0])
        else:
            view, at = memoryview(b"".join(parts) if data is None else data), 0
            for disk, n in runs:
                self._pwrite(view[at : at + n], disk)
                at += n
        return self._extents(offset, runs)

    def _extents(self, offset: int, runs: list[tuple[int, int]]) -> list[Extent]:
        out: list[Extent] = []
        for disk, n in runs:
            out.append((offset, n, disk, self.epoch))
            offset += n
        return out

    def _splice(self, file: FileMap, node: int, i: int, j: int, new: list[Extent]) -> None:
        """Put ``new`` in place of extents i..j, joined to a neighbour it continues on disk."""
        extents = file.extents
        if new and i:
            start, size, disk, epoch = extents[i - 1]
            if start + size == new[0][0] and disk + size == new[0][2] and epoch == new[0][3]:
                new = [(start, size + new[0][1], disk, epoch), *new[1:]]
                i -= 1
        old = extents[i:j]
        self._undo.append((file, i, len(new), old))
        extents[i:j] = new
        file.used += sum(e[1] for e in new) - sum(e[1] for e in old)
        kept = {e[0] for e in new}
        rows = self.rows
        for e in old:
            if e[0] not in kept:
                rows.append((node, e[0], None, None, None))
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
                self._zero_mapped(file, node, offset, end)
                return
            self._zero_mapped(file, node, offset, first)
            self._zero_mapped(file, node, last, end)
            if first == last:
                return  # no whole block: an empty run must not get among the free ones
        i = j = file.index(first)
        extents = file.extents
        new: list[Extent] = []
        while j < len(extents) and extents[j][0] < last:
            start, size, disk, epoch = extents[j]
            lo, hi = max(start, first), min(start + size, last)
            if start < lo:
                new.append((start, lo - start, disk, epoch))
            if hi < start + size:
                new.append((hi, start + size - hi, disk + hi - start, epoch))
            self._unmap(disk + lo - start, hi - lo, epoch)
            j += 1
        if j > i:
            self._splice(file, node, i, j, new)

    def _zero_mapped(self, file: FileMap, node: int, offset: int, end: int) -> None:
        """Write zeros to a part of one block, unless it is a hole."""
        if offset < end:
            i = file.index(offset)
            if i < len(file.extents) and file.extents[i][0] <= offset:
                self.write(node, offset, bytes(end - offset))

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
            runs = self.free.take(stop - at)
            self._taken += runs
            for disk, n in runs:
                self.file.expect(disk + n)
                host_fallocate(self.fd, _PUNCH, disk, n)
                host_fallocate(self.fd, 0, disk, n)
                self.file.reached(disk + n)
                if self._logged or self._logged_before:
                    self._log(None, disk, n)
            self._splice(file, node, i, i, self._extents(at, runs))
            at = stop

    def drop(self, node: int) -> None:
        """Free all of a file's blocks; the caller deletes its rows by node, none are listed."""
        self._dropped.append(node)
        for _, n, disk, epoch in self.map(node).extents:
            self._unmap(disk, n, epoch)

    def restore(self, node: int, extents: list[Extent]) -> None:
        """Give the file the map that a checkpoint has of it."""
        file = self.map(node)
        old = file.extents
        for _, n, disk, epoch in old:
            self._unmap(disk, n, epoch)
        if len(old) == len(extents) == 1 and old[0][0] == extents[0][0]:
            self._undo.append((file, 0, 1, old))
            file.extents = extents
            file.used += extents[0][1] - old[0][1]
            self.rows.append((node, *extents[0]))
        else:
            self._splice(file, node, 0, len(old), extents)

    def _pwrite(self, data: bytes | bytearray | memoryview, disk: int) -> None:
        if self._logged or self._logged_before:
            self._log(memoryview(data), disk, len(data))
        end = disk + len(data)
        self.file.expect(end)
        n = os.pwrite(self.fd, data, disk)
        while n < len(data):
            data, disk = memoryview(data)[n:], disk + n
            n = os.pwrite(self.fd, data, disk)
        self.file.reached(end)

    def _pwritev(self, parts: list[bytes | memoryview], disk: int) -> None:
        if len(parts) == 1 or self._logged or self._logged_before:
            self._pwrite(b"".join(parts), disk)
            return
        want = sum(map(len, parts))
        self.file.expect(disk + want)
        if os.pwritev(self.fd, parts, disk) != want:
            self._pwrite(b"".join(parts), disk)
        self.file.reached(disk + want)

    def _log(self, data: memoryview | None, disk: int, length: int) -> None:
        """Have what goes to blocks that the log has bytes of (None: zeros) in the log as well."""
        stop = disk + length
        first = disk - disk % BLOCK
        blocks: Iterable[int] = range(first, stop, BLOCK)
        if len(self._logged) + len(self._logged_before) < length // BLOCK:
            blocks = sorted(b for b in self._logged | self._logged_before if first <= b < stop)
        for block in blocks:
            if block in self._logged or block in self._logged_before:
                self._logged.add(block)
                lo, hi = max(block, disk), min(block + BLOCK, stop)
                self.patches.append((lo, bytes(hi - lo) if data is None else bytes(data[lo - disk : hi - disk])))
