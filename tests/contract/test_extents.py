"""The extent file against plain byte arrays: contents, undo, and blocks that wait until nobody can need them."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vfsd.backends.extents import ExtentFile, Row
from vfsd.backends.filemap import Extent
from vfsd.backends.freespace import BLOCK
from vfsd.core.changes import Laid

NODES = st.integers(1, 3)
OFFSETS = st.integers(0, 40_000) | st.integers(0, 10).map(lambda n: n * BLOCK)
LENGTHS = st.integers(1, 20_000) | st.integers(1, 5).map(lambda n: n * BLOCK)
SPAN = 80_000


class Content:
    """Bytes of one file, and which of them mean anything (those past a cut do not until written or zeroed)."""

    def __init__(self) -> None:
        self.data = bytearray(SPAN)
        self.known = bytearray(b"\1" * SPAN)

    def copy(self) -> Content:
        other = Content()
        other.data[:], other.known[:] = self.data, self.known
        return other

    def put(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data
        self.known[offset : offset + len(data)] = b"\1" * len(data)


class Extents(RuleBasedStateMachine):
    """Edits are grouped as a commit groups them: any number, then ``end(True)`` or ``end(False)``."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, dict[int, Extent]] = {}
        self.file = ExtentFile(os.memfd_create("extents"), self._fetch, lambda node: False)
        self.now = {n: Content() for n in (1, 2, 3)}
        self.before = {n: c.copy() for n, c in self.now.items()}
        self.dropped: set[int] = set()
        self.used_before: set[int] = set()
        self.waiting: set[int] = set()
        """Blocks freed by ended edits and not released: a lost commit could still show them."""
        self.drained: list[tuple[int, int]] = []
        self.filler = 0
        self.laid: Laid | None = None
        self.taken = False
        """What is laid is in a map, by an edit that has not ended."""

    def _fetch(self, node: int) -> list[Extent]:
        return sorted(self.stored.get(node, {}).values())

    def _fill(self, length: int) -> bytes:
        self.filler = self.filler % 255 + 1
        return bytes([self.filler]) * length

    @rule(node=NODES, offset=OFFSETS, length=LENGTHS)
    def write(self, node: int, offset: int, length: int) -> None:
        if node in self.dropped:
            return
        data = self._fill(length)
        self._in_place(node, offset, offset + length)
        self.file.write(node, offset, data)
        self.now[node].put(offset, data)

    def _in_place(self, node: int, offset: int, end: int) -> None:
        """What is written over in blocks the file has can't be undone."""
        for start, length, *_ in self.file.map(node).extents:
            lo, hi = max(start, offset), min(start + length, end)
            self.before[node].known[lo:hi] = bytes(max(0, hi - lo))

    @rule(node=NODES, offset=OFFSETS, length=LENGTHS)
    def zero(self, node: int, offset: int, length: int) -> None:
        if node in self.dropped:
            return
        for edge in (offset, offset + length):
            block = edge - edge % BLOCK
            self._in_place(node, max(offset, block), min(offset + length, block + BLOCK))
        self.file.zero(node, offset, offset + length)
        self.now[node].put(offset, bytes(length))

    @rule(node=NODES, offset=OFFSETS)
    def cut(self, node: int, offset: int) -> None:
        if node in self.dropped:
            return
        self.file.zero(node, offset, None)
        content, whole = self.now[node], -(-offset // BLOCK) * BLOCK
        content.put(whole, bytes(SPAN - whole))
        content.known[offset:whole] = bytes(whole - offset)

    @rule(lengths=st.lists(LENGTHS, min_size=1, max_size=3))
    def lay(self, lengths: list[int]) -> None:
        """Beforehand, and between the edits of others."""
        if self.laid is None:
            self.laid = self.file.begin([self._fill(length) for length in lengths])
            self.file.lay(self.laid)

    @rule(node=NODES)
    def take_laid(self, node: int) -> None:
        if self.laid is None or not self.laid.runs or self.taken or node in self.dropped:
            return
        self.file.write(node, 0, self.laid)
        self.now[node].put(0, bytes(self.laid) + bytes(SPAN - len(self.laid)))
        tail = slice(len(self.laid), len(self.laid) + -len(self.laid) % BLOCK)
        self.now[node].known[tail] = bytes(-len(self.laid) % BLOCK)
        self.taken = True

    @rule()
    def leave(self) -> None:
        if self.laid is not None and not self.taken:
            self.file.leave(self.laid)
            self.laid = None

    @rule(node=NODES, offset=OFFSETS, length=LENGTHS)
    def reserve(self, node: int, offset: int, length: int) -> None:
        if node in self.dropped:
            return
        self.file.reserve(node, offset, offset + length)
        used = {o + i for o, n, *_ in self.file.map(node).extents for i in range(0, n, BLOCK)}
        assert set(range(offset - offset % BLOCK, offset + length, BLOCK)) <= used

    @rule(node=NODES)
    def drop(self, node: int) -> None:
        if node not in self.dropped:
            self.file.drop(node)
            self.dropped.add(node)

    @rule()
    def end_well(self) -> None:
        for row in self.file.rows:
            self._store(row)
        self.file.end(True)
        for node in self.dropped:
            self.stored.pop(node, None)
            self.now[node] = Content()
        self.waiting |= self.used_before - self._used()
        self._settled()

    def _store(self, row: Row) -> None:
        node, offset, length, disk, epoch = row
        rows = self.stored.setdefault(node, {})
        if length is None or disk is None or epoch is None:
            rows.pop(offset, None)
        else:
            rows[offset] = (offset, length, disk, epoch)

    @rule()
    def end_badly(self) -> None:
        self.file.end(False)
        self.now = {n: c.copy() for n, c in self.before.items()}
        assert self._used() == self.used_before
        self._settled()

    def _settled(self) -> None:
        self.dropped = set()
        self.taken = False
        self.before = {n: c.copy() for n, c in self.now.items()}
        self.used_before = self._used()
        rows: list[Row] = self.file.rows
        assert rows == []
        for node in self.now:
            assert self.file.map(node).extents == self._fetch(node)
            assert self.file.map(node).used == sum(e[1] for e in self._fetch(node))
            content = self.now[node]
            found = self.file.read(node, 0, SPAN)
            assert all(a == b for a, b, known in zip(found, content.data, content.known, strict=True) if known)

    def _used(self) -> set[int]:
        out: list[int] = []
        for node in (1, 2, 3):
            if node not in self.dropped or node in self.stored:
                out += [disk + i for _, n, disk, _ in self.file.map(node).extents for i in range(0, n, BLOCK)]
        assert len(out) == len(set(out)), "a block belongs to two files"
        return set(out)

    @rule()
    def drain(self) -> None:
        self.drained += self.file.drain()

    @rule()
    def release(self) -> None:
        runs, self.drained = self.drained, []
        self.file.punch(runs)
        self.file.release(runs)
        self.waiting -= {start + i for start, n in runs for i in range(0, n, BLOCK)}

    @rule()
    def put_back(self) -> None:
        """A sync failed: the runs wait for the next."""
        runs, self.drained = self.drained, []
        self.file.requeue(runs)

    @rule()
    def forget_maps(self) -> None:
        if not self.file.rows and not self.dropped:
            self.file.end(True)
            self.file._maps.clear()

    @invariant()
    def no_waiting_block_is_in_use(self) -> None:
        for node in (1, 2, 3):
            for _, n, disk, _ in self.file.map(node).extents:
                assert not self.waiting & set(range(disk, disk + n, BLOCK))

    @invariant()
    def free_space_is_apart(self) -> None:
        free = [(start, n) for start, n in self.file.free.runs.items()]
        for (a, n), (b, _) in itertools.pairwise(free):
            assert a + n < b, "neighbours are joined, and none overlap"
        used = {disk + i for m in (1, 2, 3) for _, n, disk, _ in self.file.map(m).extents for i in range(0, n, BLOCK)}
        if self.laid is not None and not self.taken:
            laid = {start + i for start, n in self.laid.runs for i in range(0, n, BLOCK)}
            assert not used & laid
            used |= laid
        for start, n in free:
            assert not used & set(range(start, start + n, BLOCK))
            assert not self.waiting & set(range(start, start + n, BLOCK))

    def teardown(self) -> None:
        os.close(self.file.fd)


TestExtents = pytest.mark.slow(Extents.TestCase)
TestExtents.settings = settings(max_examples=40, stateful_step_count=30)
