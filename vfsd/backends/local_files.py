"""The contents and attributes of a ``local`` volume's files: opens, reads, writes, xattrs, sync.

Owns the open handles. Must not know names or directories (``local.py``) nor how an inode is reached
(``local_inodes.py``). The host's errnos pass through untouched. A method's ``fh`` may be 0: then the file is opened for
that one call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import trio
import xxhash

from vfsd.backends import local_sys
from vfsd.backends.local_inodes import Inode, Inodes, proc
from vfsd.core.changes import Change, Put, Reserve, Write, Xattr, Zero
from vfsd.core.plans import fail, in_group, without_suid
from vfsd.core.types import NODE_MASK, ROOT_NODE, Caller, SetAttr, StatFs

_OPEN_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_TRUNC | os.O_SYNC | os.O_DSYNC
"""What of open(2)'s flags reaches the host; O_DIRECT would ask for aligned buffers, O_NOATIME for ownership."""

_COPY_PIECE = 16 << 20
"""Bytes one copy_range moves at most, so that the loop is not held for long."""

Data = bytes | bytearray | memoryview


class Publisher(Protocol):
    """What this volume needs of the feed."""

    def wanted(self, caller: Caller) -> bool: ...
    def publish(self, base: int, caller: Caller, op: str, changes: Sequence[Change]) -> int: ...


class HostAttr:
    """core.types.Attr of a host file, as it was when asked."""

    __slots__ = (
        "atime_ns", "blocks", "ctime_ns", "gid", "ino", "mode", "mtime_ns", "nlink", "rdev", "size", "uid",
    )  # fmt: skip

    def __init__(self, ino: int, st: os.stat_result) -> None:
        self.ino = ino
        self.mode = st.st_mode
        self.nlink = st.st_nlink
        self.uid = st.st_uid
        self.gid = st.st_gid
        self.rdev = st.st_rdev
        self.size = st.st_size
        self.blocks = st.st_blocks
        self.atime_ns = st.st_atime_ns
        self.mtime_ns = st.st_mtime_ns
        self.ctime_ns = st.st_ctime_ns


class Open:
    """One open: of a file with descriptor ``fd``, or (``fd`` -1) of a directory, whose names ``local.py`` keeps."""

    __slots__ = ("appends", "fd", "inode", "writes")

    def __init__(self, inode: Inode, fd: int, flags: int = os.O_RDONLY) -> None:
        self.inode = inode
        self.fd = fd
        self.writes = flags & os.O_ACCMODE != os.O_RDONLY
        self.appends = bool(flags & os.O_APPEND)

    def anywhere(self) -> int:
        """The descriptor, which from now on writes where it is told to, though it was opened with O_APPEND. EPERM."""
        if self.appends:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_APPEND)
            self.appends = False
        return self.fd


def put(node: int, st: os.stat_result) -> Put:
    """The change that says a node has these attributes."""
    return Put(
        node,
        st.st_mode,
        st.st_nlink,
        st.st_uid,
        st.st_gid,
        st.st_rdev,
        st.st_size,
        st.st_atime_ns,
        st.st_mtime_ns,
        st.st_ctime_ns,
    )


