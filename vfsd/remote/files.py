"""Contents of a route that waits: read from the copy in memory, written to it, and brought out whole.

Owns which files are dirty and when they go to the remote: at ``flush`` (each close), at fsync, at once for what nobody
has open, and at the last close for the rest. What can't be brought out by the last close is undone here too, so that
nobody goes on with what the store does not have. Must not know about names being made or moved (``remotevolume``).
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import trio
import xxhash

from vfsd.backends.remote import ABSENT, ANY, Expect, Meta, Source
from vfsd.core import plans
from vfsd.core.changes import Change, Put, Write, Zero
from vfsd.core.plans import fail
from vfsd.core.tree import Node
from vfsd.core.types import NODE_MASK, Caller, SetAttr
from vfsd.remote.known import Known
from vfsd.remote.reads import RemoteReads, of_put
from vfsd.volume import TreeVolume

log = logging.getLogger(__name__)

_PIECE = 1 << 20
DIRECTORIES = 0
"""Key of the part of the lane for all directories' attributes; no node has this number."""

_WHOLE = 8 << 20
"""Contents up to this size are read on the loop in one go, and so never of two moments."""


class RemoteFiles(RemoteReads):
    """What ``RemoteVolume`` builds on."""

    # -- writing

    def _check_size(self, size: int) -> None:
        if size > self.remote.max_size:
            raise fail(errno.EFBIG)

    def _wrote(self, node: Node) -> None:
        """The copy in memory is newer than the remote's."""
        self._version[node.id] = self._version.get(node.id, 0) + 1
        self._absent.discard(node.id)
        self._cache(node.id, node.size)
        if node.nlink:
            self._dirty.add(node.id)

    def write(
        self,
        ino: int,
        fh: int,
        offset: int,
        data: bytes | bytearray | memoryview,
        caller: Caller,
        append: bool = False,
        clear_suid: bool = False,
    ) -> Any:
        self._need_writable()
        return self._with_content(ino, lambda: self._write_now(ino, fh, offset, data, caller, append, clear_suid))

    def _write_now(
        self, ino: int, fh: int, offset: int, data: bytes | bytearray | memoryview, caller: Caller,
        append: bool, clear_suid: bool,
    ) -> int:  # fmt: skip
        node = self._node(ino)
        self._check_size((node.size if append else offset) + len(data))
        written = TreeVolume.write(self, ino, fh, offset, data, caller, append, clear_suid)
        self._wrote(node)
        return written

    def fallocate(self, ino: int, fh: int, mode: int, offset: int, length: int, caller: Caller) -> Any:
        self._need_writable()
        self._check_size(offset + length)

        def now() -> None:
            TreeVolume.fallocate(self, ino, fh, mode, offset, length, caller)
            self._wrote(self._node(ino))

        return self._with_content(ino, now)

    async def copy_range(  # type: ignore[override]
        self, ino_in: int, fh_in: int, off_in: int, ino_out: int, fh_out: int, off_out: int, length: int, caller: Caller
    ) -> int:
        self._need_writable()
        for ino in (ino_in, ino_out):
            if ino & NODE_MASK in self._absent:
                await self._fetch(self._node(ino))
        return TreeVolume.copy_range(self, ino_in, fh_in, off_in, ino_out, fh_out, off_out, length, caller)

    async def replace(self, ino: int, data: bytes, caller: Caller, expect: int | None = None) -> Node:  # type: ignore[override]
        """The whole content anew once the remote has it; ESTALE when it is not there as expected, by whoever's hand."""
        async with self._changing(ino & NODE_MASK):
            node, now = self._node(ino), self._clock()
            self._check_size(len(data))
            changes = plans.replace(node, data, now)
            wanted: Expect = ANY if expect is None else expect
            if expect is not None and (node.id in self._dirty or not node.nlink):
                if xxhash.xxh3_64_intdigest(self.backend.read(node.id, 0, node.size)) != expect:
                    raise fail(errno.ESTALE)
                wanted = ANY
            await self._send_all(node, self._meta_after(node, changes), wanted, Source.of(data))
            self._commit(caller, "write", plans.replace(node, data, now))
            self._wrote(node)
            self._dirty.discard(node.id)
            self._seal(node)
            return node

    async def create_file(self, parent: int, name: bytes, perm: int, data: bytes, caller: Caller) -> Node:  # type: ignore[override]
        await self._see(parent)
        async with self._changing((parent, name)):
            return await self._create_now(parent, name, perm, data, caller)

    async def _create_now(self, parent: int, name: bytes, perm: int, data: bytes, caller: Caller) -> Node:
        """A new file with its content; EEXIST, also when somebody else has just made it at the remote."""
        self._check_size(len(data))
        changes = self._plan_file(parent, name, perm, data, caller, now := self._clock())
        path = self._path(parent, name)
        first = changes[0]
        assert isinstance(first, Put)
        try:
            known = await self._send(path, Source.of(data), of_put(first, None), ABSENT)
        except FileExistsError:
            await self._refresh(path)
            raise
        number = self.tree.next_node
        self._commit(caller, "create", self._plan_file(parent, name, perm, data, caller, now))
        self._known[path] = known
        self._cache(number, len(data))
        self._seal(self.tree.nodes[number])
        return self.tree.nodes[number]

    def _plan_file(self, parent: int, name: bytes, perm: int, data: bytes, caller: Caller, now: int) -> list[Change]:
        number = self.tree.next_node
        changes = plans.make(self.tree, self._dir(parent), name, stat.S_IFREG | (perm & 0o7777), caller, now)
        first = changes[0]
        assert isinstance(first, Put)
        changes[0] = first._replace(size=len(data))
        if data:
            changes.insert(1, Write(number, 0, data))
        return changes

    # -- to the remote; the lane is held, or the part of the file

    async def _send(self, path: bytes, source: Source, meta: Meta, expect: Expect) -> Known:
        """Put a content; what is known of the path from now on."""
        etag: Hashable = await self._call(f"write {os.fsdecode(path)}", self.remote.put, path, source, meta, expect)
        self._touch(path)
        self._known[path] = known = Known(etag, source.digest, source.size, meta)
        if (node := self.find(path)) is not None:
            self._fresh_until[node.id] = time.monotonic() + self.cache_seconds
        return known

    async def _send_all(self, node: Node, meta: Meta, expect: Expect, source: Source) -> None:
        """Put a content under all names of a file."""
        for path in self._paths(node):
            try:
                await self._send(path, source, meta, expect)
            except OSError as exc:
                if exc.errno == errno.ESTALE:
                    await self._refresh(path)
                raise
            expect = ANY

    async def _refresh(self, path: bytes) -> None:
        """See what somebody else has made of a path."""
        try:
            found = await self._call(f"read {os.fsdecode(path)}", self.remote.get, path)
        except FileNotFoundError:
            await self._absorb_gently((), [path])
        else:
            await self._absorb_gently([found], ())

    async def _source(self, node: Node) -> Source:
        """The content of one moment."""
        if self.remote.verifies and node.size > _WHOLE:
            # As large as it may be; what it must be is in its name, so that a mix would not pass.
            read = self.backend.read

            def pieces() -> Iterator[bytes]:
                for at in range(0, node.size, _PIECE):
                    yield trio.from_thread.run_sync(read, node.id, at, min(_PIECE, node.size - at))

            return Source(node.size, pieces)
        while True:
            version, size = self._version.get(node.id, 0), node.size
            if size <= _WHOLE:
                return Source.of(self.backend.read(node.id, 0, size))
            data = bytearray()
            while len(data) < size and self._version.get(node.id, 0) == version:
                data += self.backend.read(node.id, len(data), min(_PIECE, size - len(data)))
                await trio.lowlevel.checkpoint()
            if self._version.get(node.id, 0) == version:
                return Source.of(bytes(data))

    async def _put_node(self, node: Node) -> None:
        """Bring a dirty file out; it stays dirty when it was written meanwhile."""
        if not self._paths(node):
            self._dirty.discard(node.id)
            return
        if node.id in self._absent:
            await self._fetch(node)
        source = await self._source(node)
        version = self._version.get(node.id, 0)
        await self._send_all(node, self._meta(node), ANY, source)
        if self._version.get(node.id, 0) == version:
            self._dirty.discard(node.id)
            self._seal(node)

    def _seal(self, node: Node) -> None:
        """What is verified is read from where it is from now on, and is for reading only."""
        if not self.remote.verifies:
            return
        self._uncache(node.id)
        self._absent.add(node.id)
        put = plans.put(node, node.ctime_ns)._replace(mode=stat.S_IFREG | 0o444)
        self.backend.commit([Zero(node.id, 0, None)])
        self._apply("seal", [put])

    def _truncated(self, node: Node, size: int) -> Source:
        data = self.backend.read(node.id, 0, min(size, node.size)) if size else b""
        return Source.of(data + bytes(size - len(data)))

    # -- open files

    def _writers(self, node: Node, but: int = 0) -> bool:
        """Whether a handle other than ``but`` may write to the node."""
        return self._handles.writes(node, but)

    def open(self, ino: int, flags: int, caller: Caller) -> Any:
        self._need_loaded()
        node = self._node(ino)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        cuts = bool(flags & os.O_TRUNC) and stat.S_ISREG(node.mode)
        if not stat.S_ISREG(node.mode):
            return TreeVolume.open(self, ino, flags, caller)
        if self.remote.verifies:
            if writes and not cuts and node.id not in self._dirty:
                raise fail(errno.EPERM)
            if not writes and node.id in self._dirty:
                raise fail(errno.EBUSY)
        if cuts:
            self._need_writable()
            if not writes:
                return self._cut_and_open(ino, flags, caller)
            fh = TreeVolume.open(self, ino, flags & ~os.O_TRUNC, caller)
            TreeVolume.setattr(self, ino, SetAttr(size=0), caller)
            self._wrote(node)
            return fh
        if self._is_aged(node.id):
            return self._open_fresh(node, flags, caller)
        if node.id in self._absent and not self.remote.ranges:
            return self._with_content(ino, lambda: TreeVolume.open(self, ino, flags, caller))
        return TreeVolume.open(self, ino, flags, caller)

    async def _open_fresh(self, node: Node, flags: int, caller: Caller) -> int:
        await self._revalidate(node)
        return TreeVolume.open(self, node.ino, flags, caller)

    async def _cut_and_open(self, ino: int, flags: int, caller: Caller) -> int:
        async with self._changing(ino & NODE_MASK):
            node, now = self._node(ino), self._clock()
            changes = plans.setattr(node, SetAttr(size=0), now)
            await self._send_all(node, self._meta_after(node, changes), ANY, Source.of(b""))
            self._commit(caller, "setattr", plans.setattr(node, SetAttr(size=0), now))
            self._wrote(node)
            self._dirty.discard(node.id)
        return TreeVolume.open(self, ino, flags & ~os.O_TRUNC, caller)

    async def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[Node, int]:  # type: ignore[override]
        """A file for writing goes out at its close; one that must be ours alone (O_EXCL) is made there at once."""
        await self._see(parent)
        async with self._changing((parent, name)):
            there = self.tree.child(self._dir(parent), name)
            if there is not None and flags & os.O_EXCL:
                raise fail(errno.EEXIST, name)
            if there is None:
                path = self._path(parent, name)
                if flags & os.O_EXCL and not self.remote.verifies:
                    node = await self._create_now(parent, name, mode, b"", caller)
                else:
                    number = self.tree.next_node
                    self._commit(caller, "create", self._plan_file(parent, name, mode, b"", caller, self._clock()))
                    node = self.tree.nodes[number]
                    self._dirty.add(number)
                    self._touch(path)
                return node, self._handles.add(node, flags)
        opened = self.open(there.ino, flags & ~os.O_CREAT, caller)
        return there, opened if type(opened) is int else await opened

    def flush(self, ino: int, fh: int, caller: Caller) -> Any:
        """At each close of a descriptor that may write: returns once the remote has what was written."""
        node = self.tree.nodes.get(ino & NODE_MASK)
        if node is None or node.id not in self._dirty or not self._writes(fh):
            return None
        if self.remote.verifies and not node.size:
            # A shell closes its copy of a descriptor before the program has written anything.
            return None
        return self._flush(node)

    async def _flush(self, node: Node) -> None:
        async with self.lane.part(node.id):
            with trio.CancelScope(shield=True):
                if node.id in self._dirty:
                    await self._put_node(node)

    def release(self, ino: int, fh: int) -> Any:
        handle = self._handles.get(fh)
        node = handle.node
        if node.id in self._dirty and self._writes(fh) and not self._writers(node, fh):
            return self._last_close(node, fh)
        return TreeVolume.release(self, node.ino, fh)

    async def _last_close(self, node: Node, fh: int) -> None:
        try:
            with trio.CancelScope(shield=True):
                async with self.lane.part(node.id):
                    await self._put_or_undo(node, fh)
        finally:
            TreeVolume.release(self, node.ino, fh)

    async def _put_or_undo(self, node: Node, fh: int = 0) -> None:
        """For a file that nobody writes any more, but by ``fh``, which is being closed."""
        if node.id not in self._dirty:
            return
        try:
            await self._put_node(node)
        except OSError as exc:
            if self._writers(node, fh):
                # Opened for writing while we waited: the content is that one's now, who hears of it at its own close.
                return
            paths = self._paths(node)
            self._undo(node, paths)
            for path in map(os.fsdecode, paths[:1]):
                log.warning("route %s: %r is as it was before: %s", self.label, path, exc.strerror)

    def _undo(self, node: Node, paths: Sequence[bytes]) -> None:
        """What the remote did not take is not here either."""
        self._dirty.discard(node.id)
        for path in paths:
            known = self._known.get(path)
            if known is None:
                parent = self.find(path.rpartition(b"/")[0])
                assert parent is not None
                self._apply("undo", plans.unlink(self.tree, parent, path.rpartition(b"/")[2], self._clock()))
                continue
            self._absent.add(node.id)
            self._uncache(node.id)
            put = plans.put(node, self._clock(), size=known.size)
            if known.meta is not None:
                put = put._replace(mtime_ns=known.meta.mtime_ns, ctime_ns=known.meta.ctime_ns)
            self._apply("undo", [Zero(node.id, 0, None), put])

    # -- durability

    async def fsync(self, ino: int, fh: int, datasync: bool) -> None:
        """The remote has the whole of the file; EIO."""
        number = ino & NODE_MASK
        node = self.tree.nodes.get(number)
        if number in self._stale_dirs:
            await self._settle_dirs()
        elif node is not None and number in self._dirty:
            await self._flush(node)

    async def syncfs(self) -> None:
        for number in list(self._dirty):
            node = self.tree.nodes.get(number)
            if node is not None:
                await self._flush(node)
        await self._settle_dirs()

    async def _follow_names(self, node: Node) -> None:
        """Give all names of a file the content that one of them got elsewhere, unless somebody has been there since."""
        self._following.discard(node.id)
        if node.id in self._dirty or not node.nlink or self.read_only:
            return
        if node.id in self._absent:
            await self._fetch(node)
        source = await self._source(node)
        for path in self._paths(node):
            known = self._known.get(path)
            if known is None or known.digest in (None, source.digest):
                continue
            try:
                await self._send(path, source, self._meta(node), known.digest)
            except OSError as exc:
                if exc.errno != errno.ESTALE:
                    self._following.add(node.id)
                    raise
                await self._refresh(path)

    async def settle(self) -> None:
        """Bring out what nobody has open any more (written through a map, say), and times of directories."""
        for number in list(self._following):
            async with self.lane.part(number):
                if (followed := self.tree.nodes.get(number)) is not None:
                    await self._follow_names(followed)
        for number in list(self._dirty):
            node = self.tree.nodes.get(number)
            if node is not None and not self._writers(node):
                async with self.lane.part(node.id):
                    if not self._writers(node):
                        await self._put_or_undo(node)
        await self._settle_dirs()

    async def _settle_dirs(self) -> None:
        if not self._stale_dirs:
            return
        async with self.lane.part(DIRECTORIES):
            numbers = set(self._stale_dirs)
            metas = self._dir_metas()
            try:
                if metas:
                    await self._call("keep times of directories", self.remote.keep, metas)
            except OSError:
                self._stale_dirs |= numbers
                raise
            self._touch(*(path for path, _ in metas))

    def _dir_metas(self) -> list[tuple[bytes, Meta]]:
        numbers, self._stale_dirs = self._stale_dirs, set()
        if "dirs" not in self.remote.keeps or self.read_only:
            return []
        nodes = [self.tree.nodes[n] for n in numbers if n in self.tree.nodes]
        return [(path, self._meta(n)) for n in nodes if n.nlink and (path := self.tree.path(n)) is not None]

    def close(self) -> None:
        """Bring out what is left, as far as the remote answers."""
        try:
            for number in sorted(self._dirty):
                node = self.tree.nodes.get(number)
                for path in self._paths(node) if node is not None and self._loaded else ():
                    assert node is not None
                    source = Source.of(self.backend.read(node.id, 0, node.size))
                    self.remote.put(path, source, self._meta(node), ANY)
            metas = self._dir_metas()
            if metas and self._loaded:
                self.remote.keep(metas)
        except Exception as exc:
            log.error("route %s: not everything could be written at the end: %s", self.label, exc)
        finally:
            self.remote.close()
            TreeVolume.close(self)
