"""Waits for the device and for everything else of the event loop in one poll(2).

A request that wakes trio's scheduler costs 10 us and more before its handler begins: a turn of the scheduler,
epoll_ctl(2) to be told, once, of one descriptor. So the read loop stays in its own task and asks the kernel itself: is
there a request, or has the event loop something to do? Its epoll descriptor is readable then, or its next deadline has
come. Before, it asks again and again for a moment, as long as that pays: on an idle machine each wake-up of a sleeping
processor takes 50 us, on a busy one a daemon that sleeps is run on the program's own, at once.

Invariant: no task that can run, no deadline and no readable descriptor is left waiting behind the poll.
"""

from __future__ import annotations

import os
import select
import sys
import time

import trio

SPIN = 100e-6
"""Seconds of asking again and again before the wait proper.

With an idle processor beside, a request mostly comes within them, which saves the daemon a wake-up; without, they are
lost."""

SKIPPED, SKIPPED_MAX = 16, 1024
"""How many waits go without when that was in vain, twice as many each time that it is so again, up to the second."""

TURN = 1e-3
"""Seconds of requests without a turn for other tasks that have something to do, or may have."""


class Runnable(trio.abc.Instrument):
    """The tasks that are to run and have not yet begun to."""

    def __init__(self) -> None:
        self.tasks: set[trio.lowlevel.Task] = set()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.tasks.add(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.tasks.discard(task)


class Waiter:
    """For one task of a trio loop; made, used and closed by it."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._runnable = Runnable()
        self._tasks = self._runnable.tasks
        self._deadline = 0.0
        self._skip = SKIPPED
        self._skipped = SKIPPED if len(os.sched_getaffinity(0)) > 1 else sys.maxsize
        self._turned = 0.0
        """When other tasks had their last turn."""
        self._poll = select.poll()
        self._poll.register(device, select.POLLIN)
        self._epoll = _event_loop()
        if self._epoll is not None:
            self._poll.register(self._epoll, select.POLLIN)

    async def start(self) -> None:
        """To be awaited before the first question."""
        trio.lowlevel.add_instrument(self._runnable)
        # What could run before the instrument was there has begun to after two turns.
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """The loop's other tasks are told apart no more."""
        trio.lowlevel.remove_instrument(self._runnable)

    def has_request(self) -> bool:
        """Waits. True: the device has something to read. False: ``turn`` is to be awaited first.

        Requests go first, for up to TURN: what a program has done, closing a file too, counts before what a tool asks
        afterwards.
        """
        now = time.perf_counter()
        left = self._deadline - now
        if self._tasks or left <= 0.0:
            # Tasks that can always run, a search for one, take turns with the requests.
            return now < self._turned + TURN and any(fd == self._device for fd, _ in self._poll.poll(0))
        ready = self._spin(now)
        if not ready:
            # Late by up to a millisecond, since poll(2) counts in them, never early.
            ready = self._poll.poll(0 if self._epoll is None else int(left * 1000) + 1)
        if len(ready) == 2:
            self._deadline = min(self._deadline, now + TURN)
        return bool(ready) and ready[0][0] == self._device

    def _spin(self, now: float) -> list[tuple[int, int]]:
        """What comes within moments, where that has been so lately."""
        if self._skipped:
            self._skipped -= 1
            return []
        while True:
            ready = self._poll.poll(0)
            if ready:
                self._skip = SKIPPED
                return ready
            if time.perf_counter() > now + SPIN:
                self._skipped = self._skip
                self._skip = min(2 * self._skip, SKIPPED_MAX)
                return []

    async def turn(self) -> None:
        """Lets other tasks run."""
        if self._epoll is None and not self._poll.poll(0):
            await trio.lowlevel.wait_readable(self._device)
        else:
            await trio.lowlevel.checkpoint()
        self._turned = time.perf_counter()
        longest = TURN if self._epoll is None else 3600.0
        self._deadline = self._turned + min(trio.lowlevel.current_statistics().seconds_to_next_deadline, longest)


def _event_loop() -> int | None:
    """The descriptor of this thread's event loop; None where this trio keeps none, or keeps it elsewhere."""
    from trio._core._run import GLOBAL_RUN_CONTEXT

    epoll = getattr(GLOBAL_RUN_CONTEXT.runner.io_manager, "_epoll", None)
    return epoll.fileno() if isinstance(epoll, select.epoll) else None
