"""What a line of the audit says of an operation: its name, paths and sizes, as fields of JSON.

Owns the words for operations and the paths it has found, which stay true because it is told of every rename. Must not
know who did it, how lines are kept, or doors. Nothing here waits: what can only be known by waiting is left out.
"""

from __future__ import annotations

import os
import re
import stat
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

from vfsd.core.plans import RENAME_EXCHANGE
from vfsd.core.types import NODE_BITS, NODE_MASK, SetAttr
from vfsd.vfs import Vfs

Args = tuple[Any, ...]

Before = tuple[int | None, Any, Any]
"""What was there before: the size of the file (None: no file, or unknown), its attributes, those of what a rename
replaces. Attributes may be the live ones of the volume."""

NOTHING: Before = (None, None, None)

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
_is_plain = re.compile(rb"[ !#-\[\]-~]+").fullmatch
_NULL = b"null"


def quoted(text: str) -> bytes:
    """A JSON string; what is not Unicode in it (a path of other bytes) as ``\\udcXX`` for each byte."""
    try:
        return encode_basestring(text).encode()
    except UnicodeEncodeError:
        return encode_basestring_ascii(text).encode()


def quoted_path(path: bytes) -> bytes:
    """The same of a path or name."""
    if _is_plain(path) is not None:
        return b'"%b"' % path
    return quoted(path.decode(errors="surrogateescape"))


