"""Operations like os's, by path and by handle, for clients that want files rather than tools.

Registered in ``rpcops.OPS`` by being imported. Must not know sockets or frames.
"""

from __future__ import annotations

import errno
import os
import stat

from vfsd.core import acl
from vfsd.core.types import Attr, Caller, SetAttr
from vfsd.doors.rpcops import (
    MAX_PIECE,
    PIECE,
    Handle,
    Message,
    Session,
    content_of,
    flags_of,
    natural,
    op,
    packed,
    perm_of,
    release,
    want,
)
from vfsd.paths import READ, SEARCH, WRITE, again_if_stale, fail, need, need_owner, need_removal

MAX_HANDLES = 1024
"""Files one connection may have open (EMFILE)."""

# ---------------------------------------------------------------------- like os, by path


@op
@again_if_stale
async def mkdir(s: Session, m: Message, caller: Caller) -> Message:
    """{path, perm=0o755, parents=false} -> {attr}; with ``parents`` a directory that is there is fine"""
    path, perm = want(m, "path", bytes), perm_of(m, "perm", 0o755)
    if want(m, "parents", bool, False):
        return {"attr": packed(await s.paths.makedirs(path, caller, perm))}
    place = await s.paths.place_for(path, caller)
    return {"attr": packed(await s.vfs.mkdir(place.parent.ino, place.name, perm, caller))}


@op
@again_if_stale
async def mknod(s: Session, m: Message, caller: Caller) -> Message:
    """{path, mode=S_IFREG|0o644, rdev=0} -> {attr}"""
    place = await s.paths.place_for(want(m, "path", bytes), caller)
    mode, rdev = natural(m, "mode", stat.S_IFREG | 0o644), natural(m, "rdev", 0)
    if mode >= 1 << 16 or rdev >= 1 << 32:
        fail(errno.EINVAL)
    if caller.uid and stat.S_IFMT(mode) in (stat.S_IFBLK, stat.S_IFCHR):
        fail(errno.EPERM)
    return {"attr": packed(await s.vfs.mknod(place.parent.ino, place.name, mode, rdev, caller))}


@op
@again_if_stale
async def rmdir(s: Session, m: Message, caller: Caller) -> Message:
    """{path} -> {}"""
    place, _ = await s.paths.place_of(want(m, "path", bytes), caller)
    await s.vfs.rmdir(place.parent.ino, place.name, caller)
    return {}


@op
@again_if_stale
async def unlink(s: Session, m: Message, caller: Caller) -> Message:
    """{path} -> {}"""
    place, _ = await s.paths.place_of(want(m, "path", bytes), caller)
    await s.vfs.unlink(place.parent.ino, place.name, caller)
    return {}


@op
@again_if_stale
async def rename(s: Session, m: Message, caller: Caller) -> Message:
    """{old, new, flags=0} -> {}; flags of renameat2: RENAME_NOREPLACE 1, RENAME_EXCHANGE 2, RENAME_WHITEOUT 4"""
    source, moved = await s.paths.place_of(want(m, "old", bytes), caller)
    new = want(m, "new", bytes)
    target = await s.paths.walk(new.rstrip(b"/") or b"/", caller, follow=False)
    if not target.name:
        fail(errno.EBUSY)
    if target.attr is not None:
        need_removal(s.vfs, caller, target.parent, target.attr)
    need(s.vfs, caller, target.parent, WRITE | SEARCH)
    if stat.S_ISDIR(moved.mode):
        if source.parent.ino != target.parent.ino:
            # A directory's ".." changes with it (POSIX rename, EACCES).
            need(s.vfs, caller, moved, WRITE)
    elif new.endswith(b"/"):
        fail(errno.ENOTDIR)
    flags = flags_of(m)
    await s.vfs.rename(source.parent.ino, source.name, target.parent.ino, target.name, flags, caller)
    return {}


@op
@again_if_stale
async def link(s: Session, m: Message, caller: Caller) -> Message:
    """{old, new} -> {attr}: ``new`` is one more name of ``old``, itself if a symlink"""
    attr = await s.paths.resolve(want(m, "old", bytes), caller, False)
    place = await s.paths.place_for(want(m, "new", bytes), caller)
    return {"attr": packed(await s.vfs.link(attr.ino, place.parent.ino, place.name, caller))}


@op
@again_if_stale
async def symlink(s: Session, m: Message, caller: Caller) -> Message:
    """{target, path} -> {attr}"""
    place = await s.paths.place_for(want(m, "path", bytes), caller)
    return {"attr": packed(await s.vfs.symlink(place.parent.ino, place.name, want(m, "target", bytes), caller))}


@op
@again_if_stale
async def readlink(s: Session, m: Message, caller: Caller) -> Message:
    """{path} -> {target}"""
    attr = await s.paths.resolve(want(m, "path", bytes), caller, False)
    return {"target": await s.vfs.readlink(attr.ino, caller)}


