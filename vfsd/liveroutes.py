"""Routes that come and go while the tree is mounted.

Owns what has to happen in which order: a volume is opened before it shows, and is out of sight and written out before
it is closed. Must not know sockets; ``doors.rpcroutes`` asks it, the daemon makes it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from vfsd.backends.base import VolumeError
from vfsd.config import Config, ConfigError, RouteSpec, finished, parse_route
from vfsd.core.changes import Dentry
from vfsd.core.types import DAEMON, NODE_BITS, NODE_MASK
from vfsd.feed import Feed
from vfsd.remote.choose import place_of
from vfsd.remote.volume import RemoteVolume
from vfsd.routes import Route, RouteTable

log = logging.getLogger(__name__)


class Gone:
    """What is left of a volume whose route was removed: the kernel may still give back lookups of its inodes."""

    inline = True
    cache_seconds = 0.0
    kind = "removed"

    def __init__(self, base: int) -> None:
        self.base = base
        self.root_ino = base | 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refuse

    @staticmethod
    def _refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ESTALE, "the route was removed")

    def remember(self, ino: int, n: int = 1) -> None:
        """Nothing is pinned any more."""

    forget = remember

    def path_of(self, ino: int) -> None:
        """Nothing here has a path."""

    def counters(self) -> dict[str, int]:
        return {}

    async def syncfs(self) -> None:
        """All was written when the route went."""

    async def maintain(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """It was."""


class LiveRoutes:
    """Adds and removes routes of a running mount.

    ``open_volume(spec, base, feed)`` may take its time: it runs on a thread, with a feed that nobody listens to yet.
    """

    def __init__(
        self, config: Config, table: RouteTable, feed: Feed, open_volume: Callable[[RouteSpec, int, Feed], Any]
    ) -> None:
        self._config = config
        self._table = table
        self._feed = feed
        self._open = open_volume
        self._busy = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._following: dict[int, trio.CancelScope] = {}
        self.changed: Callable[[], None] = lambda: None

    async def follow(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run what the volumes that wait have to do, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for volume in self._table.volumes:
                self._start(volume)
            task_status.started()
            await trio.sleep_forever()

    def _start(self, volume: Any) -> None:
        if isinstance(volume, RemoteVolume):
            assert self._nursery is not None
            self._nursery.start_soon(self._follow_one, volume)

    async def _follow_one(self, volume: RemoteVolume) -> None:
        with trio.CancelScope() as scope:
            self._following[volume.base] = scope
            await volume.follow()

    async def add(self, text: str, cwd: str, values: Mapping[str, str]) -> dict[str, Any]:
        """Mount ``PREFIX=KIND[:LOCATION][#NAMESPACE]``; what ``status`` says of it. EINVAL, EEXIST, ENOTDIR, EIO."""
        try:
            spec = finished(parse_route(text, Path(cwd)), self._config, values)
        except ConfigError as exc:
            raise OSError(errno.EINVAL, str(exc)) from None
        prefix = os.fsencode(spec.prefix)
        async with self._busy:
            if spec.prefix == "/" or any(route.prefix == prefix for route in self._table.routes):
                raise OSError(errno.EEXIST, f"there is a route {spec.prefix} already")
            base = self._table.next_base()
            try:
                if spec.kind == "state" and spec.location is not None:
                    spec.location.mkdir(mode=0o700, parents=True, exist_ok=True)
                volume = await trio.to_thread.run_sync(self._open, spec, base, Feed())
                volume._feed = self._feed
            except VolumeError as exc:
                raise OSError(errno.EIO, str(exc)) from None
            try:
                self._table.mount(Route(prefix, spec.kind, place_of(spec), volume))
            except OSError:
                if volume in self._table.volumes:
                    self._table.volumes[base >> NODE_BITS] = Gone(base)
                self._table.routes[:] = [route for route in self._table.routes if route.volume is not volume]
                volume.close()
                raise
            self._start(volume)
            self._tell(*self._table.mounted_at[volume.root_ino])
            self.changed()
        problem = getattr(volume, "problem", None)
        return {"prefix": spec.prefix, "kind": spec.kind, "location": place_of(spec), "problem": problem}

    async def remove(self, prefix: str) -> None:
        """Take a route out of the tree. ENOENT, EBUSY while a file of it is open or a route is mounted in it."""
        wanted = os.fsencode("/" + "".join(part + "/" for part in prefix.split("/") if part))
        table = self._table
        async with self._busy:
            route = next((r for r in table.routes if r.prefix == wanted and r.kind != "system"), None)
            if route is None or wanted == b"/":
                raise OSError(errno.ENOENT, f"there is no route {os.fsdecode(wanted)} that can go")
            volume = route.volume
            if any(parent >> NODE_BITS == volume.base >> NODE_BITS for parent, _ in table.mounted_at.values()):
                raise OSError(errno.EBUSY, "another route is mounted in it")
            if volume.counters().get("open", 0):
                raise OSError(errno.EBUSY, "files of it are open")
            await volume.syncfs()
            parent, name = table.unmount(route)
            self._tell(parent, name)
            table.volumes[volume.base >> NODE_BITS] = Gone(volume.base)
            scope = self._following.pop(volume.base, None)
            if scope is not None:
                scope.cancel()
            await trio.to_thread.run_sync(volume.close)
            self.changed()

    def _tell(self, parent: int, name: bytes) -> None:
        """The kernel may have that the name is nothing, or what it was: either goes (known.stale, renames)."""
        self._feed.publish(parent & ~NODE_MASK, DAEMON, "rename-route", [Dentry(parent & NODE_MASK, name, 0)])
