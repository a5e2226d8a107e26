"""What a line of the audit says of an operation: its name, paths and sizes, as fields of JSON.

Owns the words for operations and the paths it has found, which stay true because it is told of every rename. Must not
know who did it, how lines are kept, or doors. Nothing here waits: what can only be known by waiting is left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

from vfsd.core.plans import RENAME_EXCHANGE, RENAME_WHITEOUT
from vfsd.core.types import NODE_BITS, NODE_MASK, SetAttr
from vfsd.vfs import Vfs

Args = tuple[Any, ...]

Before = tuple[int | None, Any, Any]
"""What was there before: the size of the file (None: no file, or unknown), its attributes, those of what a rename
replaces. Attributes may be the live ones of the volume."""

NOTHING: Before = (None, None, None)

_BeforeOp = Callable[[int, Args], Before]
_AfterOp = Callable[[Before, int, Args, Any], bytes]

READS = {
    "open": "open", "read": "read", "readdir": "list", "children": "list", "readlink": "readlink",
    "getxattr": "getxattr", "listxattr": "listxattr",
}  # fmt: skip
"""Operations that change nothing and have a line when reads are wanted, and what they are called there."""

_WORDS = READS | {"replace": "write", "create_file": "create", "flush": "close"}

_MAKES = frozenset({"mknod", "mkdir", "symlink", "create", "create_file"})
_REMOVES = frozenset({"unlink", "rmdir"})
_ENTRY = _MAKES | _REMOVES | {"lookup"}
_CACHED = 8192
_PLAIN = bytes(set(range(0x20, 0x7F)) - set(b'"\\'))
"""Bytes that stand for themselves in a JSON string."""
_NULL = b"null"
_IFMT, _IFREG = 0o170000, stat.S_IFREG
_OURS = 3600.0
"""Seconds that the kernel may keep what nobody but us changes, or more."""


def quoted(text: str) -> bytes:
    """A JSON string; what is not Unicode in it (a path of other bytes) as ``\\udcXX`` for each byte."""
    try:
        return encode_basestring(text).encode()
    except UnicodeEncodeError:
        return encode_basestring_ascii(text).encode()


def quoted_path(path: bytes) -> bytes:
    """The same of a path or name."""
    if path.translate(None, _PLAIN):
        return quoted(path.decode(errors="surrogateescape"))
    return b'"%b"' % path


class Lines:
    """The lines about operations on ``vfs``."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs
        self._volumes = vfs.table.volumes
        self._trees: list[Any] = []
        self._paths: dict[int, bytes] = {}
        self._directories: dict[int, bytes] = {}
        self._unlinked: dict[int, bytes] = {}
        self.befores, self.afters = self._tables()

    def before(self, op: str, ino: int, args: Args) -> Before:
        """What is to be known before a change that ``befores`` has nothing of its own for."""
        found = self._attr(args[2] if op == "copy_range" else ino)
        return (None if found is None else found.size), found, None

    def changed(self, before: Before, op: str, ino: int, args: Args) -> bytes:
        """The fields of a change that was made and that ``afters`` has nothing of its own for."""
        if op == "copy_range":
            ino = args[2]
        what = b'"op":"%b",%b' % (called(op, args), self.path(ino))
        if op == "setxattr" or op == "removexattr":
            return what + b',"name":%b' % quoted_path(args[0])
        if op == "setattr":
            what += _attributes(args[0])
        after = self._attr(ino)
        if after is None or not stat.S_ISREG(after.mode):
            return what
        return what + b',"size":[%b,%d]' % (_number(before[0]), after.size)

    def _tables(self) -> tuple[dict[str, _BeforeOp], dict[str, _AfterOp]]:
        """How each operation is told of that is not like most; a table, as every change passes here."""
        befores: dict[str, _BeforeOp] = dict.fromkeys(_MAKES, lambda ino, args: NOTHING)
        befores |= dict.fromkeys(_REMOVES, self._to_remove)
        befores |= {
            "write": self._to_write,
            "create": self._to_create,
            "rename": self._to_rename,
            "link": self._to_link,
        }
        afters: dict[str, _AfterOp] = {op: partial(self._made, op.encode()) for op in _MAKES}
        afters |= {op: partial(self._removed, op.encode()) for op in _REMOVES}
        afters |= {"write": self._wrote, "rename": self._renamed, "link": self._linked, "tmpfile": _nameless}
        return befores, afters

    # -- contents

    def _to_write(self, ino: int, args: Args) -> Before:
        try:
            tree = self._trees[ino >> NODE_BITS]
            node = tree.nodes[ino & NODE_MASK]
            return node.size, node, tree
        except (AttributeError, LookupError):  # no tree, or that part of it is not in memory
            found = self._attr(ino)
            return NOTHING if found is None else (found.size, found, self._tree(ino >> NODE_BITS))

    def _wrote(self, before: Before, ino: int, args: Args, result: Any) -> bytes:
        size, after, live = before
        if live is None:
            after = self._attr(ino)
        if after is None or size is None:
            return b'"op":"write",%b' % self.path(ino)
        return b'"op":"write",%b,"size":[%d,%d]' % (self._paths.get(ino) or self.path(ino), size, after.size)

    # -- names

    def _to_create(self, parent: int, args: Args) -> Before:
        found = self._entry(parent, args[0])
        return NOTHING if found is None else (found.size, None, None)

    def _made(self, op: bytes, before: Before, parent: int, args: Args, result: Any) -> bytes:
        attr = result[0] if type(result) is tuple else result
        new = attr.ino
        what = b'"path":%b,"ino":%d' % (self._entry_path(parent, args[0]), new)
        if attr.mode & _IFMT != _IFREG:
            return b'"op":"%b",%b' % (op, what)
        self._keep(new, what)
        return b'"op":"create",%b,"size":[%b,%d]' % (what, _number(before[0]), attr.size)

    def _to_remove(self, parent: int, args: Args) -> Before:
        found = self._entry(parent, args[0])
        return _size(found), found, None

    def _removed(self, op: bytes, before: Before, parent: int, args: Args, result: Any) -> bytes:
        size, attr, _ = before
        path = self._entry_path(parent, args[0])
        if attr is None:
            return b'"op":"%b","path":%b' % (op, path)
        self._gone(attr, path)
        if size is None:
            return b'"op":"%b","path":%b,"ino":%d' % (op, path, attr.ino)
        return b'"op":"unlink","path":%b,"ino":%d,"size":[%d,null]' % (path, attr.ino, size)

    def _to_link(self, ino: int, args: Args) -> Before:
        return None, self.path(ino), None  # afterwards it may be found by its new name

    def _linked(self, before: Before, ino: int, args: Args, result: Any) -> bytes:
        return b'"op":"link",%b,"path2":%b' % (before[1], self._entry_path(args[0], args[1]))

    def _to_rename(self, parent: int, args: Args) -> Before:
        found = self._entry(parent, args[0])
        return _size(found), found, self._entry(args[1], args[2])

    def _renamed(self, before: Before, parent: int, args: Args, result: Any) -> bytes:
        size, moved, replaced = before
        name, new_parent, new_name, flags = args[:4]
        path, path2 = self._entry_path(parent, name), self._entry_path(new_parent, new_name)
        # A file gets a free name: so it is nearly always.
        if size is not None and replaced is None and not flags & RENAME_WHITEOUT:
            ino = moved.ino
            self._paths.pop(ino, None)
            return b'"op":"rename","path":%b,"path2":%b,"ino":%d,"size":[%d,%d]' % (path, path2, ino, size, size)
        what = b'"op":"rename","path":%b,"path2":%b' % (path, path2)
        for attr in (moved, replaced):
            if attr is not None and not stat.S_ISDIR(attr.mode):
                self._paths.pop(attr.ino, None)
            elif attr is not None or moved is None:
                self.forget_paths()
        if moved is not None:
            what += b',"ino":%d' % moved.ino
        if flags & RENAME_WHITEOUT:
            what += b',"whiteout":true'
        if flags & RENAME_EXCHANGE:
            what += b',"exchange":true'
        elif replaced is not None:
            what += b',"replaced":%d' % replaced.ino
            if moved is None or replaced.ino != moved.ino:
                self._gone(replaced, path2)
        return what if size is None else what + b',"size":[%d,%d]' % (size, size)

    def failed(self, op: str, ino: int, args: Args) -> bytes:
        """The fields of an operation that failed, or of one that only looks."""
        if op in _ENTRY:
            return b'"op":"%b","path":%b' % (called(op, args), self._entry_path(ino, args[0]))
        if op == "rename":
            paths = self._entry_path(ino, args[0]), self._entry_path(args[1], args[2])
            return b'"op":"rename","path":%b,"path2":%b' % paths
        if op == "link":
            return b'"op":"link",%b,"path2":%b' % (self.path(ino), self._entry_path(args[0], args[1]))
        return b'"op":"%b",%b' % (called(op, args), self.path(args[2] if op == "copy_range" else ino))

    # -- paths

    def path(self, ino: int) -> bytes:
        """The fields ``path`` and ``ino``; of several paths, the one by which it was found last."""
        known = self._paths.get(ino)
        if known is None:
            path = self._vfs.path_of(ino)
            if path is not None:
                known = b'"path":%b,"ino":%d' % (quoted_path(path), ino)
            elif ino in self._unlinked:
                known = b'"path":%b,"ino":%d,"unlinked":true' % (self._unlinked[ino], ino)
            else:
                known = b'"path":null,"ino":%d' % ino
            self._keep(ino, known)
        return known

    def _keep(self, ino: int, path: bytes) -> None:
        if self._is_ours(ino):
            if len(self._paths) >= _CACHED:
                self._paths.clear()
            self._paths[ino] = path

    def _entry_path(self, parent: int, name: bytes) -> bytes:
        """The path of an entry as a JSON string."""
        above = self._directories.get(parent)
        if above is None:
            path = self._vfs.path_of(parent)
            above = b'"?/' if path is None else quoted_path(path.rstrip(b"/") + b"/")[:-1]
            if self._is_ours(parent):
                if len(self._directories) >= _CACHED:
                    self._directories.clear()
                self._directories[parent] = above
        # What is left without them is told apart more quickly than by a match.
        if name.translate(None, _PLAIN):
            return above + quoted_path(name)[1:]
        return b'%b%b"' % (above, name)

    def _is_ours(self, ino: int) -> bool:
        """Whether nobody but us renames what is there."""
        return bool(self._volumes[ino >> NODE_BITS].cache_seconds >= _OURS)

    def forget_paths(self) -> None:
        """Anything may have another path now."""
        self._paths.clear()
        self._directories.clear()

    def _gone(self, attr: Any, path: bytes) -> None:
        """A name of it is gone. Who has it open may go on writing to it: then it is told of by its last path."""
        if attr.mode & _IFMT == stat.S_IFDIR:
            self.forget_paths()
        else:
            self._paths.pop(attr.ino, None)
            if attr.nlink == 0:  # the live node of a volume of ours
                if len(self._unlinked) >= _CACHED:
                    self._unlinked.clear()
                self._unlinked[attr.ino] = path

    # -- what is known without waiting

    def _tree(self, number: int) -> Any:
        """The tree in memory of a volume that has one."""
        try:
            return self._trees[number]
        except IndexError:
            self._trees[:] = [getattr(volume, "tree", None) for volume in self._volumes]
            return self._trees[number]

    def _attr(self, ino: int) -> Any:
        tree = self._tree(ino >> NODE_BITS)
        if tree is not None:
            found = tree.nodes.get(ino & NODE_MASK)
            if found is not None or not self._volumes[ino >> NODE_BITS].inline:
                return found
        try:
            return self._volumes[ino >> NODE_BITS].getattr(ino)
        except OSError:
            return None

    def _entry(self, parent: int, name: bytes) -> Any:
        try:
            children = self._trees[parent >> NODE_BITS].nodes[parent & NODE_MASK].children
            found = children.get(name)
            if found is not None or children.complete:
                return found
        except (AttributeError, LookupError):  # no tree, or that part of it is not in memory
            pass
        try:
            return self._volumes[parent >> NODE_BITS].peek(parent, name)
        except OSError:
            return None


def _size(attr: Any) -> int | None:
    return attr.size if attr is not None and attr.mode & _IFMT == _IFREG else None


def _nameless(before: Before, parent: int, args: Args, result: Any) -> bytes:
    return b'"op":"tmpfile","path":null,"ino":%d,"size":[null,0]' % result[0].ino


def _number(value: int | None) -> bytes:
    return _NULL if value is None else b"%d" % value


def called(op: str, args: Args) -> bytes:
    """The name that a line has for an operation: of a setattr what it is asked for."""
    if op == "setattr":
        to: SetAttr = args[0]
        if to.size is not None:
            return b"truncate"
        if to.perm is not None:
            return b"chmod"
        return b"chown" if to.uid is not None or to.gid is not None else b"utime"
    if op == "open" and args[0] & os.O_TRUNC:
        return b"truncate"
    return _WORDS.get(op, op).encode()


def _attributes(to: SetAttr) -> bytes:
    told = b"" if to.perm is None else b',"mode":"%04o"' % to.perm
    told += b"" if to.uid is None else b',"to_uid":%d' % to.uid
    return told + (b"" if to.gid is None else b',"to_gid":%d' % to.gid)
