"""What a route that waits shows: names and contents that are in memory at once, others after a wait for the remote.

Owns which operations wait, and what is common to all that change something. Must not know how contents go to the
remote (``remotefiles``) or how names do (``remotevolume``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from typing import Any

import trio
import xxhash

from vfsd.backends.remote import Meta
from vfsd.core import plans
from vfsd.core.changes import Change, Dentry, NoDentry, Put, Xattr, rdev
from vfsd.core.plans import fail
from vfsd.core.tree import Node
from vfsd.core.types import DAEMON, NODE_MASK, ROOT_NODE, Caller, DirEntry, StatFs
from vfsd.remote.known import Known
from vfsd.remote.tree import RemoteTree
from vfsd.volume import TreeVolume


class RemoteReads(RemoteTree):
    """What ``RemoteFiles`` builds on. A method gives a result, or a coroutine where it must wait for one."""

    # -- the one way a change of ours happens

    def _commit(self, caller: Caller, op: str, changes: Sequence[Change]) -> None:
        if caller is DAEMON:
            self._apply(op, changes)
            return
        super()._commit(caller, op, changes)
        for c in changes:
            if isinstance(c, (Dentry, NoDentry)) and c.parent in self._explicit:
                self._stale_dirs.add(c.parent)
        self._after(changes)

    def _need_writable(self) -> None:
        self._need_loaded()
        if self.read_only:
            raise fail(errno.EROFS)

    @contextlib.asynccontextmanager
    async def _changing(self, key: Hashable = None) -> AsyncIterator[None]:
        """The lane, for something that is then seen through: half a change at the remote is no answer to a signal.

        All of it, or with a ``key`` the part for one file.
        """
        self._need_writable()
        async with self.lane.whole() if key is None else self.lane.part(key):
            with trio.CancelScope(shield=True):
                yield

    def _path(self, parent: int, name: bytes) -> bytes:
        """The path of a name that is to be; EILSEQ and such when the remote can't have it, ENOENT."""
        above = self.tree.path(self._dir(parent))
        if above is None:
            raise fail(errno.ENOENT, name)
        plans.check_name(name)
        path = above.rstrip(b"/") + b"/" + name
        self.remote.check(path)
        return path

    def _paths(self, node: Node) -> list[bytes]:
        """All paths of a node."""
        if node.nlink > 1 and not node.is_dir:
            return [path for path, found in self._below(self.tree.nodes[ROOT_NODE], b"") if found is node]
        path = self.tree.path(node)
        return [] if path is None or not node.nlink else [path]

    def _below(self, directory: Node, prefix: bytes) -> Iterator[tuple[bytes, Node]]:
        for name, child in (directory.children or {}).items():
            path = prefix + b"/" + name
            yield path, child
            if child.children:
                yield from self._below(child, path)

    def _meta(self, node: Node, **other: Any) -> Meta:
        """The attributes of a node as the remote keeps them."""
        link = ""
        if node.nlink > 1 and not node.is_dir:
            link = next((text for text, n in self._links.items() if n == node.id), "")
        meta = Meta(
            node.mode, node.uid, node.gid, node.rdev, node.atime_ns, node.mtime_ns, node.ctime_ns, node.target,
            tuple(sorted(self.backend.xattrs(node.id).items())), link,
        )  # fmt: skip
        return meta._replace(**other)

    def _meta_after(self, node: Node, changes: Sequence[Change]) -> Meta:
        """The attributes a node has once the changes are made."""
        meta = self._meta(node)
        xattrs = dict(meta.xattrs)
        for c in changes:
            if type(c) is Put and c.node == node.id:
                meta = of_put(c, meta)
            elif type(c) is Xattr and c.node == node.id:
                if c.value is None:
                    xattrs.pop(c.name, None)
                else:
                    xattrs[c.name] = c.value
        return meta._replace(xattrs=tuple(sorted(xattrs.items())))

    # -- listing and reading

    async def _listed(self, ino: int) -> None:
        """Bring a directory's entries into memory where they are not; the whole lane is held."""
        if ino & NODE_MASK not in self._unlisted:
            return
        node = self._node(ino)
        path = self.tree.path(node)
        if path is None:
            raise fail(errno.ENOENT)
        found = await self._call(f"list {os.fsdecode(path)}", self.remote.scan, path)
        await self._absorb_gently(found, ())
        self._unlisted.discard(node.id)

    def _after_listing(self, ino: int, then: Callable[..., Any], *args: Any) -> Any:
        """``then(ino, ...)`` at once, or after the directory was listed."""
        self._need_loaded()
        number = ino & NODE_MASK
        if number not in self._unlisted:
            return then(self, ino, *args)

        async def wait() -> Any:
            await self._see(ino)
            return then(self, ino, *args)

        return wait()

    async def _see(self, ino: int) -> None:
        """The same, by who does not hold the lane."""
        if ino & NODE_MASK in self._unlisted:
            async with self.lane.whole():
                await self._listed(ino)

    def lookup(self, parent: int, name: bytes) -> Any:
        if self.remote.verifies and self._loaded and name not in (self._dir(parent).children or {}):
            return self._probe(parent, name)
        return self._after_listing(parent, TreeVolume.lookup, name)

    async def _probe(self, parent: int, name: bytes) -> Node:
        """A blob that the last listing did not show; names that can't be one's are not asked for."""
        path = b"/" + name
        try:
            self.remote.check(path)
        except OSError:
            return TreeVolume.lookup(self, parent, name)
        found = await self._call(f"look for {os.fsdecode(path)}", self.remote.probe, path, wait=False)
        if found is not None and name not in (self._dir(parent).children or {}):
            async with self.lane.whole():
                await self._absorb_gently([found], ())
        return TreeVolume.lookup(self, parent, name)

    def peek(self, parent: int, name: bytes) -> Node:
        """What is known without waiting."""
        return TreeVolume.lookup(self, parent, name)

    def opendir(self, ino: int, caller: Caller) -> Any:
        return self._after_listing(ino, TreeVolume.opendir, caller)

    def readdir(self, ino: int, fh: int, offset: int) -> Iterator[DirEntry]:
        self._need_loaded()
        return TreeVolume.readdir(self, ino, fh, offset)

    def children(self, ino: int) -> Any:
        return self._after_listing(ino, TreeVolume.children)

    def read(self, ino: int, fh: int, offset: int, length: int) -> Any:
        number = ino & NODE_MASK
        if number in self._absent:
            return self._read_absent(self._node(ino), offset, length)
        if not fh and self._is_aged(number):
            return self._read_again(self._node(ino), offset, length)
        if self.remote.verifies and number in self._dirty and not self._writes(fh):
            raise fail(errno.EBUSY)
        return TreeVolume.read(self, ino, fh, offset, length)

    async def _read_absent(self, node: Node, offset: int, length: int) -> bytes:
        path = self.tree.path(node)
        if self.remote.ranges and path is not None:
            left = min(length, node.size - offset)
            if left <= 0:
                return b""
            what = f"read {os.fsdecode(path)}"
            return await self._call(what, self.remote.read, path, offset, left, wait=False)
        whole = length >= node.size
        await self._fetch(node)
        return TreeVolume.read(self, node.ino, 0, offset, node.size if whole else length)

    async def _read_again(self, node: Node, offset: int, length: int) -> bytes:
        whole = length >= node.size
        await self._revalidate(node)
        return TreeVolume.read(self, node.ino, 0, offset, node.size if whole else length)

    def _is_aged(self, number: int) -> bool:
        """Whether a content is to be asked for again before it is believed: of a remote that tells of no changes."""
        return self.remote.lazy and number not in self._dirty and time.monotonic() >= self._fresh_until.get(number, 0.0)

    async def _revalidate(self, node: Node) -> None:
        """Ask for a content again; what was there already stays, and with it what the kernel has of it."""
        path = self.tree.path(node)
        if path is None:
            return
        found = await self._call(f"read {os.fsdecode(path)}", self.remote.get, path, wait=False)
        self._fresh_until[node.id] = time.monotonic() + self.cache_seconds
        known = self._known.get(path)
        if node.id in self._dirty or found.data is None:
            return
        digest = xxhash.xxh3_64_intdigest(found.data)
        if known is not None and known.digest == digest and node.id not in self._absent:
            return
        self._known[path] = Known(None, digest, len(found.data), None)
        self._set_content(node, found._replace(mtime_ns=self._clock()))
        await self._feed.settled(self._feed.seq)

    def _writes(self, fh: int) -> bool:
        handle = self._handles.find(fh)
        return handle is not None and handle.flags & os.O_ACCMODE != os.O_RDONLY

    def statfs(self, ino: int) -> StatFs:
        return self._space or TreeVolume.statfs(self, ino)

    def seek(self, ino: int, fh: int, offset: int, whence: int) -> Any:
        return self._with_content(ino, lambda: TreeVolume.seek(self, ino, fh, offset, whence))

    def _with_content(self, ino: int, then: Callable[[], Any]) -> Any:
        """``then()`` at once, or once the content is in memory."""
        if ino & NODE_MASK not in self._absent:
            return then()

        async def wait() -> Any:
            await self._fetch(self._node(ino))
            return then()

        return wait()


def of_put(put: Put, like: Meta | None) -> Meta:
    """The attributes a Put sets, the rest as in ``like``."""
    meta = Meta(put.mode, put.uid, put.gid, rdev(put.mode, put.extra), put.atime_ns, put.mtime_ns, put.ctime_ns)
    return meta if like is None else meta._replace(target=like.target, xattrs=like.xattrs, link=like.link)
