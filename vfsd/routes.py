"""Where volumes stand in the one tree: routes by longest prefix, and entries of the host kept out of listings.

Owns the overlay: directory entries that lead to another volume than their directory's. Must not know doors. Knows
volumes only as things with a base and a root.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, NamedTuple

from vfsd.core.types import DAEMON, NODE_BITS, ROOT_NODE, Attr


class Overlay(NamedTuple):
    """An entry laid over a directory: ``hidden`` is found but never listed, ``weak`` gives way to a real entry."""

    ino: int
    hidden: bool = False
    weak: bool = False


class JoinedAttr:
    """The attributes of a directory that routes are mounted in: each adds a ``..`` to its link count."""

    def __init__(self, attr: Attr, more: int) -> None:
        self.ino, self.mode, self.nlink = attr.ino, attr.mode, attr.nlink + more
        self.uid, self.gid, self.rdev, self.size, self.blocks = attr.uid, attr.gid, attr.rdev, attr.size, attr.blocks
        self.atime_ns, self.mtime_ns, self.ctime_ns = attr.atime_ns, attr.mtime_ns, attr.ctime_ns


class Route(NamedTuple):
    """One route as a user sees it: prefix with slashes at both ends, kind, and where its files live."""

    prefix: bytes
    kind: str
    location: str
    volume: Any


class RouteTable:
    """The volumes of a mount, by number, and the overlay that joins them."""

    def __init__(self) -> None:
        self.volumes: list[Any] = []
        self.routes: list[Route] = []
        self.overlays: dict[int, dict[bytes, Overlay]] = {}
        self.mounted_at: dict[int, tuple[int, bytes]] = {}
        self.hidden: dict[int, set[bytes]] = {}

    def next_base(self) -> int:
        """The base the next volume must have."""
        return len(self.volumes) << NODE_BITS

    def add_volume(self, volume: Any) -> None:
        """Number a volume; its base must be ``next_base``."""
        assert volume.base == self.next_base()
        self.volumes.append(volume)

    def overlay(self, parent: int, name: bytes, ino: int, *, hidden: bool = False, weak: bool = False) -> None:
        """Lay an entry over directory ``parent``, which stays known to its volume from now on."""
        self.volumes[parent >> NODE_BITS].remember(parent)
        self.overlays.setdefault(parent, {})[name] = Overlay(ino, hidden, weak)
        self.mounted_at.setdefault(ino, (parent, name))

    def hide(self, parent: int, name: bytes) -> None:
        """Leave directory ``name`` out of listings of ``parent`` until it holds something that is listed."""
        self.volumes[parent >> NODE_BITS].remember(parent)
        self.hidden.setdefault(parent, set()).add(name)

    def hides(self, parent: int, name: bytes, ino: int) -> bool:
        """True while entry ``name`` of ``parent``, which leads to ``ino``, is left out of listings."""
        if name not in self.hidden.get(parent, ()):
            return False
        try:
            below = self.volumes[ino >> NODE_BITS].children(ino)
        except OSError:
            return False
        return all(self.hides(ino, n, attr.ino) for n, attr in below)

    def mount(self, route: Route) -> None:
        """Number the route's volume and lay its root over the tree; routes with shorter prefixes come first.

        Directories above the route that are missing are made in the volume that would hold them. The first route must
        be ``/``. Raises OSError when the place can't be had (a file is in the way, a read-only route above).
        """
        self.add_volume(route.volume)
        self.routes.append(route)
        parts = [p for p in route.prefix.split(b"/") if p]
        if not parts:
            return
        at = ROOT_NODE
        for name in parts[:-1]:
            at = self._enter(at, name)
        if not stat.S_ISDIR(self.volumes[at >> NODE_BITS].getattr(at).mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(route.prefix))
        self.overlay(at, parts[-1], route.volume.root_ino)

    def unmount(self, route: Route) -> tuple[int, bytes]:
        """Take a route's root out of the tree; where it stood. Its volume keeps its number."""
        parent, name = self.mounted_at.pop(route.volume.root_ino)
        del self.overlays[parent][name]
        if not self.overlays[parent]:
            del self.overlays[parent]
        self.volumes[parent >> NODE_BITS].forget(parent, 1)
        self.routes.remove(route)
        return parent, name

    def _enter(self, parent: int, name: bytes) -> int:
        laid = self.overlays.get(parent, {}).get(name)
        if laid is not None and not laid.weak:
            return laid.ino
        volume = self.volumes[parent >> NODE_BITS]
        try:
            return int(volume.peek(parent, name).ino)
        except FileNotFoundError:
            if not volume.inline:
                return int(volume.place(parent, name).ino)
            return int(volume.mkdir(parent, name, 0o755, DAEMON._replace(uid=os.geteuid(), gid=os.getegid())).ino)
