"""The FUSE door of a mount whose kernel opens files by itself: no request at open(2), none at close(2).

For trees that only we change. What an open would have done is done elsewhere: a file just made is let go at once, rules
judge each read and write (``Vfs.opens_heard``), and of a volume that others change untold the kernel drops its pages
before it hears of a new size or time. A route that brings contents out at a close, which nobody tells of here, can only
have come later; it is told so of a file that was not written for QUIET seconds.

Invariant: the kernel has no handle, so that every request names its file by inode alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import trio

from vfsd.core.types import DAEMON, NODE_BITS, Attr, Caller
from vfsd.doors.fuse import OURS_ALONE, FuseDoor, Opened
from vfsd.doors.known import Grown, Invalidation, InvalInode

log = logging.getLogger(__name__)

Shown = TypeVar("Shown", Attr, Attr | None)

QUIET = 1.0
"""Seconds without a write after which a file of a route that hears of closes counts as closed."""


class UnheardDoor(FuseDoor):
    """Handlers as FuseDoor's, without ``open`` and ``flush``."""

    hears_opens = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told: dict[int, tuple[int, int]] = {}
        self._held: dict[int, tuple[int, float]] = {}

    def _ours(self, ino: int) -> bool:
        return bool(self.vfs.table.volumes[ino >> NODE_BITS].cache_seconds >= OURS_ALONE)

    def is_inline(self, ino: int) -> bool:
        """What others change may have to wait until the kernel has dropped pages."""
        return super().is_inline(ino) and self._ours(ino)

    def forget(self, ino: int, count: int) -> None:
        super().forget(ino, count)
        if self._told and not self.known.lookups(ino):
            self._told.pop(ino, None)

    # ---- attributes, of what others change

    def lookup(self, parent: int, name: bytes, caller: Caller) -> Coroutine[Any, Any, Attr | None]:
        found = super().lookup(parent, name, caller)
        return found if self._ours(parent) else self._fresh(found)

    def getattr(self, ino: int, fh: int | None, caller: Caller) -> Coroutine[Any, Any, Attr]:
        found = super().getattr(ino, fh, caller)
        return found if self._ours(ino) else self._fresh(found)

    def listed(self, attr: Attr) -> bool:
        return self._ours(attr.ino) and super().listed(attr)

    async def _fresh(self, coming: Coroutine[Any, Any, Shown]) -> Shown:
        """The attributes once the kernel has none of the pages of before: it would fill the rest of the last with
        zeros."""
        attr = await coming
        if attr is not None and stat.S_ISREG(attr.mode):
            now = (attr.size, attr.mtime_ns)
            before = self._told.get(attr.ino, now)
            self._told[attr.ino] = now
            if before != now and self.invalidate is not None:
                stale: list[Invalidation] = [InvalInode(attr.ino, False)]
                if now[0] > before[0]:
                    with contextlib.suppress(OSError):
                        last = await self.vfs.read(attr.ino, 0, now[0] - 1, 1)
                        stale += [Grown(attr.ino, now[0], bytes(last))] if last else []
                seq = self.vfs.feed.publish(0, DAEMON, "refresh", ())
                self.invalidate(stale)
                await self.vfs.feed.settled(seq)
        return attr

    # ---- files

    def _made(self, attr: Attr, fh: int) -> Opened:
        made = super()._made(attr, 0)
        volume = self.vfs.table.volumes[attr.ino >> NODE_BITS]
        if volume.inline:
            volume.release(attr.ino, fh)
        else:
            self._held[attr.ino] = fh, time.monotonic()
        return made

    def write(self, ino: int, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, int]:
        if self.vfs.is_inline(ino):
            return super().write(ino, *args, **kwargs)
        return self._write_held(ino, *args, **kwargs)

    async def _write_held(
        self, ino: int, fh: int, offset: int, data: bytes | memoryview, flags: int, caller: Caller, **kwargs: Any
    ) -> int:
        held = self._held.get(ino)
        if held is None:
            opened = await self.vfs.open(ino, os.O_WRONLY, caller)
            held = self._held.setdefault(ino, (opened, 0.0))
            if held[0] != opened:
                await self.vfs.release(ino, opened)
        try:
            return await super().write(ino, held[0], offset, data, flags, caller, **kwargs)
        finally:
            if ino in self._held:
                self._held[ino] = held[0], time.monotonic()

    async def release(self, ino: int, fh: int) -> None:
        """Of a file just made the kernel may tell; it was let go long ago."""

    async def tend(self) -> None:
        """Close what has been written and left alone, until cancelled; what is left then goes out with its volume."""
        while True:
            await trio.sleep(QUIET / 2)
            for ino, (fh, written) in list(self._held.items()):
                if time.monotonic() - written >= QUIET:
                    del self._held[ino]
                    await self._close(ino, fh)

    async def _close(self, ino: int, fh: int) -> None:
        try:
            try:
                await self.vfs.flush(ino, fh, DAEMON)
            finally:
                await self.vfs.release(ino, fh)
        except OSError as exc:
            path = os.fsdecode(self.vfs.path_of(ino) or b"a file without a name")
            log.error("%s was not written: %s", path, exc.strerror)
