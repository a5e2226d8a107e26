"""The host's inodes that a ``local`` volume knows: their node numbers, their names and descriptors to reach them.

Owns confinement and identity. Must not know callers, the feed or what an operation means. Invariants:

- Every file is reached from the root's descriptor by single names, O_NOFOLLOW, or through a descriptor got that way
  (``/proc/self/fd/N`` opens that very inode); a directory used as the base of a call is inside the root at that moment.
- One (st_dev, st_ino) that lives is one node; a node never comes to mean another file while anybody refers to it.
- At most ``limit`` descriptors are kept for speed; more only for what has lost its name and is still referred to.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from vfsd.backends import local_sys
from vfsd.core.plans import fail
from vfsd.core.types import ROOT_NODE

FIRST_OWN_NODE = 1 << 46
"""Nodes from here on are counted; below it a node is the host's inode number."""

IDLE_MAX = 131072
"""Known inodes past which those nobody refers to are forgotten."""

_O_PATH_NOFOLLOW = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FMT = 0o170000

Key = int | tuple[int, int]
T = TypeVar("T")


class Inode:
    """One file of the host. ``parent`` and ``name`` are where it was last seen, ``name`` None once it is nowhere.

    ``fd`` is an O_PATH descriptor or -1, ``handles`` the descriptors of its opens, ``lookups`` what the kernel holds;
    ``ctime_ns`` is the latest seen, ``fmt`` the type bits. ``others`` are places where it was seen before, and may be.
    """

    __slots__ = ("ctime_ns", "fd", "fmt", "handles", "key", "lookups", "name", "node", "others", "parent")

    def __init__(self, node: int, key: Key, fmt: int, ctime_ns: int, parent: Inode | None, name: bytes | None) -> None:
        self.node = node
        self.key = key
        self.fmt = fmt
        self.ctime_ns = ctime_ns
        self.parent = parent
        self.name = name
        self.fd = -1
        self.lookups = 0
        self.handles: list[int] = []
        self.others: set[tuple[Inode, bytes]] = set()