@op
@again_if_stale
async def chmod(s: Session, m: Message, caller: Caller) -> Message:
    """{path, perm, follow=true} -> {attr}"""
    attr = await s.paths.resolve(want(m, "path", bytes), caller, want(m, "follow", bool, True))
    need_owner(caller, attr)
    perm = natural(m, "perm") & 0o7777
    if caller.uid and caller.gid != attr.gid:
        # POSIX chmod: setgid is for members of the file's group.
        perm &= ~stat.S_ISGID
    return {"attr": packed(await s.vfs.setattr(attr.ino, SetAttr(perm=perm), caller))}


@op
@again_if_stale
async def chown(s: Session, m: Message, caller: Caller) -> Message:
    """{path, uid=-1, gid=-1, follow=true} -> {attr}; -1 leaves one as it is"""
    attr = await s.paths.resolve(want(m, "path", bytes), caller, want(m, "follow", bool, True))
    uid, gid = want(m, "uid", int, -1), want(m, "gid", int, -1)
    if not (-1 <= uid < (1 << 32) - 1 and -1 <= gid < (1 << 32) - 1):
        fail(errno.EINVAL)
    if caller.uid and (caller.uid != attr.uid or uid not in (-1, attr.uid) or gid not in (-1, attr.gid, caller.gid)):
        fail(errno.EPERM)
    perm = None
    if stat.S_ISREG(attr.mode) and attr.mode & 0o6000:
        # What Linux does for anyone: setuid goes, and setgid where the group may execute.
        perm = attr.mode & 0o7777 & ~stat.S_ISUID & ~(stat.S_ISGID if attr.mode & stat.S_IXGRP else 0)
    to = SetAttr(perm=perm, uid=None if uid == -1 else uid, gid=None if gid == -1 else gid)
    return {"attr": packed(await s.vfs.setattr(attr.ino, to, caller))}


@op
@again_if_stale
async def utime(s: Session, m: Message, caller: Caller) -> Message:
    """{path, atime_ns?, mtime_ns?, follow=true} -> {attr}"""
    attr = await s.paths.resolve(want(m, "path", bytes), caller, want(m, "follow", bool, True))
    need_owner(caller, attr)
    atime, mtime = m.get("atime_ns"), m.get("mtime_ns")
    if not all(value is None or (type(value) is int and -1 << 63 <= value < 1 << 63) for value in (atime, mtime)):
        fail(errno.EINVAL)
    return {"attr": packed(await s.vfs.setattr(attr.ino, SetAttr(atime_ns=atime, mtime_ns=mtime), caller))}


@op
@again_if_stale
async def truncate(s: Session, m: Message, caller: Caller) -> Message:
    """{path, size} -> {attr}"""
    attr = await s.paths.resolve(want(m, "path", bytes), caller)
    if not stat.S_ISREG(attr.mode):
        fail(errno.EISDIR if stat.S_ISDIR(attr.mode) else errno.EINVAL)
    need(s.vfs, caller, attr, WRITE)
    to = SetAttr(size=natural(m, "size"), clear_suid=caller.uid != 0)
    return {"attr": packed(await s.vfs.setattr(attr.ino, to, caller))}


async def _xattr_of(s: Session, m: Message, caller: Caller, bits: int) -> tuple[Attr, bytes]:
    """The file and name of an xattr request, which the caller may use (xattr(7)); EPERM, EACCES."""
    attr = await s.paths.resolve(want(m, "path", bytes), caller, want(m, "follow", bool, True))
    name = want(m, "name", bytes)
    if name.startswith(b"trusted.") and caller.uid:
        fail(errno.EPERM if bits == WRITE else errno.ENODATA)
    if name.startswith(b"user."):
        need(s.vfs, caller, attr, bits)
    elif bits == WRITE:
        need_owner(caller, attr)
    return attr, name


@op
@again_if_stale
async def getxattr(s: Session, m: Message, caller: Caller) -> Message:
    """{path, name, follow=true} -> {value}"""
    attr, name = await _xattr_of(s, m, caller, READ)
    return {"value": await s.vfs.getxattr(attr.ino, name, caller)}


@op
@again_if_stale
async def setxattr(s: Session, m: Message, caller: Caller) -> Message:
    """{path, name, value, flags=0, follow=true} -> {}; flags: XATTR_CREATE 1, XATTR_REPLACE 2"""
    attr, name = await _xattr_of(s, m, caller, WRITE)
    await s.vfs.setxattr(attr.ino, name, want(m, "value", bytes), flags_of(m), caller)
    if name == acl.ACCESS and attr.mode & stat.S_ISGID and caller.uid and caller.gid != attr.gid:
        perm = (await s.vfs.getattr(attr.ino, caller)).mode & 0o7777
        await s.vfs.setattr(attr.ino, SetAttr(perm=perm & ~stat.S_ISGID), caller)
    return {}