class LocalFiles:
    """The half of LocalVolume that works on inodes; see there."""

    def __init__(self, base: int, root: str | bytes | os.PathLike[str], feed: Publisher, *, read_only: bool) -> None:
        self.base = base
        self.read_only = read_only
        self.root_ino = base | ROOT_NODE
        self._feed = feed
        self._inodes = Inodes(os.fsencode(root))
        self._opens: dict[int, Open] = {}
        self._last_fh = 0
        self._euid = os.geteuid()

    # --- shared ---------------------------------------------------------------------------------------------------

    def _inode(self, ino: int) -> Inode:
        inode = self._inodes.by_node.get(ino & NODE_MASK)
        if inode is None:
            raise fail(errno.ESTALE)
        return inode

    def _may_write(self) -> None:
        if self.read_only:
            raise fail(errno.EROFS)

    def _attr(self, inode: Inode, st: os.stat_result) -> HostAttr:
        return HostAttr(self.base | inode.node, st)

    def _add(self, opened: Open) -> int:
        self._last_fh = fh = self._last_fh + 1
        self._opens[fh] = opened
        if opened.fd >= 0:
            opened.inode.handles.append(opened.fd)
        return fh

    def _open(self, fh: int) -> Open:
        opened = self._opens.get(fh)
        if opened is None:
            raise fail(errno.EBADF)
        return opened

    @contextmanager
    def _opened(self, ino: int, fh: int, flags: int) -> Iterator[int]:
        """The descriptor of ``fh``, or without one a fresh one for a moment."""
        if fh:
            yield self._open(fh).fd
            return
        fd = self._inodes.open_file(self._inode(ino), flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def _tell(self, caller: Caller, op: str, inode: Inode, fd: int, *first: Change) -> None:
        """Publish that ``inode`` (open as ``fd``) changed, after ``first``."""
        if self._feed.wanted(caller):
            self._feed.publish(self.base, caller, op, [*first, put(inode.node, os.fstat(fd))])

    # --- attributes -----------------------------------------------------------------------------------------------

    def getattr(self, ino: int, fh: int = 0) -> HostAttr:
        """ESTALE when the host has removed the file and nobody holds it."""
        inode = self._inode(ino)
        return HostAttr(self.base | inode.node, self._inodes.stat(inode))

    def setattr(self, ino: int, to: SetAttr, caller: Caller, fh: int = 0) -> HostAttr:
        """truncate, chown, chmod and utimensat, in the order in which none undoes another; ctime is the host's."""
        self._may_write()
        inode = self._inode(ino)
        fd = self._inodes.fd(inode)
        path = proc(fd)
        tell: list[Change] = []
        if to.size is not None:
            if inode.fmt not in (stat.S_IFREG, stat.S_IFDIR):
                raise fail(errno.EINVAL, inode.name)
            opened = self._opens.get(fh)
            if opened is not None and opened.writes:  # open(2) with O_RDONLY|O_TRUNC comes here too
                os.ftruncate(opened.fd, to.size)
            else:
                with self._opened(ino, 0, os.O_WRONLY) as writable:
                    os.ftruncate(writable, to.size)
            tell.append(Zero(inode.node, to.size, None))
        member = to.clear_suid and in_group(os.fstat(fd).st_gid, caller)
        if to.uid is not None or to.gid is not None:
            os.chown(path, -1 if to.uid is None else to.uid, -1 if to.gid is None else to.gid)
        if to.perm is not None:
            os.chmod(path, to.perm & 0o7777)
        elif to.clear_suid:
            self._clear_suid(fd, member)
        if to.atime_ns is not None or to.mtime_ns is not None:
            local_sys.set_times(path, to.atime_ns, to.mtime_ns)
        st = os.fstat(fd)
        if self._feed.wanted(caller):
            self._feed.publish(self.base, caller, "setattr", [*tell, put(inode.node, st)])
        return self._attr(inode, st)

    def _clear_suid(self, fd: int, member: bool) -> None:
        """The host does this for a write of an ordinary user, but not for one of root, which the daemon may be."""
        mode = os.fstat(fd).st_mode
        if without_suid(mode, member) != mode:
            os.chmod(proc(fd), without_suid(mode, member) & 0o7777)

    def statfs(self, ino: int) -> StatFs:
        """The host's numbers, of the file system this file is on."""
        v = os.fstatvfs(self._inodes.fd(self._inode(ino)))
        return StatFs(
            v.f_bsize, v.f_frsize, v.f_blocks, v.f_bfree, v.f_bavail, v.f_files, v.f_ffree, v.f_favail, v.f_namemax
        )

    # --- opens ----------------------------------------------------------------------------------------------------

    def open(self, ino: int, flags: int, caller: Caller) -> int:
        """O_TRUNC is honoured. EISDIR for writing to a directory, ELOOP for a symlink, ENXIO for a FIFO or device."""
        inode = self._inode(ino)
        writes = flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC
        if writes and self.read_only:
            raise fail(errno.EROFS, inode.name)
        if inode.fmt == stat.S_IFDIR and not writes:
            return self._add(Open(inode, -1))
        fd = self._inodes.open_file(inode, flags & _OPEN_FLAGS)
        if flags & os.O_TRUNC:
            self._tell(caller, "setattr", inode, fd, Zero(inode.node, 0, None))
        return self._add(Open(inode, fd, flags))

    def flush(self, ino: int, fh: int, caller: Caller) -> None:
        """Let the host report at this close what it reports at close (NFS: a failed write)."""
        opened = self._opens.get(fh)
        if opened is not None and opened.fd >= 0:
            os.close(os.dup(opened.fd))

    def release(self, ino: int, fh: int) -> None:
        """EBADF."""
        opened = self._opens.pop(fh, None)
        if opened is None:
            raise fail(errno.EBADF)
        inode = opened.inode
        if opened.fd >= 0:
            inode.handles.remove(opened.fd)
            os.close(opened.fd)
        self._let_go(inode)

    def _let_go(self, inode: Inode) -> None:
        if inode.name is None and not inode.lookups and not inode.handles:
            self._inodes.drop(inode)

    def remember(self, ino: int, n: int = 1) -> None:
        """Add to the kernel's lookup count."""
        self._inode(ino).lookups += n

    def forget(self, ino: int, n: int) -> None:
        """Take from the kernel's lookup count."""
        inode = self._inodes.by_node.get(ino & NODE_MASK)
        if inode is not None:
            inode.lookups = max(0, inode.lookups - n)
            self._let_go(inode)

    # --- contents -------------------------------------------------------------------------------------------------

    def read(self, ino: int, fh: int, offset: int, length: int) -> bytes:
        """Bytes up to the end of the file; EISDIR."""
        opened = self._opens.get(fh)
        if opened is not None and opened.fd >= 0:
            return os.pread(opened.fd, length, offset)
        with self._opened(ino, 0, os.O_RDONLY) as fd:
            return os.pread(fd, length, offset)

    def write(
        self,
        ino: int,
        fh: int,
        offset: int,
        data: Data,
        caller: Caller,
        append: bool = False,
        clear_suid: bool = False,
    ) -> int:
        """pwrite(2), or at the end for ``append``; fewer bytes when the host stops short."""
        if self.read_only:
            raise fail(errno.EROFS)
        opened = self._opens.get(fh)
        if opened is not None and opened.fd >= 0:
            fd = opened.fd if append else opened.anywhere()
            return self._write(fd, opened.inode, offset, data, caller, append, clear_suid)
        with self._opened(ino, 0, os.O_WRONLY) as fd:
            return self._write(fd, self._inode(ino), offset, data, caller, append, clear_suid)

    def _write(
        self, fd: int, inode: Inode, offset: int, data: Data, caller: Caller, append: bool, clear_suid: bool
    ) -> int:
        if append:
            done = write_all(fd, data, None)
        else:
            done = os.pwrite(fd, data, offset)
            if done < len(data):
                done += write_all(fd, memoryview(data)[done:], offset + done, begun=True)
        if clear_suid:
            self._clear_suid(fd, in_group(os.fstat(fd).st_gid, caller))
        if self._feed.wanted(caller):
            st = os.fstat(fd)
            at = st.st_size - done if append else offset
            self._feed.publish(self.base, caller, "write", [Write(inode.node, at, data[:done]), put(inode.node, st)])
        return done

    def replace(self, ino: int, data: bytes, caller: Caller, expect: int | None = None) -> HostAttr:
        """The whole content anew, in place: keeps ino, mode, links. ESTALE when xxh3_64 of it is not ``expect``."""
        self._may_write()
        inode = self._inode(ino)
        with self._opened(ino, 0, os.O_WRONLY if expect is None else os.O_RDWR) as fd:
            st = os.fstat(fd)
            if expect is not None and _digest(fd) != expect:
                raise fail(errno.ESTALE)
            if len(data) > st.st_blocks * 512:
                # A full disk must say so before the old content is touched.
                try:
                    local_sys.fallocate(fd, local_sys.FALLOC_KEEP_SIZE, 0, len(data))
                except OSError as exc:
                    if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                        raise
            write_all(fd, data, 0, partly=False)
            os.ftruncate(fd, len(data))
            if caller.uid:
                self._clear_suid(fd, in_group(st.st_gid, caller))
            self._tell(caller, "write", inode, fd, Zero(inode.node, 0, None), Write(inode.node, 0, data))
            return self._attr(inode, os.fstat(fd))

    def fallocate(self, ino: int, fh: int, mode: int, offset: int, length: int, caller: Caller) -> None:
        """fallocate(2)."""
        self._may_write()
        inode = self._inode(ino)
        with self._opened(ino, fh, os.O_WRONLY) as fd:
            local_sys.fallocate(fd, mode, offset, length)
            if mode & ~local_sys.FALLOC_KEEP_SIZE:
                change: Change = Zero(inode.node, offset, None)
            else:
                change = Reserve(inode.node, offset, offset + length)
            self._tell(caller, "fallocate", inode, fd, change)

    def seek(self, ino: int, fh: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE (ENXIO with none left); EINVAL for other whence."""
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise fail(errno.EINVAL)
        with self._opened(ino, fh, os.O_RDONLY) as fd:
            return os.lseek(fd, offset, whence)

    def copy_range(
        self, ino_in: int, fh_in: int, off_in: int, ino_out: int, fh_out: int, off_out: int, length: int, caller: Caller
    ) -> int:
        """copy_file_range(2) within the volume, reflinked where the host can: bytes copied, 0 at the source's end."""
        self._may_write()
        inode = self._inode(ino_out)
        with self._opened(ino_in, fh_in, os.O_RDONLY) as source, self._opened(ino_out, fh_out, os.O_WRONLY) as target:
            if fh_out:
                self._open(fh_out).anywhere()
            done = os.copy_file_range(source, target, min(length, _COPY_PIECE), off_in, off_out)
            if done:
                self._tell(caller, "write", inode, target, Write(inode.node, off_out, b""))
        return done

    # --- extended attributes --------------------------------------------------------------------------------------

    def getxattr(self, ino: int, name: bytes) -> bytes:
        """ENODATA."""
        return os.getxattr(proc(self._inodes.fd(self._inode(ino))), name)

    def acl(self, ino: int, name: bytes) -> bytes | None:
        """The host's access control list, None when there is none."""
        try:
            return os.getxattr(proc(self._inodes.fd(self._inode(ino))), name)
        except OSError as exc:
            if exc.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                return None
            raise

    def listxattr(self, ino: int) -> list[bytes]:
        """The names the host shows this daemon."""
        return [os.fsencode(name) for name in os.listxattr(proc(self._inodes.fd(self._inode(ino))))]

    def setxattr(self, ino: int, name: bytes, value: bytes, flags: int, caller: Caller) -> None:
        """setxattr(2)'s errnos; EPERM for an ordinary caller of a tool outside ``user.``."""
        self._change_xattr(ino, name, value, caller, lambda path: os.setxattr(path, name, value, flags))

    def removexattr(self, ino: int, name: bytes, caller: Caller) -> None:
        """ENODATA."""
        self._change_xattr(ino, name, None, caller, lambda path: os.removexattr(path, name))

    def _change_xattr(
        self, ino: int, name: bytes, value: bytes | None, caller: Caller, change: Callable[[bytes], None]
    ) -> None:
        self._may_write()
        # For a caller at the mount the kernel has judged; a root daemon must not lend its capabilities to others.
        if caller.uid and caller.door != "fuse" and not name.startswith(b"user."):
            raise fail(errno.EPERM, name)
        inode = self._inode(ino)
        fd = self._inodes.fd(inode)
        change(proc(fd))
        self._tell(
            caller, "setxattr" if value is not None else "removexattr", inode, fd, Xattr(inode.node, name, value)
        )

    # --- durability -----------------------------------------------------------------------------------------------

    async def fsync(self, ino: int, fh: int, datasync: bool) -> None:
        """The file's content (or, for a directory, its entries) survives power loss; EIO, ENOSPC."""
        opened = self._opens.get(fh)
        inode = opened.inode if opened is not None else self._inode(ino)
        if opened is not None and opened.fd >= 0:
            fd = os.dup(opened.fd)
        elif inode.fmt == stat.S_IFDIR:
            fd = os.open(proc(self._inodes.dir_fd(inode)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            fd = self._inodes.open_file(inode, os.O_RDONLY)
        await _in_thread(os.fdatasync if datasync else os.fsync, fd)

    fsyncdir = fsync

    async def syncfs(self, ino: int = 0) -> None:
        """syncfs(2) of the root's file system, to which a read-only volume has nothing to add."""
        if self.read_only:
            return
        await _in_thread(local_sys.syncfs, os.open(proc(self._inodes.root_fd), os.O_RDONLY | os.O_CLOEXEC))

    async def maintain(self) -> None:
        """Nothing to do: the host looks after itself."""

    def counters(self) -> dict[str, int]:
        """For status."""
        return {"open": len(self._opens), **self._inodes.counters()}

    def close(self) -> None:
        """Close every descriptor."""
        for opened in self._opens.values():
            if opened.fd >= 0:
                os.close(opened.fd)
        self._opens.clear()
        self._inodes.close()


async def _in_thread(call: Callable[[int], None], fd: int) -> None:
    """Run a slow call on a descriptor of its own, and close that, whatever happens to the waiting task."""

    def run() -> None:
        try:
            call(fd)
        finally:
            os.close(fd)

    await trio.to_thread.run_sync(run)


def write_all(fd: int, data: Data, offset: int | None, *, partly: bool = True, begun: bool = False) -> int:
    """Write on until all is written; ``offset`` None: at the end.

    ``partly``: as write(2), a failure after some bytes (of this call, or before it: ``begun``) gives their count.
    """
    rest = memoryview(data)
    done = 0
    while done < len(rest):
        try:
            if offset is None:
                done += os.pwritev(fd, [rest[done:]], 0, os.RWF_APPEND)
            else:
                done += os.pwrite(fd, rest[done:], offset + done)
        except OSError:
            if partly and (done or begun):
                break
            raise
    return done


def _digest(fd: int) -> int:
    digest = xxhash.xxh3_64()
    offset = 0
    while piece := os.pread(fd, 1 << 20, offset):
        digest.update(piece)
        offset += len(piece)
    return digest.intdigest()
