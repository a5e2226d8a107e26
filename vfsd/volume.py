"""One volume whose tree the core plans: plan, commit, apply, publish, in one synchronous block.

Owns the tree, the handles and the pins of a state or memory route. Must not know doors, paths or other volumes.
Invariants: a plan mutates nothing; the backend commits before the tree shows a change; commit, apply and publish happen
without an await between them, so that the loop itself is the volume's lane; a mutation that raises changed nothing.
All methods take full inos; each raises OSError.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import trio
import xxhash

from vfsd.backends.base import Backend
from vfsd.core import plans, xattrs
from vfsd.core.acl import ACCESS, DEFAULT
from vfsd.core.changes import Change, Content, Laid, Put, Reserve, Write, Zero
from vfsd.core.handles import Handles
from vfsd.core.plans import fail
from vfsd.core.tree import Node
from vfsd.core.types import (
    DAEMON,
    FILE_MAX,
    NAME_MAX,
    NODE_MASK,
    ROOT_NODE,
    Caller,
    DirEntry,
    SetAttr,
    StatFs,
)
from vfsd.feed import Feed
from vfsd.residency import Residency

log = logging.getLogger(__name__)
_COPY_PIECE = 1 << 20
_CONTENTS = frozenset((Write, Zero, Reserve, Content))
FIRST_OFFSET = 3
"""Offset of a listing's first entry; 1 and 2 belong to ``.`` and ``..``."""


def _digest(read: Callable[[int, int], bytes], size: int) -> int:
    whole = xxhash.xxh3_64()
    for at in range(0, size, _COPY_PIECE):
        whole.update(read(at, min(_COPY_PIECE, size - at)))
    return whole.intdigest()


