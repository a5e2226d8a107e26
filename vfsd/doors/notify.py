"""Tells the kernel what a change made through another door has made stale.

One worker thread writes the notifications. Never the loop thread: the kernel lets a notification wait for a request
that only the loop thread can answer (measured: invalidate_inode behind a read of the page, invalidate_entry behind a
mkdir in the directory; the daemon then hangs in state D). The worker holds nothing while it waits.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import trio

from vfsd.doors.known import Grown, InvalEntry, Invalidation

if TYPE_CHECKING:
    from vfsd.doors.fuse import FuseDoor
    from vfsd.feed import Commit, Feed

log = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds a tool's reply waits for the kernel."""

_GONE = {errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.EBADF}
"""What a notification may answer with nothing lost: the kernel has it no more, or the mount is gone."""


class Notifier:
    """``inval_inode(ino, offset, length)`` and ``inval_entry(parent, name)`` are called on the worker thread only.

    ``offset`` negative: attributes only; else ``length`` bytes of pages from there, 0: all. A context manager, to be
    entered and left on the loop thread.
    """

    def __init__(
        self,
        feed: Feed,
        door: FuseDoor,
        inval_inode: Callable[[int, int, int], None],
        inval_entry: Callable[[int, bytes], None],
        grow: Callable[[int, int, bytes], None] | None = None,
    ) -> None:
        self._feed = feed
        self._door = door
        self._inval_inode = inval_inode
        self._inval_entry = inval_entry
        self._grow = grow
        self._queue: SimpleQueue[tuple[int, Sequence[Invalidation]] | None] = SimpleQueue()
        self._pending: deque[tuple[int, Sequence[Invalidation]]] = deque()
        self._waiting: list[tuple[int, trio.Event]] = []
        self._late: dict[int, int] = {}  # ino served with zero timeouts -> the seq that frees it
        self._done = 0
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._work, name="vfsd-notify", daemon=True)
        self._live = False
        self.sent = 0

    def __enter__(self) -> Notifier:
        self._token = trio.lowlevel.current_trio_token()
        self._live = True
        self._thread.start()
        self._feed.subscribe(self._committed, shell=False)
        self._feed.settler = self.settled
        self._door.invalidate = self.invalidate
        self._door.notifier = self
        return self

    def __exit__(self, *exc: object) -> None:
        self._live = False
        self._feed.settler = None
        self._door.invalidate = None
        self._pending.clear()
        self._queue.put(None)
        for _, event in self._waiting:
            event.set()

    def counters(self) -> dict[str, int]:
        """For status: notifications sent, commits whose notifications are still to be sent, inos served uncached."""
        behind = sum(seq > self._done for seq, _ in self._pending)
        return {"notified": self.sent, "behind": behind, "late": len(self._late)}

    def join(self, seconds: float = PATIENCE) -> bool:
        """After the context is left: waits for the worker. False when it is still in the kernel."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _committed(self, commit: Commit) -> None:
        if not self._live:
            return
        stale = self._door.known.stale(commit.base, commit.op, commit.changes)
        if stale:
            self._send(commit.seq, stale)

    def invalidate(self, stale: Sequence[Invalidation]) -> None:
        """Drop these besides what commits ask for (the kernel's view is known to be wrong)."""
        if self._live:
            self._send(self._feed.seq, stale)

    def _send(self, seq: int, stale: Sequence[Invalidation]) -> None:
        batch = (seq, stale)
        self._pending.append(batch)
        self._queue.put(batch)

    async def settled(self, seq: int) -> None:
        """Returns when the kernel has dropped all that commits up to ``seq`` made stale, or after PATIENCE seconds."""
        pending = self._pending
        while pending and pending[0][0] <= self._done:
            pending.popleft()
        if not pending or pending[0][0] > seq:
            return
        event = trio.Event()
        self._waiting.append((seq, event))
        self._wake()  # the worker may have finished between the look above and the append
        with trio.move_on_after(PATIENCE):
            await event.wait()
            return
        self._waiting = [waiter for waiter in self._waiting if waiter[1] is not event]
        late = {_ino(stale): batch for batch, every in pending if batch <= seq for stale in every}
        log.warning("the kernel has not dropped its caches of inos %s after %g s", sorted(late), PATIENCE)
        self._late.update(late)
        self._door.known.uncached.update(late)

    def _wake(self) -> None:
        """Lets go those whose wait is over. Runs on the loop thread."""
        done = self._done
        pending = self._pending
        while pending and pending[0][0] <= done:
            pending.popleft()
        first = pending[0][0] if pending else None
        still = []
        for waiter in self._waiting:
            if first is None or first > waiter[0]:
                waiter[1].set()
            else:
                still.append(waiter)
        self._waiting = still
        for ino in [ino for ino, seq in self._late.items() if seq <= done]:
            del self._late[ino]
            self._door.known.uncached.discard(ino)

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            seq, stale = batch
            for one in stale:
                try:
                    if isinstance(one, InvalEntry):
                        self._inval_entry(one.parent, one.name)
                    elif isinstance(one, Grown):
                        assert self._grow is not None
                        self._grow(*one)
                    else:
                        self._inval_inode(one.ino, -1 if one.attr_only else 0, 0)
                except OSError as e:
                    if e.errno not in _GONE:
                        log.error("the kernel refused %s: %s", one, e)
                except Exception:
                    log.exception("could not tell the kernel %s", one)
                self.sent += 1
            self._done = seq
            if self._waiting or self._late:
                assert self._token is not None
                try:
                    self._token.run_sync_soon(self._wake, idempotent=True)
                except trio.RunFinishedError:
                    return


def _ino(stale: Invalidation) -> int:
    return stale.parent if isinstance(stale, InvalEntry) else stale.ino
