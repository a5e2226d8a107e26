"""``/.checkpoints``: the checkpoints of a mount as read-only directories, ``/.checkpoints/<id>/`` each.

Owns the numbers of what is in them. A node of the past has the ino ``base | slot << PLACE_BITS | node``, where a slot
is one state volume at one checkpoint; so nothing has to be remembered of a file to know it again, and a number is not
used for something else while the kernel or a handle holds any of its slot. Where several state routes are part of a
checkpoint they stand in its directory as they do in the tree. Must not know who takes checkpoints. All methods take
full inos and raise OSError: ESTALE for what belongs to a dropped checkpoint, EROFS for every change.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from vfsd.backends.base import Stored
from vfsd.backends.extents import ExtentFile
from vfsd.backends.filemap import FileMap
from vfsd.core.changes import Change, Dentry, NoDentry
from vfsd.core.plans import fail
from vfsd.core.types import NAME_MAX, NODE_BITS, NODE_MASK, ROOT_NODE, Caller, DirEntry, StatFs
from vfsd.feed import Feed
from vfsd.past.slots import Part, Slot
from vfsd.readonly import ReadOnlyVolume, ShownAttr

PLACE_BITS = 34
"""Nodes of a state volume that can be shown: 17 thousand million; EOVERFLOW above it."""

SLOTS = 1 << (NODE_BITS - PLACE_BITS)
_PLACE_MASK = (1 << PLACE_BITS) - 1
_CACHED = 65536
_FIRST_OFFSET = 3


class _Handle(NamedTuple):
    ino: int
    entries: list[tuple[bytes, int]]


class PastVolume(ReadOnlyVolume):
    """The volume of ``/.checkpoints``; ``owner`` (uid, gid) owns the directories that only list.

    ``stubs``: the names, by the ino of their directory in the present, that listings leave out while nothing is in
    them.
    """

    cache_seconds = 86400.0
    kind = "checkpoints"

    def __init__(
        self, base: int, feed: Feed, owner: tuple[int, int], stubs: Mapping[int, Collection[bytes]] | None = None
    ) -> None:
        self.base = base
        self.root_ino = base | ROOT_NODE
        self._feed = feed
        self._owner = owner
        self._stubs = stubs if stubs is not None else {}
        self._slots: dict[int, Slot] = {}
        self._last_slot = 0
        self._last_list = ROOT_NODE
        # Directories that no volume has: the root, and those above a route where "/" is not part of the checkpoint.
        self._lists: dict[int, ShownAttr] = {self.root_ino: self._list_attr(self.root_ino, 0)}
        self._above: dict[int, tuple[int, bytes]] = {}
        self._laid: dict[int, dict[bytes, int]] = {self.root_ino: {}}
        self._shown: dict[bytes, set[int]] = {}
        self._handles: dict[int, _Handle] = {}
        self._last_handle = 0
        self._attrs: dict[int, ShownAttr] = {}
        self._maps: dict[int, FileMap] = {}

    # -- what is shown

    def show(self, name: bytes, time_ns: int, parts: Sequence[Part], caller: Caller) -> None:
        """Make ``/.checkpoints/<name>`` of the state routes of a checkpoint. Raises ENFILE."""
        if len(self._slots) + len(parts) >= SLOTS:
            raise OSError(errno.ENFILE, f"more than {SLOTS - 1} checkpoints can't be shown: drop some")
        made: set[int] = set()
        top: int | None = None
        for part in sorted(parts, key=lambda p: len(p.prefix)):
            steps = [n for n in part.prefix.split(b"/") if n]
            if not steps:
                top = self._add_slot(part, self.root_ino, name, made)
                continue
            if top is None:
                top = self._add_list(self.root_ino, name, time_ns, made)
            at = top
            for step in steps[:-1]:
                at = self._enter(at, step, time_ns, made)
            ino = self._add_slot(part, at, steps[-1], made)
            self._laid.setdefault(at, {})[steps[-1]] = ino
            made.add(at)
        if top is None:
            return
        self._shown[name] = made
        self._laid[self.root_ino][name] = top
        self._listed(time_ns)
        self._publish(caller, "checkpoint", Dentry(ROOT_NODE, name, top & NODE_MASK))

    def hide(self, name: bytes, caller: Caller) -> None:
        """From now on the checkpoint's directory and all below it are gone (ENOENT, ESTALE)."""
        top = self._laid[self.root_ino].pop(name, None)
        if top is None:
            return
        for ino in self._shown.pop(name):
            self._lists.pop(ino, None)
            self._above.pop(ino, None)
            self._laid.pop(ino, None)
            number = (ino & NODE_MASK) >> PLACE_BITS
            slot = self._slots.get(number)
            if slot is not None:
                slot.alive = False
                self._free_if_unused(number, slot)
        # A slot's number may be given out again, and these are kept by number.
        self._attrs.clear()
        self._maps.clear()
        self._listed(self._lists[self.root_ino].mtime_ns)
        self._publish(caller, "drop", NoDentry(ROOT_NODE, name, top & NODE_MASK))

    def _publish(self, caller: Caller, op: str, change: Change) -> None:
        self._feed.publish(self.base, caller, op, [change])

    def _listed(self, time_ns: int) -> None:
        self._lists[self.root_ino] = self._list_attr(self.root_ino, time_ns)._replace(
            nlink=2 + len(self._laid[self.root_ino])
        )

    def _list_attr(self, ino: int, time_ns: int) -> ShownAttr:
        uid, gid = self._owner
        return ShownAttr(ino, stat.S_IFDIR | 0o555, 2, uid, gid, 0, 0, 0, time_ns, time_ns, time_ns)

    def _add_slot(self, part: Part, parent: int, name: bytes, made: set[int]) -> int:
        number = self._last_slot
        while True:
            number = number % (SLOTS - 1) + 1
            if number not in self._slots:
                break
        self._last_slot = number
        self._slots[number] = Slot(part, parent, name)
        ino = self.base | number << PLACE_BITS | ROOT_NODE
        made.add(ino)
        return ino

    def _add_list(self, parent: int, name: bytes, time_ns: int, made: set[int]) -> int:
        self._last_list += 1
        ino = self.base | self._last_list
        self._lists[ino] = self._list_attr(ino, time_ns)
        self._above[ino] = (parent, name)
        self._laid[ino] = {}
        made.add(ino)
        return ino

    def _enter(self, parent: int, name: bytes, time_ns: int, made: set[int]) -> int:
        """The directory ``name``, one that only lists where the checkpoint has none."""
        try:
            attr = self.lookup(parent, name)
            if stat.S_ISDIR(attr.mode):
                return attr.ino
        except OSError:
            pass
        ino = self._add_list(parent, name, time_ns, made)
        self._laid.setdefault(parent, {})[name] = ino
        made.add(parent)
        return ino

    # -- numbers

    def _slot(self, ino: int) -> Slot:
        slot = self._slots.get((ino & NODE_MASK) >> PLACE_BITS)
        if slot is None or not slot.alive:
            raise fail(errno.ESTALE)
        return slot

    def _ino(self, parent: int, node: int) -> int:
        """The ino of a node of the same slot."""
        if node > _PLACE_MASK:
            raise fail(errno.EOVERFLOW)
        return (parent & ~_PLACE_MASK) | node

    def _attr(self, ino: int) -> ShownAttr:
        found = self._attrs.get(ino) or self._lists.get(ino)
        if found is None:
            slot = self._slot(ino)
            with slot.store.reading():
                stored = slot.past.node(ino & _PLACE_MASK)
            if stored is None or not stored.nlink:
                raise fail(errno.ESTALE)
            found = self._keep(ino, stored)
        return found

    def _keep(self, ino: int, s: Stored) -> ShownAttr:
        if len(self._attrs) >= _CACHED:
            self._attrs.clear()
        attr = self._attrs[ino] = ShownAttr(
            ino, s.mode, s.nlink, s.uid, s.gid, s.rdev, s.size, s.blocks, s.atime_ns, s.mtime_ns, s.ctime_ns
        )
        return attr

    def _attrs_of(self, inos: Sequence[int]) -> dict[int, ShownAttr]:
        """``_attr`` of many of one directory at once."""
        found = {ino: self._attrs.get(ino) or self._lists.get(ino) for ino in inos}
        missing: dict[int, list[int]] = {}
        for ino, attr in found.items():
            if attr is None:
                missing.setdefault(ino & ~_PLACE_MASK, []).append(ino)
        for numbers in missing.values():
            slot = self._slot(numbers[0])
            with slot.store.reading():
                stored = slot.past.nodes([ino & _PLACE_MASK for ino in numbers])
            for ino in numbers:
                if ino & _PLACE_MASK in stored:
                    found[ino] = self._keep(ino, stored[ino & _PLACE_MASK])
        return {ino: attr for ino, attr in found.items() if attr is not None}

    # -- observing

    def lookup(self, parent: int, name: bytes) -> ShownAttr:
        """ENOENT, ENOTDIR, ENAMETOOLONG, ESTALE."""
        laid = self._laid.get(parent)
        if laid is not None and name in laid:
            return self._attr(laid[name])
        directory = self._directory(parent)
        if name == b".":
            return directory
        if name == b"..":
            return self._attr(self.parent_of(parent))
        if len(name) > NAME_MAX:
            raise fail(errno.ENAMETOOLONG, name)
        if parent in self._lists:
            raise fail(errno.ENOENT, name)
        slot = self._slot(parent)
        with slot.store.reading():
            node = slot.past.child(parent & _PLACE_MASK, name)
        if node is None:
            raise fail(errno.ENOENT, name)
        return self._attr(self._ino(parent, node))

    peek = lookup

    def _directory(self, ino: int) -> ShownAttr:
        attr = self._attr(ino)
        if not stat.S_ISDIR(attr.mode):
            raise fail(errno.ENOTDIR)
        return attr

    def getattr(self, ino: int, fh: int = 0) -> ShownAttr:
        """ESTALE."""
        return self._attr(ino)

    def readlink(self, ino: int) -> bytes:
        """EINVAL for anything but a symlink."""
        if ino not in self._lists:
            slot = self._slot(ino)
            with slot.store.reading():
                stored = slot.past.node(ino & _PLACE_MASK)
            if stored is not None and stored.target is not None:
                return stored.target
        raise fail(errno.EINVAL)

    def _map(self, ino: int) -> FileMap:
        found = self._maps.get(ino)
        if found is None:
            if len(self._maps) >= _CACHED // 64:
                self._maps.clear()
            slot = self._slot(ino)
            with slot.store.reading():
                found = self._maps[ino] = FileMap(slot.past.map(ino & _PLACE_MASK))
        return found

    def _file(self, ino: int) -> ShownAttr:
        attr = self._attr(ino)
        if not stat.S_ISREG(attr.mode):
            raise fail(errno.EISDIR if stat.S_ISDIR(attr.mode) else errno.EINVAL)
        return attr

    def read(self, ino: int, fh: int, offset: int, length: int) -> bytes:
        """Bytes up to the end of the file; EISDIR, EINVAL, ESTALE."""
        left = self._file(ino).size - offset
        if left <= 0 or length <= 0:
            return b""
        return self._slot(ino).store.read_map(self._map(ino), offset, min(length, left))

    def seek(self, ino: int, fh: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE (ENXIO), EINVAL for other whence."""
        size = self._file(ino).size
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise fail(errno.EINVAL)
        found = None
        if 0 <= offset < size:
            found = ExtentFile.seek_map(self._map(ino), size, offset, whence == os.SEEK_HOLE)
        if found is None:
            raise fail(errno.ENXIO)
        return found

    def _entries(self, ino: int) -> list[tuple[bytes, int]]:
        self._directory(ino)
        laid = self._laid.get(ino, {})
        own: list[tuple[bytes, int]] = []
        if ino not in self._lists:
            slot = self._slot(ino)
            with slot.store.reading():
                names = slot.past.children(ino & _PLACE_MASK)
                for name in self._stubs.get(slot.base | ino & _PLACE_MASK, ()):
                    if name in names and self._only_stubs(slot, names[name]):
                        del names[name]
            own = [(name, self._ino(ino, node)) for name, node in names.items() if name not in laid]
        return own + list(laid.items())

    def _only_stubs(self, slot: Slot, node: int) -> bool:
        """True for a directory with nothing in it but such."""
        stored, stubs = slot.past.node(node), self._stubs.get(slot.base | node, ())
        if stored is None or not stat.S_ISDIR(stored.mode):
            return False
        return all(n in stubs and self._only_stubs(slot, child) for n, child in slot.past.children(node).items())

    def children(self, ino: int) -> list[tuple[bytes, ShownAttr]]:
        """All entries at once; ENOTDIR."""
        entries = self._entries(ino)
        attrs = self._attrs_of([child for _, child in entries])
        return [(name, attrs[child]) for name, child in entries if child in attrs]

    def opendir(self, ino: int, caller: Caller) -> int:
        """ENOTDIR."""
        return self._add_handle(ino, self._entries(ino))

    def readdir(self, ino: int, fh: int, offset: int) -> Iterator[DirEntry]:
        """Entries after ``offset``."""
        handle = self._handles.get(fh)
        entries = self._entries(ino) if handle is None else handle.entries
        start = max(0, offset - _FIRST_OFFSET + 1)
        for first in range(start, len(entries), 128):
            part = entries[first : first + 128]
            attrs = self._attrs_of([child for _, child in part])
            for i, (name, child) in enumerate(part, first):
                if child in attrs:
                    yield DirEntry(name, attrs[child], _FIRST_OFFSET + i)

    def _xattrs(self, ino: int) -> dict[bytes, bytes]:
        self._attr(ino)
        if ino in self._lists:
            return {}
        slot = self._slot(ino)
        with slot.store.reading():
            return slot.past.xattrs(ino & _PLACE_MASK)

    def getxattr(self, ino: int, name: bytes) -> bytes:
        """ENODATA."""
        value = self._xattrs(ino).get(name)
        if value is None:
            raise fail(errno.ENODATA, name)
        return value

    def acl(self, ino: int, name: bytes) -> bytes | None:
        """An access control list as it was, None when there was none."""
        return self._xattrs(ino).get(name)

    def listxattr(self, ino: int) -> list[bytes]:
        return list(self._xattrs(ino))

    def statfs(self, ino: int) -> StatFs:
        for slot in self._slots.values():
            return slot.store.statfs()
        return StatFs(4096, 4096, 0, 0, 0, 0, 0, 0)

    def parent_of(self, ino: int) -> int:
        """The ino of ``..``."""
        above = self._where(ino)
        return self.root_ino if above is None else above[0]

    def _where(self, ino: int) -> tuple[int, bytes] | None:
        """The directory that holds the ino, and its name there; None for the root and what had no link."""
        return next(iter(self.links_of(ino)), None)

    def links_of(self, ino: int) -> list[tuple[int, bytes]]:
        """Every (ino of a directory, name) that leads to the ino."""
        if ino in self._lists:
            above = self._above.get(ino)
            return [] if above is None else [above]
        slot = self._slot(ino)
        if ino & _PLACE_MASK == ROOT_NODE:
            return [(slot.parent, slot.name)]
        with slot.store.reading():
            return [(self._ino(ino, parent), name) for parent, name in slot.past.links(ino & _PLACE_MASK)]

    def path_of(self, ino: int) -> bytes | None:
        """A path from the volume's root; None for what is gone."""
        parts: list[bytes] = []
        while ino != self.root_ino:
            try:
                above = self._where(ino)
            except OSError:
                return None
            if above is None:
                return None
            ino = above[0]
            parts.append(above[1])
        return b"/" + b"/".join(reversed(parts))

    # -- handles and pins

    def open(self, ino: int, flags: int, caller: Caller) -> int:
        """EROFS for writing, ELOOP for a symlink."""
        attr = self._attr(ino)
        if stat.S_ISLNK(attr.mode):
            raise fail(errno.ELOOP)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise fail(errno.EISDIR if stat.S_ISDIR(attr.mode) else errno.EROFS)
        return self._add_handle(ino, [])

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[ShownAttr, int]:
        """Opens what is there."""
        try:
            attr = self.lookup(parent, name)
        except FileNotFoundError:
            raise fail(errno.EROFS, name) from None
        if flags & os.O_EXCL:
            raise fail(errno.EEXIST, name)
        return attr, self.open(attr.ino, flags, caller)

    def _add_handle(self, ino: int, entries: list[tuple[bytes, int]]) -> int:
        self._last_handle += 1
        self._handles[self._last_handle] = _Handle(ino, entries)
        self.remember(ino)
        return self._last_handle

    def release(self, ino: int, fh: int) -> None:
        handle = self._handles.pop(fh, None)
        if handle is None:
            raise fail(errno.EBADF)
        self.forget(handle.ino, 1)

    releasedir = release

    def remember(self, ino: int, n: int = 1) -> None:
        """Add to the holds on the ino's slot."""
        slot = self._slots.get((ino & NODE_MASK) >> PLACE_BITS)
        if slot is not None:
            slot.pins += n

    def forget(self, ino: int, n: int) -> None:
        """Take from the holds on the ino's slot."""
        number = (ino & NODE_MASK) >> PLACE_BITS
        slot = self._slots.get(number)
        if slot is not None:
            slot.pins = max(0, slot.pins - n)
            self._free_if_unused(number, slot)

    def _free_if_unused(self, number: int, slot: Slot) -> None:
        if not slot.alive and not slot.pins:
            del self._slots[number]

    def counters(self) -> dict[str, int]:
        return {"checkpoints": len(self._laid[self.root_ino]), "open": len(self._handles)}
