"""The FUSE door of a mount on which root is nobody (exports(5), root_squash).

The kernel lets root past every permission (CAP_DAC_OVERRIDE) before it asks, so that what root asks for is judged here,
as the tool door judges. Names are not cached: the kernel would let root walk through those that others have looked up.
"""

from __future__ import annotations

import errno
import os
import stat

from vfsd.core import acl
from vfsd.core.ids import squashed
from vfsd.core.types import DAEMON, Attr, Caller, SetAttr
from vfsd.doors.fuse import FuseDoor, Opened
from vfsd.paths import READ, SEARCH, WRITE, fail, need, need_owner, need_removal


class SquashingDoor(FuseDoor):
    """Handlers as FuseDoor's; EACCES and EPERM besides."""

    def entry_ttl(self, parent: int) -> float:
        return 0.0

    async def _need(self, caller: Caller, ino: int, bits: int) -> Attr:
        attr = await self.vfs.getattr(ino, caller)
        need(self.vfs, caller, attr, bits)
        return attr

    # ---- names

    async def lookup(self, parent: int, name: bytes, caller: Caller) -> Attr | None:
        if not caller.uid:
            await self._need(squashed(caller), parent, SEARCH)
        return await super().lookup(parent, name, squashed(caller))

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller, umask: int = 0) -> Attr:
        if not caller.uid:
            await self._need(squashed(caller), parent, WRITE | SEARCH)
            if stat.S_IFMT(mode) in (stat.S_IFBLK, stat.S_IFCHR):
                fail(errno.EPERM)
        return await super().mknod(parent, name, mode, rdev, squashed(caller), umask)

    async def mkdir(self, parent: int, name: bytes, perm: int, caller: Caller, umask: int = 0) -> Attr:
        if not caller.uid:
            await self._need(squashed(caller), parent, WRITE | SEARCH)
        return await super().mkdir(parent, name, perm, squashed(caller), umask)

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attr:
        if not caller.uid:
            await self._need(squashed(caller), parent, WRITE | SEARCH)
        return await super().symlink(parent, name, target, squashed(caller))

    async def link(self, ino: int, parent: int, name: bytes, caller: Caller) -> Attr:
        if not caller.uid:
            await self._need(squashed(caller), parent, WRITE | SEARCH)
        return await super().link(ino, parent, name, squashed(caller))

    async def _need_removal(self, caller: Caller, parent: int, name: bytes) -> Attr:
        directory = await self._need(caller, parent, WRITE | SEARCH)
        victim = await self.vfs.lookup(parent, name, caller)
        need_removal(self.vfs, caller, directory, victim)
        return victim

    async def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        if not caller.uid:
            await self._need_removal(squashed(caller), parent, name)
        await super().unlink(parent, name, squashed(caller))

    async def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        if not caller.uid:
            await self._need_removal(squashed(caller), parent, name)
        await super().rmdir(parent, name, squashed(caller))

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        if not caller.uid:
            nobody = squashed(caller)
            moved = await self._need_removal(nobody, parent, name)
            try:
                replaced = await self._need_removal(nobody, new_parent, new_name)
            except FileNotFoundError:
                replaced = None
            for one in (moved, replaced):
                # A directory's ".." changes with it (POSIX rename, EACCES).
                if one is not None and stat.S_ISDIR(one.mode) and parent != new_parent:
                    need(self.vfs, nobody, one, WRITE)
        await super().rename(parent, name, new_parent, new_name, flags, squashed(caller))

    # ---- attributes

    async def setattr(self, ino: int, change: SetAttr, fh: int | None, caller: Caller) -> Attr:
        if not caller.uid:
            nobody = squashed(caller)
            attr = await self.vfs.getattr(ino, nobody)
            change = change._replace(clear_suid=change.clear_suid or change.size is not None)
            if change.size is not None and fh is None:
                need(self.vfs, nobody, attr, WRITE)
            if change[:3] != (None, None, None) or change[4:7] != (None, None, None):
                need_owner(nobody, attr)
            if change.uid not in (None, attr.uid) or change.gid not in (None, attr.gid, nobody.gid):
                fail(errno.EPERM)
            if change.perm is not None and attr.gid != nobody.gid:
                change = change._replace(perm=change.perm & ~stat.S_ISGID)
        return await super().setattr(ino, change, fh, squashed(caller))

    async def _need_xattr(self, caller: Caller, ino: int, name: bytes, bits: int) -> None:
        attr = await self.vfs.getattr(ino, caller)
        if name.startswith(b"trusted."):
            fail(errno.EPERM if bits == WRITE else errno.ENODATA)
        if name.startswith(b"user."):
            need(self.vfs, caller, attr, bits)
        elif bits == WRITE:
            need_owner(caller, attr)
            if name not in acl.NAMES:
                fail(errno.EPERM)

    async def getxattr(self, ino: int, name: bytes, caller: Caller) -> bytes:
        if not caller.uid:
            await self._need_xattr(squashed(caller), ino, name, READ)
        return await super().getxattr(ino, name, squashed(caller))

    async def setxattr(
        self, ino: int, name: bytes, value: bytes, flags: int, caller: Caller, *, clear_sgid: bool = False
    ) -> None:
        if not caller.uid:
            nobody = squashed(caller)
            await self._need_xattr(nobody, ino, name, WRITE)
            clear_sgid = (await self.vfs.getattr(ino, nobody)).gid != nobody.gid
        await super().setxattr(ino, name, value, flags, squashed(caller), clear_sgid=clear_sgid)

    async def listxattr(self, ino: int, caller: Caller) -> list[bytes]:
        return await super().listxattr(ino, squashed(caller))

    async def removexattr(self, ino: int, name: bytes, caller: Caller) -> None:
        if not caller.uid:
            await self._need_xattr(squashed(caller), ino, name, WRITE)
        await super().removexattr(ino, name, squashed(caller))

    # ---- files and directories

    async def open(self, ino: int, flags: int, caller: Caller, *, clear_suid: bool = False) -> Opened:
        if not caller.uid:
            await self._need(squashed(caller), ino, _bits(flags))
        return await super().open(ino, flags, squashed(caller), clear_suid=clear_suid or not caller.uid)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller, umask: int = 0
    ) -> tuple[Attr, Opened]:
        if not caller.uid:
            nobody = squashed(caller)
            directory = await self._need(nobody, parent, SEARCH)
            there = self.vfs.peek(parent, name)
            if there is None:
                need(self.vfs, nobody, directory, WRITE)
            else:
                await self._need(nobody, there.ino, _bits(flags))
        return await super().create(parent, name, mode, flags, squashed(caller), umask)

    async def tmpfile(self, parent: int, mode: int, flags: int, caller: Caller, umask: int = 0) -> tuple[Attr, Opened]:
        if not caller.uid:
            await self._need(squashed(caller), parent, WRITE | SEARCH)
        return await super().tmpfile(parent, mode, flags, squashed(caller), umask)

    async def read(self, ino: int, fh: int, offset: int, length: int, caller: Caller = DAEMON) -> bytes | memoryview:
        return await super().read(ino, fh, offset, length, squashed(caller))

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
        clear_suid = clear_suid or (not caller.uid and not from_cache)
        return await super().write(
            ino, fh, offset, data, flags, squashed(caller), clear_suid=clear_suid, from_cache=from_cache
        )

    async def fallocate(self, ino: int, fh: int, mode: int, offset: int, length: int, caller: Caller) -> None:
        await super().fallocate(ino, fh, mode, offset, length, squashed(caller))

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
        return await super().copy_range(ino_in, fh_in, off_in, ino_out, fh_out, off_out, length, squashed(caller))

    async def opendir(self, ino: int, caller: Caller) -> Opened:
        if not caller.uid:
            await self._need(squashed(caller), ino, READ)
        return await super().opendir(ino, squashed(caller))


def _bits(flags: int) -> int:
    """What an open asks of the mode."""
    access = flags & os.O_ACCMODE
    reads = READ if access != os.O_WRONLY else 0
    return reads | (WRITE if access != os.O_RDONLY or flags & os.O_TRUNC else 0)
