"""Moves requests between /dev/fuse and the door.

The read loop takes requests until the device is empty. A request for an inline inode is answered on the spot, by
awaiting its handler in the loop; others get a task of their own, which an INTERRUPT cancels. Invariants: every request
but FORGET and INTERRUPT is answered exactly once; no exception of a handler ends the loop; the request buffer is
reused, so a request that is spawned takes a copy.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from itertools import islice

import trio

from vfsd.core.types import Attr, Caller
from vfsd.doors.engines.base import Options
from vfsd.doors.engines.native import notifications, transport
from vfsd.doors.engines.native import protocol as p
from vfsd.doors.engines.native.waiter import Waiter
from vfsd.doors.fuse import FuseDoor, Opened, errno_of
from vfsd.doors.notify import Notifier
from vfsd.doors.tally import Row, Tally, took

log = logging.getLogger(__name__)

Payload = bytes | bytearray | memoryview
Handler = Callable[[int, memoryview, Caller], Awaitable[Payload]]

READ_AHEAD = 512
"""KiB read ahead (where we may set it): cold sequential reads of 256 MiB at 1.5 times the speed of the usual 128."""

_SYNCS = frozenset((p.FSYNC, p.FSYNCDIR, p.SYNCFS))
"""What may suspend on an inline volume."""
_SMALL = 4096
_LISTED = 128
"""Entries of one listing's reply, whatever room the kernel has for more: two milliseconds in which nobody else is
answered."""


class NativeEngine:
    """One mount. ``run`` serves it, ``close`` unmounts it (``run`` then returns)."""

    name = "native"

    def __init__(self) -> None:
        self.settled: p.Negotiated | None = None
        self.requests = 0
        self._fd = -1
        self._mountpoint = ""
        self._seat: transport.Seat
        self._handlers: dict[int, Handler] = {}
        self._tasks: dict[int, trio.CancelScope] = {}
        self._flush = False
        self._tally = Tally()
        self._names: dict[int, str] = {}
        self._rows: dict[int, Row] = {}

    async def run(self, door: FuseDoor, mountpoint: str, options: Options, started: Callable[[], None]) -> None:
        """Mounts, calls ``started`` once the kernel and we agree on the protocol, serves until the mount is gone.

        Raises OSError when it cannot mount; cancelled, it takes the mount away by force.
        """
        self._door = door
        self._mountpoint = mountpoint
        self._started = started
        self._flush = door.hears_opens and door.needs_flush is not None
        self._handlers = self._table()
        self._tally = door.tally
        self._names = {code: _name(handler) for code, handler in self._handlers.items()}
        self._rows = {code: door.tally.row(name) for code, name in self._names.items()}
        self._fd = await trio.to_thread.run_sync(
            lambda: transport.mount(
                mountpoint,
                allow_other=options.allow_other,
                read_only=options.read_only,
                max_read=p.MAX_TRANSFER,
            )
        )
        self._seat = transport.seat(mountpoint)
        unmounted = False
        waiter = Waiter(self._fd)
        await waiter.start()
        notifier = Notifier(door.vfs.feed, door, self.inval_inode, self.inval_entry, self.grow)
        try:
            async with trio.open_nursery() as nursery:
                with notifier:
                    unmounted = await self._serve(nursery, waiter)
                nursery.cancel_scope.cancel()
        finally:
            waiter.close()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._take_down, notifier, unmounted)
            door.closed()

    def _take_down(self, notifier: Notifier, unmounted: bool) -> None:
        """After the last request: the descriptor and what may be left of the mount. Not on the loop: it may wait."""
        if not unmounted:
            # First of all: the notifier may be waiting in the kernel for a request that nobody will answer now, and
            # while it does, closing the descriptor ends nothing.
            transport.remove(self._seat)
        if notifier.join():
            os.close(self._fd)
        self._fd = -1

    async def close(self, *, force: bool = False) -> None:
        """Unmounts; EBUSY while something is open below, unless ``force``: then the name goes now, the mount with the
        last who uses it."""
        # On a thread: umount may write back mapped pages, which this loop must answer.
        await trio.to_thread.run_sync(lambda: transport.unmount(self._seat.now(), lazy=force))

    # ---- notifications, on the notifier's thread

    def inval_inode(self, ino: int, offset: int, length: int) -> None:
        os.write(self._fd, notifications.inval_inode(ino, offset, length))

    def inval_entry(self, parent: int, name: bytes) -> None:
        os.write(self._fd, notifications.inval_entry(parent, name))

    def grow(self, ino: int, size: int, last: bytes) -> None:
        os.write(self._fd, notifications.store(ino, size - len(last), last))

    # ---- the read loop

    async def _serve(self, nursery: trio.Nursery, waiter: Waiter) -> bool:
        """Until the mount is gone. True: unmounted; False: the connection was cut and the mount is still there."""
        fd, handlers, rows, now = self._fd, self._handlers, self._rows, time.perf_counter
        has_request, readv, parse, is_inline = waiter.has_request, os.readv, p.parse_header, self._door.is_inline
        sync_waits = self._door.sync_waits
        buffer = bytearray(p.BUFFER_SIZE)
        view, buffers, body_at = memoryview(buffer), [buffer], p.HEADER_SIZE
        caller = Caller(0, 0)
        credentials = (0, 0, 0)
        while True:
            if not has_request():
                await waiter.turn()
                continue
            try:
                size = readv(fd, buffers)
            except OSError as e:
                if e.errno in (errno.ENODEV, errno.ECONNABORTED):
                    return e.errno == errno.ENODEV
                if e.errno in (errno.EAGAIN, errno.ENOENT, errno.EINTR):  # it was taken back before we had it
                    continue
                raise
            self.requests += 1
            try:
                opcode, unique, ino, uid, gid, pid, end = parse(view, size)
            except p.ProtocolError as e:
                log.error("the kernel sent %s", e)
                if size >= body_at:
                    self._reply(p.IN_HEADER.unpack_from(view)[2], errno.EIO)
                continue
            handler = handlers.get(opcode)
            if handler is None:
                self._without_handler(opcode, unique, ino, view[body_at:end])
                continue
            began = now()
            if (uid, gid, pid) != credentials:
                credentials = (uid, gid, pid)
                caller = Caller(uid, gid, pid)
            try:
                if is_inline(ino) and (opcode not in _SYNCS or not sync_waits(ino)):
                    payload = await handler(ino, view[body_at:end], caller)
                else:
                    body = memoryview(bytes(view[body_at:end]))
                    nursery.start_soon(self._answer, handler, opcode, unique, ino, body, caller, began)
                    continue
            except Exception as e:
                self._reply(unique, self._failed(e, opcode, ino))
            else:
                self._reply(unique, 0, payload)
            took(rows[opcode], now() - began)

    async def _answer(
        self, handler: Handler, opcode: int, unique: int, ino: int, body: memoryview, caller: Caller, began: float
    ) -> None:
        """A request that may have to wait, in its own task."""
        with trio.CancelScope() as scope:
            self._tasks[unique] = scope
            try:
                payload = await handler(ino, body, caller)
            except Exception as e:
                self._reply(unique, self._failed(e, opcode, ino))
            else:
                self._reply(unique, 0, payload)
            finally:
                del self._tasks[unique]
        if scope.cancelled_caught:
            self._tally.failed[self._names[opcode], errno.EINTR] += 1
            self._reply(unique, errno.EINTR)
        took(self._rows[opcode], time.perf_counter() - began)

    def _failed(self, exc: Exception, opcode: int, ino: int) -> int:
        code = errno_of(exc, f"FUSE request {opcode} for ino {ino}")
        if opcode in self._names:
            self._tally.failed[self._names[opcode], code] += 1
        return code

    def _reply(self, unique: int, error: int = 0, payload: Payload = b"") -> None:
        size = len(payload)
        try:
            if size <= _SMALL:
                os.write(self._fd, p.reply(unique, error, size) + payload)
            else:
                os.writev(self._fd, (p.reply(unique, error, size), payload))
        except OSError as e:
            # ENOENT: the request is no more (aborted). ENODEV: neither is the mount.
            if e.errno not in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED):
                log.error("the kernel refused a reply of %d bytes: %s", size, e)
                if e.errno == errno.EINVAL and not error:
                    self._reply(unique, errno.EIO)

    def _without_handler(self, opcode: int, unique: int, ino: int, body: memoryview) -> None:
        """Requests with no handler: those about requests, and those we do not know."""
        if opcode in (p.FORGET, p.BATCH_FORGET):
            try:
                for forgotten, count in [(ino, p.forget(body))] if opcode == p.FORGET else p.batch_forget(body):
                    self._door.forget(forgotten, count)
            except Exception as e:  # there is nobody to answer, and the mount must live
                self._failed(e, opcode, ino)
        elif opcode == p.INTERRUPT:
            # One that is not found was answered already.
            scope = self._tasks.get(p.forget(body))
            if scope is not None:
                scope.cancel()
        elif opcode == p.INIT:
            self._init(unique, body)
        elif opcode == p.DESTROY:
            self._reply(unique)
        elif opcode == p.IOCTL:
            self._reply(unique, errno.ENOTTY)
        else:
            # The kernel remembers ENOSYS for most calls and asks no more, or falls back (ACCESS, POLL, FLUSH).
            self._reply(unique, errno.ENOSYS)

    def _init(self, unique: int, body: memoryview) -> None:
        try:
            self.settled, payload = p.negotiate(body, self._wanted())
        except p.VersionError as e:
            self._reply(unique, errno.EPROTO)
            raise OSError(errno.EPROTO, str(e), self._mountpoint) from None
        self._reply(unique, 0, payload)
        if self.settled is not None:
            log.info("FUSE 7.%d, flags %#x", self.settled.minor, self.settled.flags)
            transport.read_ahead(self._mountpoint, READ_AHEAD)
            self._started()

    def _wanted(self) -> int:
        if not self._door.hears_opens:
            return p.WANTED_UNHEARD
        return p.WANTED_SHARED if self._door.shared else p.WANTED

    # ---- one method an opcode

    def _table(self) -> dict[int, Handler]:
        table: dict[int, Handler] = {
            p.LOOKUP: self._lookup, p.GETATTR: self._getattr, p.SETATTR: self._setattr, p.READLINK: self._readlink,
            p.SYMLINK: self._symlink, p.MKNOD: self._mknod, p.MKDIR: self._mkdir, p.UNLINK: self._unlink,
            p.RMDIR: self._rmdir, p.RENAME: self._rename, p.RENAME2: self._rename2, p.LINK: self._link,
            p.OPEN: self._open, p.READ: self._read, p.WRITE: self._write, p.STATFS: self._statfs,
            p.RELEASE: self._release, p.FSYNC: self._fsync, p.SETXATTR: self._setxattr, p.GETXATTR: self._getxattr,
            p.LISTXATTR: self._listxattr, p.REMOVEXATTR: self._removexattr, p.OPENDIR: self._opendir,
            p.READDIR: self._readdir, p.READDIRPLUS: self._readdirplus, p.RELEASEDIR: self._releasedir,
            p.FSYNCDIR: self._fsyncdir, p.CREATE: self._create, p.TMPFILE: self._tmpfile,
            p.FALLOCATE: self._fallocate, p.LSEEK: self._lseek, p.COPY_FILE_RANGE: self._copy_file_range,
            p.COPY_FILE_RANGE_64: self._copy_file_range_64, p.SYNCFS: self._syncfs, p.STATX: self._statx,
        }  # fmt: skip
        if not self._door.hears_opens:
            del table[p.OPEN]  # answered ENOSYS, which the kernel remembers for the whole connection
        if self._flush:
            # Without it FLUSH is answered ENOSYS, which the kernel remembers for the whole connection.
            table[p.FLUSH] = self._do_flush
        return table

    def _entry(self, parent: int, attr: Attr) -> bytes:
        return p.entry(attr, self._door.entry_ttl(parent), self._door.ttl(attr.ino))

    async def _lookup(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        attr = await self._door.lookup(ino, p.name_of(body), caller)
        if attr is not None:
            return self._entry(ino, attr)
        ttl = self._door.entry_ttl(ino)
        if ttl == 0.0:
            raise OSError(errno.ENOENT, "no such name")
        return p.negative(ttl)

    async def _getattr(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        return p.attr(await self._door.getattr(ino, p.getattr_in(body), caller), self._door.ttl(ino))

    async def _statx(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        attr, birth_ns = await self._door.statx(ino, p.getattr_in(body), caller)
        return p.statx(attr, birth_ns, self._door.ttl(ino))

    async def _setattr(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        change, fh = p.setattr_in(body, time.time_ns)
        return p.attr(await self._door.setattr(ino, change, fh, caller), self._door.ttl(ino))

    async def _readlink(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        return await self._door.readlink(ino, caller)

    async def _symlink(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        name, target = p.symlink(body)
        return self._entry(ino, await self._door.symlink(ino, name, target, caller))

    async def _mknod(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        mode, rdev, umask, name = p.mknod(body)
        return self._entry(ino, await self._door.mknod(ino, name, mode, rdev, caller, umask))

    async def _mkdir(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        perm, umask, name = p.mkdir(body)
        return self._entry(ino, await self._door.mkdir(ino, name, perm, caller, umask))

    async def _unlink(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        await self._door.unlink(ino, p.name_of(body), caller)
        return b""

    async def _rmdir(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        await self._door.rmdir(ino, p.name_of(body), caller)
        return b""

    async def _rename(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        new_parent, name, new_name = p.rename(body)
        await self._door.rename(ino, name, new_parent, new_name, 0, caller)
        return b""

    async def _rename2(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        new_parent, flags, name, new_name = p.rename2(body)
        await self._door.rename(ino, name, new_parent, new_name, flags, caller)
        return b""

    async def _link(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        existing, name = p.link(body)
        return self._entry(ino, await self._door.link(existing, ino, name, caller))

    async def _open(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        flags, clear_suid = p.open_in(body)
        opened = await self._door.open(ino, flags, caller, clear_suid=clear_suid)
        return p.opened(opened.fh, _open_flags(opened))

    async def _create(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        flags, mode, umask, name = p.create(body)
        attr, opened = await self._door.create(ino, name, mode, flags, caller, umask)
        return self._entry(ino, attr) + p.opened(opened.fh, _open_flags(opened))

    async def _tmpfile(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        flags, mode, umask = p.tmpfile(body)
        attr, opened = await self._door.tmpfile(ino, mode, flags, caller, umask)
        return self._entry(ino, attr) + p.opened(opened.fh, _open_flags(opened))

    async def _read(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh, offset, length = p.read_in(body)
        return await self._door.read(ino, fh, offset, length, caller)

    async def _write(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh, offset, write_flags, flags, data = p.write_in(body)
        size = await self._door.write(
            ino,
            fh,
            offset,
            data,
            flags,
            caller,
            clear_suid=bool(write_flags & p.WRITE_KILL_SUIDGID),
            from_cache=bool(write_flags & p.WRITE_CACHE),
        )
        return p.written(size)

    async def _statfs(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        return p.statfs(await self._door.statfs(ino))

    async def _do_flush(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        await self._door.flush(ino, p.handle(body)[0], caller)
        return b""

    async def _release(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        await self._door.release(ino, p.handle(body)[0])
        return b""

    async def _fsync(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh, flags = p.handle(body)
        await self._door.fsync(ino, fh, bool(flags & p.FSYNC_FDATASYNC))
        return b""

    async def _setxattr(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        assert self.settled is not None
        flags, name, value, clear_sgid = p.setxattr(body, bool(self.settled.flags & p.SETXATTR_EXT))
        await self._door.setxattr(ino, name, bytes(value), flags, caller, clear_sgid=clear_sgid)
        return b""

    async def _getxattr(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        room, name = p.getxattr(body)
        return _sized(await self._door.getxattr(ino, name, caller), room)

    async def _listxattr(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        return _sized(p.names(await self._door.listxattr(ino, caller)), p.room(body))

    async def _removexattr(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        await self._door.removexattr(ino, p.xattr_name(body), caller)
        return b""

    async def _opendir(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        opened = await self._door.opendir(ino, caller)
        return p.opened(opened.fh, _open_flags(opened) & ~p.FOPEN_NOFLUSH)

    async def _readdir(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh, offset, room = p.read_in(body)
        out = bytearray()
        for name, attr, following in islice(await self._door.readdir(ino, fh, offset, caller), _LISTED):
            one = p.dirent(name, attr.ino, attr.mode, following)
            if len(out) + len(one) > room:
                break
            out += one
        return out

    async def _readdirplus(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh, offset, room = p.read_in(body)
        door = self._door
        entry_ttl = door.entry_ttl(ino)
        out = bytearray()
        for name, attr, following in islice(await door.readdir(ino, fh, offset, caller), _LISTED):
            one = p.dirent(name, attr.ino, attr.mode, following)
            if len(out) + p.ENTRY_SIZE + len(one) > room:
                break
            if following <= 2 or not door.listed(attr):  # a nodeid of 0 tells the kernel to take no lookup
                out += p.NO_ENTRY
            else:
                out += p.entry(attr, entry_ttl, door.ttl(attr.ino))
            out += one
        return out

    async def _releasedir(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        await self._door.releasedir(ino, p.handle(body)[0])
        return b""

    async def _fsyncdir(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh, flags = p.handle(body)
        await self._door.fsyncdir(ino, fh, bool(flags & p.FSYNC_FDATASYNC))
        return b""

    async def _fallocate(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh, offset, length, mode = p.fallocate(body)
        await self._door.fallocate(ino, fh, mode, offset, length, caller)
        return b""

    async def _lseek(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh, offset, whence = p.lseek(body)
        return p.u64(await self._door.seek(ino, fh, offset, whence))

    async def _copy_file_range(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh_in, off_in, ino_out, fh_out, off_out, length = p.copy_file_range(body)
        length = min(length, 1 << 30)  # what was copied comes back in 32 bits
        return p.written(await self._door.copy_range(ino, fh_in, off_in, ino_out, fh_out, off_out, length, caller))

    async def _copy_file_range_64(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        fh_in, off_in, ino_out, fh_out, off_out, length = p.copy_file_range(body)
        return p.u64(await self._door.copy_range(ino, fh_in, off_in, ino_out, fh_out, off_out, length, caller))

    async def _syncfs(self, ino: int, body: memoryview, caller: Caller) -> Payload:
        await self._door.syncfs(ino)
        return b""


def _name(handler: Handler) -> str:
    """The operation that a handler is for."""
    return handler.__name__.strip("_").removeprefix("do_")


def _open_flags(opened: Opened) -> int:
    return (
        (p.FOPEN_DIRECT_IO if opened.direct else 0)
        | (p.FOPEN_KEEP_CACHE if opened.keep_cache else 0)
        | (p.FOPEN_CACHE_DIR if opened.cache_dir else 0)
        | (0 if opened.flush else p.FOPEN_NOFLUSH)
    )


def _sized(value: bytes, room: int) -> bytes:
    """An extended attribute's answer: its size when that was asked, ERANGE when it does not fit."""
    if room == 0:
        return p.written(len(value))
    if len(value) > room:
        raise OSError(errno.ERANGE, "the buffer is too small for the extended attribute")
    return value
