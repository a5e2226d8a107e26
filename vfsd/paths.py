"""Paths and whole files on top of the inode API: what a tool means by a name, for callers who have no kernel.

Owns the path walk (POSIX path resolution inside the tree), the permission checks the kernel makes for the shell
(``default_permissions``), and the whole-file operations. Must not know sockets, messages or backends.

Invariants: no path leads out of the tree, an absolute symlink starts at the tree's root; on volumes that answer inline
nothing suspends between the comparison and the write of ``write_file``, and elsewhere ``vfs.replace`` compares again;
uid 0 passes every check of mode bits. Every method raises OSError.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import trio

from vfsd.core import acl
from vfsd.core.changes import Laid
from vfsd.core.types import NODE_BITS, PATH_MAX, Attr, Caller, SetAttr
from vfsd.vfs import Vfs

READ, WRITE, SEARCH = 4, 2, 1

_SYMLINKS_MAX = 40
"""Symlinks followed in one walk before ELOOP (Linux MAXSYMLINKS)."""

LARGE = 1 << 20
"""Bytes of content from which on it is made ready in a thread, whose hop then is the less."""

_SLICE_S = 0.003


_P = ParamSpec("_P")
_T = TypeVar("_T")


def again_if_stale(
    operation: Callable[_P, Coroutine[Any, Any, _T]],
) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """An operation on a path, done once more when what a name on the way led to was gone by the time it was used, as
    the kernel does for who comes by the mount (linux/namei.h retry_estale). Nothing was changed by then."""

    @functools.wraps(operation)
    async def twice(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return await operation(*args, **kwargs)
        except OSError as exc:
            # With ``expect`` it says that the content is another, which a second look would not change.
            if exc.errno != errno.ESTALE or kwargs.get("expect") is not None:
                raise
        return await operation(*args, **kwargs)

    return twice


class Place(NamedTuple):
    """Where a walk ended: ``attr`` of what ``name`` is in directory ``parent``, None when there is nothing.

    ``name`` is empty when the path ends in the root, ``.`` or ``..``: such a path cannot be removed or made.
    """

    parent: Attr
    name: bytes
    attr: Attr | None


def fail(number: int) -> NoReturn:
    """Raise the OSError of ``number`` with the system's own words."""
    raise OSError(number, os.strerror(number))


def may(vfs: Vfs, caller: Caller, attr: Attr, bits: int) -> bool:
    """Whether mode or access control list of ``attr`` grant ``caller`` all of ``bits`` (READ, WRITE, SEARCH)."""
    uid, gid, mode = caller.uid, caller.gid, attr.mode
    if uid == 0:
        return True
    if uid != attr.uid and mode & 0o070 and (access := vfs.acl(attr.ino)) is not None:
        return acl.grants(access, uid, gid, attr.uid, attr.gid, bits)
    shift = 6 if uid == attr.uid else 3 if gid == attr.gid else 0
    return (mode >> shift) & bits == bits


def need(vfs: Vfs, caller: Caller, attr: Attr, bits: int) -> None:
    """EACCES unless ``caller`` has ``bits`` on ``attr``."""
    if caller.uid and not may(vfs, caller, attr, bits):
        fail(errno.EACCES)


def need_owner(caller: Caller, attr: Attr) -> None:
    """EPERM unless ``caller`` owns ``attr`` or is root (POSIX chmod, utimensat with times)."""
    if caller.uid not in (0, attr.uid):
        fail(errno.EPERM)


def need_removal(vfs: Vfs, caller: Caller, parent: Attr, victim: Attr) -> None:
    """EACCES unless ``parent`` may be written; EPERM when its sticky bit keeps ``victim`` from others (unlink(2))."""
    if caller.uid:
        need(vfs, caller, parent, WRITE | SEARCH)
        if parent.mode & stat.S_ISVTX and caller.uid not in (victim.uid, parent.uid):
            fail(errno.EPERM)


