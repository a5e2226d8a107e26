"""Going back to a checkpoint on all state routes of a mount together: planned, judged, committed as one.

Owns what keeps a restore from being made, and what is said of it after. Must not know the names of checkpoints, their
policies, nor doors.
"""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import trio

from vfsd.core.changes import Change, Drop, Put, rdev
from vfsd.core.types import Caller
from vfsd.past.marks import Mark
from vfsd.past.slots import Part
from vfsd.routes import RouteTable
from vfsd.statevolume import Prepared, StateVolume

TRIES = 3
"""How often a restore is worked out, and a checkpoint before it taken, beside a tree that goes on changing, before the
mount waits for it."""

Plans = Mapping[bytes, list[Change]]
"""What would change, by the prefix of the route."""

Judge = Callable[[Sequence[Mapping[str, Any]], Sequence[frozenset[bytes]]], None]
"""Given what differs from the present to a checkpoint (as ``Difference.plain``), and all names of each, raises OSError
if that may not be."""


class GoingBack:
    """``volumes``: the state routes of ``table``, by prefix."""

    def __init__(self, table: RouteTable, volumes: Mapping[bytes, StateVolume]) -> None:
        self._table = table
        self._volumes = volumes

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Inside, nobody else folds a volume or takes checkpoints of it."""
        async with contextlib.AsyncExitStack() as stack:
            for volume in self._volumes.values():
                await stack.enter_async_context(volume.store.busy)
            yield

    async def hold(self, before: Mark, prepared: Mapping[bytes, Prepared], *, wait: bool) -> bool:
        """Make ``before`` a checkpoint of the present, inside ``alone``; False when that is another by now.

        In threads if that may ``wait`` and the plans are those prepared, else the mount waits, and nothing can change.
        """
        wait = wait and self._stand(prepared)
        args = (before.id, before.label, before.cause, before.time_ns)
        with trio.CancelScope(shield=True):
            for prefix, volume in self._volumes.items():
                store = volume.store
                made = await store.checkpoint(*args) if wait else store.checkpoint_now(*args)
                before.parts.append(Part(prefix, store, made.epoch, volume.base))
        if not wait:
            return True
        stay = [await self._volumes[prefix].stays_open(plan) for prefix, plan in prepared.items()]
        return all(stay) and self._stand(prepared)

    async def prepare(self, mark: Mark) -> Mapping[bytes, Prepared]:
        """Work the plans out in threads, inside ``alone``; for ``plans``, which then need not.

        Again, up to TRIES in all, when something changed meanwhile. Raises OSError.
        """
        for _ in range(TRIES):
            prepared = {p.prefix: await self._volumes[p.prefix].prepare_restore(p.epoch) for p in mark.parts}
            if self._stand(prepared):
                break
        return prepared

    def _stand(self, prepared: Mapping[bytes, Prepared]) -> bool:
        return all(self._volumes[prefix].stands(plan) for prefix, plan in prepared.items())

    def plans(self, mark: Mark, prepared: Mapping[bytes, Prepared]) -> Plans:
        """Inside ``alone``, and until the next commit only.

        EBUSY when a file that would change is open for writing, or a directory would go in which a route stands.
        """
        plans = {p.prefix: _plan(p.prefix, self._volumes[p.prefix], p.epoch, prepared[p.prefix]) for p in mark.parts}
        for prefix, plan in plans.items():
            self._refuse_to_lose_a_route(prefix, plan)
        return plans

    def _refuse_to_lose_a_route(self, prefix: bytes, plan: Sequence[Change]) -> None:
        """EBUSY when a directory in which another route stands would go, as rmdir(2) has it for a mountpoint."""
        base = self._volumes[prefix].base
        for c in plan:
            if type(c) is Drop or (type(c) is Put and not c.nlink):
                laid = self._table.overlays.get(base | c.node, {})
                name = next((name for name, entry in laid.items() if not entry.weak), None)
                if name is not None:
                    where = f"the directory in which route {name.decode(errors='replace')!r} stands"
                    raise OSError(errno.EBUSY, f"{where} was not there then: mount without it")

    def matters(self, plans: Plans) -> bool:
        """False when only times would change, as those of a directory in which a file came and went."""
        return any(self._matters(prefix, plan) for prefix, plan in plans.items())

    def _matters(self, prefix: bytes, plan: Sequence[Change]) -> bool:
        volume = self._volumes[prefix]
        for c in plan:
            if type(c) is not Put:
                return True
            try:
                node = volume.getattr(volume.base | c.node)
            except OSError:
                return True
            before = (node.mode, node.nlink, node.uid, node.gid, node.rdev, node.size)
            if (*c[1:5], rdev(c.mode, c.extra), c.size) != before:
                return True
        return False

    def commit(self, plans: Plans, before: Mark, caller: Caller) -> None:
        """All the plans, or none; ``before`` is a checkpoint of the present."""
        done: list[Part] = []
        parts = {part.prefix: part for part in before.parts}
        try:
            for prefix, changes in plans.items():
                self._volumes[prefix].commit_restore(changes, caller)
                done.append(parts[prefix])
        except OSError:
            for part in done:
                volume = self._volumes[part.prefix]
                volume.commit_restore(volume.plan_restore(part.epoch), caller)
            raise


def _plan(prefix: bytes, volume: StateVolume, epoch: int, prepared: Prepared) -> list[Change]:
    try:
        return volume.plan_restore(epoch, prepared)
    except OSError as error:
        if error.errno != errno.EBUSY or not isinstance(error.filename, str):
            raise
        path = prefix.decode(errors="surrogateescape").rstrip("/") + error.filename
        raise OSError(
            errno.EBUSY, f"{path} is open for writing and would change: close it first; nothing was changed"
        ) from None


_NOUNS = {"file": ("file", "files"), "directory": ("directory", "directories"), "symlink": ("link", "links")}
_SAID = {"added": "brought back", "deleted": "removed", "renamed": "renamed back"}


def summary(changes: Sequence[Mapping[str, Any]]) -> str:
    """What was done, in words: ``3 files changed back, 1 file removed``; empty when only times were other."""
    counts = Counter((c["type"], _SAID.get(c["kind"], "changed back")) for c in changes)
    words = []
    for (kind, said), count in sorted(counts.items()):
        one, more = _NOUNS.get(kind, ("special file", "special files"))
        words.append(f"{count} {one if count == 1 else more} {said}")
    return ", ".join(words)
