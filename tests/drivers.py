"""One small os-like interface over every way into a tree: a directory by system calls, the inode API, the socket.

Paths are text from the driver's root, as the tools write them; names and contents are bytes. ``HostDriver`` is a
directory by real system calls, be it of the host or of a mount; it is what the others are compared with.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from typing import Any, NamedTuple, Protocol

import trio
from makers import ME, done

from agenttools.client import Client
from vfsd.core.types import Caller, SetAttr
from vfsd.paths import Paths
from vfsd.vfs import Vfs

NOREPLACE, EXCHANGE = 1, 2
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Stat(NamedTuple):
    """What of stat(2) is compared; a directory's size and blocks are its file system's own business."""

    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    ino: int
    blocks: int
    mtime_ns: int
    ctime_ns: int


def fail(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Driver(Protocol):
    """Every method raises OSError; ``open`` returns a number for the methods that take ``fh``."""

    def mkdir(self, path: str, perm: int = 0o755) -> None: ...
    def mknod(self, path: str, mode: int, rdev: int = 0) -> None: ...
    def symlink(self, target: str, path: str) -> None: ...
    def link(self, old: str, new: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def rename(self, old: str, new: str, flags: int = 0) -> None: ...
    def readlink(self, path: str) -> bytes: ...
    def listdir(self, path: str) -> list[bytes]: ...
    def stat(self, path: str) -> Stat: ...
    def lstat(self, path: str) -> Stat: ...
    def chmod(self, path: str, perm: int) -> None: ...
    def chown(self, path: str, uid: int, gid: int) -> None: ...
    def utime(self, path: str, atime_ns: int, mtime_ns: int) -> None: ...
    def truncate(self, path: str, size: int) -> None: ...
    def getxattr(self, path: str, name: str) -> bytes: ...
    def setxattr(self, path: str, name: str, value: bytes, flags: int = 0) -> None: ...
    def listxattr(self, path: str) -> list[bytes]: ...
    def removexattr(self, path: str, name: str) -> None: ...
    def open(self, path: str, flags: int, mode: int = 0o644) -> int: ...
    def close(self, fh: int) -> None: ...
    def pread(self, fh: int, length: int, offset: int) -> bytes: ...
    def pwrite(self, fh: int, data: bytes, offset: int) -> int: ...
    def ftruncate(self, fh: int, size: int) -> None: ...
    def fstat(self, fh: int) -> Stat: ...
    def fsync(self, fh: int) -> None: ...
    def seek(self, fh: int, offset: int, whence: int) -> int: ...
    def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None: ...


def read_file(fs: Driver, path: str) -> bytes:
    """The whole content."""
    fh = fs.open(path, os.O_RDONLY)
    try:
        out = b""
        while piece := fs.pread(fh, 1 << 20, len(out)):
            out += piece
        return out
    finally:
        fs.close(fh)


def write_file(fs: Driver, path: str, data: bytes) -> None:
    """Make or replace the content."""
    fh = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        assert fs.pwrite(fh, data, 0) == len(data)
    finally:
        fs.close(fh)


def _check(result: int) -> None:
    if result:
        raise fail(ctypes.get_errno())


def _of_host(st: os.stat_result) -> Stat:
    return Stat(
        st.st_mode, st.st_nlink, st.st_uid, st.st_gid, st.st_rdev, st.st_size, st.st_ino, st.st_blocks,
        st.st_mtime_ns, st.st_ctime_ns,
    )  # fmt: skip


class HostDriver:
    """The directory ``root`` by system calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)

    def _at(self, path: str) -> str:
        return self.root + path

    def mkdir(self, path: str, perm: int = 0o755) -> None:
        os.mkdir(self._at(path), perm)

    def mknod(self, path: str, mode: int, rdev: int = 0) -> None:
        os.mknod(self._at(path), mode, rdev)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, self._at(path))

    def link(self, old: str, new: str) -> None:
        os.link(self._at(old), self._at(new), follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        names = (os.fsencode(self._at(old)), os.fsencode(self._at(new)))
        _check(_libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags))

    def readlink(self, path: str) -> bytes:
        return os.readlink(os.fsencode(self._at(path)))

    def listdir(self, path: str) -> list[bytes]:
        return sorted(os.listdir(os.fsencode(self._at(path))))

    def stat(self, path: str) -> Stat:
        return _of_host(os.stat(self._at(path)))

    def lstat(self, path: str) -> Stat:
        return _of_host(os.lstat(self._at(path)))

    def chmod(self, path: str, perm: int) -> None:
        os.chmod(self._at(path), perm)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(self._at(path), uid, gid)

    def utime(self, path: str, atime_ns: int, mtime_ns: int) -> None:
        os.utime(self._at(path), ns=(atime_ns, mtime_ns))

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self._at(path), size)

    def getxattr(self, path: str, name: str) -> bytes:
        return os.getxattr(self._at(path), name)

    def setxattr(self, path: str, name: str, value: bytes, flags: int = 0) -> None:
        os.setxattr(self._at(path), name, value, flags)

    def listxattr(self, path: str) -> list[bytes]:
        return sorted(map(os.fsencode, os.listxattr(self._at(path))))

    def removexattr(self, path: str, name: str) -> None:
        os.removexattr(self._at(path), name)

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        return os.open(self._at(path), flags, mode)

    def close(self, fh: int) -> None:
        os.close(fh)

    def pread(self, fh: int, length: int, offset: int) -> bytes:
        return os.pread(fh, length, offset)

    def pwrite(self, fh: int, data: bytes, offset: int) -> int:
        return os.pwrite(fh, data, offset)

    def ftruncate(self, fh: int, size: int) -> None:
        os.ftruncate(fh, size)

    def fstat(self, fh: int) -> Stat:
        return _of_host(os.fstat(fh))

    def fsync(self, fh: int) -> None:
        os.fsync(fh)

    def seek(self, fh: int, offset: int, whence: int) -> int:
        return os.lseek(fh, offset, whence)

    def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        _check(_libc.fallocate(fh, mode, offset, length))


