"""A host directory as a volume: the host's kernel does all of POSIX, this passes it on without ever leaving the root.

Owns what names mean: lookup, listing, creation, removal, renaming, and the feed's account of them. Must not know doors,
paths of several names or other volumes. Invariants: every host call is by one name below an O_PATH descriptor and
never follows a symlink (``local_inodes.py``); nothing is opened that may block; the host's answer is the answer,
nothing is planned above it (docs/decisions/0001).
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress

from vfsd.backends import local_sys
from vfsd.backends.local_files import _OPEN_FLAGS, HostAttr, LocalFiles, Open, Publisher, put, write_all
from vfsd.backends.local_inodes import Inode, proc
from vfsd.core.acl import DEFAULT
from vfsd.core.changes import Change, Dentry, Drop, NoDentry, Target
from vfsd.core.plans import RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, RENAMES, check_name, fail
from vfsd.core.types import Attr, Caller, DirEntry

FIRST_OFFSET = 3
"""Offset of a listing's first entry; 1 and 2 belong to ``.`` and ``..``."""

_LISTINGS_MAX = 64
"""Directories whose listing is remembered for readers without a handle."""

_GONE_MAX = 1024
"""Names no longer there that a listing carries along, besides as many as there are."""

_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class _Listing:
    """The names of a directory with offsets that stay good when it is read anew."""

    __slots__ = ("names", "offsets")

    def __init__(self) -> None:
        self.names: list[bytes] | None = None
        self.offsets: Sequence[int] = range(0)

    def take(self, present: list[bytes]) -> None:
        """Put new names after the last; those gone keep their offset, for they may come back, while they are few."""
        if not self.names:
            self.names, self.offsets = present, range(FIRST_OFFSET, FIRST_OFFSET + len(present))
            return
        late = dict.fromkeys(present)
        for name in self.names:
            late.pop(name, None)
        first = self.offsets[-1] + 1
        names, offsets = [*self.names, *late], [*self.offsets, *range(first, first + len(late))]
        if len(names) > 2 * len(present) + _GONE_MAX:
            here = set(present)
            kept = [i for i, name in enumerate(names) if name in here]
            names, offsets = [names[i] for i in kept], [offsets[i] for i in kept]
        self.names, self.offsets = names, offsets