@op
@again_if_stale
async def removexattr(s: Session, m: Message, caller: Caller) -> Message:
    """{path, name, follow=true} -> {}"""
    attr, name = await _xattr_of(s, m, caller, WRITE)
    await s.vfs.removexattr(attr.ino, name, caller)
    return {}


@op
@again_if_stale
async def listxattr(s: Session, m: Message, caller: Caller) -> Message:
    """{path, follow=true} -> {names}"""
    attr = await s.paths.resolve(want(m, "path", bytes), caller, want(m, "follow", bool, True))
    return {"names": await s.vfs.listxattr(attr.ino, caller)}


@op
@again_if_stale
async def statfs(s: Session, m: Message, caller: Caller) -> Message:
    """{path=b"/"} -> the fields of core.types.StatFs"""
    attr = await s.paths.resolve(want(m, "path", bytes, b"/"), caller)
    return (await s.vfs.statfs(attr.ino))._asdict()


# ---------------------------------------------------------------------- like os, by handle


@op
async def open_(s: Session, m: Message, caller: Caller) -> Message:
    """{path, flags=O_RDONLY, mode=0o644} -> {fh, attr}; the handle ends with the connection"""
    if len(s.handles) >= MAX_HANDLES:
        fail(errno.EMFILE)
    flags = flags_of(m)
    attr, fh = await s.paths.open(want(m, "path", bytes), flags, perm_of(m, "mode", 0o644), caller)
    number = s.number()
    s.handles[number] = Handle(attr.ino, fh, flags, stat.S_ISDIR(attr.mode))
    return {"fh": number, "attr": packed(attr)}


def _for_reading(s: Session, m: Message) -> Handle:
    handle = s.handle(m)
    if handle.flags & os.O_ACCMODE == os.O_WRONLY:
        fail(errno.EBADF)
    if handle.directory:
        fail(errno.EISDIR)
    return handle


def _for_writing(s: Session, m: Message) -> Handle:
    handle = s.handle(m)
    if handle.flags & os.O_ACCMODE == os.O_RDONLY:
        fail(errno.EBADF)
    return handle


@op
async def pread(s: Session, m: Message, caller: Caller) -> Message:
    """{fh, offset, length=PIECE} -> {data}"""
    handle = _for_reading(s, m)
    length = min(natural(m, "length", PIECE), MAX_PIECE)
    return {"data": await s.vfs.read(handle.ino, handle.fh, natural(m, "offset"), length, caller)}


@op
async def pwrite(s: Session, m: Message, caller: Caller) -> Message:
    """{fh, offset, data} -> {written}; at the end whatever ``offset`` says when opened with O_APPEND"""
    handle = _for_writing(s, m)
    append = bool(handle.flags & os.O_APPEND)
    offset = natural(m, "offset", 0)
    # A write takes the set-id bits of a file away for all but root (POSIX write).
    kill = caller.uid != 0
    data = content_of(m)
    return {"written": await s.vfs.write(handle.ino, handle.fh, offset, data, caller, append=append, clear_suid=kill)}


@op
async def ftruncate(s: Session, m: Message, caller: Caller) -> Message:
    """{fh, size} -> {attr}"""
    handle = _for_writing(s, m)
    to = SetAttr(size=natural(m, "size"), clear_suid=caller.uid != 0)
    return {"attr": packed(await s.vfs.setattr(handle.ino, to, caller, handle.fh))}


@op
async def fstat(s: Session, m: Message, caller: Caller) -> Message:
    """{fh} -> {attr}"""
    handle = s.handle(m)
    return {"attr": packed(await s.vfs.getattr(handle.ino, caller, handle.fh))}


@op
async def fsync(s: Session, m: Message, caller: Caller) -> Message:
    """{fh, datasync=false} -> {}"""
    handle = s.handle(m)
    sync_ = s.vfs.fsyncdir if handle.directory else s.vfs.fsync
    await sync_(handle.ino, handle.fh, want(m, "datasync", bool, False))
    return {}


@op
async def seek(s: Session, m: Message, caller: Caller) -> Message:
    """{fh, offset, whence: SEEK_DATA 3 or SEEK_HOLE 4} -> {offset}"""
    handle = _for_reading(s, m)
    return {"offset": await s.vfs.seek(handle.ino, handle.fh, natural(m, "offset"), natural(m, "whence", end=1 << 31))}


@op
async def fallocate(s: Session, m: Message, caller: Caller) -> Message:
    """{fh, mode=0, offset, length} -> {}"""
    handle = _for_writing(s, m)
    offset, length = natural(m, "offset"), natural(m, "length")
    await s.vfs.fallocate(handle.ino, handle.fh, flags_of(m, "mode"), offset, length, caller)
    return {}


@op
async def close(s: Session, m: Message, caller: Caller) -> Message:
    """{fh} -> {}; what a store could not write at close is raised here"""
    handle = s.handle(m)
    del s.handles[m["fh"]]
    try:
        if not handle.directory:
            await s.vfs.flush(handle.ino, handle.fh, caller)
    finally:
        await release(s.vfs, handle)
    return {}