def _of_attr(attr: Any) -> Stat:
    return Stat(
        attr.mode, attr.nlink, attr.uid, attr.gid, attr.rdev, attr.size, attr.ino, attr.blocks,
        attr.mtime_ns, attr.ctime_ns,
    )  # fmt: skip


class VfsDriver:
    """The inode API and the path walk above it, in this process; ``root`` is a directory of the tree."""

    def __init__(self, vfs: Vfs, root: str = "", caller: Caller = ME) -> None:
        self.vfs = vfs
        self.caller = caller
        self.paths = Paths(vfs)
        self.root = os.fsencode(root)
        self._open: dict[int, tuple[int, int, int]] = {}
        self._next = 3

    def _at(self, path: str) -> bytes:
        return self.root + os.fsencode(path)

    def _ino(self, path: str, follow: bool = True) -> int:
        return int(done(self.paths.resolve(self._at(path), self.caller, follow)).ino)

    def _new(self, path: str) -> tuple[int, bytes]:
        place = done(self.paths.place_for(self._at(path), self.caller))
        return place.parent.ino, place.name

    def _old(self, path: str) -> tuple[int, bytes]:
        place, _ = done(self.paths.place_of(self._at(path), self.caller))
        return place.parent.ino, place.name

    def mkdir(self, path: str, perm: int = 0o755) -> None:
        done(self.vfs.mkdir(*self._new(path), perm, self.caller))

    def mknod(self, path: str, mode: int, rdev: int = 0) -> None:
        done(self.vfs.mknod(*self._new(path), mode, rdev, self.caller))

    def symlink(self, target: str, path: str) -> None:
        done(self.vfs.symlink(*self._new(path), os.fsencode(target), self.caller))

    def link(self, old: str, new: str) -> None:
        done(self.vfs.link(self._ino(old, False), *self._new(new), self.caller))

    def unlink(self, path: str) -> None:
        done(self.vfs.unlink(*self._old(path), self.caller))

    def rmdir(self, path: str) -> None:
        done(self.vfs.rmdir(*self._old(path), self.caller))

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        # As the kernel: both directories are walked to before either name is looked up.
        done(self.paths.walk(self._at(old), self.caller, follow=False))
        target = done(self.paths.walk(self._at(new), self.caller, follow=False))
        done(self.vfs.rename(*self._old(old), target.parent.ino, target.name, flags, self.caller))

    def readlink(self, path: str) -> bytes:
        return done(self.vfs.readlink(self._ino(path, False), self.caller))

    def listdir(self, path: str) -> list[bytes]:
        ino = self._ino(path)
        fh = done(self.vfs.opendir(ino, self.caller))
        try:
            return sorted(entry.name for entry in done(self.vfs.readdir(ino, fh, 0, self.caller)))
        finally:
            done(self.vfs.releasedir(ino, fh))

    def stat(self, path: str) -> Stat:
        return _of_attr(done(self.paths.resolve(self._at(path), self.caller)))

    def lstat(self, path: str) -> Stat:
        return _of_attr(done(self.paths.resolve(self._at(path), self.caller, False)))

    def _set(self, path: str, to: SetAttr) -> None:
        done(self.vfs.setattr(self._ino(path), to, self.caller))

    def chmod(self, path: str, perm: int) -> None:
        self._set(path, SetAttr(perm=perm))

    def chown(self, path: str, uid: int, gid: int) -> None:
        self._set(path, SetAttr(uid=None if uid == -1 else uid, gid=None if gid == -1 else gid))

    def utime(self, path: str, atime_ns: int, mtime_ns: int) -> None:
        self._set(path, SetAttr(atime_ns=atime_ns, mtime_ns=mtime_ns))

    def truncate(self, path: str, size: int) -> None:
        self._set(path, SetAttr(size=size))

    def getxattr(self, path: str, name: str) -> bytes:
        return done(self.vfs.getxattr(self._ino(path), os.fsencode(name), self.caller))

    def setxattr(self, path: str, name: str, value: bytes, flags: int = 0) -> None:
        done(self.vfs.setxattr(self._ino(path), os.fsencode(name), value, flags, self.caller))

    def listxattr(self, path: str) -> list[bytes]:
        return sorted(done(self.vfs.listxattr(self._ino(path), self.caller)))

    def removexattr(self, path: str, name: str) -> None:
        done(self.vfs.removexattr(self._ino(path), os.fsencode(name), self.caller))

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        attr, fh = done(self.paths.open(self._at(path), flags, mode, self.caller))
        self._next += 1
        self._open[self._next] = (attr.ino, fh, flags)
        return self._next

    def _handle(self, fh: int, *, reads: bool = False, writes: bool = False) -> tuple[int, int]:
        ino, number, flags = self._open[fh]
        access = flags & os.O_ACCMODE
        if (reads and access == os.O_WRONLY) or (writes and access == os.O_RDONLY):
            raise fail(errno.EBADF)  # the kernel, and the socket door, refuse that above the inode API
        return ino, number

    def close(self, fh: int) -> None:
        ino, number, _ = self._open.pop(fh)
        directory = stat.S_ISDIR(done(self.vfs.getattr(ino, self.caller, number)).mode)
        done((self.vfs.releasedir if directory else self.vfs.release)(ino, number))

    def pread(self, fh: int, length: int, offset: int) -> bytes:
        return bytes(done(self.vfs.read(*self._handle(fh, reads=True), offset, length)))

    def pwrite(self, fh: int, data: bytes, offset: int) -> int:
        handle, append = self._handle(fh, writes=True), bool(self._open[fh][2] & os.O_APPEND)
        return done(self.vfs.write(*handle, offset, data, self.caller, append=append))

    def ftruncate(self, fh: int, size: int) -> None:
        ino, number = self._handle(fh, writes=True)
        done(self.vfs.setattr(ino, SetAttr(size=size), self.caller, number))

    def fstat(self, fh: int) -> Stat:
        ino, number = self._handle(fh)
        return _of_attr(done(self.vfs.getattr(ino, self.caller, number)))

    def fsync(self, fh: int) -> None:
        trio.run(self.vfs.fsync, *self._handle(fh), False)

    def seek(self, fh: int, offset: int, whence: int) -> int:
        return done(self.vfs.seek(*self._handle(fh), offset, whence))

    def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        done(self.vfs.fallocate(*self._handle(fh, writes=True), mode, offset, length, self.caller))


