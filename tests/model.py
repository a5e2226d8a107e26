"""A dumb file tree to compare with: dicts, lists and no cleverness. It has the interface of ``machine.Ops``.

It knows nothing of permissions, times and blocks, and its symlinks lead to nowhere.
"""

from __future__ import annotations

import errno
import os
import stat

from drivers import EXCHANGE, NOREPLACE, Stat, fail


class File:
    """One file or directory; a directory's entries are in ``entries``, all else in ``data``."""

    def __init__(self, number: int, mode: int) -> None:
        self.number = number
        self.mode = mode
        self.data = bytearray()
        self.entries: dict[str, File] = {}
        self.xattrs: dict[str, bytes] = {}

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)


class Model:
    """The tree."""

    def __init__(self) -> None:
        self._count = 0
        self.root = self._new(stat.S_IFDIR | 0o755)

    def _new(self, mode: int) -> File:
        self._count += 1
        return File(self._count, mode)

    def _find(self, path: str) -> File:
        at = self.root
        for name in path.split("/"):
            if name:
                self._enter(at)
                if name not in at.entries:
                    raise fail(errno.ENOENT)
                at = at.entries[name]
        return at

    @staticmethod
    def _enter(file: File) -> None:
        """Every symlink leads to nowhere."""
        if not file.is_dir:
            raise fail(errno.ENOENT if stat.S_ISLNK(file.mode) else errno.ENOTDIR)

    def _parent(self, path: str) -> tuple[File, str]:
        above, _, name = path.rpartition("/")
        parent = self._find(above)
        self._enter(parent)
        return parent, name

    def _add(self, path: str, file: File) -> None:
        parent, name = self._parent(path)
        if name in parent.entries:
            raise fail(errno.EEXIST)
        parent.entries[name] = file

    def _links(self, file: File, at: File | None = None) -> int:
        at = at or self.root
        return sum((child is file) + self._links(file, child) for child in at.entries.values())

    def _within(self, directory: File, file: File) -> bool:
        return file is directory or any(self._within(child, file) for child in directory.entries.values())

    # -- the interface

    def mkdir(self, path: str, perm: int = 0o755) -> None:
        self._add(path, self._new(stat.S_IFDIR | perm))

    def mknod(self, path: str, mode: int, rdev: int = 0) -> None:
        self._add(path, self._new(mode))

    def symlink(self, target: str, path: str) -> None:
        link = self._new(stat.S_IFLNK | 0o777)
        link.data[:] = target.encode()
        self._add(path, link)

    def link(self, old: str, new: str) -> None:
        file = self._find(old)
        self._parent(new)
        if self._exists(new):
            raise fail(errno.EEXIST)
        if file.is_dir:
            raise fail(errno.EPERM)
        self._add(new, file)

    def _exists(self, path: str) -> bool:
        parent, name = self._parent(path)
        return name in parent.entries

    def unlink(self, path: str) -> None:
        parent, name = self._parent(path)
        if self._find(path).is_dir:
            raise fail(errno.EISDIR)
        del parent.entries[name]

    def rmdir(self, path: str) -> None:
        parent, name = self._parent(path)
        directory = self._find(path)
        if not directory.is_dir:
            raise fail(errno.ENOTDIR)
        if directory.entries:
            raise fail(errno.ENOTEMPTY)
        del parent.entries[name]

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        (parent, name), (new_parent, new_name) = self._parent(old), self._parent(new)
        file = self._find(old)
        other = new_parent.entries.get(new_name)
        if flags == NOREPLACE and other is not None:
            raise fail(errno.EEXIST)
        if flags == EXCHANGE and other is None:
            raise fail(errno.ENOENT)
        if file.is_dir and self._within(file, new_parent):
            raise fail(errno.EINVAL)
        if other is not None and other.is_dir and self._within(other, parent):
            raise fail(errno.EINVAL if flags == EXCHANGE else errno.ENOTEMPTY)
        if other is file:
            return
        if flags == EXCHANGE:
            assert other is not None
            parent.entries[name], new_parent.entries[new_name] = other, file
            return
        if other is not None:
            if other.is_dir and not file.is_dir:
                raise fail(errno.EISDIR)
            if file.is_dir and not other.is_dir:
                raise fail(errno.ENOTDIR)
            if other.entries:
                raise fail(errno.ENOTEMPTY)
        del parent.entries[name]
        new_parent.entries[new_name] = file

    def readlink(self, path: str) -> bytes:
        link = self._find(path)
        if not stat.S_ISLNK(link.mode):
            raise fail(errno.EINVAL)
        return bytes(link.data)

    def listdir(self, path: str) -> list[bytes]:
        directory = self._find(path)
        if not directory.is_dir:
            raise fail(errno.ENOTDIR)
        return sorted(os.fsencode(name) for name in directory.entries)

    def lstat(self, path: str) -> Stat:
        file = self._find(path)
        if file.is_dir:
            nlink = 2 + sum(child.is_dir for child in file.entries.values())
        else:
            nlink = self._links(file)
        return Stat(file.mode, nlink, 0, 0, 0, len(file.data), file.number, 0, 0, 0)

    def chmod(self, path: str, perm: int) -> None:
        file = self._find(path)
        if stat.S_ISLNK(file.mode):
            raise fail(errno.EOPNOTSUPP)
        file.mode = stat.S_IFMT(file.mode) | perm

    def truncate(self, path: str, size: int) -> None:
        file = self._regular(path)
        del file.data[size:]
        file.data += bytes(size - len(file.data))

    def _regular(self, path: str) -> File:
        file = self._find(path)
        if file.is_dir:
            raise fail(errno.EISDIR)
        if not stat.S_ISREG(file.mode):
            raise fail(errno.EINVAL)
        return file

    def write(self, path: str, data: bytes, offset: int | None) -> None:
        """At ``offset``, None: at the end."""
        file = self._regular(path)
        at = len(file.data) if offset is None else offset
        if data:
            file.data += bytes(max(0, at - len(file.data)))
            file.data[at : at + len(data)] = data

    def zero(self, path: str, offset: int, length: int) -> None:
        """Punch a hole."""
        file = self._regular(path)
        end = min(offset + length, len(file.data))
        file.data[offset:end] = bytes(max(0, end - offset))

    def read(self, path: str) -> bytes:
        return bytes(self._regular(path).data)

    def setxattr(self, path: str, name: str, value: bytes, flags: int = 0) -> None:
        xattrs = self.xattrs(path)
        if flags & os.XATTR_CREATE and name in xattrs:
            raise fail(errno.EEXIST)
        if flags & os.XATTR_REPLACE and name not in xattrs:
            raise fail(errno.ENODATA)
        xattrs[name] = value

    def removexattr(self, path: str, name: str) -> None:
        if self.xattrs(path).pop(name, None) is None:
            raise fail(errno.ENODATA)

    def xattrs(self, path: str) -> dict[str, bytes]:
        """For files and directories only (xattr(7))."""
        file = self._find(path)
        if not file.is_dir and not stat.S_ISREG(file.mode):
            raise fail(errno.EPERM)
        return file.xattrs

    def hold(self, path: str) -> File:
        """Open for reading and writing."""
        return self._regular(path)

    def held_write(self, file: File, data: bytes, offset: int) -> None:
        file.data += bytes(max(0, offset - len(file.data)))
        file.data[offset : offset + len(data)] = data

    def held_read(self, file: File) -> bytes:
        return bytes(file.data)

    def let_go(self, file: File) -> None:
        """Close."""
