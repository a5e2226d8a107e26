"""A route that waits for its store: each operation, planned on the tree in memory, done at the remote, then shown.

Owns names and attributes: the remote first, on a worker thread, then commit, apply and publish; contents are
``remotefiles``'. Invariants: the whole lane for what moves names, a part of it for one file's attributes; a plan is
made anew after each wait, since contents may have been written meanwhile; what fails at the remote has changed nothing
here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any

from vfsd.backends.remote import ANY, Meta, Moved
from vfsd.core import acl, plans, xattrs
from vfsd.core.changes import Change, Put
from vfsd.core.plans import fail
from vfsd.core.tree import Node
from vfsd.core.types import NODE_MASK, Caller, SetAttr
from vfsd.remote.files import DIRECTORIES, RemoteFiles
from vfsd.remote.known import Known
from vfsd.remote.reads import of_put
from vfsd.volume import TreeVolume


class RemoteVolume(RemoteFiles):
    """The volume of a store, blob or backend route. Methods give a result, or a coroutine where they must wait."""

    # -- names

    async def mkdir(self, parent: int, name: bytes, perm: int, caller: Caller) -> Node:  # type: ignore[override]
        self._refuse_unless("dirs" in self.remote.keeps or self.remote.lazy, name)
        return await self._make_alone("mkdir", parent, name, stat.S_IFDIR | (perm & 0o7777), caller)

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Node:  # type: ignore[override]
        self._refuse_unless("symlinks" in self.remote.keeps, name)
        return await self._make_alone("symlink", parent, name, stat.S_IFLNK | 0o777, caller, 0, target)

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Node:  # type: ignore[override]
        if stat.S_IFMT(mode) in (0, stat.S_IFREG):
            return await self.create_file(parent, name, mode & 0o7777, b"", caller)
        self._refuse_unless("special" in self.remote.keeps, name)
        return await self._make_alone("mknod", parent, name, mode, caller, rdev)

    def birth_ns(self, ino: int) -> int | None:
        """Not kept."""
        return None

    @staticmethod
    def _refuse_unless(kept: bool, name: bytes) -> None:
        """EPERM: the file system has no such files (POSIX symlink(2), mknod(2))."""
        if not kept:
            raise fail(errno.EPERM, name)

    def place(self, parent: int, name: bytes) -> Node:
        """A directory that is only here, to mount a route on."""
        number, owner = self.tree.next_node, Caller(*self.owner)
        directory = self._dir(parent)
        self._apply("mkdir", plans.make(self.tree, directory, name, stat.S_IFDIR | 0o755, owner, self._clock()))
        self._explicit.add(number)
        return self.tree.nodes[number]

    async def _make_alone(
        self, op: str, parent: int, name: bytes, mode: int, caller: Caller, rdev: int = 0, target: bytes | None = None
    ) -> Node:
        """A name that has attributes and no content."""
        async with self._changing():
            await self._listed(parent)
            now = self._clock()

            def plan() -> list[Change]:
                return plans.make(self.tree, self._dir(parent), name, mode, caller, now, rdev=rdev, target=target)

            first = plan()[0]
            assert isinstance(first, Put)
            path = self._path(parent, name)
            if "dirs" in self.remote.keeps:
                meta = of_put(first, None)._replace(target=target)
                await self._call(f"{op} {os.fsdecode(path)}", self.remote.keep, [(path, meta)])
                self._known[path] = Known(None, None, 0, meta)
            number = self.tree.next_node
            self._touch(path)
            self._commit(caller, op, plan())
            node = self.tree.nodes[number]
            if node.is_dir:
                self._explicit.add(number)
            return node

    async def link(self, ino: int, parent: int, name: bytes, caller: Caller) -> Node:  # type: ignore[override]
        self._refuse_unless("links" in self.remote.keeps, name)
        async with self._changing():
            await self._listed(parent)
            node, now = self._node(ino), self._clock()

            def plan() -> list[Change]:
                return plans.link(self.tree, node, self._dir(parent), name, now)

            changes = plan()
            path = self._path(parent, name)
            if node.id in self._absent:
                await self._fetch(node)
            meta, others = self._meta_after(node, changes), self._paths(node)
            if others:
                text = meta.link or next((t for t, n in self._links.items() if n == node.id), "")
                meta = meta._replace(link=text or os.urandom(12).hex())
                self._links[meta.link] = node.id
            metas = [(p, meta) for p in others]
            if stat.S_ISREG(node.mode):
                await self._send(path, await self._source(node), meta, ANY)
            else:
                metas.append((path, meta))
            if metas:
                await self._call(f"link {os.fsdecode(path)}", self.remote.keep, metas)
            self._now_known(metas)
            self._commit(caller, "link", plan())
            return node

    def _now_known(self, metas: Sequence[tuple[bytes, Meta]]) -> None:
        for path, meta in metas:
            known = self._known.get(path) or Known(None, None, 0, None)
            self._known[path] = known._replace(etag=None, meta=meta)
            self._touch(path)

    async def unlink(self, parent: int, name: bytes, caller: Caller) -> None:  # type: ignore[override]
        await self._remove("unlink", plans.unlink, parent, name, caller)

    async def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:  # type: ignore[override]
        await self._remove("rmdir", plans.rmdir, parent, name, caller)

    async def _remove(
        self, op: str, planner: Callable[..., list[Change]], parent: int, name: bytes, caller: Caller
    ) -> None:
        async with self._changing():
            await self._listed(parent)
            now = self._clock()
            gone = self.tree.child(self._dir(parent), name)
            if gone is not None and gone.id in self._unlisted:
                await self._listed(gone.ino)

            def plan() -> list[Change]:
                return planner(self.tree, self._dir(parent), name, now)

            changes = plan()
            assert gone is not None
            path = self._path(parent, name)
            if gone.pins and gone.nlink == 1 and gone.id in self._absent:
                await self._fetch(gone)  # whoever has it open reads on
            await self._keep_emptied(self._dir(parent))
            if path in self._known:
                await self._call(f"{op} {os.fsdecode(path)}", self.remote.remove, [path])
                del self._known[path]
            others = [p for p in self._paths(gone) if p != path] if gone.nlink > 1 and not gone.is_dir else []
            if others and gone.id not in self._dirty:
                meta = self._meta_after(gone, changes)
                metas = [(p, meta if len(others) > 1 else meta._replace(link="")) for p in others]
                await self._call(f"{op} {os.fsdecode(path)}", self.remote.keep, metas)
                self._now_known(metas)
            self._touch(path)
            self._commit(caller, op, plan())
            if not gone.nlink:
                self._dirty.discard(gone.id)

    async def _keep_emptied(self, directory: Node) -> None:
        """A directory that was there for its last file only must be kept for itself from now on."""
        if directory.id in self._explicit or len(directory.children or ()) > 1:
            return
        path = self.tree.path(directory)
        if path is not None and "dirs" in self.remote.keeps:
            metas = [(path, self._meta(directory))]
            await self._call("keep a directory", self.remote.keep, metas)
            self._now_known(metas)
        self._explicit.add(directory.id)

    async def rename(  # type: ignore[override]
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        if flags & plans.RENAME_WHITEOUT:
            raise fail(errno.EINVAL, name)
        async with self._changing():
            await self._listed(parent)
            await self._listed(new_parent)
            now = self._clock()

            def plan() -> list[Change]:
                source, target = self._dir(parent), self._dir(new_parent)
                return plans.rename(self.tree, source, name, target, new_name, flags, now)

            if not (changes := plan()):
                return
            old, new = self._path(parent, name), self._path(new_parent, new_name)
            node = self.tree.child(self._dir(parent), name)
            replaced = self.tree.child(self._dir(new_parent), new_name)
            assert node is not None
            if self.remote.verifies:
                raise fail(errno.EPERM, name)
            moves = await self._moves(node, old, new, changes)
            if replaced is not None and flags == plans.RENAME_EXCHANGE:
                moves += await self._moves(replaced, new, old, changes)
            elif replaced is not None and replaced.pins and replaced.id in self._absent:
                await self._fetch(replaced)
            await self._keep_emptied(self._dir(parent))
            if moves:
                await self._call(f"rename {os.fsdecode(old)}", self.remote.move, moves)
            if flags != plans.RENAME_EXCHANGE and new in self._known and new not in {m.new for m in moves}:
                await self._call(f"rename {os.fsdecode(old)}", self.remote.remove, [new])
            self._moved(old, new, moves)
            self._commit(caller, "rename", plan())
            if replaced is not None and not replaced.nlink:
                self._dirty.discard(replaced.id)

    def _moved(self, old: bytes, new: bytes, moves: Sequence[Moved]) -> None:
        """What is known of the paths goes with them."""
        known = {m.old: self._known.pop(m.old, None) for m in moves}
        for path in (old, new):
            self._known.pop(path, None)
        for m in moves:
            before = known[m.old] or Known(None, None, 0, None)
            self._known[m.new] = before._replace(etag=None, meta=m.meta)
            self._touch(m.old, m.new)

    async def _moves(self, node: Node, old: bytes, new: bytes, changes: Sequence[Change]) -> list[Moved]:
        """What a rename of a node moves at the remote: itself and all below it."""
        todo, moves = [(old, node)], list[Moved]()
        while todo:
            path, one = todo.pop(0)
            to = new + path[len(old) :]
            self.remote.check(to)
            if one.is_dir:
                await self._listed(one.ino)
                todo += [(path + b"/" + name, child) for name, child in (one.children or {}).items()]
            elif one.id in self._dirty:
                await self._put_node(one)
            regular = stat.S_ISREG(one.mode)
            if path in self._known or (one.id in self._explicit and "dirs" in self.remote.keeps):
                moves.append(Moved(path, to, self._meta_after(one, changes), regular))
        return moves

    # -- attributes

    def setattr(self, ino: int, to: SetAttr, caller: Caller, fh: int = 0) -> Any:
        if to.size is not None and self._writes(fh):
            # An open file: what is written goes out at its close.
            self._need_writable()
            self._check_size(to.size)
            if to.size:
                return self._with_content(ino, lambda: self._set_open(ino, to, caller, fh))
            return self._set_open(ino, to, caller, fh)
        return self._set(ino, to, caller)

    def _set_open(self, ino: int, to: SetAttr, caller: Caller, fh: int) -> Node:
        node = TreeVolume.setattr(self, ino, to, caller, fh)
        self._wrote(node)
        return node

    def _part_of(self, ino: int) -> int:
        """The key of the part of the lane for a node's attributes."""
        node = self._node(ino)
        return DIRECTORIES if node.is_dir else node.id

    async def _set(self, ino: int, to: SetAttr, caller: Caller) -> Node:
        async with self._changing(self._part_of(ino)):
            node, now = self._node(ino), self._clock()
            changes = plans.setattr(node, to, now)
            if self.remote.verifies and not self._is_no_change(node, to):
                raise fail(errno.EPERM)
            if to.size is not None:
                self._check_size(to.size)
                if to.size and node.id in self._absent:
                    await self._fetch(node)
                if node.nlink and not self._writers(node):
                    meta = self._meta_after(node, changes)
                    await self._send_all(node, meta, ANY, self._truncated(node, to.size))
                    sent = True
                else:
                    sent = False
                self._commit(caller, "setattr", plans.setattr(node, to, now))
                self._wrote(node)
                if sent:
                    self._dirty.discard(node.id)
                return node
            if node.nlink and node.id not in self._dirty:
                await self._keep_meta(node, self._meta_after(node, changes))
            self._commit(caller, "setattr", plans.setattr(node, to, now))
            return node

    def _is_no_change(self, node: Node, to: SetAttr) -> bool:
        """Whether all that is asked for is so already, or a time; of a blob nothing else can be set."""
        perm = to.perm is None or to.perm & 0o7777 == stat.S_IMODE(node.mode)
        return perm and to.uid in (None, node.uid) and to.gid in (None, node.gid) and to.size is None

    async def _keep_meta(self, node: Node, meta: Meta) -> None:
        if node.is_dir:
            self._explicit.add(node.id)
        if not self.remote.keeps & {"modes", "times"}:
            return
        metas = [(path, meta) for path in self._paths(node)]
        await self._call("set attributes", self.remote.keep, metas)
        self._now_known(metas)

    async def setxattr(self, ino: int, name: bytes, value: bytes, flags: int, caller: Caller) -> None:  # type: ignore[override]
        await self._set_xattr(ino, name, caller, lambda n, x, now: xattrs.setxattr(n, x, name, value, flags, now))

    async def removexattr(self, ino: int, name: bytes, caller: Caller) -> None:  # type: ignore[override]
        await self._set_xattr(ino, name, caller, lambda n, x, now: xattrs.removexattr(n, x, name, now))

    async def _set_xattr(self, ino: int, name: bytes, caller: Caller, planner: Callable[..., list[Change]]) -> None:
        if "xattrs" not in self.remote.keeps or name in acl.NAMES:
            raise fail(errno.EOPNOTSUPP, name)
        async with self._changing(self._part_of(ino)):
            node, now = self._node(ino), self._clock()
            changes = planner(node, self.backend.xattrs(node.id), now)
            if node.nlink and node.id not in self._dirty:
                await self._keep_meta(node, self._meta_after(node, changes))
            self._commit(caller, "setxattr", planner(node, self.backend.xattrs(node.id), now))

    def is_listed(self, ino: int) -> bool:
        """Whether a directory's entries are in memory."""
        return ino & NODE_MASK not in self._unlisted
