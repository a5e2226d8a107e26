"""Volumes and whole trees for tests, without a kernel, and what stands in them as plain values to compare.

``done(coroutine)`` runs an operation of an inline volume, which never suspends. ``dump(volume)`` is all that a volume
promises about its tree; two dumps are equal exactly when nobody could tell the trees apart.
"""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from vfsd.backends.local import LocalVolume
from vfsd.backends.memory import MemoryBackend
from vfsd.backends.sqlite import SqliteBackend
from vfsd.core.types import Caller
from vfsd.feed import Feed
from vfsd.routes import Route, RouteTable
from vfsd.statevolume import StateVolume
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume

T = TypeVar("T")
KINDS = ("state", "memory", "local")
ME = Caller(os.geteuid(), os.getegid(), 0, "rpc")


def done(operation: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that must not suspend."""
    try:
        operation.send(None)
    except StopIteration as stop:
        return stop.value
    operation.close()
    raise AssertionError("an operation of an inline volume suspended")


def ticking(start: int = 1_000_000_000) -> Callable[[], int]:
    """A clock that rises by a microsecond at each look, the same in every run."""
    counter = itertools.count(start, 1000)
    return lambda: next(counter)


def open_volume(
    kind: str, place: Path, feed: Feed | None = None, *, base: int = 0, clock: Callable[[], int] | None = None,
    read_only: bool = False,
) -> Any:  # fmt: skip
    """A volume of ``kind`` whose files are in ``place``."""
    feed, clock = feed or Feed(), clock or time.time_ns
    if kind == "local":
        place.mkdir(exist_ok=True)
        return LocalVolume(base, place, feed, read_only=read_only)
    owner = (os.geteuid(), os.getegid())
    if kind == "state":
        return StateVolume(base, SqliteBackend(place), feed, clock, owner=owner, read_only=read_only)
    return TreeVolume(base, MemoryBackend(), feed, clock, owner=owner, read_only=read_only)


def open_vfs(routes: dict[str, tuple[str, Path]], *, system: bool = False) -> Vfs:
    """A tree of routes, ``{prefix: (kind, place)}`` with shorter prefixes first."""
    table, feed = RouteTable(), Feed()
    for prefix, (kind, place) in routes.items():
        volume = open_volume(kind, place, feed, base=table.next_base())
        try:
            table.mount(Route(os.fsencode(prefix), kind, str(place), volume))
        except OSError:
            for volume in reversed(table.volumes):
                volume.close()
            raise
    entries = SystemEntries(table, feed, time.time_ns)
    if system:
        entries.add_host()
    return Vfs(table, feed, entries)


def close_vfs(vfs: Vfs) -> None:
    """Let go of every volume."""
    for volume in reversed(vfs.table.volumes):
        volume.close()


def squeeze(volume: Any, *, fold: bool = True) -> None:
    """Let go of every node of a state volume that need not be in memory."""
    if fold:
        volume.store.fold_now()
    most, volume.resident_max = volume.resident_max, 0
    before = 0
    while before != (before := len(volume.tree.nodes)):
        while volume.evict():
            pass
    volume.resident_max = most


def attributes(attr: Any) -> tuple[int, ...]:
    """All of stat(2) but the inode number and the access time."""
    size = 0 if stat.S_ISDIR(attr.mode) else attr.size
    return (attr.mode, attr.nlink, attr.uid, attr.gid, attr.rdev, size, attr.mtime_ns, attr.ctime_ns)


def dump(volume: Any, *, inos: bool = True) -> dict[bytes, tuple[Any, ...]]:
    """Everything below the volume's root by path: attributes, identity, content, target, extended attributes."""
    found: dict[bytes, tuple[Any, ...]] = {}
    first_path: dict[int, bytes] = {}
    todo = [(b"/", volume.root_ino)]
    while todo:
        path, ino = todo.pop()
        attr = volume.getattr(ino)
        content: bytes | None = None
        if stat.S_ISREG(attr.mode):
            content = bytes(volume.read(ino, 0, 0, attr.size))
        elif stat.S_ISLNK(attr.mode):
            content = volume.readlink(ino)
        elif stat.S_ISDIR(attr.mode):
            for name, child in sorted(volume.children(ino)):
                todo.append((path.rstrip(b"/") + b"/" + name, child.ino))
        same = ino if inos else first_path.setdefault(ino, path)
        if stat.S_ISLNK(attr.mode):
            xattrs: dict[bytes, bytes] = {}
        else:
            xattrs = {name: volume.getxattr(ino, name) for name in volume.listxattr(ino)}
        found[path] = (same, attributes(attr), content, tuple(sorted(xattrs.items())))
    return found


def without_times(tree: dict[bytes, tuple[Any, ...]]) -> dict[bytes, tuple[Any, ...]]:
    """A dump with mtime and ctime left out."""
    return {path: (same, attr[:6], content, xattrs) for path, (same, attr, content, xattrs) in tree.items()}