class Lines:
    """The lines about operations on ``vfs``."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs
        self._volumes = vfs.table.volumes
        self.trees: list[Any] = []
        self.paths: dict[int, bytes] = {}
        self._directories: dict[int, bytes] = {}
        self._unlinked: dict[int, bytes] = {}

    def before(self, op: str, ino: int, args: Args) -> Before:
        """What is to be known before a change."""
        if op == "write":
            found = self._attr(ino)
            return NOTHING if found is None else (found.size, found, self._tree(ino >> NODE_BITS))
        if op in _MAKES:
            if op != "create":
                return NOTHING
            found = self._entry(ino, args[0])
            return (found.size if found is not None else None), None, None
        if op in _REMOVES:
            found = self._entry(ino, args[0])
            return _size(found), found, None
        if op == "rename":
            found = self._entry(ino, args[0])
            return _size(found), found, self._entry(args[1], args[2])
        if op == "link":
            return None, self.path(ino), None  # afterwards it may be found by its new name
        found = self._attr(args[2] if op == "copy_range" else ino)
        return (None if found is None else found.size), found, None

    def changed(self, before: Before, op: str, ino: int, args: Args, result: Any) -> bytes:
        """The fields of a change that was made."""
        size = before[0]
        if op == "write":
            _, after, live = before
            if live is None:
                after = self._attr(ino)
            if after is None or size is None:
                return b'"op":"write",%b' % self.path(ino)
            return b'"op":"write",%b,"size":[%d,%d]' % (self.paths.get(ino) or self.path(ino), size, after.size)
        if op in _MAKES:
            attr = result[0] if op == "create" else result
            new = attr.ino
            what = b'"path":%b,"ino":%d' % (self._entry_path(ino, args[0]), new)
            if not stat.S_ISREG(attr.mode):
                return b'"op":"%b",%b' % (op.encode(), what)
            if self._is_ours(new):
                if len(self.paths) >= _CACHED:
                    self.paths.clear()
                self.paths[new] = what
            if size is None:
                return b'"op":"create",%b,"size":[null,%d]' % (what, attr.size)
            return b'"op":"create",%b,"size":[%b,%b]' % (what, _number(size), _number(attr.size))
        if op in _REMOVES:
            return self._removed(before, op, ino, args[0])
        if op == "rename":
            return self._renamed(before, ino, args)
        if op == "link":
            return b'"op":"link",%b,"path2":%b' % (before[1], self._entry_path(args[0], args[1]))
        if op == "tmpfile":
            return b'"op":"tmpfile","path":null,"ino":%d,"size":[null,0]' % result[0].ino
        if op == "copy_range":
            ino = args[2]
        what = b'"op":"%b",%b' % (_called(op, args), self.path(ino))
        if op == "setxattr" or op == "removexattr":
            return what + b',"name":%b' % quoted_path(args[0])
        if op == "setattr":
            what += _attributes(args[0])
        after = self._attr(ino)
        if after is None or not stat.S_ISREG(after.mode):
            return what
        return what + b',"size":[%b,%d]' % (_number(size), after.size)

    def _removed(self, before: Before, op: str, parent: int, name: bytes) -> bytes:
        size, attr, _ = before
        path = self._entry_path(parent, name)
        if attr is None:
            return b'"op":"%b","path":%b' % (op.encode(), path)
        self._gone(attr, path)
        if size is None:
            return b'"op":"%b","path":%b,"ino":%d' % (op.encode(), path, attr.ino)
        return b'"op":"unlink","path":%b,"ino":%d,"size":[%d,null]' % (path, attr.ino, size)

    def _renamed(self, before: Before, parent: int, args: Args) -> bytes:
        size, moved, replaced = before
        name, new_parent, new_name, flags = args[:4]
        path, path2 = self._entry_path(parent, name), self._entry_path(new_parent, new_name)
        if size is not None and replaced is None:  # a file gets a free name: so it is nearly always
            ino = moved.ino
            self.paths.pop(ino, None)
            return b'"op":"rename","path":%b,"path2":%b,"ino":%d,"size":[%d,%d]' % (path, path2, ino, size, size)
        what = b'"op":"rename","path":%b,"path2":%b' % (path, path2)
        for attr in (moved, replaced):
            if attr is not None and not stat.S_ISDIR(attr.mode):
                self.paths.pop(attr.ino, None)
            elif attr is not None or moved is None:
                self.forget_paths()
        if moved is not None:
            what += b',"ino":%d' % moved.ino
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
            return b'"op":"%b","path":%b' % (_called(op, args), self._entry_path(ino, args[0]))
        if op == "rename":
            paths = self._entry_path(ino, args[0]), self._entry_path(args[1], args[2])
            return b'"op":"rename","path":%b,"path2":%b' % paths
        if op == "link":
            return b'"op":"link",%b,"path2":%b' % (self.path(ino), self._entry_path(args[0], args[1]))
        return b'"op":"%b",%b' % (_called(op, args), self.path(args[2] if op == "copy_range" else ino))

    # -- paths

    def path(self, ino: int) -> bytes:
        """The fields ``path`` and ``ino``; of several paths, the one by which it was found last."""
        known = self.paths.get(ino)
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
            if len(self.paths) >= _CACHED:
                self.paths.clear()
            self.paths[ino] = path

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
        if _is_plain(name) is not None:
            return b'%b%b"' % (above, name)
        return above + quoted_path(name)[1:]

    def _is_ours(self, ino: int) -> bool:
        """Whether nobody but us renames what is there."""
        return bool(self._volumes[ino >> NODE_BITS].cache_seconds >= 3600.0)

    def forget_paths(self) -> None:
        """Anything may have another path now."""
        self.paths.clear()
        self._directories.clear()

    def _gone(self, attr: Any, path: bytes) -> None:
        """A name of it is gone. Who has it open may go on writing to it: then it is told of by its last path."""
        if stat.S_ISDIR(attr.mode):
            self.forget_paths()
        else:
            self.paths.pop(attr.ino, None)
            if attr.nlink == 0:  # the live node of a volume of ours
                if len(self._unlinked) >= _CACHED:
                    self._unlinked.clear()
                self._unlinked[attr.ino] = path

    # -- what is known without waiting

    def _tree(self, number: int) -> Any:
        """The tree in memory of a volume that has one."""
        try:
            return self.trees[number]
        except IndexError:
            self.trees[:] = [getattr(volume, "tree", None) for volume in self._volumes]
            return self.trees[number]

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
            tree = self._tree(parent >> NODE_BITS)
            children = tree.nodes[parent & NODE_MASK].children
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
    return attr.size if attr is not None and stat.S_ISREG(attr.mode) else None


def _number(value: int | None) -> bytes:
    return _NULL if value is None else b"%d" % value


def _called(op: str, args: Args) -> bytes:
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
