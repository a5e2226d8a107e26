"""The checkpoints of a mount: taking, naming, comparing, restoring, dropping, and when they are taken by themselves.

A checkpoint is one id for the same moment of every state route of the mount. Owns their names, causes and retention,
and who may change what while one is being read. Must not know doors or configuration files; what a volume does at a
checkpoint is its own business (``SqliteBackend``, ``StateVolume``).

Causes: ``user`` (asked for), ``auto`` (before an execute or tool call, by policy), ``restore`` and ``undo`` (before
one), ``moment`` (held while the present is read, then dropped; never shown). All methods raise OSError whose sentence
is for the user, with nothing changed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from vfsd.backends.history import NOW
from vfsd.config import CheckpointPolicy
from vfsd.core.types import DAEMON, NODE_MASK, Caller
from vfsd.past.fork import fork_volume
from vfsd.past.goback import TRIES, GoingBack, Judge, summary
from vfsd.past.marks import LABEL_MAX, Mark, check_label, find, why_excluded
from vfsd.past.slots import Part
from vfsd.past.spans import Span, compare, totals
from vfsd.past.volume import PastVolume
from vfsd.routes import RouteTable
from vfsd.statevolume import StateVolume

log = logging.getLogger(__name__)

_REMEMBERED = 100
"""Tool calls remembered of one automatic checkpoint, to be told of when it is gone back to."""

NEARLY_FULL = 0.05
"""Share of the disk that is free below which all automatic checkpoints but the newest are given up."""

COMPACT_BYTES = 8 << 20
"""Bytes a database or a data file wastes before they are given back unasked, by a mount at rest."""

REST_SECONDS = 60.0
"""Time without a change after which a mount is at rest."""


Shows = Callable[[Collection[bytes]], bool]
"""Whether the content of a path may be shown."""


class Checkpoints:
    """The checkpoints of one mount.

    ``home(name, thread)`` is the directory of a thread's state volumes, of the mount ``name`` or ("") this one, raising
    OSError for a bad name; ``clock`` gives nanoseconds since the epoch. What is left of them in the stores is taken up
    at once.
    """

    def __init__(
        self,
        table: RouteTable,
        past: PastVolume,
        policy: CheckpointPolicy,
        clock: Callable[[], int],
        home: Callable[[str, str], Path],
    ) -> None:
        self.policy = policy
        self._volumes: dict[bytes, StateVolume] = {r.prefix: r.volume for r in table.routes if r.kind == "state"}
        self._excluded = [
            {"prefix": r.prefix, "kind": r.kind, "why": why_excluded(r.kind)}
            for r in table.routes
            if r.kind not in ("state", "system")
        ]
        self._table = table
        self._back = GoingBack(table, self._volumes)
        self._past = past
        self._clock = clock
        self._home = home
        self._lock = trio.Lock()
        self._marks: dict[str, Mark] = {}
        self._leftover: list[Part] = []
        self._commits = -1
        self._calls = 0
        self._last_call = ""
        self._latest: Mark | None = None
        self._rested = (0, 0.0)
        self._take_up()

    def _take_up(self) -> None:
        found: dict[str, Mark] = {}
        for prefix, volume in self._volumes.items():
            for c in volume.store.checkpoints():
                part = Part(prefix, volume.store, c.epoch, volume.base)
                if c.cause == "moment":
                    self._leftover.append(part)
                else:
                    found.setdefault(c.id, Mark(c.id, c.label, c.cause, c.time_ns)).parts.append(part)
        for mark in sorted(found.values(), key=lambda m: m.time_ns):
            self._marks[mark.id] = mark
            try:
                self._past.show(mark.id.encode(), mark.time_ns, mark.parts, DAEMON)
            except OSError as error:
                log.warning("checkpoint %s is not in /.checkpoints: %s", mark.id, error.strerror)

    def all(self) -> list[Mark]:
        """Oldest first."""
        return list(self._marks.values())

    def find(self, ref: str) -> Mark:
        """As ``marks.find``."""
        return find(self._marks, ref)

    # -- taking and dropping

    async def create(self, label: str, caller: Caller) -> dict[str, Any]:
        """Take one; what it is, and what it leaves out."""
        check_label(label)
        async with self._lock:
            mark = await self._create(label, "user", caller)
        return mark.plain() | {"not_included": self._excluded}

    def _need_volumes(self) -> None:
        if not self._volumes:
            raise OSError(
                errno.EOPNOTSUPP, "no route of this mount is of kind state, so there is nothing to checkpoint"
            )
        if any(volume.read_only for volume in self._volumes.values()):
            raise OSError(errno.EROFS, "the mount is read-only: no checkpoint can be made, restored or dropped")

    async def _create(self, label: str, cause: str, caller: Caller) -> Mark:
        self._need_volumes()
        mark = self._new_mark(label, cause)
        # Half a checkpoint must not stay, whoever gives up waiting for it.
        with trio.CancelScope(shield=True):
            try:
                for prefix, volume in self._volumes.items():
                    async with volume.store.busy:
                        made = await volume.store.checkpoint(mark.id, label, cause, mark.time_ns)
                    mark.parts.append(Part(prefix, volume.store, made.epoch, volume.base))
                if cause != "moment":
                    self._admit(mark, caller)
            except OSError:
                await self._forget(mark)
                raise
        return mark

    def _new_mark(self, label: str, cause: str) -> Mark:
        while (name := secrets.token_hex(4)) in self._marks:
            pass
        return Mark(name, label, cause, self._clock())

    def _admit(self, mark: Mark, caller: Caller) -> None:
        self._past.show(mark.id.encode(), mark.time_ns, mark.parts, caller)
        self._marks[mark.id] = mark

    async def drop(self, refs: Sequence[str], caller: Caller) -> list[Mark]:
        """Forget checkpoints; all are known before the first goes. EBUSY while one is being read."""
        async with self._lock:
            self._need_volumes()
            marks = [self.find(ref) for ref in refs]
            for mark in marks:
                if mark.readers:
                    raise OSError(errno.EBUSY, f"checkpoint {mark.id} is being read (diff or fork); try again later")
            for mark in marks:
                await self._drop(mark, caller)
        return marks

    async def _drop(self, mark: Mark, caller: Caller) -> None:
        # First of all nobody may read it any more: its blocks are about to be used for something else.
        self._past.hide(mark.id.encode(), caller)
        self._marks.pop(mark.id, None)
        await self._forget(mark)

    async def _forget(self, mark: Mark) -> None:
        with trio.CancelScope(shield=True):
            while mark.parts:
                part = mark.parts.pop()
                try:
                    await part.store.drop_checkpoint(part.epoch)
                except OSError:
                    self._leftover.append(part)
                    raise

    # -- reading

    @contextlib.asynccontextmanager
    async def _being_read(self, ref: str | None) -> AsyncIterator[dict[bytes, int]]:
        """The epochs, by prefix, of a checkpoint that can't go meanwhile; of the present when ``ref`` is None."""
        if ref is not None:
            mark = self.find(ref)
            mark.readers += 1
            try:
                yield _epochs(mark)
            finally:
                mark.readers -= 1
        elif any(volume.read_only for volume in self._volumes.values()):
            for volume in self._volumes.values():
                async with volume.store.busy:
                    volume.store.fold_now()
            yield dict.fromkeys(self._volumes, NOW)
        else:
            async with self._lock:
                mark = await self._create("", "moment", DAEMON)
            try:
                yield _epochs(mark)
            finally:
                await self._forget(mark)

    async def show(self, ref: str) -> dict[str, Any]:
        """A checkpoint with what was in it: files, directories, and the sum of the files' sizes."""
        mark = self.find(ref)
        sums = [0, 0, 0]
        async with self._being_read(ref):
            for part in mark.parts:
                counts = await trio.to_thread.run_sync(totals, part)
                sums = [a + b for a, b in zip(sums, counts, strict=True)]
        files, directories, size = sums
        return mark.plain() | {
            "files": files,
            "directories": directories,
            "bytes": size,
            "not_included": self._excluded,
        }

    async def diff(self, a: str, b: str | None, *, patch: bool, shows: Shows | None = None) -> dict[str, Any]:
        """What changed from ``a`` to ``b`` (None: the present); ``complete`` is false when patches had no room.

        ``shows``: a patch is left out where it is False of the names that the file had and has.
        """
        result: dict[str, Any] = {"a": self.find(a).id, "b": None if b is None else self.find(b).id}
        async with self._being_read(a) as then, self._being_read(b) as now:
            changes, names, patches, complete = await self._compare(then, now, patch, named=shows is not None)
        result["changes"] = changes
        if patch:
            if shows is not None:
                shown = list(map(functools.cache(shows), names))
                complete = complete and all(shown)
                patches = [text for text, show in zip(patches, shown, strict=True) if show]
            result |= {"patch": b"".join(patches), "complete": complete}
        return result

    async def _compare(
        self, then: Mapping[bytes, int], now: Mapping[bytes, int], patch: bool = False, named: bool = False
    ) -> tuple[list[dict[str, Any]], list[frozenset[bytes]], list[bytes], bool]:
        """The differences between epochs by prefix, the names and the patch of each, and whether patches are whole."""
        changes: list[dict[str, Any]] = []
        names: list[frozenset[bytes]] = []
        patches: list[bytes] = []
        complete = True
        for prefix in sorted(then.keys() & now.keys()):
            span = Span(self._volumes[prefix].store, then[prefix], now[prefix], self._stubs(prefix))
            told = await trio.to_thread.run_sync(compare, span, prefix, patch, named)
            complete = complete and told.whole
            changes += told.changes
            names += told.names
            patches += told.patches
        return changes, names, patches, complete

    def _stubs(self, prefix: bytes) -> list[tuple[int, bytes]]:
        """Directories of the route that are there for a command's view only: (parent node, name)."""
        base = self._volumes[prefix].base
        hidden = [(ino & NODE_MASK, names) for ino, names in self._table.hidden.items() if ino & ~NODE_MASK == base]
        return [(node, name) for node, names in hidden for name in names]

    async def fork(self, ref: str, thread: str, name: str = "") -> dict[str, Any]:
        """Make a new thread's state volumes of a checkpoint. EEXIST when the thread is there already."""
        mark = self.find(ref)
        home = self._home(name, thread)
        async with self._being_read(ref):
            made = await trio.to_thread.run_sync(fork_volume, home, [(p.prefix, p.store, p.epoch) for p in mark.parts])
        return {
            "id": mark.id,
            "thread": thread,
            "location": str(home),
            "routes": [part.prefix for part in mark.parts],
            "volumes": made,
            "not_included": self._excluded,
        }

    # -- going back

    async def restore(self, ref: str, caller: Caller, judge: Judge | None = None) -> dict[str, Any]:
        """Make all that the checkpoint has what it was then. EBUSY when a file that would change is open for writing.

        ``before`` is the checkpoint of how things were until now, None when nothing had to change. ``judge`` is given
        what differs before anything changes, and may raise.
        """
        async with self._lock:
            self._need_volumes()
            mark = self.find(ref)
            changes, before = await self._go_back(mark, "restore", caller, judge)
            back = await self._summary(mark, before)
        return {
            "id": mark.id,
            "label": mark.label,
            "changes": changes,
            "back": back,
            "before": None if before is None else before.id,
            "not_included": self._excluded,
        }

    async def undo(self, caller: Caller, judge: Judge | None = None) -> dict[str, Any]:
        """Take back the last execute or tool call that changed something, as a whole, with what came after it."""
        async with self._lock:
            self._need_volumes()
            for mark in self._undoable():
                changes, before = await self._go_back(mark, "undo", caller, judge)
                if before is not None:
                    after, mark.after = mark.after[1:], []
                    return {
                        "id": mark.id,
                        "undone": mark.label,
                        "after": after,
                        "changes": changes,
                        "back": await self._summary(mark, before),
                        "before": before.id,
                    }
        raise OSError(
            errno.ENOENT,
            "there is nothing to undo: no automatic checkpoint from before the present state differs from it (see "
            "[checkpoints] in vfsd.toml for when they are taken, vfsd checkpoint list for those of what was undone)",
        )

    async def _summary(self, mark: Mark, before: Mark | None) -> str:
        """What going back to ``mark`` did."""
        if before is None:
            return ""
        return summary((await self._compare(_epochs(before), _epochs(mark)))[0])

    async def _judge(self, mark: Mark, judge: Judge) -> None:
        moment = await self._create("", "moment", DAEMON)
        try:
            judge(*(await self._compare(_epochs(moment), _epochs(mark), named=True))[:2])
        finally:
            await self._forget(moment)

    def _undoable(self) -> list[Mark]:
        """The automatic checkpoints that lead to the present, newest first.

        After a restore or an undo the present is what its target was, so only what came before the target counts.
        """
        found: list[Mark] = []
        limit = NOW
        for mark in reversed(self._marks.values()):
            if mark.time_ns >= limit:
                continue
            if mark.cause == "auto":
                found.append(mark)
            elif mark.cause in ("restore", "undo"):
                target = self._marks.get(mark.label.rpartition(" ")[2])
                if target is None:
                    break
                limit = min(limit, target.time_ns)
        return found

    async def _go_back(self, mark: Mark, cause: str, caller: Caller, judge: Judge | None) -> tuple[int, Mark | None]:
        """The number of changes, and the checkpoint taken right before them."""
        if judge is not None:
            # What it refuses nobody else can change meanwhile either.
            await self._judge(mark, judge)
        before = self._new_mark(f"before {cause} to {mark.id}", cause)
        try:
            for left in reversed(range(TRIES)):
                async with self._back.alone():
                    prepared = await self._back.prepare(mark)
                    plans = self._back.plans(mark, prepared)
                    total = sum(map(len, plans.values()))
                    if not total or (cause == "undo" and not self._back.matters(plans)):
                        return 0, None
                    # What the new checkpoint has must be exactly what the restore changes.
                    if await self._back.hold(before, prepared, wait=left > 0):
                        self._back.commit(plans, before, caller)
                        break
                await self._forget(before)
        except OSError:
            await self._forget(before)
            raise
        self._admit(before, caller)
        self._commits = self._count()
        return total, before

    # -- by themselves

    def _count(self) -> int:
        return sum(volume.commits for volume in self._volumes.values())

    async def before_call(self, what: str, call_id: str, caller: Caller) -> None:
        """A tool call is about to change something."""
        if self.policy.every_calls and not (call_id and call_id == self._last_call):
            due = self._calls % self.policy.every_calls == 0
            self._calls += 1
            if due:
                await self._automatic(what, caller)
        if not (call_id and call_id == self._last_call):
            self._note(what)
        self._last_call = call_id

    async def before_execute(self, command: str, caller: Caller) -> str:
        """A command is about to run; the id of the checkpoint before it, empty for none."""
        what = f"execute: {command}"
        taken = await self._automatic(what, caller) if self.policy.every_execute else ""
        self._note(what)
        return taken

    def _note(self, what: str) -> None:
        """``what`` is about to happen, after the latest automatic checkpoint."""
        if self._latest is not None and len(self._latest.after) < _REMEMBERED:
            self._latest.after.append(what)

    async def _automatic(self, what: str, caller: Caller) -> str:
        """Take one unless nothing changed since the last; what it comes before is more to the user than that it failed
        to be taken, so a failure only warns."""
        if not self._volumes or any(volume.read_only for volume in self._volumes.values()):
            return ""
        label = "".join(c if c.isprintable() else " " for c in what)[:LABEL_MAX]
        async with self._lock:
            commits = self._count()
            newest = next(reversed(self._marks.values()), None)
            if newest is not None and newest.cause == "auto" and commits == self._commits:
                await self._relabel(newest, label)
                self._latest, newest.after = newest, []
                return newest.id
            try:
                mark = await self._create(label, "auto", caller)
            except OSError as error:
                log.warning("no checkpoint before %s: %s", label, error.strerror)
                return ""
            self._latest, self._commits = mark, commits
        return mark.id

    async def _relabel(self, mark: Mark, label: str) -> None:
        """Durably, as far as the stores take it: what the label is of is there either way."""
        if mark.label == label:
            return
        mark.label = label
        with trio.CancelScope(shield=True):
            try:
                for part in mark.parts:
                    await self._volumes[part.prefix].relabel(part.epoch, label)
            except OSError as error:
                log.warning("checkpoint %s will be called otherwise after the next start: %s", mark.id, error.strerror)

    async def maintain(self) -> None:
        """Drop what retention says, and what an end without warning left; compact the databases of a mount at rest."""
        while self._leftover:
            part = self._leftover.pop()
            if any(c.epoch == part.epoch for c in part.store.checkpoints()):
                await part.store.drop_checkpoint(part.epoch)
        while True:
            # One at a time, so that nobody waits long for the lock.
            async with self._lock:
                surplus = self._surplus()
                if surplus is None:
                    break
                await self._drop(surplus, DAEMON)
        now, count = trio.current_time(), self._count()
        if self._rested[0] != count:
            self._rested = (count, now)
        elif now - self._rested[1] > REST_SECONDS:
            for volume in self._volumes.values():
                if volume.store.waste() > COMPACT_BYTES:
                    await volume.store.compact()
                elif volume.store.slack() > COMPACT_BYTES:
                    await volume.store.give_back()

    def _surplus(self) -> Mark | None:
        """The oldest checkpoint that retention does not keep."""
        automatic = [mark for mark in self._marks.values() if mark.cause != "user"]
        keep = 1 if self._nearly_full() else self.policy.keep
        surplus = automatic[: max(0, len(automatic) - keep)]
        return next((mark for mark in surplus if not mark.readers), None)

    def _nearly_full(self) -> bool:
        stats = [volume.store.statfs() for volume in self._volumes.values()]
        return any(s.bavail < NEARLY_FULL * s.blocks for s in stats)

    async def collect(self) -> dict[str, int]:
        """Give back all the space that can be (``vfsd gc``): bytes of disk before and after."""
        self._need_volumes()
        before = sum(volume.store.disk_used() for volume in self._volumes.values())
        await self.maintain()
        for volume in self._volumes.values():
            await volume.store.compact()
        return {"before": before, "after": sum(volume.store.disk_used() for volume in self._volumes.values())}


def _epochs(mark: Mark) -> dict[bytes, int]:
    return {part.prefix: part.epoch for part in mark.parts}
