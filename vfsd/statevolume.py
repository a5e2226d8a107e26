"""A state volume: a tree volume that keeps checkpoints and can be what it was at one.

Owns what a restore does to the tree in memory, and which nodes leave memory. Must not know who asks for checkpoints,
their names or policies.
"""

from __future__ import annotations

import errno
import gc
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import trio

from vfsd.backends import history
from vfsd.backends.history import NOW, Past
from vfsd.backends.sqlite import SqliteBackend
from vfsd.core.changes import Change, Dentry, Drop, NoDentry, Put
from vfsd.core.plans import fail
from vfsd.core.types import ROOT_NODE, Caller
from vfsd.feed import Feed
from vfsd.past.rewind import Rewind
from vfsd.residency import RESIDENT
from vfsd.volume import TreeVolume


class Opened:
    """Tells of a node True where it is open for writing, False where it is open else, None where it isn't.

    ``handles`` is what we know of; ``programs``, if they open files without our hearing of it, are looked for once, and
    only when the kernel knows the node at all.
    """

    def __init__(self, volume: StateVolume) -> None:
        self.handles = volume.writers()
        self._volume = volume
        self._programs: Mapping[int, bool] | None = None
        self.told: dict[int, bool | None] = {}
        """What was found out of programs, by ino."""

    def __call__(self, node: int) -> bool | None:
        found, volume = self.handles.get(node), self._volume
        if found or volume.programs is None or not volume.is_pinned(node):
            return found
        if self._programs is None:
            self._programs = volume.programs()
        ino = volume.base | node
        more = self.told[ino] = self._programs.get(ino)
        return found if more is None else more


class Prepared(NamedTuple):
    """The plan of a restore, or why there is none, and of which moment: commits until then, what was open."""

    changes: list[Change] | OSError
    commits: int
    opened: Opened


FOLDS = 3
"""Folds after which a volume that others go on changing is not folded, for the plan of a restore."""

_SLICE_S = 0.003

EVICT_SECONDS = 0.25
"""Between two looks at whether more is in memory than should be."""


async def stay_small(volumes: Sequence[object]) -> None:
    """Bound what the state volumes among ``volumes`` have in memory; never returns."""
    while True:
        for volume in list(volumes):
            while isinstance(volume, StateVolume) and volume.evict():
                await trio.sleep(0.001)
        await trio.sleep(EVICT_SECONDS)