class Paths:
    """Walks and whole-file operations of one tree."""

    def __init__(self, vfs: Vfs) -> None:
        self.vfs = vfs

    @again_if_stale
    async def walk(self, path: bytes, caller: Caller, *, follow: bool = True, make: int | None = None) -> Place:
        """Follow ``path`` from the root; relative paths start there too.

        ``follow``: also a symlink at the end (one with a slash behind it always is). ``make``: permission bits of the
        directories to make where those before the last name are missing. Raises ENOENT (a directory on the way),
        ENOTDIR, ELOOP, EACCES, ENAMETOOLONG, EINVAL (a NUL).
        """
        if not path:
            fail(errno.ENOENT)
        if len(path) > PATH_MAX:
            fail(errno.ENAMETOOLONG)
        if b"\0" in path:
            fail(errno.EINVAL)
        vfs, checked = self.vfs, caller.uid != 0
        lookup = vfs.lookup
        todo = path.split(b"/")
        todo.reverse()
        root = parent = attr = await vfs.getattr(vfs.root_ino, caller)
        name = b""
        links = 0
        while todo:
            part = todo.pop()
            if not part or part == b".":
                if part or not todo:
                    # "x/." and "x/" are only ever directories, and "/" itself is one.
                    if not stat.S_ISDIR(attr.mode):
                        fail(errno.ENOTDIR)
                    if part:
                        name = b""
                continue
            if not stat.S_ISDIR(attr.mode):
                fail(errno.ENOTDIR)
            if checked and not may(vfs, caller, attr, SEARCH):
                fail(errno.EACCES)
            if part == b"..":
                parent = attr = await vfs.getattr(vfs.parent_of(attr.ino), caller)
                name = b""
                continue
            try:
                child = await lookup(attr.ino, part, caller)
            except FileNotFoundError:
                if not any(left not in (b"", b".") for left in todo):
                    return Place(attr, part, None)
                if make is None:
                    raise
                child = await self._mkdir(attr, part, make, caller)
            if child.mode & 0o170000 == stat.S_IFLNK and (follow or todo):
                links += 1
                if links > _SYMLINKS_MAX:
                    fail(errno.ELOOP)
                target = await vfs.readlink(child.ino, caller)
                if target.startswith(b"/"):
                    attr = root
                    name = b""
                todo += reversed(target.split(b"/"))
                continue
            parent, attr, name = attr, child, part
        return Place(parent, name, attr)

    async def resolve(self, path: bytes, caller: Caller, follow: bool = True) -> Attr:
        """The attributes of what ``path`` names; ENOENT and what ``walk`` raises."""
        attr = (await self.walk(path, caller, follow=follow)).attr
        if attr is None:
            fail(errno.ENOENT)
        return attr

    async def resolve_parent(self, path: bytes, caller: Caller) -> tuple[int, bytes]:
        """The directory that has, or could have, the last name of ``path``, and that name; EINVAL when it has none."""
        place = await self.walk(path.rstrip(b"/") or b"/", caller, follow=False)
        if not place.name:
            fail(errno.EINVAL)
        return place.parent.ino, place.name

    async def place_for(self, path: bytes, caller: Caller, *, make: int | None = None) -> Place:
        """Where something new called ``path`` would go, which the caller may write to; EEXIST, EACCES."""
        place = await self.walk(path.rstrip(b"/") or b"/", caller, follow=False, make=make)
        if place.attr is not None:
            fail(errno.EEXIST)
        need(self.vfs, caller, place.parent, WRITE | SEARCH)
        return place

    async def place_of(self, path: bytes, caller: Caller) -> tuple[Place, Attr]:
        """What ``path`` names, a symlink itself, for taking it from its directory; ENOENT, EBUSY (the root), EACCES."""
        place = await self.walk(path.rstrip(b"/") or b"/", caller, follow=False)
        if place.attr is None:
            fail(errno.ENOENT)
        if not place.name:
            if place.attr.ino == self.vfs.root_ino:
                raise OSError(errno.EBUSY, "it is the root of the tree")
            fail(errno.EINVAL)
        need_removal(self.vfs, caller, place.parent, place.attr)
        return place, place.attr

    @again_if_stale
    async def read_file(self, path: bytes, offset: int, length: int, caller: Caller) -> tuple[Attr, bytes | memoryview]:
        """Up to ``length`` bytes of a regular file from ``offset``, and its attributes; EISDIR, EINVAL, EACCES."""
        attr = (await self.walk(path, caller)).attr
        if attr is None:
            fail(errno.ENOENT)
        if attr.mode & 0o170000 != stat.S_IFREG:
            fail(errno.EISDIR if stat.S_ISDIR(attr.mode) else errno.EINVAL)
        if caller.uid:
            need(self.vfs, caller, attr, READ)
        return attr, await self.vfs.read(attr.ino, 0, offset, length, caller)

    @again_if_stale
    async def write_file(
        self,
        path: bytes,
        data: bytes | Sequence[bytes],
        caller: Caller,
        *,
        expect: int | None = None,
        parents: bool = True,
        perm: int = 0o644,
        exclusive: bool = False,
    ) -> tuple[bool, Attr]:
        """Make ``data``, or its pieces, the content of ``path`` in one commit: (whether the file is new, attributes).

        A file that is there keeps its ino, mode and links; through a symlink its target is written. ``expect``: the
        xxh3_64 of the content the caller knows; ESTALE when it is another, ENOENT when there is no file. ``exclusive``:
        EEXIST when there is one. ``parents``: make missing directories.
        """
        pieces = [data] if isinstance(data, bytes) else data
        content: bytes | Laid = data if isinstance(data, bytes) else b""
        large = sum(map(len, pieces)) > LARGE or content is not data
        prepared = -1
        async with contextlib.AsyncExitStack() as stack:
            while True:
                make = 0o755 if parents and expect is None else None
                place = await self.walk(path, caller, make=make)
                attr = place.attr
                if attr is not None:
                    if exclusive:
                        fail(errno.EEXIST)
                    if attr.mode & 0o170000 != stat.S_IFREG:
                        fail(errno.EISDIR if stat.S_ISDIR(attr.mode) else errno.EINVAL)
                    need(self.vfs, caller, attr, WRITE)
                else:
                    if expect is not None:
                        fail(errno.ENOENT)
                    if path.endswith((b"/", b"/.")):
                        fail(errno.EISDIR)
                    need(self.vfs, caller, place.parent, WRITE | SEARCH)
                ino = place.parent.ino if attr is None else attr.ino
                compare = expect is not None and attr is not None and attr.size > LARGE
                if prepared < 0 and (large or compare):
                    # Others have their turn meanwhile, so that all is to be looked at again.
                    prepared = ino >> NODE_BITS
                    content = await stack.enter_async_context(self._preparing(ino, pieces, compare))
                    continue
                if prepared not in (-1, ino >> NODE_BITS):
                    fail(errno.ESTALE)
                if attr is not None:
                    return False, await self._replace(attr, content, caller, expect)
                try:
                    perm = self._perm(place.parent, perm)
                    return True, await self.vfs.create_file(place.parent.ino, place.name, perm, content, caller)
                except FileExistsError:
                    # Only where this had to wait: someone else made it meanwhile, so overwrite that.
                    if exclusive or (self.vfs.is_inline(place.parent.ino) and not self.vfs.waits):
                        raise

    @contextlib.asynccontextmanager
    async def _preparing(self, ino: int, pieces: Sequence[bytes], compare: bool) -> AsyncIterator[bytes | Laid]:
        """Content for one ``replace`` of the ino (with ``expect`` if ``compare``) or ``create_file`` in it, inside.

        Where a commit is made inline, what takes long in it is done beforehand, in a thread. ENOSPC, EIO.
        """
        volume = self.vfs.table.volumes[ino >> NODE_BITS]
        async with contextlib.AsyncExitStack() as stack:
            content: bytes | Laid
            if volume.inline and hasattr(volume, "laying"):
                if compare:
                    await stack.enter_async_context(volume.comparing(ino))
                content = await stack.enter_async_context(volume.laying(pieces))
            else:
                content = b"".join(pieces)
            yield content

    async def _replace(self, attr: Attr, content: bytes | Laid, caller: Caller, expect: int | None) -> Attr:
        try:
            attr = await self.vfs.replace(attr.ino, content, caller, expect)
        except OSError as exc:
            if exc.errno == errno.ESTALE and expect is not None:
                raise OSError(errno.ESTALE, "changed since it was read") from None
            raise
        if caller.uid and attr.mode & 0o6000:
            attr = await self.vfs.setattr(attr.ino, SetAttr(clear_suid=True), caller)
        return attr

    def _perm(self, parent: Attr, perm: int) -> int:
        """A default access control list takes the place of the umask that tools have, 022."""
        inherits = self.vfs.acl(parent.ino, acl.DEFAULT) is not None
        return perm | perm >> 1 & 0o022 if inherits else perm

    async def makedirs(self, path: bytes, caller: Caller, perm: int = 0o755) -> Attr:
        """The directory ``path``, made with its parents where missing; ENOTDIR, EEXIST (something else is there)."""
        place = await self.walk(path.rstrip(b"/") or b"/", caller, make=perm)
        attr = place.attr or await self._mkdir(place.parent, place.name, perm, caller)
        if not stat.S_ISDIR(attr.mode):
            fail(errno.EEXIST)
        return attr

    async def _mkdir(self, parent: Attr, name: bytes, perm: int, caller: Caller) -> Attr:
        need(self.vfs, caller, parent, WRITE | SEARCH)
        try:
            return await self.vfs.mkdir(parent.ino, name, self._perm(parent, perm), caller)
        except FileExistsError:
            return await self.vfs.lookup(parent.ino, name, caller)

    @again_if_stale
    async def delete(self, path: bytes, caller: Caller, *, recursive: bool = True) -> None:
        """Remove a file, a symlink (never its target) or a directory with all in it.

        ENOTEMPTY without ``recursive``; EBUSY for the root of a route or a directory above one, before anything is
        removed.
        """
        place, attr = await self.place_of(path, caller)
        if not stat.S_ISDIR(attr.mode):
            await self.vfs.unlink(place.parent.ino, place.name, caller)
        elif not recursive:
            await self.vfs.rmdir(place.parent.ino, place.name, caller)
        else:
            await self._delete_tree(place.parent.ino, place.name, attr, caller)

    async def _delete_tree(self, parent: int, name: bytes, attr: Attr, caller: Caller) -> None:
        """Depth first, children before their directory; gives way to others every few milliseconds."""
        vfs = self.vfs
        if self._holds_route(attr.ino):
            raise OSError(errno.EBUSY, "a route begins there or below, which stays: only its files can be deleted")
        if vfs.guard is not None:
            await vfs.guard.deleting(parent, name, caller)
        stack: list[tuple[int, bytes, Attr]] = [(parent, name, attr)]
        began = time.perf_counter()
        while stack:
            parent, name, directory = stack[-1]
            below: list[tuple[int, bytes, Attr]] = []
            try:
                need(self.vfs, caller, directory, READ)
                for child, found in await vfs.children(directory.ino, caller):
                    need_removal(self.vfs, caller, directory, found)
                    if stat.S_ISDIR(found.mode):
                        below.append((directory.ino, child, found))
                        continue
                    await _gone_is_fine(vfs.unlink(directory.ino, child, caller))
                    if time.perf_counter() - began > _SLICE_S:
                        await trio.lowlevel.checkpoint()
                        began = time.perf_counter()
                if not below:
                    await _gone_is_fine(vfs.rmdir(parent, name, caller))
            except OSError as exc:
                # Someone added to it meanwhile: take that too.
                if exc.errno != errno.ENOTEMPTY:
                    raise
                await trio.lowlevel.checkpoint()
                continue
            if below:
                stack += below
            else:
                stack.pop()

    def _holds_route(self, ino: int) -> bool:
        """Whether directory ``ino`` is the root of a route, or one is mounted somewhere below it."""
        vfs, table = self.vfs, self.vfs.table
        for root, (parent, name) in list(table.mounted_at.items()):
            if table.overlays[parent][name].weak:
                continue
            if root == ino:
                return True
            while parent not in (ino, vfs.root_ino):
                parent = vfs.parent_of(parent)
            if parent == ino:
                return True
        return False

    @again_if_stale
    async def open(self, path: bytes, flags: int, perm: int, caller: Caller) -> tuple[Attr, int]:
        """open(2) for a regular file: its attributes and the handle to release. Errnos as in POSIX; ENXIO for others.

        Of ``flags`` O_CREAT, O_EXCL, O_TRUNC, O_APPEND, O_NOFOLLOW, O_DIRECTORY and O_TMPFILE count.
        """
        vfs = self.vfs
        access = flags & os.O_ACCMODE
        bits = (READ if access != os.O_WRONLY else 0) | (WRITE if access != os.O_RDONLY or flags & os.O_TRUNC else 0)
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            directory = await self.resolve(path, caller)
            need(self.vfs, caller, directory, WRITE | SEARCH)
            return await vfs.tmpfile(directory.ino, perm, flags, caller)
        if flags & os.O_CREAT and flags & os.O_DIRECTORY:
            fail(errno.EINVAL)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        place = await self.walk(path, caller, follow=not (exclusive or flags & os.O_NOFOLLOW))
        attr = place.attr
        if attr is None:
            if not flags & os.O_CREAT:
                fail(errno.ENOENT)
            if path.endswith((b"/", b"/.")):
                fail(errno.EISDIR)
            need(self.vfs, caller, place.parent, WRITE | SEARCH)
            return await vfs.create(place.parent.ino, place.name, perm, flags, caller)
        if exclusive:
            fail(errno.EEXIST)
        if stat.S_ISDIR(attr.mode):
            if access != os.O_RDONLY or flags & (os.O_CREAT | os.O_TRUNC):
                fail(errno.EISDIR)
        elif flags & os.O_DIRECTORY:
            fail(errno.ENOTDIR)
        elif stat.S_ISLNK(attr.mode):
            fail(errno.ELOOP)
        elif not stat.S_ISREG(attr.mode):
            fail(errno.ENXIO)
        need(self.vfs, caller, attr, bits)
        if stat.S_ISDIR(attr.mode):
            return attr, await vfs.opendir(attr.ino, caller)
        return attr, await vfs.open(attr.ino, flags & ~(os.O_CREAT | os.O_EXCL), caller)


async def _gone_is_fine(removal: Coroutine[Any, Any, None]) -> None:
    """Someone else removed it first."""
    with contextlib.suppress(FileNotFoundError):
        await removal
