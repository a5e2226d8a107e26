"""Who may change a route that waits: one operation that needs the whole of it, or several that need one file each.

Names move only while nobody else is at work, so that a rename goes out after what was written before it; contents and
attributes of different files go out side by side. In order of asking, so that nobody waits for ever.
Must not know what is done meanwhile. Invariant: who holds a part asks for nothing more.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Hashable

import trio


class _Turn:
    """A key's lock, and how many have it or wait for it."""

    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.users = 0


class Lane:
    """A lock for the whole, or for parts of it that are named by keys."""

    def __init__(self) -> None:
        self._gate = trio.Lock()
        self._parts = 0
        self._left = trio.Event()
        self._busy: dict[Hashable, _Turn] = {}

    @contextlib.asynccontextmanager
    async def whole(self) -> AsyncIterator[None]:
        """Alone, once those who have a part are done."""
        async with self._gate:
            while self._parts:
                self._left = trio.Event()
                await self._left.wait()
            yield

    @contextlib.asynccontextmanager
    async def part(self, key: Hashable) -> AsyncIterator[None]:
        """Beside others, but not beside those with the same key, who come in order of asking."""
        async with self._gate:
            self._parts += 1
        try:
            turn = self._busy.setdefault(key, _Turn())
            turn.users += 1
            try:
                async with turn.lock:
                    yield
            finally:
                turn.users -= 1
                if not turn.users:
                    del self._busy[key]
        finally:
            self._parts -= 1
            if not self._parts:
                self._left.set()
