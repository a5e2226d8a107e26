"""Entries of the host in the tree: its system directories read-only, and stubs to bind host directories on.

One path string must name one file in the tools and in a command whose root is the tree, so ``/usr`` and its like are
there in both doors; they are hidden: found by name, never listed, never entered by a search from above. Stubs are empty
directories for what only the command's namespace has (``/proc``, the caller's toolchain).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from vfsd.backends.local import LocalVolume
from vfsd.backends.memory import MemoryBackend
from vfsd.core.changes import Dentry
from vfsd.core.types import DAEMON, NODE_BITS, NODE_MASK, ROOT_NODE
from vfsd.feed import Feed
from vfsd.routes import Route, RouteTable
from vfsd.volume import TreeVolume

SYSTEM_DIRECTORIES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
STUB_DIRECTORIES = ("proc", "dev", "sys", "run")


class SystemEntries:
    """The hidden entries of one mount; made after its routes. ``clock`` gives nanoseconds since the epoch."""

    def __init__(self, table: RouteTable, feed: Feed, clock: Callable[[], int]) -> None:
        self._table = table
        self._feed = feed
        self._stubs = TreeVolume(table.next_base(), MemoryBackend(), feed, clock)
        table.add_volume(self._stubs)
        self._clock = clock

    def add_host(self, host: Path = Path("/"), names: Sequence[str] = SYSTEM_DIRECTORIES) -> None:
        """Lay the host's system directories over the root, links as links, and the stub directories."""
        root = self._stubs.root_ino
        for name in names:
            path, entry = host / name, os.fsencode(name)
            if self._taken(entry):
                continue
            if path.is_symlink():
                link = self._stubs.symlink(root, entry, os.fsencode(os.readlink(path)), DAEMON)
                self._table.overlay(ROOT_NODE, entry, link.ino, hidden=True)
            elif path.is_dir():
                volume = LocalVolume(self._table.next_base(), path, self._feed, read_only=True)
                self._table.add_volume(volume)
                self._table.routes.append(Route(b"/" + entry + b"/", "system", str(path), volume))
                self._table.overlay(ROOT_NODE, entry, volume.root_ino, hidden=True)
        for name in STUB_DIRECTORIES:
            if not self._taken(os.fsencode(name)):
                stub = self._stubs.mkdir(root, os.fsencode(name), 0o755, DAEMON)
                self._table.overlay(ROOT_NODE, os.fsencode(name), stub.ino, hidden=True)
        self._stubs.read_only = True

    def _taken(self, name: bytes) -> bool:
        """True when a route of the user's stands at the root under that name."""
        return name in self._table.overlays.get(ROOT_NODE, {})

    def add_stub(self, path: bytes) -> None:
        """Make ``path`` a hidden directory where the tree has nothing; what is there already stays as it is.

        In a route that keeps its own tree it is a real directory, which shows in listings as soon as somebody puts
        something in it: a stub must take no name from the tree. A host directory is spared that: there the stub is laid
        over it and stays read-only. Raises OSError (ENOTDIR when a file is in the way).
        """
        table, at = self._table, ROOT_NODE
        for name in (p for p in path.split(b"/") if p):
            laid = table.overlays.get(at, {}).get(name)
            volume = table.volumes[at >> NODE_BITS]
            try:
                if laid is not None and not laid.weak:
                    at = laid.ino
                else:
                    at = volume.peek(at, name).ino
            except FileNotFoundError:
                at = laid.ino if laid is not None else self._stub(at, name)

    def tidy(self) -> None:
        """Remove the stubs that nobody has used; called when the mount is gone."""
        for parent, names in reversed(self._table.hidden.items()):
            volume = self._table.volumes[parent >> NODE_BITS]
            for name in names:
                with contextlib.suppress(OSError):
                    volume.rmdir(parent, name, DAEMON)

    def _stub(self, parent: int, name: bytes) -> int:
        stubs, table = self._stubs, self._table
        volume = table.volumes[parent >> NODE_BITS]
        if volume is not stubs and isinstance(volume, TreeVolume) and volume.inline and not volume.read_only:
            owner = DAEMON._replace(uid=os.geteuid(), gid=os.getegid())
            made = volume.mkdir(parent, name, 0o755, owner)
            table.hide(parent, name)
            return made.ino
        inside = parent >> NODE_BITS == stubs.base >> NODE_BITS
        stubs.read_only = False
        try:
            if inside:
                return stubs.mkdir(parent, name, 0o755, DAEMON).ino
            # Stubs laid over other volumes stand in the stub volume's root under their parent's number.
            ino = stubs.mkdir(stubs.root_ino, b"%d:%s" % (parent, name[:200]), 0o755, DAEMON).ino
        finally:
            stubs.read_only = True
        table.overlay(parent, name, ino, hidden=True, weak=True)
        base = parent & ~NODE_MASK
        self._feed.publish(base, DAEMON, "stub", [Dentry(parent & NODE_MASK, name, ino & NODE_MASK)])
        return ino