class TreeVolume(Residency):
    """A route of kind memory, and what a state route builds on.

    ``base`` is ``volume << NODE_BITS``; ``clock`` gives nanoseconds since the epoch; ``owner`` (uid, gid) owns the root
    directory of a volume just made.
    """

    inline = True
    cache_seconds = 86400.0

    def __init__(
        self,
        base: int,
        backend: Backend,
        feed: Feed,
        clock: Callable[[], int],
        *,
        owner: tuple[int, int] = (0, 0),
        read_only: bool = False,
    ) -> None:
        super().__init__(base, backend)
        self.kind = backend.kind
        self.read_only = False
        self.commits = 0
        self._digests: dict[int, object] = {}
        """Node -> xxh3_64 of its content as it is, or what stands for one that is being worked out."""
        self._grown_blocks = backend.allocated()
        self._feed = feed
        self._clock = clock
        self._handles = Handles()
        root = backend.root()
        if root is None:
            now = clock()
            self._commit(DAEMON, "mkfs", [Put(ROOT_NODE, stat.S_IFDIR | 0o755, 2, *owner, 0, 0, now, now, now)])
        else:
            self._insert(root)
        self.tree.next_node = max(self.tree.next_node, backend.next_node())
        orphans = [self._insert(s) for s in backend.orphans()]
        if orphans:
            self._commit(DAEMON, "purge", plans.forget(orphans))
        # From here on: a new volume still needs its root, one whose daemon was killed its purge.
        self.read_only = read_only

    # -- the one way a change happens

    def _commit(self, caller: Caller, op: str, changes: Sequence[Change]) -> None:
        if self.read_only:
            raise fail(errno.EROFS)
        backend, tree = self.backend, self.tree
        backend.commit(changes)
        tree.apply(changes)
        for c in changes:
            if type(c) in _CONTENTS:
                node = tree.nodes.get(c.node)
                if node is not None:
                    blocks = backend.blocks(node.id)
                    self._grown_blocks += blocks - node.blocks
                    node.blocks = blocks
        if self._digests:
            for c in changes:
                self._digests.pop(c.node, None)
        self.commits += 1
        self._feed.publish(self.base, caller, op, changes)

    # -- observing

    def lookup(self, parent: int, name: bytes) -> Node:
        """ENOENT, ENOTDIR, ENAMETOOLONG, ESTALE."""
        directory = self.tree.nodes.get(parent & NODE_MASK)
        if directory is None or directory.children is None:
            if name == b".":  # asked of files too, by who opens them by handle
                return self._node(parent)
            directory = self._dir(parent)
        assert directory.children is not None
        node = directory.children.get(name)
        if node is None and not directory.children.complete:
            node = self._entry(directory, name)
        if node is None:
            if name == b".":
                return directory
            if name == b"..":
                return directory.parent or directory
            raise fail(errno.ENAMETOOLONG if len(name) > NAME_MAX else errno.ENOENT, name)
        if node.parent is None:
            node.parent, node.name = directory, name
        return node

    peek = lookup

    def getattr(self, ino: int, fh: int = 0) -> Node:
        """ESTALE."""
        return self._node(ino)

    def birth_ns(self, ino: int) -> int | None:
        """ESTALE."""
        return self._node(ino).birth_ns

    def readlink(self, ino: int) -> bytes:
        """EINVAL for anything but a symlink."""
        target = self._node(ino).target
        if target is None:
            raise fail(errno.EINVAL)
        return target

    def read(self, ino: int, fh: int, offset: int, length: int) -> bytes:
        """Bytes up to the end of the file; EISDIR, EINVAL."""
        node = self._node(ino)
        if not stat.S_ISREG(node.mode):
            raise fail(errno.EISDIR if stat.S_ISDIR(node.mode) else errno.EINVAL)
        left = node.size - offset
        if left <= 0 or length <= 0:
            return b""
        return self.backend.read(node.id, offset, length if length < left else left)

    def seek(self, ino: int, fh: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE (ENXIO past the end or with no data left), EINVAL for other whence."""
        node = self._node(ino)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise fail(errno.EINVAL)
        if not 0 <= offset < node.size:
            raise fail(errno.ENXIO)
        found = self.backend.seek(node.id, node.size, offset, whence == os.SEEK_HOLE)
        if found is None:
            raise fail(errno.ENXIO)
        return found

    def opendir(self, ino: int, caller: Caller) -> int:
        """ENOTDIR."""
        return self._handles.add(self._dir(ino), os.O_RDONLY)

    def readdir(self, ino: int, fh: int, offset: int) -> Iterator[DirEntry]:
        """Entries after ``offset``, from a list of the names that offset 0 takes anew, at once or page by page.

        An entry that stays is given once; one that goes before its turn is left out; one that comes later
        may be missed.
        """
        handle = self._handles.get(fh)
        directory = self._dir(ino)
        assert directory.children is not None
        if handle.names is None or offset < FIRST_OFFSET:
            whole = self._to_list(ino).complete
            handle.names = list(directory.children) if whole else []
            handle.more = None if whole else self._pages(ino)
        at = max(0, offset - FIRST_OFFSET + 1)
        names = handle.names
        while True:
            if at >= len(names):
                page = None if handle.more is None else next(handle.more, None)
                if page is None:
                    return
                names += [name for name, _ in page]
                continue
            node = directory.children.get(names[at]) or self._entry(directory, names[at])
            if node is not None:
                yield DirEntry(names[at], node, FIRST_OFFSET + at)
            at += 1

    def getxattr(self, ino: int, name: bytes) -> bytes:
        """ENODATA."""
        value = self.backend.xattrs(self._node(ino).id).get(name)
        if value is None:
            raise fail(errno.ENODATA, name)
        return value

    def listxattr(self, ino: int) -> list[bytes]:
        return list(self.backend.xattrs(self._node(ino).id))

    def acl(self, ino: int, name: bytes) -> bytes | None:
        """An access control list, None when there is none."""
        return self.backend.xattrs(ino & NODE_MASK).get(name)

    def statfs(self, ino: int) -> StatFs:
        return self.backend.statfs()

    def used(self) -> tuple[int, int]:
        """(nodes, bytes allocated to their contents), for quotas."""
        return self.backend.counts()[0], (self._grown_blocks - self.tree.dropped_blocks) * 512

    # -- mutating: names

    def _make(self, op: str, parent: int, name: bytes, mode: int, caller: Caller, **more: Any) -> Node:
        directory = self.tree.nodes.get(parent & NODE_MASK)
        if directory is None or directory.children is None:
            directory = self._dir(parent)
        tree = self.tree
        number = tree.next_node
        default, now = self.acl(parent, DEFAULT), self._clock()
        changes = self._plan(plans.make, tree, directory, name, mode, caller, now, default=default, **more)
        self._commit(caller, op, changes)
        return tree.nodes[number]

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Node:
        """A regular file, FIFO, socket or device node."""
        if not stat.S_IFMT(mode):
            mode |= stat.S_IFREG
        if stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
            raise fail(errno.EPERM if stat.S_ISDIR(mode) else errno.EINVAL, name)
        return self._make("mknod", parent, name, mode, caller, rdev=rdev)

    def mkdir(self, parent: int, name: bytes, perm: int, caller: Caller) -> Node:
        return self._make("mkdir", parent, name, stat.S_IFDIR | (perm & 0o7777), caller)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Node:
        return self._make("symlink", parent, name, stat.S_IFLNK | 0o777, caller, target=target)

    def link(self, ino: int, parent: int, name: bytes, caller: Caller) -> Node:
        node = self._node(ino)
        self._commit(caller, "link", self._plan(plans.link, self.tree, node, self._dir(parent), name, self._clock()))
        return node

    def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        self._commit(caller, "unlink", self._plan(plans.unlink, self.tree, self._dir(parent), name, self._clock()))

    def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        directory = self._dir(parent)
        self._commit(caller, "rmdir", self._plan(plans.rmdir, self.tree, directory, name, self._clock()))

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller) -> None:
        source, target = self._dir(parent), self._dir(new_parent)
        changes = self._plan(plans.rename, self.tree, source, name, target, new_name, flags, self._clock(), caller)
        if changes:
            self._commit(caller, "rename", changes)

    # -- mutating: attributes and contents

    def setattr(self, ino: int, to: SetAttr, caller: Caller, fh: int = 0) -> Node:
        node = self._node(ino)
        member = plans.in_group(node.gid, caller)
        access = None if to.perm is None else self.acl(ino, ACCESS)
        self._commit(caller, "setattr", plans.setattr(node, to, self._clock(), member=member, access=access))
        return node

    def setxattr(self, ino: int, name: bytes, value: bytes, flags: int, caller: Caller) -> None:
        node = self._node(ino)
        present = self.backend.xattrs(node.id)
        self._commit(caller, "setxattr", xattrs.setxattr(node, present, name, value, flags, self._clock()))

    def removexattr(self, ino: int, name: bytes, caller: Caller) -> None:
        node = self._node(ino)
        present = self.backend.xattrs(node.id)
        if changes := xattrs.removexattr(node, present, name, self._clock()):
            self._commit(caller, "removexattr", changes)

    def write(
        self,
        ino: int,
        fh: int,
        offset: int,
        data: bytes | bytearray | memoryview,
        caller: Caller,
        append: bool = False,
        clear_suid: bool = False,
    ) -> int:
        """Bytes written, fewer at the file size limit; EFBIG at it, EISDIR, EINVAL, ENOSPC.

        An ``append`` goes to the end as it is now: the kernel's idea of the size may be older than the last tool write.
        The caller knows what O_APPEND is by now; fcntl(2) may have changed it since the open.
        """
        node = self._node(ino)
        if not stat.S_ISREG(node.mode):
            raise fail(errno.EISDIR if stat.S_ISDIR(node.mode) else errno.EINVAL)
        if append:
            offset = node.size
        room = FILE_MAX - offset
        if len(data) > room:
            if room <= 0:
                raise fail(errno.EFBIG)
            data = memoryview(data)[:room]
        if data:
            member, now = not clear_suid or plans.in_group(node.gid, caller), self._clock()
            self._commit(caller, "write", plans.write(node, offset, data, now, clear_suid=clear_suid, member=member))
        return len(data)

    def replace(self, ino: int, data: bytes | Laid, caller: Caller, expect: int | None = None) -> Node:
        """The whole content anew in one commit; keeps ino, mode and links.

        ESTALE when xxh3_64 of the present content is not ``expect``.
        """
        node = self._node(ino)
        if expect is not None:
            digest = self._digests.get(node.id)
            if type(digest) is not int:
                digest = xxhash.xxh3_64_intdigest(self.read(ino, 0, 0, node.size))
            if digest != expect:
                raise fail(errno.ESTALE)
        self._commit(caller, "write", plans.replace(node, data, self._clock()))
        return node

    def create_file(self, parent: int, name: bytes, perm: int, data: bytes | Laid, caller: Caller) -> Node:
        """A new regular file with its content in one commit; EEXIST."""
        return self._make("create", parent, name, stat.S_IFREG | (perm & 0o7777), caller, data=data)

    @contextlib.asynccontextmanager
    async def laying(self, pieces: Sequence[bytes]) -> AsyncIterator[bytes | Laid]:
        """Large content made ready in a thread, for one ``replace`` or ``create_file`` inside.

        Where there is no room it is as it was, for a commit makes some. Raises EIO.
        """
        laid = self.backend.begin(pieces)
        try:
            content: bytes | Laid = laid
            try:
                await trio.to_thread.run_sync(self.backend.lay, laid)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                self.backend.leave(laid)
                content = bytes(laid)
            await trio.lowlevel.checkpoint_if_cancelled()
            yield content
        finally:
            self.backend.leave(laid)

    @contextlib.asynccontextmanager
    async def comparing(self, ino: int) -> AsyncIterator[None]:
        """Inside, ``replace`` knows what a large content is hashed to, from a thread, unless it changed since."""
        node = self._node(ino)
        own = self._digests[node.id] = object()
        read, size = self.backend.contents(node.id), node.size
        try:
            digest = await trio.to_thread.run_sync(_digest, read, size)
            if self._digests.get(node.id) is own:
                self._digests[node.id] = own = digest
            yield
        finally:
            if self._digests.get(node.id) is own:
                del self._digests[node.id]

    def fallocate(self, ino: int, fh: int, mode: int, offset: int, length: int, caller: Caller) -> None:
        node = self._node(ino)
        self._commit(caller, "fallocate", plans.fallocate(node, mode, offset, length, self._clock()))

    def copy_range(
        self, ino_in: int, fh_in: int, off_in: int, ino_out: int, fh_out: int, off_out: int, length: int, caller: Caller
    ) -> int:
        """copy_file_range(2) within the volume: bytes copied, 0 at the end of the source."""
        length = min(length, _COPY_PIECE)
        data = self.read(ino_in, fh_in, off_in, length)
        return self.write(ino_out, 0, off_out, data, caller) if data else 0

    # -- handles and pins

    def open(self, ino: int, flags: int, caller: Caller) -> int:
        """O_TRUNC is honoured; EISDIR for writing to a directory, ELOOP for a symlink."""
        node = self._node(ino)
        if stat.S_ISLNK(node.mode):
            raise fail(errno.ELOOP)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        if stat.S_ISDIR(node.mode) and writes:
            raise fail(errno.EISDIR)
        if writes and self.read_only:
            raise fail(errno.EROFS)
        if flags & os.O_TRUNC and stat.S_ISREG(node.mode):
            self.setattr(ino, SetAttr(size=0), caller)
        return self._handles.add(node, flags)

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[Node, int]:
        """open(2) with O_CREAT: opens what is there unless O_EXCL (EEXIST)."""
        node = self._entry(self._dir(parent), name)
        if node is None:
            node = self._make("create", parent, name, stat.S_IFREG | (mode & 0o7777), caller)
            return node, self._handles.add(node, flags)
        if flags & os.O_EXCL:
            raise fail(errno.EEXIST, name)
        return node, self.open(node.ino, flags, caller)

    def tmpfile(self, parent: int, mode: int, flags: int, caller: Caller) -> tuple[Node, int]:
        """open(2) with O_TMPFILE."""
        number = self.tree.next_node
        default, now = self.acl(parent, DEFAULT), self._clock()
        mode = stat.S_IFREG | (mode & 0o7777)
        changes = plans.make_unlinked(self.tree, self._dir(parent), mode, caller, now, default=default)
        self._commit(caller, "tmpfile", changes)
        node = self.tree.nodes[number]
        return node, self._handles.add(node, flags)

    def flush(self, ino: int, fh: int, caller: Caller) -> None:
        """Nothing is held back from the backend, so there is nothing to do at close."""

    def release(self, ino: int, fh: int) -> None:
        self._drop_if_gone(self._handles.remove(fh))

    releasedir = release

    def remember(self, ino: int, n: int = 1) -> None:
        """Add to the kernel's lookup count."""
        self._node(ino).pins += n

    def forget(self, ino: int, n: int) -> None:
        """Take from the kernel's lookup count; an unlinked node that nothing pins any more is dropped."""
        node = self.tree.nodes.get(ino & NODE_MASK)
        if node is not None:
            node.pins = max(0, node.pins - n)
            self._drop_if_gone(node)
        elif (left := self._evicted_pins.pop(ino & NODE_MASK, 0) - n) > 0:
            self._evicted_pins[ino & NODE_MASK] = left

    def _drop_if_gone(self, node: Node) -> None:
        if node.nlink or node.pins or node.id not in self.tree.nodes:
            return
        try:
            self._commit(DAEMON, "drop", plans.forget([node]))
        except OSError as error:
            log.warning("node %d of %s is kept until the next start: %s", node.id, self.kind, error.strerror)

    # -- durability

    async def fsync(self, ino: int, fh: int, datasync: bool) -> None:
        """All that was committed survives power loss; EIO, ENOSPC."""
        await self.backend.sync()

    async def syncfs(self) -> None:
        await self.backend.sync()

    @property
    def sync_waits(self) -> bool:
        """Whether the next fsync suspends."""
        return self.backend.sync_waits

    async def maintain(self) -> None:
        """Bound logs and give space back; the daemon calls it when idle and now and then."""
        await self.backend.maintain()

    def counters(self) -> dict[str, int]:
        nodes, used = self.backend.counts()
        held = {"resident": len(self.tree.nodes), "open": len(self._handles)}
        return {"nodes": nodes, "bytes": used, "commits": self.commits, **held}

    def close(self) -> None:
        self.backend.close()
