"""Memory for requests that are still coming in, over all connections together.

Owns the count and the queue. A connection asks once, for a whole frame, before it reads more of it: so who has room can
finish, and who waits holds next to nothing. A peer that does not finish is cut off when others wait: nobody waits for
ever. Small frames need no room.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

ROOM = 128 << 20
"""Bytes of all unfinished frames that need room."""

PATIENCE_S = 20.0
"""Seconds a frame may take to arrive while others wait for its room."""


class Room:
    """ROOM bytes, to ``take`` and to ``give`` back."""

    def __init__(self) -> None:
        self._free = ROOM
        self._held: dict[object, tuple[int, float, Callable[[], object]]] = {}
        self._turn = trio.Lock()
        self._given = trio.Event()

    async def take(self, holder: object, size: int, evict: Callable[[], object]) -> None:
        """Wait for ``size`` bytes, at most ROOM; who asked first is first. ``evict`` ends the holder at once."""
        async with self._turn:
            while self._free < size:
                oldest, (_, since, end) = next(iter(self._held.items()))
                self._given = trio.Event()
                with trio.move_on_at(since + PATIENCE_S) as waited:
                    await self._given.wait()
                if waited.cancelled_caught:
                    self.give(oldest)
                    end()
            self._free -= size
            self._held[holder] = size, trio.current_time(), evict

    def give(self, holder: object) -> None:
        """Take back what ``holder`` has, if it has any."""
        self._free += self._held.pop(holder, (0,))[0]
        self._given.set()