class _Attr:
    def __init__(self, fields: dict[str, int]) -> None:
        self.__dict__.update(fields)


class RpcDriver:
    """The socket; ``root`` is a directory of the tree."""

    def __init__(self, client: Client, root: str = "") -> None:
        self.client = client
        self.root = os.fsencode(root)

    def _at(self, path: str) -> bytes:
        return self.root + os.fsencode(path)

    def mkdir(self, path: str, perm: int = 0o755) -> None:
        self.client.call("mkdir", path=self._at(path), perm=perm)

    def mknod(self, path: str, mode: int, rdev: int = 0) -> None:
        self.client.call("mknod", path=self._at(path), mode=mode, rdev=rdev)

    def symlink(self, target: str, path: str) -> None:
        self.client.call("symlink", target=os.fsencode(target), path=self._at(path))

    def link(self, old: str, new: str) -> None:
        self.client.call("link", old=self._at(old), new=self._at(new))

    def unlink(self, path: str) -> None:
        self.client.call("unlink", path=self._at(path))

    def rmdir(self, path: str) -> None:
        self.client.call("rmdir", path=self._at(path))

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        self.client.call("rename", old=self._at(old), new=self._at(new), flags=flags)

    def readlink(self, path: str) -> bytes:
        target: bytes = self.client.call("readlink", path=self._at(path))["target"]
        return target

    def listdir(self, path: str) -> list[bytes]:
        return sorted(entry[0] for entry in self.client.call("list", path=self._at(path))["entries"])

    def _stat(self, **params: Any) -> Stat:
        return _of_attr(_Attr(self.client.call("stat", **params)["attr"]))

    def stat(self, path: str) -> Stat:
        return self._stat(path=self._at(path))

    def lstat(self, path: str) -> Stat:
        return self._stat(path=self._at(path), follow=False)

    def chmod(self, path: str, perm: int) -> None:
        self.client.call("chmod", path=self._at(path), perm=perm)

    def chown(self, path: str, uid: int, gid: int) -> None:
        self.client.call("chown", path=self._at(path), uid=uid, gid=gid)

    def utime(self, path: str, atime_ns: int, mtime_ns: int) -> None:
        self.client.call("utime", path=self._at(path), atime_ns=atime_ns, mtime_ns=mtime_ns)

    def truncate(self, path: str, size: int) -> None:
        self.client.call("truncate", path=self._at(path), size=size)

    def getxattr(self, path: str, name: str) -> bytes:
        value: bytes = self.client.call("getxattr", path=self._at(path), name=os.fsencode(name))["value"]
        return value

    def setxattr(self, path: str, name: str, value: bytes, flags: int = 0) -> None:
        self.client.call("setxattr", path=self._at(path), name=os.fsencode(name), value=value, flags=flags)

    def listxattr(self, path: str) -> list[bytes]:
        return sorted(self.client.call("listxattr", path=self._at(path))["names"])

    def removexattr(self, path: str, name: str) -> None:
        self.client.call("removexattr", path=self._at(path), name=os.fsencode(name))

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        return int(self.client.call("open", path=self._at(path), flags=flags, mode=mode)["fh"])

    def close(self, fh: int) -> None:
        self.client.call("close", fh=fh)

    def pread(self, fh: int, length: int, offset: int) -> bytes:
        data: bytes = self.client.call("pread", fh=fh, length=length, offset=offset)["data"]
        return data

    def pwrite(self, fh: int, data: bytes, offset: int) -> int:
        return int(self.client.call("pwrite", fh=fh, data=data, offset=offset)["written"])

    def ftruncate(self, fh: int, size: int) -> None:
        self.client.call("ftruncate", fh=fh, size=size)

    def fstat(self, fh: int) -> Stat:
        return _of_attr(_Attr(self.client.call("fstat", fh=fh)["attr"]))

    def fsync(self, fh: int) -> None:
        self.client.call("fsync", fh=fh)

    def seek(self, fh: int, offset: int, whence: int) -> int:
        return int(self.client.call("seek", fh=fh, offset=offset, whence=whence)["offset"])

    def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        self.client.call("fallocate", fh=fh, mode=mode, offset=offset, length=length)
