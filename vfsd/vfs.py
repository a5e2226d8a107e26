"""The inode API of the whole mount: what both doors call, each operation once.

Owns the way from an ino to its volume, the entries that join volumes, and the two funnels every operation passes,
``_observe`` and ``_mutate``. Must not know FUSE, sockets or any backend. Operations are coroutines so that a route may
wait for its store; on inline volumes (``is_inline``) they finish without suspending, fsync and syncfs excepted. Every
one raises OSError, and nothing else for want of the caller.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from vfsd.core import acl
from vfsd.core.changes import Laid
from vfsd.core.plans import RENAME_EXCHANGE, fail
from vfsd.core.types import DAEMON, NODE_BITS, ROOT_NODE, Attr, Caller, DirEntry, SetAttr, StatFs
from vfsd.core.xattrs import unfit
from vfsd.feed import Feed
from vfsd.routes import JoinedAttr, Overlay, RouteTable
from vfsd.system import SystemEntries

if TYPE_CHECKING:
    from vfsd.rules.guard import Guard
    from vfsd.witness import Witness

_OVERLAY_OFFSET = 1 << 40
"""Readdir offsets of overlaid entries begin here, above those of any volume."""


class Vfs:
    """One mount: the volumes of ``table`` as one tree whose root is ino 1."""

    root_ino = ROOT_NODE

    def __init__(self, table: RouteTable, feed: Feed, system: SystemEntries) -> None:
        self.table = table
        self._system = system
        self.feed = feed
        self._volumes = table.volumes
        self._overlays = table.overlays
        self._observed = self._mutated = 0
        self.witness: Witness | None = None
        self.guard: Guard | None = None
        self.opens_heard = True
        """False: the kernel opens files by itself, so that reads and writes come by inode and are judged each."""
        self.waits = False
        """Whether the guard may let an operation wait, on whatever volume."""
        self.rules_changed: Callable[[], None] = lambda: None

    # -- the funnels

    async def _observe(self, op: str, caller: Caller, ino: int, *args: Any) -> Any:
        """Every operation that changes nothing passes here."""
        self._observed += 1
        try:
            guard = self.guard
            if guard is not None and (judge := guard.judges.get(op)) is not None:
                waits = judge(op, caller, ino, args)
                if waits is not None:
                    await waits
            result = getattr(self._volumes[ino >> NODE_BITS], op)(ino, *args)
            if type(result) is CoroutineType:
                result = await result
        except OSError as error:
            if self.witness is not None:
                self.witness.unseen(op, caller, ino, args, error)
            raise
        if self.witness is not None and op in self.witness.reads:
            self.witness.saw(op, caller, ino)
        return result

    async def _mutate(self, op: str, caller: Caller, ino: int, *args: Any) -> Any:
        """Every operation that changes the tree or contents passes here."""
        self._mutated += 1
        guard, witness = self.guard, self.witness
        before = None
        try:
            # Judged inside the ``try``, so that a denial is told of too.
            if guard is not None and (waits := guard.mutating(op, caller, ino, args)) is not None:
                await waits
            if witness is not None:
                before = witness.before(op, ino, args)
            result = getattr(self._volumes[ino >> NODE_BITS], op)(ino, *args)
            if type(result) is CoroutineType:
                result = await result
        except BaseException as error:
            if witness is not None:
                witness.failed(op, caller, ino, args, error)
            raise
        finally:
            if guard is not None and guard.moving:
                guard.settled(args)
        if witness is not None:
            witness.done(before, op, caller, ino, args, result)
        return result

    def _refusal(self, code: int, name: bytes, op: str, caller: Caller, ino: int, *args: Any) -> OSError:
        """The error of an operation that the tree refuses before it reaches its volume: an exit of the funnel too."""
        error = fail(code, name)
        if self.witness is not None:
            self.witness.failed(op, caller, ino, args, error)
        return error

    # -- what the doors ask about an ino

    def is_inline(self, ino: int) -> bool:
        """True when operations on the ino's volume never suspend."""
        return bool(self._volumes[ino >> NODE_BITS].inline)

    def ttl(self, ino: int) -> float:
        """Seconds the kernel may keep entries and attributes of the ino."""
        return float(self._volumes[ino >> NODE_BITS].cache_seconds)

    def remember(self, ino: int, n: int = 1) -> None:
        """Raise the kernel's lookup count, in the synchronous section of the reply that gives the ino out."""
        self._volumes[ino >> NODE_BITS].remember(ino, n)

    def forget(self, ino: int, n: int) -> None:
        """Lower the kernel's lookup count."""
        self._volumes[ino >> NODE_BITS].forget(ino, n)

    def acl(self, ino: int, name: bytes = acl.ACCESS) -> bytes | None:
        """An access control list of the ino, None where there is none; ESTALE. Never suspends."""
        return self._volumes[ino >> NODE_BITS].acl(ino, name)  # type: ignore[no-any-return]

    def birth_ns(self, ino: int) -> int | None:
        """When the file was made, None where that isn't known; ESTALE. Never suspends."""
        return self._volumes[ino >> NODE_BITS].birth_ns(ino)  # type: ignore[no-any-return]

    def parent_of(self, ino: int) -> int:
        """The ino of ``..``; the root's own at the root."""
        at = self.table.mounted_at.get(ino)
        if at is not None:
            return at[0]
        return int(self._volumes[ino >> NODE_BITS].parent_of(ino))

    def path_of(self, ino: int) -> bytes | None:
        """A path of the ino in the tree, for messages and rules; None without a link."""
        volume = self._volumes[ino >> NODE_BITS]
        path: bytes | None = volume.path_of(ino)
        at = self.table.mounted_at.get(volume.root_ino)
        if path is None or at is None:
            return path
        above = self.path_of(at[0])
        if above is None:
            return None
        prefix = above.rstrip(b"/") + b"/" + at[1]
        return prefix if path == b"/" else prefix + path

    # -- overlay

    def _overlaid(self, parent: int, name: bytes) -> Overlay | None:
        """The entry laid over ``name``, None where the volume's own counts."""
        over = self._overlays.get(parent)
        entry = None if over is None else over.get(name)
        if entry is None or not entry.weak or self._child(parent, name) is None:
            return entry
        return None

    def _child(self, parent: int, name: bytes) -> Attr | None:
        """The volume's own entry as far as is known without waiting."""
        try:
            attr: Attr = self._volumes[parent >> NODE_BITS].peek(parent, name)
        except OSError:
            return None
        return attr

    peek = _child

    def _root(self, laid: Overlay) -> Attr:
        """What an overlay leads to; a volume's root is always in memory."""
        attr: Attr = self._volumes[laid.ino >> NODE_BITS].getattr(laid.ino)
        return attr

    def _refuse_overlaid(self, parent: int, name: bytes, code: int, *told: Any) -> None:
        """``told``: the operation as ``_mutate`` takes it."""
        if parent in self._overlays and self._overlaid(parent, name) is not None:
            raise self._refusal(code, name, *told)

    def _joined(self, attr: Attr) -> Attr:
        """The attributes as they show with routes mounted below."""
        over = self._overlays.get(attr.ino)
        if over is None:
            return attr
        more = sum(not laid.hidden and self._child(attr.ino, name) is None for name, laid in over.items())
        return JoinedAttr(attr, more) if more else attr

    # -- observing

    async def lookup(self, parent: int, name: bytes, caller: Caller) -> Attr:
        """The entry ``name``; ENOENT, ENOTDIR, ENAMETOOLONG, ESTALE."""
        if parent in self._overlays:
            entry = self._overlaid(parent, name)
            if entry is not None:
                return self._joined(self._root(entry))
        if name == b"..":
            return await self.getattr(self.parent_of(parent), caller)
        attr: Attr = await self._observe("lookup", caller, parent, name)
        return self._joined(attr) if attr.ino in self._overlays else attr

    async def getattr(self, ino: int, caller: Caller, fh: int | None = None) -> Attr:
        """ESTALE when the ino is no more."""
        attr: Attr = await self._observe("getattr", caller, ino, fh or 0)
        return self._joined(attr) if ino in self._overlays else attr

    async def readlink(self, ino: int, caller: Caller) -> bytes:
        """EINVAL for anything but a symlink."""
        target: bytes = await self._observe("readlink", caller, ino)
        return target

    async def read(self, ino: int, fh: int, offset: int, length: int, caller: Caller = DAEMON) -> bytes | memoryview:
        """Up to ``length`` bytes; fewer only at the end of the file. ``fh`` 0 reads by inode."""
        data: bytes | memoryview = await self._observe("read", caller, ino, fh, offset, length)
        return data

    def reader(self) -> Callable[[int, int], bytes | None] | None:
        """What reads whole files for a search, beside the funnel: ``(ino, size)``, None for one whose route waits.

        None at all while somebody judges or records reads."""
        if self.guard is not None or (self.witness is not None and "read" in self.witness.reads):
            return None
        volumes = self._volumes

        def read(ino: int, size: int) -> bytes | None:
            volume = volumes[ino >> NODE_BITS]
            return bytes(volume.read(ino, 0, 0, size)) if volume.inline else None

        return read

    async def seek(self, ino: int, fh: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE; ENXIO."""
        found: int = await self._observe("seek", DAEMON, ino, fh, offset, whence)
        return found

    async def opendir(self, ino: int, caller: Caller) -> int:
        """ENOTDIR."""
        fh: int = await self._observe("opendir", caller, ino, caller)
        return fh

    async def readdir(self, ino: int, fh: int, offset: int, caller: Caller) -> Iterator[DirEntry]:
        """Entries after ``offset`` (3 is the first entry's), without ``.`` and ``..``."""
        over = self._overlays.get(ino)
        if over is None and ino not in self.table.hidden:
            entries: Iterator[DirEntry] = await self._observe("readdir", caller, ino, fh, offset)
        else:
            own = await self._observe("readdir", caller, ino, fh, offset) if offset < _OVERLAY_OFFSET else ()
            entries = self._joined_entries(ino, own, offset, over or {})
        return entries if self.guard is None or not self.guard.hiding else self.guard.shown(ino, entries)

    def _joined_entries(
        self, ino: int, own: Iterable[DirEntry], offset: int, over: dict[bytes, Overlay]
    ) -> Iterator[DirEntry]:
        for entry in own:
            laid = over.get(entry.name)
            if (laid is None or laid.weak) and not self.table.hides(ino, entry.name, entry.attr.ino):
                yield entry._replace(attr=self._joined(entry.attr)) if entry.attr.ino in self._overlays else entry
        for i, (name, laid) in enumerate(list(over.items()), _OVERLAY_OFFSET + 1):
            if not laid.hidden and i > offset:
                yield DirEntry(name, self._joined(self._root(laid)), i)

    async def children(self, ino: int, caller: Caller) -> Iterable[tuple[bytes, Attr]]:
        """All listed entries, unordered, to be taken once; of a large directory as they are taken. ENOTDIR."""
        entries: Iterable[tuple[bytes, Attr]] = await self._observe("children", caller, ino)
        over = self._overlays.get(ino, {})
        if over or ino in self.table.hidden:
            hides = self.table.hides
            own = ((n, a) for n, a in entries if (n not in over or over[n].weak) and not hides(ino, n, a.ino))
            entries = chain(own, [(n, self._root(laid)) for n, laid in over.items() if not laid.hidden])
        return entries if self.guard is None or not self.guard.hiding else self.guard.shown(ino, entries)

    async def statfs(self, ino: int) -> StatFs:
        found: StatFs = await self._observe("statfs", DAEMON, ino)
        return found

    async def getxattr(self, ino: int, name: bytes, caller: Caller) -> bytes:
        """ENODATA; EOPNOTSUPP for unknown namespaces."""
        if name in acl.NAMES:
            # Like a mode: the kernel asks for it to judge others' operations, so it is neither judged nor recorded.
            if (found := self.acl(ino, name)) is not None:
                return found
            raise fail(errno.ENODATA, name)
        if code := unfit(name):
            raise fail(code, name)
        value: bytes = await self._observe("getxattr", caller, ino, name)
        return value

    async def listxattr(self, ino: int, caller: Caller) -> list[bytes]:
        """Names; those of ``trusted.`` for root only (xattr(7))."""
        names: list[bytes] = await self._observe("listxattr", caller, ino)
        return names if caller.uid == 0 else [n for n in names if not n.startswith(b"trusted.")]

    # -- mutating: names

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attr:
        """EEXIST, ENOENT, ENOTDIR, ENAMETOOLONG, ENOSPC, EROFS, as for all that make a name."""
        self._refuse_overlaid(parent, name, errno.EEXIST, "mknod", caller, parent, name)
        attr: Attr = await self._mutate("mknod", caller, parent, name, mode, rdev, caller)
        return attr

    async def mkdir(self, parent: int, name: bytes, perm: int, caller: Caller) -> Attr:
        """EMLINK too."""
        self._refuse_overlaid(parent, name, errno.EEXIST, "mkdir", caller, parent, name)
        attr: Attr = await self._mutate("mkdir", caller, parent, name, perm, caller)
        return attr

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attr:
        self._refuse_overlaid(parent, name, errno.EEXIST, "symlink", caller, parent, name)
        attr: Attr = await self._mutate("symlink", caller, parent, name, target, caller)
        return attr

    async def link(self, ino: int, new_parent: int, new_name: bytes, caller: Caller) -> Attr:
        """EXDEV across routes, EPERM for a directory, EMLINK."""
        if ino >> NODE_BITS != new_parent >> NODE_BITS:
            raise self._refusal(errno.EXDEV, new_name, "link", caller, ino, new_parent, new_name)
        self._refuse_overlaid(new_parent, new_name, errno.EEXIST, "link", caller, ino, new_parent, new_name)
        attr: Attr = await self._mutate("link", caller, ino, new_parent, new_name, caller)
        return attr

    async def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        """EBUSY for a route, ENOENT, EISDIR."""
        self._refuse_overlaid(parent, name, errno.EBUSY, "unlink", caller, parent, name)
        await self._mutate("unlink", caller, parent, name, caller)

    async def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        """EBUSY for a route, ENOENT, ENOTDIR, ENOTEMPTY (also when routes are mounted below)."""
        self._refuse_overlaid(parent, name, errno.EBUSY, "rmdir", caller, parent, name)
        self._refuse_mount_below(parent, name, errno.ENOTEMPTY, "rmdir", caller, parent, name)
        if self.table.hidden:
            await self._drop_hidden(parent, name, caller)
        await self._mutate("rmdir", caller, parent, name, caller)

    async def _drop_hidden(self, parent: int, name: bytes, caller: Caller) -> None:
        """Remove the stubs in a directory that shows as empty and is to go."""
        attr = self._child(parent, name)
        if attr is None or attr.ino not in self.table.hidden or list(await self.children(attr.ino, caller)):
            return
        for stub in self.table.hidden.pop(attr.ino):
            if self._child(attr.ino, stub) is not None:
                await self.rmdir(attr.ino, stub, caller)

    def _refuse_mount_below(self, parent: int, name: bytes, code: int, *told: Any) -> None:
        """A directory that a route is mounted in directly may not go. ``told`` as for ``_refuse_overlaid``."""
        attr = None if self._overlays.keys() <= {ROOT_NODE} else self._child(parent, name)  # the root itself can't go
        if attr is not None and any(not o.weak for o in self._overlays.get(attr.ino, {}).values()):
            raise self._refusal(code, name, *told)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        """EXDEV across routes, EBUSY for a route, and rename(2)'s errnos."""
        told = ("rename", caller, parent, name, new_parent, new_name, flags)
        self._refuse_overlaid(parent, name, errno.EBUSY, *told)
        self._refuse_overlaid(new_parent, new_name, errno.EBUSY, *told)
        if parent >> NODE_BITS != new_parent >> NODE_BITS:
            raise self._refusal(errno.EXDEV, name, *told)
        if not flags & RENAME_EXCHANGE and (parent, name) != (new_parent, new_name):
            self._refuse_mount_below(new_parent, new_name, errno.ENOTEMPTY, *told)
        await self._mutate("rename", caller, parent, name, new_parent, new_name, flags, caller)

    # -- mutating: attributes and contents

    async def setattr(self, ino: int, to: SetAttr, caller: Caller, fh: int | None = None) -> Attr:
        """EFBIG, EINVAL, EISDIR, ENOSPC, EROFS."""
        attr: Attr = await self._mutate("setattr", caller, ino, to, caller, fh or 0)
        return self._joined(attr) if ino in self._overlays else attr

    async def setxattr(self, ino: int, name: bytes, value: bytes, flags: int, caller: Caller) -> None:
        """EEXIST, ENODATA, ERANGE, E2BIG; EOPNOTSUPP for access control lists where they are not kept."""
        if code := unfit(name):
            raise self._refusal(code, name, "setxattr", caller, ino, name)
        await self._mutate("setxattr", caller, ino, name, value, flags, caller)

    async def removexattr(self, ino: int, name: bytes, caller: Caller) -> None:
        """ENODATA; EOPNOTSUPP for access control lists where they are not kept."""
        if code := unfit(name):
            raise self._refusal(code, name, "removexattr", caller, ino, name)
        await self._mutate("removexattr", caller, ino, name, caller)

    async def write(
        self,
        ino: int,
        fh: int,
        offset: int,
        data: bytes | bytearray | memoryview,
        caller: Caller,
        *,
        append: bool = False,
        clear_suid: bool = False,
    ) -> int:
        """Bytes written; EFBIG, ENOSPC, EROFS. ``append`` writes at the end as it is now."""
        written: int = await self._mutate("write", caller, ino, fh, offset, data, caller, append, clear_suid)
        return written

    async def replace(self, ino: int, data: bytes | Laid, caller: Caller, expect: int | None = None) -> Attr:
        """The whole content anew in one commit; ESTALE unless xxh3_64 of the present content is ``expect``."""
        attr: Attr = await self._mutate("replace", caller, ino, data, caller, expect)
        return attr

    async def create_file(self, parent: int, name: bytes, perm: int, data: bytes | Laid, caller: Caller) -> Attr:
        """A new regular file with its content in one commit; EEXIST."""
        self._refuse_overlaid(parent, name, errno.EEXIST, "create_file", caller, parent, name)
        attr: Attr = await self._mutate("create_file", caller, parent, name, perm, data, caller)
        return attr

    async def fallocate(self, ino: int, fh: int, mode: int, offset: int, length: int, caller: Caller) -> None:
        """EOPNOTSUPP for modes not kept, EFBIG, EINVAL, ENOSPC."""
        await self._mutate("fallocate", caller, ino, fh, mode, offset, length, caller)

    async def copy_range(
        self, ino_in: int, fh_in: int, off_in: int, ino_out: int, fh_out: int, off_out: int, length: int, caller: Caller
    ) -> int:
        """Bytes copied, 0 at the end of the source; EXDEV across routes (the kernel then copies by itself)."""
        if ino_in >> NODE_BITS != ino_out >> NODE_BITS:
            args = (fh_in, off_in, ino_out, fh_out, off_out, length, caller)
            raise self._refusal(errno.EXDEV, b"", "copy_range", caller, ino_in, *args)
        copied: int = await self._mutate(
            "copy_range", caller, ino_in, fh_in, off_in, ino_out, fh_out, off_out, length, caller
        )
        return copied

    # -- handles

    async def open(self, ino: int, flags: int, caller: Caller) -> int:
        """The handle; O_TRUNC is honoured. EISDIR, ELOOP, EROFS."""
        funnel = self._mutate if flags & os.O_TRUNC else self._observe
        fh: int = await funnel("open", caller, ino, flags, caller)
        return fh

    async def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[Attr, int]:
        """A file made and opened, or opened when it is there and O_EXCL is not given."""
        self._refuse_overlaid(parent, name, errno.EEXIST, "create", caller, parent, name)
        made: tuple[Attr, int] = await self._mutate("create", caller, parent, name, mode, flags, caller)
        return made

    async def tmpfile(self, parent: int, mode: int, flags: int, caller: Caller) -> tuple[Attr, int]:
        """A file without a name, opened."""
        made: tuple[Attr, int] = await self._mutate("tmpfile", caller, parent, mode, flags, caller)
        return made

    async def flush(self, ino: int, fh: int, caller: Caller) -> None:
        """At each close of a descriptor; errors of a store that writes at close."""
        await self._observe("flush", caller, ino, fh, caller)

    async def release(self, ino: int, fh: int) -> None:
        """At the last close."""
        await self._observe("release", DAEMON, ino, fh)

    async def releasedir(self, ino: int, fh: int) -> None:
        await self._observe("releasedir", DAEMON, ino, fh)

    async def fsync(self, ino: int, fh: int, datasync: bool) -> None:
        """What was acknowledged for the ino survives power loss; suspends. EIO, ENOSPC."""
        await self._observe("fsync", DAEMON, ino, fh, datasync)

    async def fsyncdir(self, ino: int, fh: int, datasync: bool) -> None:
        await self._observe("fsync", DAEMON, ino, fh, datasync)

    async def syncfs(self, ino: int) -> None:
        """As ``sync_all``, of the ino's volume."""
        await self._volumes[ino >> NODE_BITS].syncfs()

    async def sync_all(self) -> None:
        """Every volume survives power loss; suspends."""
        for volume in self._volumes:
            await volume.syncfs()

    # -- housekeeping

    def tidy(self) -> None:
        """Remove what the mount needed for itself; called when it is gone."""
        self._system.tidy()

    def hides_in(self, ino: int) -> bool:
        """True when listings of the directory leave out entries that may show later without a change of its own."""
        return ino in self.table.hidden or (self.guard is not None and self.guard.hiding)

    def add_stub(self, path: bytes) -> None:
        """Make ``path`` a hidden directory where the tree has nothing, to bind a host directory on."""
        self._system.add_stub(path)

    def counters(self) -> dict[str, int]:
        """Operations since the start, and the volumes' own counts added up."""
        total = {"observed": self._observed, "mutated": self._mutated, "seq": self.feed.seq}
        for volume in self._volumes:
            for key, value in volume.counters().items():
                total[key] = total.get(key, 0) + value
        return total
