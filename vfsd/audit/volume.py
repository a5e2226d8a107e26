"""``/.vfsd``: what the daemon tells of itself, as read-only files: ``log.ndjson`` and ``errors.ndjson``.

Owns the numbers of what is in it. Must not know what a line says. A file's offsets are fixed for as long as it has its
number, also when lines are dropped from the front of the log: then the name leads to a new number, whose file begins
with what is left, and who has the old one open reads on (``tail -f``) at the offsets it knows. All methods take full
inos and raise OSError: ESTALE for a number that is no more, EROFS for every change.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping

from vfsd.audit.log import SegmentLog
from vfsd.core.plans import fail
from vfsd.core.types import NAME_MAX, NODE_MASK, ROOT_NODE, Caller, DirEntry, StatFs
from vfsd.readonly import ReadOnlyVolume, ShownAttr

_FIRST_OFFSET = 3


class _File:
    """One number: the log it shows, and the position in it of the file's first byte."""

    __slots__ = ("log", "name", "origin", "pins")

    def __init__(self, name: bytes, log: SegmentLog) -> None:
        self.name = name
        self.log = log
        self.origin = log.origin
        self.pins = 0


class AuditVolume(ReadOnlyVolume):
    """The volume of ``/.vfsd``, which shows ``logs``; ``owner`` (uid, gid) owns what is in it."""

    cache_seconds = 0.0
    """Nothing may be kept by the kernel: lines come at any time, and nobody tells it."""
    kind = "audit"

    def __init__(self, base: int, logs: Mapping[bytes, SegmentLog], owner: tuple[int, int]) -> None:
        self.base = base
        self.root_ino = base | ROOT_NODE
        self._owner = owner
        self._files: dict[int, _File] = {}
        self._current: dict[bytes, int] = {}
        self._last = ROOT_NODE
        self._logs = logs
        self._handles: dict[int, int] = {}
        self._last_handle = 0

    # -- numbers

    def _number(self, name: bytes) -> int:
        """The node that the name leads to now."""
        log = self._logs[name]
        node = self._current.get(name)
        if node is not None and self._files[node].origin == log.origin:
            return node
        self._last += 1
        self._files[self._last] = _File(name, log)
        self._current[name] = self._last
        if node is not None:
            self._free_if_unused(node)
        return self._last

    def _file(self, ino: int) -> _File:
        file = self._files.get(ino & NODE_MASK)
        if file is None:
            raise fail(errno.EISDIR if ino == self.root_ino else errno.ESTALE)
        return file

    def _attr(self, ino: int) -> ShownAttr:
        uid, gid = self._owner
        if ino == self.root_ino:
            newest = max(log.mtime_ns for log in self._logs.values())
            return ShownAttr(ino, stat.S_IFDIR | 0o555, 2, uid, gid, 0, 0, 0, newest, newest, newest)
        file = self._file(ino)
        size, time_ns = file.log.end - file.origin, file.log.mtime_ns
        return ShownAttr(
            ino, stat.S_IFREG | 0o444, 1, uid, gid, 0, size, (size + 511) // 512, time_ns, time_ns, time_ns
        )  # fmt: skip

    # -- observing

    def lookup(self, parent: int, name: bytes) -> ShownAttr:
        """ENOENT, ENOTDIR, ENAMETOOLONG, ESTALE."""
        self._directory(parent)
        if name in (b".", b".."):
            return self._attr(self.root_ino)
        if name not in self._logs:
            raise fail(errno.ENAMETOOLONG if len(name) > NAME_MAX else errno.ENOENT, name)
        return self._attr(self.base | self._number(name))

    peek = lookup

    def _directory(self, ino: int) -> None:
        if ino != self.root_ino:
            self._file(ino)
            raise fail(errno.ENOTDIR)

    def getattr(self, ino: int, fh: int = 0) -> ShownAttr:
        """ESTALE."""
        return self._attr(ino)

    def readlink(self, ino: int) -> bytes:
        """EINVAL: there is no symlink."""
        raise fail(errno.EINVAL)

    def read(self, ino: int, fh: int, offset: int, length: int) -> bytes:
        """Bytes up to the end as it is now; EISDIR, ESTALE."""
        file = self._file(ino)
        found = file.log.read(file.origin + offset, length)
        if len(found) == length or not found:
            return found
        # Fewer than asked for would be the end of the file: go on in the next segment.
        pieces, had = [found], len(found)
        while had < length and (found := file.log.read(file.origin + offset + had, length - had)):
            pieces.append(found)
            had += len(found)
        return b"".join(pieces)

    def seek(self, ino: int, fh: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE (ENXIO), EINVAL for other whence."""
        size = self._attr(ino).size
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise fail(errno.EINVAL)
        if not 0 <= offset < size:
            raise fail(errno.ENXIO)
        return size if whence == os.SEEK_HOLE else offset

    def children(self, ino: int) -> list[tuple[bytes, ShownAttr]]:
        """All entries at once; ENOTDIR."""
        self._directory(ino)
        return [(name, self.lookup(ino, name)) for name in self._logs]

    def opendir(self, ino: int, caller: Caller) -> int:
        """ENOTDIR."""
        self._directory(ino)
        return self._add_handle(ino)

    def readdir(self, ino: int, fh: int, offset: int) -> Iterator[DirEntry]:
        """Entries after ``offset``."""
        for i, (name, attr) in enumerate(self.children(ino), _FIRST_OFFSET):
            if i > offset:
                yield DirEntry(name, attr, i)

    def getxattr(self, ino: int, name: bytes) -> bytes:
        """ENODATA."""
        raise fail(errno.ENODATA, name)

    def listxattr(self, ino: int) -> list[bytes]:
        return []

    def acl(self, ino: int, name: bytes) -> bytes | None:
        """None: there is none."""
        return None

    def statfs(self, ino: int) -> StatFs:
        return StatFs(4096, 4096, 0, 0, 0, 0, 0, 0)

    def parent_of(self, ino: int) -> int:
        """The ino of ``..``."""
        return self.root_ino

    def path_of(self, ino: int) -> bytes | None:
        """A path from the volume's root; None for what is gone."""
        if ino == self.root_ino:
            return b"/"
        file = self._files.get(ino & NODE_MASK)
        return None if file is None else b"/" + file.name

    # -- handles and pins

    def open(self, ino: int, flags: int, caller: Caller) -> int:
        """EROFS for writing."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise fail(errno.EISDIR if ino == self.root_ino else errno.EROFS)
        self._attr(ino)
        return self._add_handle(ino)

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[ShownAttr, int]:
        """Opens what is there."""
        try:
            attr = self.lookup(parent, name)
        except FileNotFoundError:
            raise fail(errno.EROFS, name) from None
        if flags & os.O_EXCL:
            raise fail(errno.EEXIST, name)
        return attr, self.open(attr.ino, flags, caller)

    def _add_handle(self, ino: int) -> int:
        self._last_handle += 1
        self._handles[self._last_handle] = ino
        self.remember(ino)
        return self._last_handle

    def release(self, ino: int, fh: int) -> None:
        held = self._handles.pop(fh, None)
        if held is None:
            raise fail(errno.EBADF)
        self.forget(held, 1)

    releasedir = release

    def remember(self, ino: int, n: int = 1) -> None:
        """Add to the holds on the number."""
        file = self._files.get(ino & NODE_MASK)
        if file is not None:
            file.pins += n

    def forget(self, ino: int, n: int) -> None:
        """Take from the holds on the number."""
        file = self._files.get(ino & NODE_MASK)
        if file is not None:
            file.pins = max(0, file.pins - n)
            self._free_if_unused(ino & NODE_MASK)

    def _free_if_unused(self, node: int) -> None:
        file = self._files[node]
        if not file.pins and self._current[file.name] != node:
            del self._files[node]

    def counters(self) -> dict[str, int]:
        return {"open": len(self._handles)}
