"""The FUSE door: what each kernel request means, on plain types, with no binding and no decoding.

Engines call these handlers and move requests, nothing else. The door adds to the inode API what only the kernel needs:
lookup counts, negative entries, ``.`` and ``..``, cache lifetimes, and the record of what the kernel may hold
(``known``). Permission is the kernel's business (default_permissions). Must not know trio or any engine.

Invariants: a handler raises OSError or, by a fault of ours, something that ``errno_of`` logs and turns into EIO; the
lookup count rises in the same synchronous section in which the entry was found; what the kernel may cache is marked
both before and after a wait.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from vfsd.core import acl
from vfsd.core.plans import fail
from vfsd.core.types import DAEMON, NODE_BITS, Attr, Caller, DirEntry, SetAttr, StatFs
from vfsd.doors.known import ATTR, DATA, InvalEntry, Invalidation, InvalInode, Known
from vfsd.doors.tally import Tally

if TYPE_CHECKING:
    from vfsd.doors.notify import Notifier
    from vfsd.vfs import Vfs

log = logging.getLogger(__name__)

OURS_ALONE = 3600.0
"""From this time to live (seconds) on nobody but us changes a file, and pages may outlive a close."""


NOTHING = SetAttr(clear_suid=True)
"""A request to change nothing: chown(-1, -1), or a write to a file with setuid or setgid is about to come."""


SELINUX = b"security.selinux"
"""Where it is not supported ``ls -l`` asks for it once, else of each file (coreutils 9.1, ls.c getfilecon_cache)."""


class Opened(NamedTuple):
    """A handle and what the kernel may do with it.

    ``keep_cache``: pages from before this open are still right. ``cache_dir``: the listing may be kept. ``direct``:
    no page cache. ``flush``: close(2) must ask us.
    """

    fh: int
    keep_cache: bool
    cache_dir: bool = False
    direct: bool = False
    flush: bool = False


class FuseDoor:
    """``needs_flush(ino)``: some volume wants to hear of each close (none of the embedded ones does)."""

    hears_opens = True
    """False: the engine answers ENOSYS to OPEN, so that the kernel opens files by itself and tells of no close."""

    def __init__(self, vfs: Vfs, *, needs_flush: Callable[[int], bool] | None = None) -> None:
        self.vfs = vfs
        vfs.rules_changed = self.rules_changed
        self.needs_flush = needs_flush
        self.known = Known(vfs.remember, lambda ino: vfs.forget(ino, 1))
        self.invalidate: Callable[[Sequence[Invalidation]], None] | None = None
        """Set while a Notifier runs."""
        self.tally = Tally()
        self.notifier: Notifier | None = None

    # ---- cache lifetimes and bookkeeping

    @property
    def shared(self) -> bool:
        """Whether others change files of a route without telling us; the host's system directories apart."""
        return any(r.kind != "system" and r.volume.cache_seconds < OURS_ALONE for r in self.vfs.table.routes)

    def is_inline(self, ino: int) -> bool:
        """Whether requests for the ino never wait; those that a rule may hold up do."""
        vfs = self.vfs
        return not vfs.waits and vfs.is_inline(ino)

    def sync_waits(self, ino: int) -> bool:
        """Whether the next fsync of an inline ino may wait nevertheless."""
        return bool(self.vfs.table.volumes[ino >> NODE_BITS].sync_waits)

    def rules_changed(self) -> None:
        """Have the kernel drop what it could still answer by itself and may not any more: pages and names."""
        guard, invalidate = self.vfs.guard, self.invalidate
        if guard is None or invalidate is None:
            return
        stale: list[Invalidation] = []
        for ino in self.known.with_data():
            if not guard.may_read(ino):
                stale.append(InvalInode(ino, False))
                if not guard.is_directory(ino):
                    stale += [InvalEntry(parent, name) for parent, name in guard.links_of(ino)]
            elif guard.hiding and guard.is_directory(ino):
                stale.append(InvalInode(ino, False))
        if stale:
            invalidate(stale)

    def ttl(self, ino: int) -> float:
        """Seconds the kernel may keep ``ino``'s attributes, or if a directory its listing."""
        if self.known.uncached and ino in self.known.uncached:
            return 0.0
        return self.vfs.ttl(ino)

    def entry_ttl(self, parent: int) -> float:
        """Seconds the kernel may keep what a name in ``parent`` is."""
        return self.ttl(parent)

    def forget(self, ino: int, count: int) -> None:
        self.known.forget(ino, count)

    def listed(self, attr: Attr) -> bool:
        """An entry of a listing goes out, with its attributes (READDIRPLUS), which counts as a lookup, unless False."""
        self.known.looked_up(attr.ino)
        return True

    def counters(self) -> dict[str, int]:
        """For status: what the kernel knows, and what it has been told to forget."""
        told = {} if self.notifier is None else self.notifier.counters()
        return {"inodes": len(self.known)} | told

    def closed(self) -> None:
        """The mount is gone."""
        self.known.forget_all()

    def _opened(self, ino: int, fh: int) -> Opened:
        ttl = self.ttl(ino)
        flush = self.needs_flush is not None and self.needs_flush(ino)
        return Opened(fh, ttl >= OURS_ALONE, False, ttl == 0.0, flush)

    def _made(self, attr: Attr, fh: int) -> Opened:
        """A file just made goes out, which counts as a lookup, with its handle."""
        self.known.looked_up(attr.ino)
        return self._opened(attr.ino, fh)

    # ---- names

    async def lookup(self, parent: int, name: bytes, caller: Caller) -> Attr | None:
        """None: it is nothing, and the kernel may remember that."""
        if not self.is_inline(parent):
            self.known.negative(parent, name)
        try:
            attr = await self.vfs.lookup(parent, name, caller)
        except OSError as e:
            if e.errno != errno.ENOENT:
                raise
            self.known.negative(parent, name)
            return None
        self.known.looked_up(attr.ino)
        return attr

    def _masked(self, parent: int, mode: int, umask: int) -> int:
        """The mode of what is made in a directory: a default access control list takes the place of the umask."""
        return mode if umask == 0 or self.vfs.acl(parent, acl.DEFAULT) is not None else mode & ~umask

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller, umask: int = 0) -> Attr:
        attr = await self.vfs.mknod(parent, name, self._masked(parent, mode, umask), rdev, caller)
        self.known.looked_up(attr.ino)
        return attr

    async def mkdir(self, parent: int, name: bytes, perm: int, caller: Caller, umask: int = 0) -> Attr:
        attr = await self.vfs.mkdir(parent, name, self._masked(parent, perm, umask), caller)
        self.known.looked_up(attr.ino)
        return attr

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attr:
        attr = await self.vfs.symlink(parent, name, target, caller)
        self.known.looked_up(attr.ino)
        return attr

    async def link(self, ino: int, parent: int, name: bytes, caller: Caller) -> Attr:
        attr = await self.vfs.link(ino, parent, name, caller)
        self.known.looked_up(attr.ino)
        return attr

    async def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        # Unlinked here, the kernel turns its entry into a negative one by itself (d_delete).
        self.known.negative(parent, name)
        await self.vfs.unlink(parent, name, caller)

    async def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        self.known.negative(parent, name)
        await self.vfs.rmdir(parent, name, caller)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        self.known.negative(parent, name)
        await self.vfs.rename(parent, name, new_parent, new_name, flags, caller)

    async def readlink(self, ino: int, caller: Caller) -> bytes:
        self.known.mark(ino, DATA)
        return await self.vfs.readlink(ino, caller)

    # ---- attributes

    async def getattr(self, ino: int, fh: int | None, caller: Caller) -> Attr:
        attr = await self.vfs.getattr(ino, caller, fh)
        self.known.mark(ino, ATTR)
        return attr

    async def statx(self, ino: int, fh: int | None, caller: Caller) -> tuple[Attr, int | None]:
        """The time of birth too, None where it isn't known. The kernel asks once for each file of which somebody wants
        it (fuse_update_get_attr, 6.18), else by ``getattr``."""
        return await self.getattr(ino, fh, caller), self.vfs.birth_ns(ino)

    async def setattr(self, ino: int, change: SetAttr, fh: int | None, caller: Caller) -> Attr:
        if change == NOTHING and caller.uid:
            # Where it would drop setuid, ext4 refuses a stranger; here the same request precedes a stranger's write,
            # which says by itself what it drops.
            attr = await self.getattr(ino, fh, caller)
            if caller.uid != attr.uid and attr.mode & (stat.S_ISUID | stat.S_ISGID):
                return attr
        attr = await self.vfs.setattr(ino, change, caller, fh)
        self.known.mark(ino, ATTR)
        return attr

    async def statfs(self, ino: int) -> StatFs:
        return await self.vfs.statfs(ino)

    async def getxattr(self, ino: int, name: bytes, caller: Caller) -> bytes:
        if name in acl.NAMES:
            self.known.mark(ino, ATTR)  # the kernel keeps access control lists with the attributes, absence too
        try:
            return await self.vfs.getxattr(ino, name, caller)
        except OSError as e:
            if name == SELINUX and e.errno == errno.ENODATA:
                raise fail(errno.EOPNOTSUPP, name) from None
            raise

    async def setxattr(
        self, ino: int, name: bytes, value: bytes, flags: int, caller: Caller, *, clear_sgid: bool = False
    ) -> None:
        """``clear_sgid``: an access control list set by somebody who may not keep setgid through the new mode."""
        await self.vfs.setxattr(ino, name, value, flags, caller)
        if clear_sgid and name == acl.ACCESS:
            mode = (await self.vfs.getattr(ino, caller)).mode
            if mode & stat.S_ISGID:
                await self.vfs.setattr(ino, SetAttr(perm=mode & 0o7777 & ~stat.S_ISGID), caller)

    async def listxattr(self, ino: int, caller: Caller) -> list[bytes]:
        return await self.vfs.listxattr(ino, caller)

    async def removexattr(self, ino: int, name: bytes, caller: Caller) -> None:
        await self.vfs.removexattr(ino, name, caller)

    # ---- files

    async def open(self, ino: int, flags: int, caller: Caller, *, clear_suid: bool = False) -> Opened:
        """``clear_suid``: O_TRUNC by somebody who may not keep setuid and setgid through it."""
        if clear_suid and flags & os.O_TRUNC:
            await self.vfs.setattr(ino, SetAttr(size=0, clear_suid=True), caller)
            flags &= ~os.O_TRUNC
        return self._opened(ino, await self.vfs.open(ino, flags, caller))

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller, umask: int = 0
    ) -> tuple[Attr, Opened]:
        attr, fh = await self.vfs.create(parent, name, self._masked(parent, mode, umask), flags, caller)
        return attr, self._made(attr, fh)

    async def tmpfile(self, parent: int, mode: int, flags: int, caller: Caller, umask: int = 0) -> tuple[Attr, Opened]:
        attr, fh = await self.vfs.tmpfile(parent, self._masked(parent, mode, umask), flags, caller)
        return attr, self._made(attr, fh)

    async def read(self, ino: int, fh: int, offset: int, length: int, caller: Caller = DAEMON) -> bytes | memoryview:
        # Marked before the wait: a change committed during it must find that these bytes go out.
        self.known.mark(ino, DATA)
        return await self.vfs.read(ino, fh, offset, length, caller)

    async def write(
        self,
        ino: int,
        fh: int,
        offset: int,
        data: bytes | memoryview,
        flags: int,
        caller: Caller,
        *,
        clear_suid: bool = False,
        from_cache: bool = False,
    ) -> int:
        """``data`` is valid until this returns. ``flags``: the handle's open flags.

        ``from_cache``: the kernel writes back a mapped page and only guesses the handle, so that O_APPEND of that
        handle must not count.
        """
        self.known.mark(ino, DATA)
        if from_cache:
            return await self.vfs.write(ino, 0, offset, data, caller)
        if not flags & os.O_APPEND:
            return await self.vfs.write(ino, fh, offset, data, caller, clear_suid=clear_suid)
        end = (await self.vfs.getattr(ino, caller)).size
        size = await self.vfs.write(ino, fh, offset, data, caller, append=True, clear_suid=clear_suid)
        if end != offset and self.invalidate is not None:
            # Another door appended meanwhile: the kernel has put these bytes at the wrong place of its page cache.
            self.invalidate([InvalInode(ino, False)])
        return size

    async def flush(self, ino: int, fh: int, caller: Caller) -> None:
        await self.vfs.flush(ino, fh, caller)

    async def release(self, ino: int, fh: int) -> None:
        await self.vfs.release(ino, fh)

    async def fsync(self, ino: int, fh: int, datasync: bool) -> None:
        await self.vfs.fsync(ino, fh, datasync)

    async def fallocate(self, ino: int, fh: int, mode: int, offset: int, length: int, caller: Caller) -> None:
        await self.vfs.fallocate(ino, fh, mode, offset, length, caller)
        await self._modified(ino, caller)

    async def seek(self, ino: int, fh: int, offset: int, whence: int) -> int:
        return await self.vfs.seek(ino, fh, offset, whence)

    async def copy_range(
        self,
        ino_in: int,
        fh_in: int,
        off_in: int,
        ino_out: int,
        fh_out: int,
        off_out: int,
        length: int,
        caller: Caller,
    ) -> int:
        size = await self.vfs.copy_range(ino_in, fh_in, off_in, ino_out, fh_out, off_out, length, caller)
        await self._modified(ino_out, caller)
        return size

    async def _modified(self, ino: int, caller: Caller) -> None:
        """Contents changed by a request in which the kernel does not say whether setuid and setgid must go.

        With HANDLE_KILLPRIV_V2 it leaves that to us (fuse_setattr drops ATTR_KILL_*, 6.18); CAP_FSETID is taken to be
        root's alone.
        """
        if caller.uid and (await self.vfs.getattr(ino, caller)).mode & 0o6000:
            await self.vfs.setattr(ino, SetAttr(clear_suid=True), caller)

    async def syncfs(self, ino: int) -> None:
        await self.vfs.syncfs(ino)

    # ---- directories

    async def opendir(self, ino: int, caller: Caller) -> Opened:
        fh = await self.vfs.opendir(ino, caller)
        ours = self.ttl(ino) >= OURS_ALONE and not self.vfs.hides_in(ino)
        return Opened(fh, ours, ours)

    async def readdir(self, ino: int, fh: int, offset: int, caller: Caller) -> Iterator[DirEntry]:
        """Entries after ``offset``; ``.`` and ``..`` come first, at 1 and 2. Take no more than go out."""
        self.known.mark(ino, DATA)
        entries: Iterable[DirEntry] = await self.vfs.readdir(ino, fh, 0 if offset <= 2 else offset, caller)
        self.known.mark(ino, DATA)
        if offset >= 2:
            return iter(entries)
        dots = []
        if offset == 0:
            dots.append(DirEntry(b".", await self.vfs.getattr(ino, caller), 1))
        dots.append(DirEntry(b"..", await self.vfs.getattr(self.vfs.parent_of(ino), caller), 2))
        return chain(dots, entries)

    async def releasedir(self, ino: int, fh: int) -> None:
        await self.vfs.releasedir(ino, fh)

    async def fsyncdir(self, ino: int, fh: int, datasync: bool) -> None:
        await self.vfs.fsyncdir(ino, fh, datasync)


def errno_of(exc: Exception, what: object) -> int:
    """The errno a failed handler answers with. Anything but an OSError is a fault of ours: logged, and EIO."""
    if isinstance(exc, OSError) and exc.errno is not None and 0 < exc.errno < 512:  # MAX_ERRNO a reply may carry
        # The caller's own table of files is the kernel's to watch, so it is ours that is full.
        return errno.ENFILE if exc.errno == errno.EMFILE else exc.errno
    log.error("%s failed", what, exc_info=exc)
    return errno.EIO
