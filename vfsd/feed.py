"""The ordered feed of commits: every mutation, whatever door it came through, told once to everyone who listens.

Owns the sequence number. Must not know doors, backends or the kernel. Invariants: ``seq`` rises by one a commit;
subscribers are called synchronously, in order, in the critical section of the commit; none may raise or wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from vfsd.core.changes import Change
from vfsd.core.types import Caller


class Commit(NamedTuple):
    """One committed mutation: ``base | node`` is the ino of a change's node."""

    seq: int
    base: int
    caller: Caller
    op: str
    changes: Sequence[Change]


Subscriber = Callable[[Commit], None]


class Feed:
    """Publishes commits to subscribers and lets a door wait until the kernel's caches follow."""

    def __init__(self) -> None:
        self.seq = 0
        self.settler: Callable[[int], Awaitable[None]] | None = None
        self._subscribers: list[Subscriber] = []
        self._shell_subscribers: list[Subscriber] = []

    def subscribe(self, fn: Subscriber, *, shell: bool = True) -> None:
        """Call ``fn`` at each commit; with ``shell=False`` only at those that did not come through FUSE.

        The kernel keeps its own caches right for what it asked for itself, so its notifier needs no more.
        """
        self._subscribers.append(fn)
        if shell:
            self._shell_subscribers.append(fn)

    def wanted(self, caller: Caller) -> bool:
        """True when somebody listens to commits of this caller's door."""
        return bool(self._shell_subscribers) or (caller.door != "fuse" and bool(self._subscribers))

    def publish(self, base: int, caller: Caller, op: str, changes: Sequence[Change]) -> int:
        """Number the commit and tell it. Returns its sequence number."""
        self.seq += 1
        subscribers = self._shell_subscribers if caller.door == "fuse" else self._subscribers
        if subscribers:
            commit = Commit(self.seq, base, caller, op, changes)
            for fn in subscribers:
                fn(commit)
        return self.seq

    async def settled(self, seq: int) -> None:
        """Return once the kernel has dropped what commits up to ``seq`` made stale (bounded by the settler)."""
        if self.settler is not None:
            await self.settler(seq)
