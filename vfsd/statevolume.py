"""A state volume: a tree volume that keeps checkpoints and can be what it was at one.

Owns what a restore does to the tree in memory. Must not know who asks for checkpoints, their names or policies.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Sequence

import trio

from vfsd.backends.base import Stored
from vfsd.backends.history import NOW, Past
from vfsd.backends.sqlite import SqliteBackend
from vfsd.core.changes import Change, Dentry, Drop, NoDentry, Put
from vfsd.core.plans import fail
from vfsd.core.types import Caller
from vfsd.feed import Feed
from vfsd.past.rewind import Rewind
from vfsd.volume import TreeVolume


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

    async def restore(self, epoch: int, caller: Caller) -> int:
        """Make the volume what it was at a checkpoint, in one commit; returns the number of changes.

        EBUSY when a file that would change is open for writing, ENOSPC, EIO; then nothing changed.
        """
        async with self.store.busy:
            # Nothing waits from here to the commit: the plan must be of the moment it is committed at.
            changes = self.plan_restore(epoch)
            self.commit_restore(changes, caller)
        return len(changes)

    def plan_restore(self, epoch: int) -> list[Change]:
        """What a restore would change; for who holds ``store.busy``, and until the next commit only. Raises as it."""
        store = self.store
        store.fold_now()
        rewind = Rewind(
            store.past(epoch),
            store.past(NOW),
            self._handles.writers(),
            self._is_pinned,
            self.tree.next_node,
            self._clock(),
            store.read_extents,
        )
        return rewind.changes(store.touched(epoch, NOW))

    def commit_restore(self, changes: Sequence[Change], caller: Caller) -> None:
        """Make a plan so."""
        if changes:
            self._bring_in(changes, self.store.past(NOW))
            self._commit(caller, "restore", changes)

    def counters(self) -> dict[str, int]:
        return super().counters() | {"journal_bytes": self.store._journal.size}

    def _is_pinned(self, node: int) -> bool:
        found = self.tree.nodes.get(node)
        return found is not None and found.pins > 0

    def _bring_in(self, changes: Sequence[Change], now: Past) -> None:
        """Have in memory what the changes alter: whatever is not folded must be."""
        nodes = self.tree.nodes
        made = {c.node for c in changes if type(c) is Put}
        for c in changes:
            if isinstance(c, (Put, Drop, Dentry)):
                self._insert_stored(now.node(c.node) if c.node not in nodes else None)
        for c in changes:
            if isinstance(c, (Dentry, NoDentry)):
                if c.parent not in nodes and c.parent not in made:
                    self._insert_stored(now.node(c.parent))
                parent = nodes.get(c.parent)
                if parent is not None and parent.children is None:
                    self._load(parent)

    def _insert_stored(self, stored: Stored | None) -> None:
        if stored is not None:
            self._insert(stored)