class StateVolume(TreeVolume):
    """A route of kind state; the arguments are TreeVolume's."""

    def __init__(
        self,
        base: int,
        backend: SqliteBackend,
        feed: Feed,
        clock: Callable[[], int],
        *,
        owner: tuple[int, int] = (0, 0),
        read_only: bool = False,
    ) -> None:
        super().__init__(base, backend, feed, clock, owner=owner, read_only=read_only)
        self.store = backend
        self.programs: Callable[[], Mapping[int, bool]] | None = None
        """What programs have open without our hearing of it: inos, True where for writing."""
        self.resident_max = RESIDENT
        self._oldest: list[int] = []
        """Nodes to look at for eviction, the oldest last."""
        self._evicted = 0
        self._in_vain = (-1, 0)
        """Folds done, and nodes left, when a look at all of them let hardly any go."""

    @property
    def problem(self) -> str | None:
        """Why the volume is read-only, when that is not what was asked for."""
        return self.store.problem

    async def relabel(self, epoch: int, label: str) -> None:
        """Give a checkpoint another label, which survives power loss from then on. ENOSPC, EIO."""
        async with self.store.busy:
            await trio.to_thread.run_sync(self._relabel, epoch, label)

    def _relabel(self, epoch: int, label: str) -> None:
        db = self.store.connect_past()
        try:
            db.execute("UPDATE checkpoint SET label=? WHERE epoch=?", (label, epoch))
            db.execute("COMMIT")
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
            raise fail(errno.ENOSPC if full else errno.EIO) from error
        finally:
            db.close()

    async def prepare_restore(self, epoch: int) -> Prepared:
        """What a restore would change, worked out in a thread, for who holds ``store.busy``. ENOSPC, EIO.

        What never stands, while others change the volume all the time.
        """
        for _ in range(FOLDS):
            if not self.store.unfolded:
                break
            await self.store.fold()
        else:
            return Prepared([], -1, Opened(self))
        commits, opened = self.commits, Opened(self)
        found: list[Change] | OSError
        try:
            found = await trio.to_thread.run_sync(self._plan_aside, epoch, opened)
        except OSError as error:
            found = error
        else:
            await self._warm(found)
        return Prepared(found, commits, opened)

    async def _warm(self, changes: Sequence[Change]) -> None:
        """Have what they alter in memory, a little at a time: it is not looked for when they are made."""
        began = time.perf_counter()
        for c in changes:
            if isinstance(c, (Put, Drop, Dentry)) and self._bring(c.node) is not None and not isinstance(c, Dentry):
                self.store.blocks(c.node)
            if time.perf_counter() - began > _SLICE_S:
                await trio.lowlevel.checkpoint()
                began = time.perf_counter()

    def _plan_aside(self, epoch: int, opened: Opened) -> list[Change]:
        db = self.store.connect_past()
        try:
            rewind = self._rewind(Past(db, epoch), Past(db, NOW), opened)
            return rewind.changes(history.touched(db, epoch, NOW))
        finally:
            db.close()

    def stands(self, prepared: Prepared) -> bool:
        """Whether nothing that the plan rests on has changed: the tree, what is open, what the kernel holds.

        Programs that are not heard of apart: ``stays_open``."""
        if prepared.commits != self.commits or prepared.opened.handles != self.writers():
            return False
        if isinstance(prepared.changes, OSError):
            return True
        for c in prepared.changes:
            if type(c) is Drop and self.is_pinned(c.node):
                return False
            if type(c) is Put and not c.nlink and not self.is_pinned(c.node):
                return False
        return True

    async def stays_open(self, prepared: Prepared) -> bool:
        """Whether programs that open files without our hearing of it have open what they had."""
        told = prepared.opened.told
        if self.programs is None or not told:
            return True
        found = await trio.to_thread.run_sync(self.programs)
        return all(found.get(ino) == was for ino, was in told.items())

    def writers(self) -> dict[int, bool]:
        """The nodes that are open, as far as we have heard; True where for writing."""
        return self._handles.writers()

    def plan_restore(self, epoch: int, prepared: Prepared | None = None) -> list[Change]:
        """What a restore would change: as prepared, if that stands, else worked out now.

        For who holds ``store.busy``, and until the next commit only. EBUSY when a file that would change is open for
        writing, ENOSPC, EIO; then nothing changed.
        """
        if prepared is not None and self.stands(prepared):
            if isinstance(prepared.changes, OSError):
                raise prepared.changes
            return prepared.changes
        store = self.store
        store.fold_now()
        rewind = self._rewind(store.past(epoch), store.past(NOW), Opened(self))
        return rewind.changes(store.touched(epoch, NOW))

    def _rewind(self, then: Past, now: Past, opened: Opened) -> Rewind:
        return Rewind(
            then,
            now,
            opened,
            self.is_pinned,
            self.tree.next_node,
            self._clock(),
            self.store.read_extents,
        )

    def commit_restore(self, changes: Sequence[Change], caller: Caller) -> None:
        """Make a plan so."""
        if not changes:
            return
        # What it makes is there to stay: to look through it again and again took a third of the time.
        gc.disable()
        try:
            revived = self._bring_in(changes)
            self._commit(caller, "restore", changes)
            self.store.revived(revived)
        finally:
            gc.enable()

    def counters(self) -> dict[str, int]:
        return super().counters() | {"journal_bytes": self.store._journal.size}

    def is_pinned(self, node: int) -> bool:
        """Whether the kernel or a handle holds the node."""
        found = self.tree.nodes.get(node)
        return node in self._evicted_pins if found is None else found.pins > 0

    # -- eviction

    def evict(self, count: int = 500) -> bool:
        """Look at up to ``count`` nodes above ``resident_max``, the oldest first, and let go of those that can come in
        again; True when there is more to do at once. For who runs between operations: they hold on to nodes.

        One stays that is open, that has no link, whose last change is not folded, or that has entries in memory.
        """
        nodes, keeps, pins = self.tree.nodes, self.store.keeps, self._evicted_pins
        more = self.store.forget_maps(count)
        if len(nodes) <= self.resident_max:
            return more
        if not self._oldest:
            folds, left = self._in_vain
            if self.store.folds == folds and len(nodes) < left + left // 10 + 1:
                return more
            self._evicted = 0
            self._oldest = list(islice(nodes, len(nodes) - self.resident_max))
            self._oldest.reverse()
        opened = self._handles.writers()
        while self._oldest and count:
            count -= 1
            number = self._oldest.pop()
            node = nodes.get(number)
            if node is None or number == ROOT_NODE or not node.nlink or node.children or keeps(number):
                continue
            if number not in opened:
                above = node.parent
                self.tree.evict(node)
                if above is not None and not above.children:
                    self._oldest.append(above.id)
                self._evicted += 1
                if node.pins:
                    pins[number] = node.pins
        if self._oldest:
            return True
        if self._evicted * 10 < len(nodes) - self.resident_max:
            self._in_vain = (self.store.folds, len(nodes))
        return more

    def _bring_in(self, changes: Sequence[Change]) -> int:
        """Have in memory what the changes alter: whatever is not folded must be. All is folded now.

        How many nodes they make that had been there before.
        """
        made = {c.node for c in changes if type(c) is Put}
        named = {c.node for c in changes if isinstance(c, (Put, Drop, Dentry))}.difference(self.tree.nodes)
        known = self.store.known(named)
        for node in known:
            self._bring(node)
        absent = named - known
        for node in made & absent:
            self.store.new(node)
        for parent in {c.parent for c in changes if isinstance(c, (Dentry, NoDentry))} - absent:
            directory = self._bring(parent)
            if directory is not None:
                self._dir(directory.ino)
            else:
                assert parent in made
        return sum(node < self.tree.next_node for node in made & absent)
