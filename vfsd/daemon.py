"""One mount, from its configuration to its end: the only place that knows all the parts.

Builds volumes, tree, doors and engine, runs them in one trio loop, and takes them down in the order that loses nothing:
unmount (the kernel writes back), stop the socket, close the volumes. Must not know how the process was started.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import trio

from vfsd import __version__
from vfsd.audit.recorder import Audit
from vfsd.audit.volume import AuditVolume
from vfsd.backends.base import VolumeError
from vfsd.backends.local import LocalVolume
from vfsd.backends.memory import MemoryBackend
from vfsd.backends.sqlite import SqliteBackend
from vfsd.config import (
    LOG_LEVELS,
    Config,
    ConfigError,
    RouteSpec,
    again,
    audit_home,
    check_word,
    state_home,
    thread_home,
)
from vfsd.core.ids import Ids
from vfsd.core.types import NODE_BITS, ROOT_NODE
from vfsd.doors import engines, rpc, rpccontrol, rpcroutes
from vfsd.doors.events import Events
from vfsd.doors.fuse import FuseDoor
from vfsd.doors.squash import SquashingDoor
from vfsd.doors.unheard import UnheardDoor
from vfsd.feed import Feed
from vfsd.liveroutes import LiveRoutes
from vfsd.mapped import MappedVfs
from vfsd.metrics import Metrics
from vfsd.nativeroutes import NativeRoutes
from vfsd.opens import Programs, programs, tell_of_programs, why_heard
from vfsd.past.checkpoints import Checkpoints
from vfsd.past.volume import PastVolume
from vfsd.process import logs, memory, places, registry
from vfsd.process import mountpoint as mounts
from vfsd.process.supervisor import Supervisor
from vfsd.reload import Reloader
from vfsd.remote.choose import open_remote, place_of
from vfsd.routes import Route, RouteTable
from vfsd.rules.book import Rulebook
from vfsd.statevolume import EVICT_SECONDS, StateVolume, stay_small
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume

log = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""Between the unmount and the end for who still uses the tree from another mount namespace."""

MAINTAIN_SECONDS = 5.0
"""Between two rounds of maintenance; a volume that did not change since has nothing to do."""

SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter from the loop, which asks for it after each system call: Python's usual
5 ms would be what every request waits while a journal is folded."""


class Daemon:
    """One mount of ``config`` on ``mountpoint`` (an absolute real path), whose log is the file ``log``, if any."""

    def __init__(self, config: Config, mountpoint: str, manager: Supervisor, log: Path | None) -> None:
        self.config = config
        self.log = None if log is None else str(log)
        self.manager = manager
        self.mountpoint = mountpoint
        self.started = 0.0
        self.checkpoints: Checkpoints
        self.audit: Audit | None = None
        self.rulebook: Rulebook
        self.natives: NativeRoutes
        self._clock = engines.clock(config.engine)
        self._ids = Ids(config.uid_map, config.gid_map) if config.uid_map or config.gid_map else None
        self._engine: engines.Engine | None = None
        self.heard: str | None = None
        """Why the kernel asks us at each open(2); None: it doesn't."""
        self._programs: Programs | None = None
        self._reloader: Reloader
        self._fuse: FuseDoor | None = None
        self._door: rpc.RpcDoor | None = None
        self._metrics: Metrics | None = None
        self._told: dict[str, Any] = {}
        self._serving = trio.CancelScope()
        self._leave = trio.Event()

    def run(self, ready: Callable[[dict[str, Any]], None]) -> None:
        """Mount, call ``ready`` with this mount's entry once it serves, return after a clean unmount.

        Raises VolumeError, MountpointError or OSError with a sentence for the user.
        """
        table = RouteTable()
        # Volumes are for their owner only, with all directories made on the way to them.
        os.umask(0o077)
        sys.setswitchinterval(SWITCH_SECONDS)
        with self._only_one():
            try:
                vfs = self._build(table)
                # From here on files are made for callers, whose umask the kernel has applied to the modes it sends.
                os.umask(0)
                trio.run(self._serve, vfs, ready)
                vfs.tidy()
            finally:
                for volume in reversed(table.volumes):
                    volume.close()
                if self.audit is not None:
                    self.audit.close()
                registry.erase(self.config.name, passed=self.manager.listener is not None)

    @contextlib.contextmanager
    def _only_one(self) -> Iterator[None]:
        """No other daemon of this name, for as long as we live."""
        try:
            lock = registry.claim(self.config.name)
        except registry.Held as exc:
            raise mounts.MountpointError(f"{self.config.name!r} is already running (pid {exc.pid})") from None
        try:
            yield
        finally:
            os.close(lock)

    # -- the parts

    def _build(self, table: RouteTable) -> Vfs:
        """The tree with all its routes; every volume opened is in ``table``, also when this raises."""
        feed = Feed()
        for spec in self.config.routes:
            volume = self._volume(spec, table.next_base(), feed)
            try:
                table.mount(Route(os.fsencode(spec.prefix), spec.kind, place_of(spec), volume))
            except OSError as exc:
                raise VolumeError(f"route {spec.prefix} has no place in the tree: {exc.strerror}") from None
        system = SystemEntries(table, feed, self._clock)
        system.add_host()
        owner = (os.geteuid(), os.getegid())
        past = PastVolume(table.next_base(), feed, owner, table.hidden)
        table.add_volume(past)
        table.overlay(ROOT_NODE, b".checkpoints", past.root_ino, hidden=True)
        self.checkpoints = Checkpoints(table, past, self.config.checkpoints, time.time_ns, self._thread_home)
        ids = self._ids
        vfs = MappedVfs(table, feed, system, ids) if ids else Vfs(table, feed, system)
        if self.config.audit.enabled:
            self._watch(vfs, owner)
        try:
            self.rulebook = Rulebook(vfs, self.config.rules, lambda: self._reread(self.config).rules)
        except ValueError as exc:
            raise VolumeError(str(exc)) from None
        self.natives = NativeRoutes(self.config, table, self.rulebook, self._own_files)
        return vfs

    def _reread(self, config: Config) -> Config:
        """The configuration as the file has it now. Raises ConfigError, or OSError where there is no file."""
        if config.source is None:
            raise OSError(
                errno.EOPNOTSUPP,
                f"{config.name!r} was mounted without a configuration file, so there is nothing to read anew: "
                f"vfsd umount {config.name}, then vfsd mount --config FILE",
            )
        return again(config)

    def _watch(self, vfs: Vfs, owner: tuple[int, int]) -> None:
        """Record who changes what, and show the record as ``/.vfsd``."""
        policy = self.config.audit
        place = audit_home(self.config.name, self.config.thread)
        try:
            audit = Audit(vfs, place, max_bytes=policy.max_bytes, max_age=policy.max_age, reads=policy.reads)
        except OSError as exc:
            raise VolumeError(f"the audit log {place}: {exc.strerror}") from None
        self.audit = vfs.witness = audit
        base = vfs.table.next_base()
        shown = AuditVolume(base, {b"log.ndjson": audit.log, b"errors.ndjson": audit.errors}, owner)
        vfs.table.add_volume(shown)
        vfs.table.overlay(ROOT_NODE, b".vfsd", shown.root_ino, hidden=True)
        audit.silent.add(base >> NODE_BITS)

    def _thread_home(self, name: str, thread: str) -> Path:
        """Where the state volumes of another thread live; EINVAL for a name that can't be a thread's, EEXIST."""
        name = name or self.config.name
        try:
            home = thread_home(check_word("name", name), check_word("thread", thread))
        except ConfigError as exc:
            raise OSError(errno.EINVAL, str(exc)) from None
        if (name, thread) == (self.config.name, self.config.thread):
            raise OSError(errno.EEXIST, f"thread {thread!r} exists already: it is mounted here; nothing was changed")
        return home

    def _volume(self, spec: RouteSpec, base: int, feed: Feed) -> Any:
        volume = self._opened(spec, base, feed)
        try:
            places.remember(spec)
        except OSError as exc:
            log.warning("%s: %s; vfsd gc --blobs will not look into %s", places.list_file(), exc.strerror, spec.prefix)
        return volume

    def _opened(self, spec: RouteSpec, base: int, feed: Feed) -> Any:
        read_only = self.config.read_only
        if spec.kind == "local":
            assert spec.location is not None
            try:
                return LocalVolume(base, spec.location, feed, read_only=read_only)
            except OSError as exc:
                raise VolumeError(f"route {spec.prefix}: location {spec.location}: {exc.strerror}") from None
        if spec.kind in ("store", "blob", "backend"):
            return open_remote(spec, base, feed, read_only=read_only)
        owner = (os.geteuid(), os.getegid())
        if self._ids:
            owner = self._ids.uid_in(owner[0]), self._ids.gid_in(owner[1])
        if spec.location is None:
            return TreeVolume(base, MemoryBackend(), feed, self._clock, owner=owner, read_only=read_only)
        backend = SqliteBackend(spec.location)
        return StateVolume(base, backend, feed, self._clock, owner=owner, read_only=read_only)

    # -- serving

    async def _serve(self, vfs: Vfs, ready: Callable[[dict[str, Any]], None]) -> None:
        config = self.config
        try:
            self._engine, reason = engines.choose(config.engine)
        except ImportError as exc:
            raise mounts.MountpointError(str(exc)) from None
        log.info("engine %s (%s)", self._engine.name, reason)
        if config.root_squash and not config.allow_other and os.geteuid() == 0:
            log.warning(
                "root_squash without allow_other: nobody but root may enter this mount, and root is nobody in it"
            )
        options = engines.Options(allow_other=config.allow_other, read_only=config.read_only)
        self.started = time.time()

        def started() -> None:
            entry = self.entry(vfs)
            registry.record(entry)
            log.info("mounted %s on %s", config.name, self.mountpoint)
            ready(entry)
            self.manager.tell("READY=1", f"STATUS={_summary(entry)}")
            if self.manager.watchdog:
                nursery.start_soon(self._watchdog, vfs)

        self._told = self._hello(vfs)
        self.heard = why_heard(config, self._engine.name)
        vfs.opens_heard = self.heard is not None
        kind = SquashingDoor if config.root_squash else FuseDoor if self.heard else UnheardDoor
        # A route that waits brings contents out at each close.
        self._fuse = fuse = kind(vfs, needs_flush=lambda ino: not vfs.is_inline(ino))
        if self.heard is None:
            self._programs = partial(programs, self.mountpoint)
        tell_of_programs(vfs.table.volumes, self._programs)
        self._metrics = Metrics(config.metrics, lambda: self.status(vfs)) if config.metrics else None
        door = self._door = rpc.RpcDoor(
            vfs,
            hello=self._told,
            status=lambda: self.status(vfs),
            shutdown=self._leave.set,
            version=__version__,
            checkpoints=self.checkpoints,
            rules=self.rulebook,
            binds=self.natives.binds,
            root_squash=config.root_squash,
        )
        live = LiveRoutes(config, self.mountpoint, vfs.table, vfs.feed, self._volume)
        live.programs = self._programs
        live.changed = lambda: self._routes_changed(vfs)
        live.prepare = lambda routes: self.rulebook.prepare(self.rulebook.spec, routes)
        self._reloader = Reloader(config, self._reread, live, self.rulebook, self.checkpoints, self._apply)
        rpcroutes.serve(live)
        rpccontrol.serve(self)
        async with trio.open_nursery() as nursery:
            await nursery.start(self._signals)
            # So that from the beginning ``vfsd check`` finds a whole tree in the database of a mounted volume.
            await self._maintain_once(vfs)
            await nursery.start(door.serve, self._socket, self.manager.listener)
            nursery.start_soon(self._maintain, vfs)
            nursery.start_soon(stay_small, vfs.table.volumes)
            nursery.start_soon(memory.bound_collector, EVICT_SECONDS)
            await nursery.start(live.follow)
            nursery.start_soon(self._leave_when_asked)
            nursery.start_soon(self.rulebook.warn)
            if isinstance(fuse, UnheardDoor):
                nursery.start_soon(fuse.tend)
            if self._metrics is not None:
                nursery.start_soon(self._metrics.serve)
            if not config.read_only:
                events = Events(self._fuse, self.mountpoint, lambda: engines.mounted(self.mountpoint))
                nursery.start_soon(events.run)
            with self._serving:
                mounts.clear(self.mountpoint)
                await self._engine.run(self._fuse, self.mountpoint, options, started)
            log.info("unmounted %s", self.mountpoint)
            self.manager.tell("STOPPING=1", "STATUS=writing what is left")
            nursery.cancel_scope.cancel()

    def _routes_changed(self, vfs: Vfs) -> None:
        tell_of_programs(vfs.table.volumes, self._programs)
        entry = self.entry(vfs)
        self._told["routes"] = entry["routes"]
        registry.record(entry)

    def _hello(self, vfs: Vfs) -> dict[str, Any]:
        entry = self.entry(vfs)
        known = {key: entry[key] for key in ("name", "thread", "routes")}
        return known | {"mountpoint": os.fsencode(self.mountpoint), "executes": True, "execute": self._execute()}

    def _execute(self) -> dict[str, Any]:
        return self.config.execute.told() | {"private": [os.fsencode(path) for path in self._private()]}

    def _private(self) -> list[Path]:
        """The daemon's own files, which no command has to do with, should one lie in a directory that it is shown."""
        source = [] if self.config.source is None else [self.config.source]
        return [*self._own_files(), *source]

    def _own_files(self) -> list[Path]:
        """Those that it alone has to do with."""
        stored = [r.location for r in self.config.routes if r.kind != "local" and r.location is not None]
        return [state_home(), Path(self._socket).parent, *stored]

    @property
    def _socket(self) -> str:
        return self.manager.address or str(registry.socket_path(self.config.name))

    def entry(self, vfs: Vfs) -> dict[str, Any]:
        """What the runtime directory and ``status`` tell about this mount."""
        assert self._engine is not None
        return {
            "name": self.config.name,
            "pid": os.getpid(),
            "mountpoint": self.mountpoint,
            "socket": self._socket,
            "activated": self.manager.listener is not None,
            "thread": self.config.thread,
            "engine": self._engine.name,
            "opens": "by the kernel" if self.heard is None else f"heard: {self.heard}",
            "routes": [
                {"prefix": os.fsdecode(r.prefix), "kind": r.kind, "location": r.location or None}
                | _problem(r.volume)
                | self.natives.told(r)
                for r in vfs.table.routes
            ],
            "started": self.started,
            "version": __version__,
            "config": None if self.config.source is None else str(self.config.source),
            "read_only": self.config.read_only,
            "allow_other": self.config.allow_other,
            "log_format": self.config.log_format,
            "metrics": None if self._metrics is None else self._metrics.address,
            "log": self.log,
        }

    def status(self, vfs: Vfs) -> dict[str, Any]:
        """The entry with what changes (docs/operations.md)."""
        assert self._engine is not None and self._door is not None and self._fuse is not None
        counters = vfs.counters() | {"requests": self._engine.requests}
        if self.audit is not None:
            counters |= self.audit.counters()
        entry = self.entry(vfs)
        for row, route in zip(entry["routes"], vfs.table.routes, strict=True):
            row["counters"] = route.volume.counters()
        book = self.rulebook
        return {
            **entry,
            **self._door.counters(),
            "uptime": time.time() - self.started,
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "counters": counters,
            "kernel": self._fuse.counters(),
            "operations": {"fuse": self._fuse.tally.plain(), "rpc": self._door.tally.plain()},
            "rules": sum(len(layer.policy.rules) for layer in book.guard.layers.values()),
            "approvals": len(book.approvals.pending()),
            "log_level": self.log_level(""),
        }

    async def _signals(self, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
            async with trio.open_nursery() as nursery:
                task_status.started()
                async for number in received:
                    log.info("received %s", signal.Signals(number).name)
                    # A terminal that closes sends SIGHUP too.
                    if number == signal.SIGHUP and not os.isatty(0):
                        nursery.start_soon(self._reload_by_signal)
                    else:
                        self._leave.set()

    async def _reload_by_signal(self) -> None:
        try:
            for warning in (await self.reload())["warnings"]:
                log.warning("%s", warning)
        except OSError as exc:
            log.error("not reloaded: %s", exc.strerror)

    async def reload(self) -> dict[str, Any]:
        """Put the configuration file in force as it is now; OSError and nothing is changed (``reload``)."""
        return await self._reloader.reload()

    def _apply(self, config: Config) -> None:
        """What a reload brings besides routes and rules."""
        self.config = config
        self._told["execute"] = self._execute()
        self.natives.configure(config)
        self.log_level(config.log_level)
        logs.use(config.log_format)

    def log_level(self, level: str) -> str:
        """Log from ``level`` on, unless it is empty; the one in force. OSError(EINVAL)."""
        if level and level not in LOG_LEVELS:
            raise OSError(errno.EINVAL, f"log level {level!r} is unknown: use {', '.join(LOG_LEVELS)}")
        root = logging.getLogger()
        if level:
            root.setLevel(level.upper())
        return logging.getLevelName(root.level).lower()

    async def _leave_when_asked(self) -> None:
        """Unmount once asked to; programs that still use the tree then lose it.

        Who asks may kill us next (a service manager does), so waiting for them would lose the orderly end instead.
        A user who wants to wait unmounts by the kernel, as ``vfsd umount`` does, and gets EBUSY.
        """
        assert self._engine is not None
        await self._leave.wait()
        self.manager.tell("STOPPING=1", "STATUS=unmounting")
        try:
            await self._engine.close()
            # What a command left running in a namespace of its own keeps the file system alive without the mount.
            await trio.sleep(GRACE_SECONDS)
            self._serving.cancel()
        except OSError as exc:
            users = await trio.to_thread.run_sync(mounts.holders, self.mountpoint)
            whom = ", ".join(f"pid {u.pid} ({u.comm})" for u in users) or "other mount namespaces"
            log.warning("%s; cutting off %s", exc.strerror, whom)
            self._serving.cancel()

    async def _watchdog(self, vfs: Vfs) -> None:
        """Signs of life, from the loop that answers all requests: when it hangs, they end."""
        while True:
            self.manager.tell("WATCHDOG=1", f"STATUS={_summary(self.entry(vfs))}")
            await trio.sleep(self.manager.watchdog / 3)

    async def _maintain(self, vfs: Vfs) -> None:
        """Keep logs and memory bounded: now and then, and never at the same time twice."""
        idle = memory.Idle()
        while True:
            await trio.sleep(MAINTAIN_SECONDS)
            await self._maintain_once(vfs)
            try:
                await self.checkpoints.maintain()
            except OSError as exc:
                log.warning("maintenance of checkpoints: %s", exc.strerror)
            if self.audit is not None:
                try:
                    self.audit.maintain()
                    if self.audit.dirty:
                        await trio.to_thread.run_sync(self.audit.sync)
                except OSError as exc:
                    log.warning("maintenance of the audit log: %s", exc.strerror)
            assert self._engine is not None
            counters = vfs.counters()
            if idle.now(self._engine.requests + counters["observed"] + counters["mutated"]):
                await trio.to_thread.run_sync(memory.give_back, counters.get("resident", 0))

    @staticmethod
    async def _maintain_once(vfs: Vfs) -> None:
        for volume in list(vfs.table.volumes):
            try:
                await volume.maintain()
            except OSError as exc:
                log.warning("maintenance of %s: %s", volume.kind, exc.strerror)


def _summary(entry: dict[str, Any]) -> str:
    """One line for the service manager."""
    routes = [route for route in entry["routes"] if route["kind"] != "system"]
    broken = [f"{route['prefix']} does not work: {route['problem']}" for route in routes if "problem" in route]
    return "; ".join([f"{len(routes)} routes on {entry['mountpoint']}", *broken])


def _problem(volume: Any) -> dict[str, str]:
    """Why a route does not answer for now."""
    problem = getattr(volume, "problem", None)
    return {} if problem is None else {"problem": problem}
