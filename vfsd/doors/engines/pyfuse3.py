"""Moves requests between libfuse, through pyfuse3, and the door.

The one module that imports pyfuse3. Its session is a process global: one engine a process. pyfuse3 gives no inode with
a handle, so handles are numbered here; it lets only FUSEError out of a handler without ending the main loop, so every
handler is wrapped. What pyfuse3 does not offer (fallocate, lseek, copy_file_range, O_TMPFILE) the kernel answers in
our place. Must not decide anything the door decides.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, SetattrFields, StatvfsData

from vfsd.core import acl
from vfsd.core.plans import in_group
from vfsd.core.types import Attr, Caller, SetAttr
from vfsd.doors.engines.base import Options
from vfsd.doors.engines.native import transport
from vfsd.doors.engines.native.protocol import BLKSIZE
from vfsd.doors.fuse import FuseDoor, Opened, errno_of
from vfsd.doors.notify import Notifier
from vfsd.doors.tally import Tally, took

log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Pyfuse3Engine:
    """One mount. ``run`` serves it, ``close`` unmounts it (``run`` then returns)."""

    name = "pyfuse3"

    def __init__(self) -> None:
        self._operations: _Operations | None = None
        self._seat: transport.Seat

    @property
    def requests(self) -> int:
        return 0 if self._operations is None else self._operations.requests

    async def run(self, door: FuseDoor, mountpoint: str, options: Options, started: Callable[[], None]) -> None:
        """Mounts, calls ``started`` once the kernel and libfuse agree, serves until the mount is gone.

        Raises OSError when it cannot mount; cancelled, it takes the mount away by force.
        """
        self._operations = _Operations(door, started)
        flags = {"fsname=vfsd", "subtype=vfsd", "default_permissions", "nosuid", "nodev"}
        flags |= {"allow_other"} if options.allow_other else set()
        flags |= {"ro"} if options.read_only else set()
        try:
            pyfuse3.init(self._operations, mountpoint, flags)
        except RuntimeError as e:
            # libfuse has written the reason to stderr and keeps no errno.
            raise OSError(errno.EPERM, f"cannot mount: {e}", mountpoint) from None
        self._seat = transport.seat(mountpoint)
        ended = False
        notifier = Notifier(door.vfs.feed, door, _inval_inode, pyfuse3.invalidate_entry)
        try:
            with notifier:
                await pyfuse3.main()
            ended = True
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_take_down, notifier, self._seat, ended)
            door.closed()

    async def close(self, *, force: bool = False) -> None:
        """Unmounts; EBUSY while something is open below, unless ``force``: then the name goes now, the mount with the
        last who uses it."""
        await trio.to_thread.run_sync(lambda: transport.unmount(self._seat.now(), lazy=force))


def _take_down(notifier: Notifier, seat: transport.Seat, ended: bool) -> None:
    """After the last request: the session and what may be left of the mount. Not on the loop: it may wait."""
    if not ended or _is_dead(seat):
        # First of all: the notifier may be waiting in the kernel for a request that nobody will answer now.
        transport.remove(seat)
    if notifier.join():
        pyfuse3.close(unmount=False)


def _is_dead(seat: transport.Seat) -> bool:
    try:
        return transport.is_dead(seat.now())
    except OSError:  # it is there no more
        return False


def _inval_inode(ino: int, offset: int, length: int) -> None:
    pyfuse3.invalidate_inode(pyfuse3.InodeT(ino), attr_only=offset < 0)


def _guarded(handler: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, Coroutine[Any, Any, _T]]:
    name = handler.__name__

    @functools.wraps(handler)
    async def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        args[0].requests += 1  # type: ignore[attr-defined]
        tally: Tally = args[0]._door.tally  # type: ignore[attr-defined]
        began = time.perf_counter()
        try:
            return await handler(*args, **kwargs)
        except FUSEError as e:
            tally.failed[name, e.errno] += 1
            raise
        except Exception as e:
            code = errno_of(e, f"FUSE request {name}")
            tally.failed[name, code] += 1
            raise FUSEError(code) from None
        finally:
            took(tally.row(name), time.perf_counter() - began)

    return guarded


class _Operations(pyfuse3.Operations):
    """pyfuse3's names and types to the door's."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = True

    def __init__(self, door: FuseDoor, started: Callable[[], None]) -> None:
        super().__init__()
        self._door = door
        self._started = started
        self._handles: dict[int, tuple[int, int, int]] = {}  # ours -> ino, the volume's fh, open flags
        self._openers: dict[int, Caller] = {}  # pyfuse3 does not say who reads and writes
        self._sizes: dict[int, int] = {}  # the size of each file as the kernel was told, or made it by writing
        self._last = 0
        self.requests = 0

    def init(self) -> None:
        self._started()

    # ---- values

    def _attributes(self, attr: Attr, entry_ttl: float) -> EntryAttributes:
        self._sizes[attr.ino] = attr.size
        e = EntryAttributes()
        e.st_ino = attr.ino
        e.generation = 0
        e.entry_timeout = entry_ttl
        e.attr_timeout = self._door.ttl(attr.ino)
        e.st_mode = attr.mode
        e.st_nlink = attr.nlink
        e.st_uid = attr.uid
        e.st_gid = attr.gid
        e.st_rdev = attr.rdev
        e.st_size = attr.size
        e.st_blksize = BLKSIZE
        e.st_blocks = attr.blocks
        e.st_atime_ns = attr.atime_ns
        e.st_mtime_ns = attr.mtime_ns
        e.st_ctime_ns = attr.ctime_ns
        return e

    def _entry(self, parent: int, attr: Attr) -> EntryAttributes:
        return self._attributes(attr, self._door.entry_ttl(parent))

    def _handle(self, ino: int, fh: int, flags: int) -> int:
        self._last += 1
        self._handles[self._last] = (ino, fh, flags)
        return self._last

    def _file(self, ino: int, opened: Opened, flags: int, caller: Caller) -> FileInfo:
        fh = self._handle(ino, opened.fh, flags)
        self._openers[fh] = caller
        return FileInfo(fh=fh, keep_cache=opened.keep_cache, direct_io=opened.direct)

    # ---- names

    @_guarded
    async def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        attr = await self._door.lookup(parent, name, _caller(ctx))
        if attr is not None:
            return self._entry(parent, attr)
        ttl = self._door.entry_ttl(parent)
        if ttl == 0.0:
            raise OSError(errno.ENOENT, "no such name")
        nothing = EntryAttributes()
        nothing.st_ino = 0
        nothing.entry_timeout = ttl
        return nothing

    @_guarded
    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, count in inode_list:
            self._door.forget(ino, count)
            if not self._door.known.lookups(ino):
                self._sizes.pop(ino, None)

    @_guarded
    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        return self._entry(parent, await self._door.mknod(parent, name, mode, rdev, _caller(ctx)))

    @_guarded
    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        return self._entry(parent, await self._door.mkdir(parent, name, mode & 0o7777, _caller(ctx)))

    @_guarded
    async def symlink(self, parent: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        return self._entry(parent, await self._door.symlink(parent, name, target, _caller(ctx)))

    @_guarded
    async def link(self, ino: int, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return self._entry(parent, await self._door.link(ino, parent, name, _caller(ctx)))

    @_guarded
    async def unlink(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        await self._door.unlink(parent, name, _caller(ctx))

    @_guarded
    async def rmdir(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        await self._door.rmdir(parent, name, _caller(ctx))

    @_guarded
    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: RequestContext
    ) -> None:
        await self._door.rename(parent, name, new_parent, new_name, flags, _caller(ctx))

    @_guarded
    async def readlink(self, ino: int, ctx: RequestContext) -> bytes:
        return await self._door.readlink(ino, _caller(ctx))

    # ---- attributes

    @_guarded
    async def getattr(self, ino: int, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(await self._door.getattr(ino, None, _caller(ctx)), 0.0)

    @_guarded
    async def setattr(
        self, ino: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        caller = _caller(ctx)
        chown = fields.update_uid or fields.update_gid
        change = SetAttr(
            attr.st_mode & 0o7777 if fields.update_mode else None,
            attr.st_uid if fields.update_uid else None,
            attr.st_gid if fields.update_gid else None,
            attr.st_size if fields.update_size else None,
            attr.st_atime_ns if fields.update_atime else None,
            attr.st_mtime_ns if fields.update_mtime else None,
            attr.st_ctime_ns if fields.update_ctime else None,
            # libfuse does not negotiate HANDLE_KILLPRIV_V2: for a chown the kernel sends no mode along.
            bool((chown and not fields.update_mode) or (fields.update_size and caller.uid)),
        )
        handle = None if fh is None else self._handles[fh][1]
        return self._attributes(await self._door.setattr(ino, change, handle, caller), 0.0)

    @_guarded
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        found = await self._door.statfs(pyfuse3.ROOT_INODE)
        s = StatvfsData()
        s.f_bsize, s.f_frsize, s.f_namemax = found.bsize, found.frsize, found.namemax
        s.f_blocks, s.f_bfree, s.f_bavail = found.blocks, found.bfree, found.bavail
        s.f_files, s.f_ffree, s.f_favail = found.files, found.ffree, found.favail
        return s

    @_guarded
    async def getxattr(self, ino: int, name: bytes, ctx: RequestContext) -> bytes:
        return await self._door.getxattr(ino, name, _caller(ctx))

    @_guarded
    async def setxattr(self, ino: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        # pyfuse3 hands on no flags: XATTR_CREATE and XATTR_REPLACE are not told apart from neither.
        caller = _caller(ctx)
        clear = name in acl.NAMES and not in_group((await self._door.getattr(ino, None, caller)).gid, caller)
        await self._door.setxattr(ino, name, value, 0, caller, clear_sgid=clear)

    @_guarded
    async def listxattr(self, ino: int, ctx: RequestContext) -> list[bytes]:
        return await self._door.listxattr(ino, _caller(ctx))

    @_guarded
    async def removexattr(self, ino: int, name: bytes, ctx: RequestContext) -> None:
        await self._door.removexattr(ino, name, _caller(ctx))

    # ---- files

    @_guarded
    async def open(self, ino: int, flags: int, ctx: RequestContext) -> FileInfo:
        caller = _caller(ctx)
        return self._file(ino, await self._door.open(ino, flags, caller, clear_suid=caller.uid != 0), flags, caller)

    @_guarded
    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        caller = _caller(ctx)
        attr, opened = await self._door.create(parent, name, mode, flags, caller)
        return self._file(attr.ino, opened, flags, caller), self._entry(parent, attr)

    @_guarded
    async def read(self, fh: int, offset: int, size: int) -> Any:
        ino, handle, _ = self._handles[fh]
        return await self._door.read(ino, handle, offset, size, self._openers[fh])

    @_guarded
    async def write(self, fh: int, offset: int, data: bytes) -> int:
        ino, handle, flags = self._handles[fh]
        # pyfuse3 does not say that the kernel writes back a mapped page with a handle it only guessed. But an append
        # begins at the end of the file as the kernel knows it, and a mapped page before.
        size = self._sizes.get(ino, 0)
        from_cache = bool(flags & os.O_APPEND) and offset < size
        self._sizes[ino] = max(size, offset + len(data))
        return await self._door.write(ino, handle, offset, data, flags, self._openers[fh], from_cache=from_cache)

    @_guarded
    async def flush(self, fh: int) -> None:
        ino, handle, _ = self._handles[fh]
        if self._door.needs_flush is not None and self._door.needs_flush(ino):
            await self._door.flush(ino, handle, _NOBODY)

    @_guarded
    async def release(self, fh: int) -> None:
        ino, handle, _ = self._handles.pop(fh)
        del self._openers[fh]
        await self._door.release(ino, handle)

    @_guarded
    async def fsync(self, fh: int, datasync: bool) -> None:
        ino, handle, _ = self._handles[fh]
        await self._door.fsync(ino, handle, datasync)

    # ---- directories

    @_guarded
    async def opendir(self, ino: int, ctx: RequestContext) -> int:
        return self._handle(ino, (await self._door.opendir(ino, _caller(ctx))).fh, 0)

    @_guarded
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        ino, handle, _ = self._handles[fh]
        ttl = self._door.entry_ttl(ino)
        for name, attr, following in await self._door.readdir(ino, handle, start_id, _NOBODY):
            if not pyfuse3.readdir_reply(token, name, self._attributes(attr, ttl), following):
                return
            if following > 2:  # the kernel takes no lookup of "." and ".."
                self._door.listed(attr)

    @_guarded
    async def releasedir(self, fh: int) -> None:
        ino, handle, _ = self._handles.pop(fh)
        await self._door.releasedir(ino, handle)

    @_guarded
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        ino, handle, _ = self._handles[fh]
        await self._door.fsyncdir(ino, handle, datasync)


_NOBODY = Caller(0, 0)
"""pyfuse3 does not say who reads, writes or closes; the kernel has checked at open."""


def _caller(ctx: RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid)