class LocalVolume(LocalFiles):
    """A route of kind local.

    ``base`` is ``volume << NODE_BITS``, ``root`` the host directory. All methods take full inos and raise OSError,
    ESTALE for an ino whose file the host has removed.
    """

    inline = True
    sync_waits = True
    kind = "local"
    cache_seconds = 1.0
    """The host may change its files without telling us: how long the kernel may believe what it was told."""

    def __init__(
        self, base: int, root: str | bytes | os.PathLike[str], feed: Publisher, *, read_only: bool = False
    ) -> None:
        super().__init__(base, root, feed, read_only=read_only)
        self._dir_listings: dict[int, _Listing] = {}
        self._listings: OrderedDict[int, _Listing] = OrderedDict()

    # --- observing ------------------------------------------------------------------------------------------------

    def lookup(self, parent: int, name: bytes) -> HostAttr:
        """ENOENT, ENOTDIR, ENAMETOOLONG, ESTALE; ``..`` of the root is the root."""
        directory = self._inode(parent)
        if name == b".":
            return self.getattr(parent)
        if name == b"..":
            return self.getattr(self.parent_of(parent))
        if not name or b"/" in name or b"\0" in name:
            raise fail(errno.EINVAL, name)
        inodes = self._inodes
        dir_fd = inodes.dir_fd(directory)
        st = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        return HostAttr(self.base | inodes.enter(st, dir_fd, directory, name).node, st)

    peek = lookup

    def birth_ns(self, ino: int) -> int | None:
        """As the host has it; ESTALE."""
        return local_sys.birth_ns(self._inodes.fd(self._inode(ino)), b"")

    def readlink(self, ino: int) -> bytes:
        """The target as it stands; EINVAL for anything but a symlink."""
        inode = self._inode(ino)
        if inode.fmt != stat.S_IFLNK:
            raise fail(errno.EINVAL, inode.name)
        return os.readlink(b"", dir_fd=self._inodes.fd(inode))

    def parent_of(self, ino: int) -> int:
        """The ino of ``..``."""
        inode = self._inode(ino)
        return self.root_ino if inode.parent is None else self.base | inode.parent.node

    def path_of(self, ino: int) -> bytes | None:
        """A path from the volume's root; None for a file without a name."""
        try:
            return self._inodes.path_of(self._inode(ino))
        except OSError:
            return None

    def links_of(self, ino: int) -> list[tuple[int, bytes]]:
        """Every (ino of a directory, name) that is known to lead to the ino; the host may have more."""
        return [(self.base | at, name) for at, name in self._inodes.links_of(self._inode(ino))]

    def opendir(self, ino: int, caller: Caller) -> int:
        """ENOTDIR."""
        inode = self._inode(ino)
        if inode.fmt != stat.S_IFDIR:
            raise fail(errno.ENOTDIR, inode.name)
        return self._add(Open(inode, -1))

    def releasedir(self, ino: int, fh: int) -> None:
        """EBADF."""
        self._dir_listings.pop(fh, None)
        self.release(ino, fh)

    def readdir(self, ino: int, fh: int, offset: int) -> Iterator[DirEntry]:
        """Entries after ``offset``, from a snapshot of the names that offset 0 takes anew.

        An entry that stays is given once; one that goes before its turn is left out; a late one may be missed.
        """
        inode = self._inode(ino)
        if fh:
            listing = self._dir_listings.get(fh)
            if listing is None:
                self._open(fh)
                listing = self._dir_listings[fh] = _Listing()
        else:
            listing = self._listings.get(inode.node)
            if listing is None:
                listing = self._listings[inode.node] = _Listing()
                if len(self._listings) > _LISTINGS_MAX:
                    self._listings.popitem(last=False)
        if listing.names is None or offset < FIRST_OFFSET:
            listing.take(self._inodes.listdir(inode))
        names, offsets = listing.names, listing.offsets
        assert names is not None
        start = bisect_right(offsets, offset)
        return self._entries(inode, names, offsets, start)

    def _entries(self, inode: Inode, names: list[bytes], offsets: Sequence[int], start: int) -> Iterator[DirEntry]:
        inodes, base = self._inodes, self.base
        for i in range(start, len(names)):
            name = names[i]
            dir_fd = inode.fd if inode.fd >= 0 else inodes.dir_fd(inode)
            try:
                st = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
                child = inodes.enter(st, dir_fd, inode, name)
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.ELOOP):
                    continue
                raise
            yield DirEntry(name, HostAttr(base | child.node, st), offsets[i])

    def children(self, ino: int) -> list[tuple[bytes, Attr]]:
        """All entries at once, for searches and listings; ENOTDIR."""
        inode = self._inode(ino)
        names = self._inodes.listdir(inode)
        return [(name, attr) for name, attr, _ in self._entries(inode, names, range(len(names)), 0)]

    # --- creating -------------------------------------------------------------------------------------------------

    def _parent(self, ino: int, name: bytes) -> tuple[Inode, int]:
        """The directory a name is to be made, removed or moved in, and its descriptor."""
        if self.read_only:
            raise fail(errno.EROFS, name)
        check_name(name)
        directory = self._inode(ino)
        return directory, self._inodes.dir_fd(directory)

    def _made(
        self,
        op: str,
        directory: Inode,
        dir_fd: int,
        name: bytes,
        perm: int,
        caller: Caller,
        target: bytes | None = None,
    ) -> HostAttr:
        """Give what was just made its owner, group and mode, and tell of it."""
        inodes = self._inodes
        st = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        is_dir = stat.S_ISDIR(st.st_mode)
        if self._needs_settling(st, perm, caller):
            fd = inodes.open_child(dir_fd, name)
            try:
                now = os.fstat(fd)
                # Somebody on the host may have put another file here meanwhile, which must not be given away.
                if not os.path.samestat(st, now) or now.st_uid != self._euid or now.st_nlink > (2 if is_dir else 1):
                    raise fail(errno.ESTALE, name)
                try:
                    st = self._settle(fd, now, dir_fd, perm, caller)
                except BaseException:
                    (os.rmdir if is_dir else os.unlink)(name, dir_fd=dir_fd)
                    raise
            finally:
                os.close(fd)
        inode = inodes.enter_new(st, directory, name)
        self._tell_made(op, directory, dir_fd, name, inode, st, caller, target)
        return self._attr(inode, st)

    @staticmethod
    def _mode_bits(st: os.stat_result) -> int:
        """Which permission bits of a new file the caller chooses: a directory's setgid comes from its parent."""
        return 0 if stat.S_ISLNK(st.st_mode) else 0o1777 if stat.S_ISDIR(st.st_mode) else 0o7777

    def _needs_settling(self, st: os.stat_result, perm: int, caller: Caller) -> bool:
        wrong_mode = (st.st_mode ^ perm) & self._mode_bits(st)
        return bool(wrong_mode) or st.st_uid != caller.uid or st.st_gid != caller.gid

    @staticmethod
    def _inherits(dir_fd: int) -> bool:
        """Whether the host gives what is made here its access control list, and so its permissions."""
        try:
            return bool(os.getxattr(proc(dir_fd), DEFAULT))
        except OSError:
            return False

    def _settle(self, fd: int, st: os.stat_result, dir_fd: int, perm: int, caller: Caller) -> os.stat_result:
        """chown and chmod a new file to what its caller would have got. An ordinary user's daemon can't give away."""
        path = proc(fd)
        # A setgid directory has given its group already (Linux inode_init_owner).
        gid = -1 if os.fstat(dir_fd).st_mode & stat.S_ISGID or st.st_gid == caller.gid else caller.gid
        if self._euid == 0:
            if st.st_uid != caller.uid or gid != -1:
                os.chown(path, caller.uid, gid)
        elif gid != -1 and st.st_uid == caller.uid:
            with suppress(PermissionError):  # a group the daemon is not in
                os.chown(path, -1, gid)
        bits = self._mode_bits(st)
        if self._inherits(dir_fd):
            bits &= ~0o777
        if (st.st_mode ^ perm) & bits:
            os.chmod(path, (perm & bits) | (st.st_mode & 0o7777 & ~bits))
        return os.fstat(fd)

    def _tell_made(
        self,
        op: str,
        directory: Inode,
        dir_fd: int,
        name: bytes,
        inode: Inode,
        st: os.stat_result,
        caller: Caller,
        target: bytes | None = None,
    ) -> None:
        if not self._feed.wanted(caller):
            return
        changes: list[Change] = [put(inode.node, st)]
        if target is not None:
            changes.append(Target(inode.node, target))
        changes += [Dentry(directory.node, name, inode.node), put(directory.node, os.fstat(dir_fd))]
        self._feed.publish(self.base, caller, op, changes)

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> HostAttr:
        """A regular file, FIFO, socket or device node; EPERM for a device asked for by an ordinary user."""
        directory, dir_fd = self._parent(parent, name)
        fmt = stat.S_IFMT(mode) or stat.S_IFREG
        if caller.uid and fmt in (stat.S_IFBLK, stat.S_IFCHR):
            raise fail(errno.EPERM, name)
        # No setuid before the owner is right: it would be root's for a moment.
        os.mknod(name, fmt | (mode & 0o777), rdev, dir_fd=dir_fd)
        return self._made("mknod", directory, dir_fd, name, mode, caller)

    def mkdir(self, parent: int, name: bytes, perm: int, caller: Caller) -> HostAttr:
        """EEXIST, EMLINK; the group and setgid come from a setgid parent."""
        directory, dir_fd = self._parent(parent, name)
        os.mkdir(name, perm & 0o1777, dir_fd=dir_fd)
        return self._made("mkdir", directory, dir_fd, name, perm, caller)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> HostAttr:
        """The target is stored as it is, wherever it points."""
        directory, dir_fd = self._parent(parent, name)
        if b"\0" in target:
            raise fail(errno.EINVAL, name)
        os.symlink(target, name, dir_fd=dir_fd)
        return self._made("symlink", directory, dir_fd, name, 0, caller, target)

    def _create(self, directory: Inode, dir_fd: int, name: bytes, mode: int, flags: int, caller: Caller) -> Open:
        """A new regular file, opened; EEXIST."""
        fd = self._inodes.open_new(dir_fd, name, flags & _OPEN_FLAGS | _CREATE, mode & 0o777)
        try:
            st = os.fstat(fd)
            if self._needs_settling(st, mode, caller):
                st = self._settle(fd, st, dir_fd, mode, caller)
        except BaseException:
            os.close(fd)
            os.unlink(name, dir_fd=dir_fd)
            raise
        return Open(self._inodes.enter_new(st, directory, name), fd, flags)

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[HostAttr, int]:
        """open(2) with O_CREAT: opens what is there unless O_EXCL (EEXIST)."""
        directory, dir_fd = self._parent(parent, name)
        try:
            opened = self._create(directory, dir_fd, name, mode, flags, caller)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            fh = self.open(self.lookup(parent, name).ino, flags, caller)
            inode = self._opens[fh].inode
            return self._attr(inode, self._inodes.stat(inode)), fh
        st = os.fstat(opened.fd)
        self._tell_made("create", directory, dir_fd, name, opened.inode, st, caller)
        return self._attr(opened.inode, st), self._add(opened)

    def create_file(self, parent: int, name: bytes, perm: int, data: bytes, caller: Caller) -> HostAttr:
        """A new regular file with its content; EEXIST, and without a trace ENOSPC."""
        directory, dir_fd = self._parent(parent, name)
        opened = self._create(directory, dir_fd, name, perm, os.O_WRONLY, caller)
        try:
            write_all(opened.fd, data, 0, partly=False)
            st = os.fstat(opened.fd)
        except BaseException:
            os.unlink(name, dir_fd=dir_fd)
            raise
        finally:
            os.close(opened.fd)
        self._tell_made("create", directory, dir_fd, name, opened.inode, st, caller)
        return self._attr(opened.inode, st)

    def tmpfile(self, parent: int, mode: int, flags: int, caller: Caller) -> tuple[HostAttr, int]:
        """open(2) with O_TMPFILE."""
        if self.read_only:
            raise fail(errno.EROFS)
        dir_fd = self._inodes.dir_fd(self._inode(parent))
        flags = flags & (_OPEN_FLAGS | os.O_EXCL) & ~os.O_TRUNC | os.O_TMPFILE | os.O_CLOEXEC
        fd = self._inodes.open_new(dir_fd, b".", flags, mode & 0o777)
        try:
            st = self._settle(fd, os.fstat(fd), dir_fd, mode, caller)
            opened = Open(self._inodes.enter_unnamed(fd), fd, flags)
        except BaseException:
            os.close(fd)
            raise
        fh = self._add(opened)
        self._tell(caller, "tmpfile", opened.inode, fd)
        return self._attr(opened.inode, st), fh

    def link(self, ino: int, parent: int, name: bytes, caller: Caller) -> HostAttr:
        """EPERM for a directory, EEXIST, EMLINK, EXDEV across the host's mounts."""
        directory, dir_fd = self._parent(parent, name)
        inode = self._inode(ino)
        fd = self._inodes.fd(inode)
        os.link(proc(fd), name, dst_dir_fd=dir_fd, follow_symlinks=True)
        if inode.name is None:
            self._inodes.place(inode, directory, name)
        st = os.fstat(fd)
        self._tell_made("link", directory, dir_fd, name, inode, st, caller)
        return self._attr(inode, st)

    # --- removing and renaming ------------------------------------------------------------------------------------

    def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        """ENOENT, EISDIR."""
        self._remove("unlink", parent, name, caller)

    def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        """ENOENT, ENOTDIR, ENOTEMPTY."""
        self._remove("rmdir", parent, name, caller)

    def _remove(self, op: str, parent: int, name: bytes, caller: Caller) -> None:
        directory, dir_fd = self._parent(parent, name)
        inodes = self._inodes
        st = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        inode = inodes.enter(st, dir_fd, directory, name)
        inodes.pin(inode)
        try:
            (os.rmdir if op == "rmdir" else os.unlink)(name, dir_fd=dir_fd)
        except BaseException:
            inodes.unpin(inode)
            raise
        gone = self._lost(inode, directory, name, st)
        if self._feed.wanted(caller):
            changes = [NoDentry(directory.node, name, inode.node), gone, put(directory.node, os.fstat(dir_fd))]
            self._feed.publish(self.base, caller, op, changes)

    def _lost(self, inode: Inode, directory: Inode, name: bytes, st: os.stat_result) -> Change:
        """What has become of an inode that just lost a name; ``st`` is of before."""
        nlink = 0 if stat.S_ISDIR(st.st_mode) else st.st_nlink - 1
        self._inodes.lose(inode, directory, name, nlink)
        if not nlink and not inode.lookups and not inode.handles:
            return Drop(inode.node)
        return put(inode.node, st)._replace(nlink=nlink)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller) -> None:
        """rename(2), or renameat2(2), flags as in RENAMES."""
        if flags not in RENAMES:
            raise fail(errno.EINVAL, name)
        source, source_fd = self._parent(parent, name)
        target, target_fd = self._parent(new_parent, new_name)
        inodes = self._inodes
        st = os.stat(name, dir_fd=source_fd, follow_symlinks=False)
        inode = inodes.enter(st, source_fd, source, name)
        other: Inode | None = None
        try:
            other_st = os.stat(new_name, dir_fd=target_fd, follow_symlinks=False)
            other = inodes.enter(other_st, target_fd, target, new_name)
        except FileNotFoundError:
            pass
        if other is inode and not flags & RENAME_NOREPLACE:
            return  # two names of one file: POSIX wants nothing done
        replaced = None if flags & (RENAME_NOREPLACE | RENAME_EXCHANGE) else other
        if replaced is not None:
            inodes.pin(replaced)
        try:
            if flags:
                local_sys.rename(source_fd, name, target_fd, new_name, flags)
            else:
                os.rename(name, new_name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
        except BaseException:
            if replaced is not None:
                inodes.unpin(replaced)
            raise
        changes: list[Change] = []
        if flags == RENAME_EXCHANGE and other is not None:
            inodes.place(inode, target, new_name)
            inodes.place(other, source, name)
            changes += [Dentry(source.node, name, other.node), Dentry(target.node, new_name, inode.node)]
        else:
            changes.append(NoDentry(source.node, name, inode.node))
            if other is not None:
                changes += [NoDentry(target.node, new_name, other.node), self._lost(other, target, new_name, other_st)]
            inodes.place(inode, target, new_name)
            changes.append(Dentry(target.node, new_name, inode.node))
        if self._feed.wanted(caller):
            changes += [put(d.node, os.fstat(fd)) for d, fd in {source: source_fd, target: target_fd}.items()]
            self._feed.publish(self.base, caller, "rename", changes)
        if flags & RENAME_WHITEOUT:
            self._made("mknod", source, source_fd, name, 0, caller)
