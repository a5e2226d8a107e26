"""How long the tool door answers before everybody else has a turn: a share of each turn of the event loop.

One turn of the loop runs every task that can run, so of many connections with a request all would be answered before
the device is looked at again. Must not know connections.
"""

from __future__ import annotations

import time

import trio

SHARE_S = 0.003
"""Seconds of each turn after which what is not begun waits for the next."""


class Turns(trio.abc.Instrument):
    """To be added to the loop that asks."""

    def __init__(self) -> None:
        self._ends = 0.0

    def before_io_wait(self, timeout: float) -> None:
        """A turn is over."""
        self._ends = 0.0

    async def mine(self) -> None:
        """Return at once while there is time left in this turn, else in one that has some."""
        while True:
            now = time.perf_counter()
            if not self._ends:
                self._ends = now + SHARE_S
            if now <= self._ends:
                return
            await trio.lowlevel.checkpoint()