class Inodes:
    """The table of one volume. All methods are synchronous and raise OSError."""

    def __init__(self, root: bytes) -> None:
        """``root``: the host directory. Raises ENOENT, ENOTDIR, EACCES."""
        # Symlinks on the way TO the root are the operator's own, so they are followed here and nowhere else.
        self.root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        st = os.fstat(self.root_fd)
        self._dev = st.st_dev
        self.root = Inode(ROOT_NODE, st.st_ino, stat.S_IFDIR, st.st_ctime_ns, None, b"")
        self.root.fd = self.root_fd
        self.by_node: dict[int, Inode] = {ROOT_NODE: self.root}
        self._by_key: dict[Key, Inode] = {st.st_ino: self.root}
        self._next_own = FIRST_OWN_NODE
        self._idle_max = IDLE_MAX
        self._hot: OrderedDict[int, Inode] = OrderedDict()
        self.limit = _descriptors_to_keep()
        self._prefix = b""
        self._read_prefix()

    # --- identity -------------------------------------------------------------------------------------------------

    def get(self, node: int) -> Inode:
        """Raises ESTALE for a node that is not known (any more)."""
        inode = self.by_node.get(node)
        if inode is None:
            raise fail(errno.ESTALE)
        return inode

    def find(self, st: os.stat_result) -> Inode | None:
        """The known inode a stat result is of."""
        num = st.st_ino
        return self._by_key.get(num if st.st_dev == self._dev else (st.st_dev, num))

    def enter(self, st: os.stat_result, dir_fd: int, parent: Inode, name: bytes) -> Inode:
        """The inode that ``name`` in ``parent`` (open as ``dir_fd``) is, known from now on at the latest."""
        num = st.st_ino
        key: Key = num if st.st_dev == self._dev else (st.st_dev, num)
        inode = self._by_key.get(key)
        ctime_ns = st.st_ctime_ns
        if inode is not None:
            if inode.fmt == st.st_mode & _FMT and (
                inode.ctime_ns == ctime_ns or self._is_same(inode, ctime_ns, dir_fd, name)
            ):
                inode.ctime_ns = ctime_ns
                if inode.parent is not parent or inode.name != name:
                    self.place(inode, parent, name)
                return inode
            self._retire(inode)
        return self._add(key, st.st_mode & _FMT, ctime_ns, parent, name)

    def enter_new(self, st: os.stat_result, parent: Inode | None, name: bytes | None) -> Inode:
        """The inode of a file just created; what had its number before is gone."""
        key: Key = st.st_ino if st.st_dev == self._dev else (st.st_dev, st.st_ino)
        old = self._by_key.get(key)
        if old is not None:
            self._retire(old)
        return self._add(key, st.st_mode & _FMT, st.st_ctime_ns, parent, name)

    def place(self, inode: Inode, parent: Inode, name: bytes) -> None:
        """The inode is ``name`` in ``parent`` now. Raises ELOOP for a bind mount of the root inside itself."""
        if inode is self.root:
            raise fail(errno.ELOOP, name)
        if inode.fmt == stat.S_IFDIR and inode.parent is not parent:
            # The host may have turned a into b/a where we still knew b as a/b: then where b is we don't know.
            at: Inode | None = parent
            while at is not None:
                if at.parent is inode:
                    at.parent = at.name = None
                at = at.parent
        unnamed = inode.name is None
        if inode.fmt != stat.S_IFDIR and inode.parent is not None and inode.name is not None:
            inode.others.add((inode.parent, inode.name))
        inode.parent = parent
        inode.name = name
        if unnamed and inode.fd >= 0:
            self.keep(inode, inode.fd)

    def lose(self, inode: Inode, parent: Inode, name: bytes, nlink: int) -> None:
        """``name`` in ``parent`` is not the inode any more, which has ``nlink`` names left. ``pin`` came before."""
        if inode.parent is parent and inode.name == name:
            inode.parent = inode.name = None
        else:
            self.unpin(inode)
        if not nlink and not inode.lookups and not inode.handles:
            self.drop(inode)

    def enter_unnamed(self, fd: int) -> Inode:
        """The inode of an O_TMPFILE's descriptor; it keeps an O_PATH descriptor of its own."""
        inode = self.enter_new(os.fstat(fd), None, None)
        inode.fd = self._open(proc(fd), os.O_PATH | os.O_CLOEXEC, None)
        return inode

    def _add(self, key: Key, fmt: int, ctime_ns: int, parent: Inode | None, name: bytes | None) -> Inode:
        if len(self.by_node) >= self._idle_max:
            self._sweep()
        node = key if isinstance(key, int) else 0
        # The host's own number where it is free: stat then says the same on both sides (git's index is good for both).
        if not ROOT_NODE < node < FIRST_OWN_NODE or node in self.by_node:
            node = self._next_own
            self._next_own += 1
        inode = Inode(node, key, fmt, ctime_ns, parent, name)
        self.by_node[node] = self._by_key[key] = inode
        return inode

    def _is_same(self, inode: Inode, ctime_ns: int, dir_fd: int, name: bytes) -> bool:
        """Whether the host's inode number still means the same file, now that its ctime has moved on.

        File systems give the number of a removed file to a new one at once; that one was born after anything we saw.
        """
        if inode.fd >= 0 or inode.handles:
            return True
        born = local_sys.birth_ns(dir_fd, name)
        # Born after its own latest change: the host's clock went back, and such a birth tells nothing.
        return born is None or born <= inode.ctime_ns or born > ctime_ns

    def _retire(self, inode: Inode) -> None:
        """Let go of an inode's number on the host, which is another file's now; its node stays while referred to."""
        if self._by_key.get(inode.key) is inode:
            del self._by_key[inode.key]
        inode.name = inode.parent = None
        if not inode.lookups and not inode.handles:
            self.drop(inode)

    def drop(self, inode: Inode) -> None:
        """Forget an inode nobody refers to."""
        self.by_node.pop(inode.node, None)
        if self._by_key.get(inode.key) is inode:
            del self._by_key[inode.key]
        self._hot.pop(inode.node, None)
        if inode.fd >= 0:
            os.close(inode.fd)
            inode.fd = -1

    def _sweep(self) -> None:
        """Forget the older half of what nobody refers to: no lookup, no handle, no descriptor, nothing known below."""
        keep: set[int] = set()
        for inode in self.by_node.values():
            if inode.lookups or inode.handles or inode.fd >= 0:
                up: Inode | None = inode
                while up is not None and up.node not in keep:
                    keep.add(up.node)
                    up = up.parent
        idle = [inode for node, inode in self.by_node.items() if node not in keep]
        # A directory may go before what is below it, which then is ESTALE until it is looked up again.
        for inode in idle[: (len(idle) + 1) // 2]:
            self.drop(inode)
        self._idle_max = max(IDLE_MAX, 2 * len(self.by_node))

    # --- descriptors ----------------------------------------------------------------------------------------------

    def dir_fd(self, inode: Inode) -> int:
        """An O_PATH descriptor to use as the base of a call, inside the root now. Raises ESTALE when it is not."""
        fd = inode.fd
        if fd == self.root_fd:
            return fd
        if fd < 0:
            return self._reach(inode)
        try:
            inside = os.readlink(b"/proc/self/fd/%d" % fd).startswith(self._prefix)
        except OSError:
            inside = False
        if not inside and not self._is_inside(inode, fd):
            if inode.node not in self._hot:
                raise fail(errno.ESTALE)
            self._cool(inode)
            return self._reach(inode)
        if inode.node in self._hot:
            self._hot.move_to_end(inode.node)
        return fd

    def fd(self, inode: Inode) -> int:
        """A descriptor of the inode, good for fstat and by ``proc``. Raises ESTALE when the host has removed it."""
        if inode.fd >= 0:
            if inode.node in self._hot:
                self._hot.move_to_end(inode.node)
            return inode.fd
        if inode.handles:
            return inode.handles[0]
        return self._reach(inode)

    def stat(self, inode: Inode) -> os.stat_result:
        """stat of the inode, by its name where no descriptor is at hand. Raises ESTALE."""
        if inode.fd >= 0:
            return os.fstat(inode.fd)
        if inode.handles:
            return os.fstat(inode.handles[0])
        if inode.parent is None or inode.name is None:
            raise fail(errno.ESTALE)
        dir_fd = self.dir_fd(inode.parent)
        try:
            st = os.stat(inode.name, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            raise fail(errno.ESTALE, inode.name) from None
        if self.enter(st, dir_fd, inode.parent, inode.name) is not inode:
            raise fail(errno.ESTALE, inode.name)
        return st

    def _reach(self, inode: Inode) -> int:
        """Open the inode where it was last seen, and make sure that it is the one."""
        names = self._names(inode)
        if names is None:
            raise fail(errno.ESTALE)
        try:
            fd = self._frugally(lambda: local_sys.open_beneath(self.root_fd, names))
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
                raise fail(errno.ESTALE, inode.name) from None
            raise
        try:
            st = os.fstat(fd)
            if self.find(st) is not inode or inode.fmt != st.st_mode & _FMT:
                raise fail(errno.ESTALE, inode.name)
            if st.st_ctime_ns != inode.ctime_ns:
                if not self._is_same(inode, st.st_ctime_ns, fd, b""):
                    self._retire(inode)
                    raise fail(errno.ESTALE, inode.name)
                inode.ctime_ns = st.st_ctime_ns
        except BaseException:
            os.close(fd)
            raise
        self.keep(inode, fd)
        return fd

    def keep(self, inode: Inode, fd: int) -> None:
        """Make ``fd`` the inode's O_PATH descriptor, closing the coldest one when there are too many."""
        inode.fd = fd
        self._hot[inode.node] = inode
        if len(self._hot) > self.limit:
            _, cold = self._hot.popitem(last=False)
            os.close(cold.fd)
            cold.fd = -1

    def pin(self, inode: Inode) -> None:
        """Call before an inode may lose the name it is known by: if it is in use, keep a descriptor until it is not."""
        if not inode.lookups and not inode.handles:
            return
        if inode.fd < 0:
            try:
                fd = self.fd(inode)
            except OSError as exc:
                if exc.errno == errno.ESTALE:  # already gone: what is about to lose its name is another file
                    return
                raise
            if inode.fd < 0:
                inode.fd = self._open(proc(fd), os.O_PATH | os.O_CLOEXEC, None)
        self._hot.pop(inode.node, None)

    def unpin(self, inode: Inode) -> None:
        """It kept its name after all."""
        if inode.fd >= 0:
            self.keep(inode, inode.fd)

    def open_child(self, dir_fd: int, name: bytes) -> int:
        """An O_PATH descriptor of one name in a directory, not following it."""
        return self._open(name, _O_PATH_NOFOLLOW, dir_fd)

    def open_file(self, inode: Inode, flags: int) -> int:
        """Open a regular file's contents. Raises EISDIR, ELOOP (symlink), ENXIO (FIFO, socket, device), ESTALE.

        The type is known from a descriptor of this very inode, so a FIFO can't be slipped in to block the daemon.
        """
        if inode.fmt != stat.S_IFREG:
            kinds = {stat.S_IFDIR: errno.EISDIR, stat.S_IFLNK: errno.ELOOP}
            raise fail(kinds.get(inode.fmt, errno.ENXIO), inode.name)
        fd = self.fd(inode)
        if inode.node in self._hot and not self._is_inside(inode, fd):
            self._cool(inode)
            fd = self.fd(inode)
        return self._open(proc(fd), flags | os.O_CLOEXEC, None)

    def _cool(self, inode: Inode) -> None:
        del self._hot[inode.node]
        os.close(inode.fd)
        inode.fd = -1

    def listdir(self, inode: Inode) -> list[bytes]:
        """The names in a directory, in the host's order. Raises ENOTDIR, EACCES."""
        path = proc(self.dir_fd(inode))
        return self._frugally(lambda: os.listdir(path))

    def open_new(self, dir_fd: int, name: bytes, flags: int, perm: int) -> int:
        """Create and open a file of one name in a directory."""
        try:
            return os.open(name, flags, perm, dir_fd=dir_fd)
        except OSError as exc:
            if exc.errno != errno.EMFILE:
                raise
        return self._frugally(lambda: os.open(name, flags, perm, dir_fd=dir_fd))

    def _open(self, path: bytes, flags: int, dir_fd: int | None) -> int:
        return self._frugally(lambda: os.open(path, flags, dir_fd=dir_fd))

    def _frugally(self, call: Callable[[], T]) -> T:
        """Make a call that takes a descriptor; where there is none left, give up those kept for speed and try again."""
        try:
            return call()
        except OSError as exc:
            # The newest ones are spared: the call at hand works with some of them.
            count = len(self._hot) // 2
            if exc.errno != errno.EMFILE or count < 4:
                raise
        for _ in range(count):
            _, cold = self._hot.popitem(last=False)
            os.close(cold.fd)
            cold.fd = -1
        return call()

    # --- the border -----------------------------------------------------------------------------------------------

    def _read_prefix(self) -> None:
        self._prefix = os.readlink(proc(self.root_fd)).rstrip(b"/") + b"/"

    def _is_inside(self, inode: Inode, fd: int) -> bool:
        """Whether an inode is below the root now: the host may have moved it out, with us holding on to it."""
        try:
            self._read_prefix()
            return os.readlink(proc(fd)).startswith(self._prefix)
        except OSError as exc:
            if exc.errno != errno.ENAMETOOLONG:
                raise
        # Deeper than PATH_MAX, where proc(5) has no words for it: see whether the way there still leads there.
        names = self._names(inode)
        if names is None:
            return True
        try:
            found = local_sys.open_beneath_by_steps(self.root_fd, names)
        except OSError:
            return False
        try:
            return os.path.samestat(os.fstat(found), os.fstat(fd))
        finally:
            os.close(found)

    def _names(self, inode: Inode) -> list[bytes] | None:
        names: list[bytes] = []
        at = inode
        while at is not self.root:
            if at.name is None or at.parent is None:
                return None
            names.append(at.name)
            at = at.parent
        names.reverse()
        return names

    def path_of(self, inode: Inode) -> bytes | None:
        """The path from the root, ``/`` first; None for a file without a name."""
        names = self._names(inode)
        return None if names is None else b"/" + b"/".join(names)

    def links_of(self, inode: Inode) -> list[tuple[int, bytes]]:
        """The (node of a directory, name) of each place where the inode was seen and still is."""
        found = [] if inode.parent is None or inode.name is None else [(inode.parent.node, inode.name)]
        for parent, name in list(inode.others):
            try:
                there = self.find(os.stat(name, dir_fd=self.dir_fd(parent), follow_symlinks=False))
            except OSError:
                there = None
            if there is not inode or (parent is inode.parent and name == inode.name):
                inode.others.discard((parent, name))
            else:
                found.append((parent.node, name))
        return found

    def counters(self) -> dict[str, int]:
        """For status."""
        return {"inodes": len(self.by_node), "path_fds": len(self._hot)}

    def close(self) -> None:
        """Close every O_PATH descriptor."""
        for inode in self.by_node.values():
            if inode.fd >= 0:
                os.close(inode.fd)
                inode.fd = -1
        self.by_node.clear()
        self._by_key.clear()
        self._hot.clear()


def proc(fd: int) -> bytes:
    """A path that opens exactly the inode behind a descriptor (proc(5), magic link), O_PATH ones too."""
    return b"/proc/self/fd/%d" % fd


def _descriptors_to_keep() -> int:
    """Raise the soft limit of open files to the hard one; returns how many a volume may spend on speed.

    A mount has several local volumes (each system directory is one), and most of the limit is for the callers' opens.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # a sandbox may forbid it; the lower limit still works
            pass
    if soft == resource.RLIM_INFINITY:
        return 4096
    return max(64, min(4096, soft // 16))
