"""A mount without a kernel that keeps checkpoints: its volumes, its manager, and what they hold at a moment."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from vfsd.backends.memory import MemoryBackend
from vfsd.backends.sqlite import SqliteBackend
from vfsd.config import CheckpointPolicy
from vfsd.core.types import ROOT_NODE, Caller
from vfsd.feed import Feed
from vfsd.past.checkpoints import Checkpoints
from vfsd.past.volume import PastVolume
from vfsd.routes import Route, RouteTable
from vfsd.statevolume import StateVolume
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume

OWNER = (os.geteuid(), os.getegid())
ME = Caller(0, 0, 1, "rpc")

State = dict[bytes, tuple[Any, ...]]
"""All that a user sees but times, by path."""


class Mount:
    """State routes at ``prefixes`` below ``home``, memory routes at ``others``; ``open`` again after ``close``."""

    def __init__(
        self,
        home: Path,
        prefixes: tuple[str, ...] = ("/",),
        others: tuple[str, ...] = (),
        policy: CheckpointPolicy | None = None,
    ) -> None:
        self.home = home
        self.prefixes = prefixes
        self.others = others
        self.policy = policy or CheckpointPolicy()
        self.open()

    def place(self, prefix: str) -> Path:
        return self.home / "main" / (prefix.strip("/") or "root")

    def open(self) -> None:
        self.feed, self.table = Feed(), RouteTable()
        self.volumes: dict[str, StateVolume] = {}
        for prefix in sorted((*self.prefixes, *self.others)):
            base = self.table.next_base()
            volume: TreeVolume
            if prefix in self.prefixes:
                volume = StateVolume(base, SqliteBackend(self.place(prefix)), self.feed, time.time_ns, owner=OWNER)
                self.volumes[prefix] = volume
            else:
                volume = TreeVolume(base, MemoryBackend(), self.feed, time.time_ns, owner=OWNER)
            self.table.mount(Route(prefix.encode(), volume.kind, "", volume))
        system = SystemEntries(self.table, self.feed, time.time_ns)
        self.past = PastVolume(self.table.next_base(), self.feed, OWNER, self.table.hidden)
        self.table.add_volume(self.past)
        self.table.overlay(ROOT_NODE, b".checkpoints", self.past.root_ino, hidden=True)
        self.checkpoints = Checkpoints(
            self.table, self.past, self.policy, time.time_ns, lambda _, thread: self.home / "threads" / thread
        )
        self.vfs = Vfs(self.table, self.feed, system)

    @property
    def root(self) -> StateVolume:
        return self.volumes["/"]

    def close(self) -> None:
        for volume in reversed(self.table.volumes):
            volume.close()

    def crash(self) -> None:
        """Let go of the files as a killed daemon does."""
        for volume in self.volumes.values():
            os.close(volume.store._lock)

    def write(self, path: str, data: bytes = b"x") -> None:
        """Make or replace the file at ``path`` of the root volume; directories on the way are made."""
        *above, name = path.strip("/").encode().split(b"/")
        at = self.root.root_ino
        for part in above:
            try:
                at = self.root.lookup(at, part).ino
            except FileNotFoundError:
                at = self.root.mkdir(at, part, 0o755, ME).ino
        try:
            self.root.replace(self.root.lookup(at, name).ino, data, ME)
        except FileNotFoundError:
            self.root.create_file(at, name, 0o644, data, ME)

    def find(self, path: str) -> Any:
        """The node at ``path`` of the root volume."""
        at: Any = self.root.getattr(self.root.root_ino)
        for part in path.strip("/").encode().split(b"/"):
            at = self.root.lookup(at.ino, part)
        return at

    def state(self) -> State:
        return state_of(self.root)

    def past_state(self, name: str) -> State:
        """What ``/.checkpoints/<name>`` shows."""
        return state_of(self.past, self.past.lookup(self.past.root_ino, name.encode()).ino)


def state_of(volume: Any, top: int | None = None) -> State:
    found: State = {}

    def walk(ino: int, above: bytes) -> None:
        for name, attr in volume.children(ino):
            path = above + b"/" + name
            kind = stat.S_IFMT(attr.mode)
            xattrs = {n: volume.getxattr(attr.ino, n) for n in volume.listxattr(attr.ino)}
            content = volume.read(attr.ino, 0, 0, attr.size) if kind == stat.S_IFREG else b""
            if kind == stat.S_IFLNK:
                content = volume.readlink(attr.ino)
            links = attr.nlink if kind != stat.S_IFDIR else 0
            found[path] = (attr.mode, attr.uid, attr.gid, links, attr.size, content, tuple(sorted(xattrs.items())))
            if kind == stat.S_IFDIR:
                walk(attr.ino, path)

    walk(volume.root_ino if top is None else top, b"")
    return found


def run(call: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    async def main() -> Any:
        return await call(*args, **kwargs)

    return trio.run(main)


def create(mount: Mount, label: str = "") -> str:
    return str(run(mount.checkpoints.create, label, ME)["id"])


def refused(call: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> OSError:
    with pytest.raises(OSError) as caught:
        run(call, *args, **kwargs)
    return caught.value


def changes(mount: Mount, a: str, b: str | None = None) -> list[tuple[str, bytes]]:
    return [(c["kind"], c["path"]) for c in run(mount.checkpoints.diff, a, b, patch=False)["changes"]]
