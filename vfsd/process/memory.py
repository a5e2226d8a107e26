"""Memory given back to the machine once a daemon that was busy has nothing to do; a collector that holds nobody up.

Owns when and how. The C library keeps what was freed between what is in use; the collector keeps lists of its own.
"""

from __future__ import annotations

import ctypes
import gc

import trio

COLLECT_MAX = 200_000
"""Files in memory above which the collector is left alone: it holds everything up, 0.1 s for so many."""

FREEZE_AFTER = 5
"""Collections of the garbage collector's middle generation, one for about 7,000 objects that stay, before all that is
there is taken out of its sight: a tree has no cycles that could become garbage, and to look for some in a hundred
thousand nodes would hold up every request for as long as a tenth of a second."""


async def bound_collector(seconds: float) -> None:
    """Bound the work of the garbage collector, with a look each so many seconds; never returns."""
    frozen_at = -FREEZE_AFTER
    while True:
        collections = gc.get_stats()[1]["collections"]
        if collections - frozen_at >= FREEZE_AFTER:
            gc.collect(1)
            gc.freeze()
            frozen_at = collections
        await trio.sleep(seconds)


class Idle:
    """Notices that work has ended."""

    def __init__(self) -> None:
        self._last = self._rested = 0

    def now(self, done: int) -> bool:
        """Given how much was ``done`` since the start, now and then: True once when no more was since the last time."""
        rests = done == self._last != self._rested
        self._last = done
        if rests:
            self._rested = done
        return rests


def give_back(resident: int) -> None:
    """Have free memory back at the machine, with ``resident`` files in memory. For any thread."""
    if resident <= COLLECT_MAX:
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
