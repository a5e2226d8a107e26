"""Routes that come and go while the tree is mounted.

Owns what has to happen in which order: a volume is opened before it shows, and is out of sight and written out before
it is closed. Must not know sockets; ``doors.rpcroutes`` asks it, the daemon makes it.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import trio

from vfsd.backends.base import VolumeError
from vfsd.config import Config, ConfigError, RouteSpec, check_locations, finished, parse_route
from vfsd.core.changes import Dentry
from vfsd.core.types import DAEMON, NODE_BITS, NODE_MASK, ROOT_NODE
from vfsd.feed import Feed
from vfsd.process.mountpoint import MountpointError, check_places
from vfsd.remote.choose import place_of
from vfsd.remote.volume import RemoteVolume
from vfsd.routes import Route, RouteTable

log = logging.getLogger(__name__)

MANY = 1000
"""Hidden entries that are counted."""

CLOSING_SECONDS = 2.0
"""How long the removal of a route waits for what is open in it, also what counts as open a second after its last write
(``doors.unheard``)."""

Prepare = Callable[[list[Route]], Callable[[], None]]


def _has_open(route: Route) -> bool:
    """Whether files of it are open, as far as we have heard."""
    return bool(route.volume.counters().get("open", 0))


class Gone:
    """What is left of a volume whose route was removed: the kernel may still give back lookups of its inodes."""

    inline = True
    sync_waits = False
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


async def _got(result: Any) -> Any:
    """What a volume gives at once, or when waited for."""
    return await result if inspect.isawaitable(result) else result


def _placed(route: Route) -> RouteSpec:
    """What ``check_locations`` has to know of a route."""
    directory = route.kind in ("state", "local", "blob") and route.location.startswith("/")
    return RouteSpec(os.fsdecode(route.prefix), route.kind, Path(route.location) if directory else None)


class LiveRoutes:
    """Adds and removes routes of a running mount, on ``mountpoint``.

    ``open_volume(spec, base, feed)`` may take its time: it runs on a thread, with a feed that nobody listens to yet.
    """

    def __init__(
        self,
        config: Config,
        mountpoint: str,
        table: RouteTable,
        feed: Feed,
        open_volume: Callable[[RouteSpec, int, Feed], Any],
    ) -> None:
        self._config = config
        self._mountpoint = mountpoint
        self._table = table
        self._feed = feed
        self._open = open_volume
        self._busy = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._following: dict[int, trio.CancelScope] = {}
        self.changed: Callable[[], None] = lambda: None
        self.programs: Callable[[], Mapping[int, bool]] | None = None
        """What programs have open without our hearing of it (inos); None: we hear of each open."""
        self.prepare: Prepare = lambda routes: lambda: None
        """What stays in force when routes have gone; ValueError when it can't."""

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
        """Mount ``PREFIX=KIND[:LOCATION][#NAMESPACE]``; what ``status`` says of it, and warnings.

        EINVAL, EEXIST, EBUSY, ENOTDIR, EIO.
        """
        try:
            spec = finished(parse_route(text, Path(cwd)), self._config, values)
            warnings = await self.change([spec], [])
        except ConfigError as exc:
            raise OSError(errno.EINVAL, str(exc)) from None
        volume = next((r.volume for r in self._table.routes if r.prefix == os.fsencode(spec.prefix)), None)
        problem = getattr(volume, "problem", None)
        told = {"prefix": spec.prefix, "kind": spec.kind, "location": place_of(spec), "problem": problem}
        return told | {"warnings": warnings}

    async def remove(self, prefix: str) -> None:
        """Take a route out of the tree. ENOENT, EBUSY while a file of it is open or a route is mounted in it."""
        try:
            await self.change([], ["/" + "".join(part + "/" for part in prefix.split("/") if part)], self.prepare)
        except ValueError as exc:
            raise OSError(errno.EBUSY, f"route {prefix} can't go: {exc}") from None

    async def change(
        self, add: Sequence[RouteSpec], remove: Sequence[str], prepare: Prepare = lambda routes: lambda: None
    ) -> list[str]:
        """Add and remove routes, all or none; a sentence for each added one that hides files or does not work for now.

        ``prepare`` is given the routes there will be; what it returns happens with the change and can't fail, what it
        raises stops it. OSError: EEXIST, ENOENT, EBUSY, ENOTDIR, EIO, EINVAL.
        """
        async with self._busy:
            going = [await self._removable(prefix) for prefix in remove]
            fresh: list[Route] = []
            try:
                for spec in add:
                    fresh.append(await self._opened(spec, len(self._table.volumes) + len(fresh), fresh))
                for route in going:
                    await route.volume.syncfs()
                hidden = [text for route in fresh if (text := await self._hides(route, going))]
                commit = prepare([r for r in self._table.routes if r not in going] + fresh)
                self._lay(fresh, going)
            except BaseException:
                for route in fresh:
                    route.volume.close()
                raise
            commit()
            for route in fresh:
                self._start(route.volume)
                self._tell(*self._table.mounted_at[route.volume.root_ino])
            for route in going:
                self._tell(*self._table.unmount(route))
                self._table.volumes[route.volume.base >> NODE_BITS] = Gone(route.volume.base)
                if (scope := self._following.pop(route.volume.base, None)) is not None:
                    scope.cancel()
            self.changed()
            for route in going:
                await trio.to_thread.run_sync(route.volume.close)
        broken = [(os.fsdecode(r.prefix), problem) for r in fresh if (problem := getattr(r.volume, "problem", None))]
        return hidden + [f"route {prefix} is there, but does not work: {problem}" for prefix, problem in broken]

    async def _removable(self, prefix: str) -> Route:
        wanted = os.fsencode(prefix)
        route = next((r for r in self._table.routes if r.prefix == wanted and r.kind != "system"), None)
        if wanted == b"/":
            raise OSError(errno.EBUSY, "the route / can't go: the tree begins there")
        if route is None:
            raise OSError(errno.ENOENT, f"there is no route {prefix}: see vfsd route list")
        # The kernel tells of a close a moment after the program has gone on.
        with trio.move_on_after(CLOSING_SECONDS):
            while _has_open(route) or await self._is_unheard(route):
                await trio.sleep(0.02)
        self._refuse_busy(route, await self._is_unheard(route))
        return route

    async def _is_unheard(self, route: Route) -> bool:
        """Whether programs have files open without our hearing of it."""
        if self.programs is None:
            return False
        found = await trio.to_thread.run_sync(self.programs)
        return any(ino >> NODE_BITS == route.volume.base >> NODE_BITS for ino in found)

    def _refuse_busy(self, route: Route, unheard: bool = False) -> None:
        volume, prefix = route.volume, os.fsdecode(route.prefix)
        if any(parent >> NODE_BITS == volume.base >> NODE_BITS for parent, _ in self._table.mounted_at.values()):
            raise OSError(errno.EBUSY, f"route {prefix} can't go: another route is mounted in it")
        if unheard or _has_open(route):
            raise OSError(errno.EBUSY, f"route {prefix} can't go: files of it are open")

    async def _opened(self, spec: RouteSpec, number: int, others: Sequence[Route]) -> Route:
        """A route with its volume open, to have this number; nobody sees it yet."""
        prefix = os.fsencode(spec.prefix)
        if spec.prefix == "/" or any(route.prefix == prefix for route in (*self._table.routes, *others)):
            raise OSError(errno.EEXIST, f"there is a route {spec.prefix} already")
        check_locations([*map(_placed, (*self._table.routes, *others)), spec])
        try:
            volume = await trio.to_thread.run_sync(self._open_at, spec, number << NODE_BITS)
        except VolumeError as exc:
            raise OSError(errno.EIO, str(exc)) from None
        volume._feed = self._feed
        return Route(prefix, spec.kind, place_of(spec), volume)

    async def _hides(self, route: Route, going: Sequence[Route]) -> str:
        """A sentence about the entries that will be hidden below the route, empty when there are none.

        EBUSY where another route, not of ``going``, would be hidden, ENOTDIR where anything but a directory.
        """
        table, at, path = self._table, ROOT_NODE, b""
        for other in table.routes:
            if other.prefix.startswith(route.prefix) and other not in going:
                text = f"route {os.fsdecode(other.prefix)} is mounted there, which it would hide: remove that first"
                raise OSError(errno.EBUSY, f"route {os.fsdecode(route.prefix)} can't be added: {text}")
        for name in filter(None, route.prefix.split(b"/")):
            path += b"/" + name
            volume, laid = table.volumes[at >> NODE_BITS], table.overlays.get(at, {}).get(name)
            if laid is not None and not laid.weak:
                at = laid.ino
                continue
            try:
                found = await _got(volume.lookup(at, name))
            except OSError:
                return ""
            if not stat.S_ISDIR(found.mode):
                what = "a symbolic link" if stat.S_ISLNK(found.mode) else "a file"
                text = f"{os.fsdecode(path)} is {what} in the tree: move or delete it first"
                raise OSError(errno.ENOTDIR, f"route {os.fsdecode(route.prefix)} can't be added: {text}")
            at = found.ino
        try:
            count = sum(1 for _ in islice(await _got(table.volumes[at >> NODE_BITS].children(at)), MANY + 1))
        except OSError:
            return ""
        many = f"more than {MANY} entries" if count > MANY else "1 entry" if count == 1 else f"{count} entries"
        return f"route {os.fsdecode(route.prefix)} hides {many} of the tree until it is removed" if count else ""

    def _open_at(self, spec: RouteSpec, base: int) -> Any:
        try:
            check_places([spec], self._mountpoint)
        except MountpointError as exc:
            raise VolumeError(str(exc)) from None
        if spec.kind == "state" and spec.location is not None:
            spec.location.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._open(spec, base, Feed())

    def _lay(self, fresh: Sequence[Route], going: Sequence[Route]) -> None:
        """Put the new routes into the tree, if those that go still can; else OSError, and none is."""
        table, first = self._table, len(self._table.volumes)
        try:
            for route in fresh:
                table.mount(route)
            for route in going:
                self._refuse_busy(route)
        except OSError:
            for route in reversed(fresh):
                if route.volume.root_ino in table.mounted_at:
                    table.unmount(route)
            table.routes[:] = [route for route in table.routes if route not in fresh]
            del table.volumes[first:]
            raise

    def _tell(self, parent: int, name: bytes) -> None:
        """The kernel may have that the name is nothing, or what it was: either goes (known.stale, renames)."""
        self._feed.publish(parent & ~NODE_MASK, DAEMON, "rename-route", [Dentry(parent & NODE_MASK, name, 0)])
