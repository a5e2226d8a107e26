"""The inode API for a host whose user and group ids are not the tree's: translated at the funnels, for both doors.

Above it ids are the host's, below it the tree's: in the record, in rules, in what is kept. Must not know doors.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import Any

from vfsd.core import acl
from vfsd.core.ids import NO_ID, Ids
from vfsd.core.plans import fail
from vfsd.core.types import Attr, Caller, DirEntry
from vfsd.feed import Feed
from vfsd.readonly import ShownAttr
from vfsd.routes import Overlay, RouteTable
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs

_ATTRS = frozenset(("lookup", "getattr", "setattr", "replace"))
_MAKES = frozenset(("mknod", "mkdir", "symlink", "create_file"))
_OPENS = frozenset(("create", "tmpfile"))


class MappedVfs(Vfs):
    """``Vfs`` with ``ids`` between. Whoever the tree has no id for can make nothing (EOVERFLOW)."""

    def __init__(self, table: RouteTable, feed: Feed, system: SystemEntries, ids: Ids) -> None:
        super().__init__(table, feed, system)
        self._ids = ids

    async def _observe(self, op: str, caller: Caller, ino: int, *args: Any) -> Any:
        inside = self._inside(caller)
        return self._out(op, await super()._observe(op, inside, ino, *_with(inside, args)))

    async def _mutate(self, op: str, caller: Caller, ino: int, *args: Any) -> Any:
        inside = self._inside(caller)
        if op in _MAKES or op in _OPENS:
            if NO_ID in (inside.uid, inside.gid):
                raise fail(errno.EOVERFLOW)
        elif op == "setattr":
            args = (self._ids.setattr_in(args[0]), *args[1:])
        elif op == "setxattr" and args[0] in acl.NAMES:
            args = (args[0], self._ids.acl_in(args[1]), *args[2:])
        return self._out(op, await super()._mutate(op, inside, ino, *_with(inside, args)))

    def acl(self, ino: int, name: bytes = acl.ACCESS) -> bytes | None:
        value = super().acl(ino, name)
        return None if value is None else self._ids.acl_out(value)

    def _root(self, laid: Overlay) -> Attr:
        return self._shown(super()._root(laid))

    def _inside(self, caller: Caller) -> Caller:
        return caller if caller.door == "daemon" else self._ids.caller_in(caller)

    def _out(self, op: str, result: Any) -> Any:
        if op in _ATTRS or op in _MAKES or op == "link":
            return self._shown(result)
        if op in _OPENS:
            return self._shown(result[0]), result[1]
        if op == "children":
            return [(name, self._shown(attr)) for name, attr in result]
        return self._entries(result) if op == "readdir" else result

    def _entries(self, entries: Iterable[DirEntry]) -> Iterator[DirEntry]:
        for entry in entries:
            yield entry._replace(attr=self._shown(entry.attr))

    def _shown(self, a: Attr) -> ShownAttr:
        return ShownAttr(
            a.ino, a.mode, a.nlink, self._ids.uid_out(a.uid), self._ids.gid_out(a.gid), a.rdev, a.size, a.blocks,
            a.atime_ns, a.mtime_ns, a.ctime_ns,
        )  # fmt: skip


def _with(inside: Caller, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(inside if type(arg) is Caller else arg for arg in args)
