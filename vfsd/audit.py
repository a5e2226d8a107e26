"""One line for each change and each refusal, whatever door: when, what, on which path, with what result, and by whom.

Owns what a line says (``docs/audit.md`` has the fields) and what is worth one. Called by the funnels of ``vfs`` at each
exit, and by the tool door for what fails before it reaches them. Must not know how lines are kept, nor doors.

Invariants: an exit is told of once; a line is in the kernel's hands before the door answers; nothing here makes an
operation fail or wait: a line that can't be written is counted, and the count is written when that is possible again.
No contents: a line has names, numbers and the command line of who did it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import time
from collections.abc import Collection, Mapping
from json.encoder import encode_basestring, encode_basestring_ascii
from pathlib import Path
from typing import Any, NamedTuple

from vfsd.actors import Actors
from vfsd.auditlog import SegmentLog, lines_back
from vfsd.core.types import NODE_BITS, NODE_MASK, Caller, SetAttr
from vfsd.vfs import Vfs

log = logging.getLogger(__name__)

ERRORS_BYTES = 1 << 20
"""Bytes kept of lines about what failed, besides those in the whole log."""

REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ECANCELED})
"""Failures to observe that are worth a line. All others only say what is there and what not (ENOENT, ENODATA)."""

READS = {
    "open": "open", "read": "read", "readdir": "list", "children": "list", "readlink": "readlink",
    "getxattr": "getxattr", "listxattr": "listxattr",
}  # fmt: skip
"""Operations that change nothing and have a line when reads are wanted, and what they are called there."""

TOOL_CHANGES = frozenset({
    "write", "upload_commit", "delete", "mkdir", "rmdir", "unlink", "rename", "link", "symlink", "chmod", "chown",
    "utime", "truncate", "mknod", "setxattr", "removexattr", "pwrite", "ftruncate", "fallocate", "restore", "undo",
})  # fmt: skip
"""Operations of the tool door whose failure is worth a line, whatever the reason."""

_CACHED = 8192
_MAKES = frozenset({"mknod", "mkdir", "symlink", "create", "create_file"})
_REMOVES = frozenset({"unlink", "rmdir"})
_NULL = b"null"

_Actor = tuple[bytes, int]


class Before(NamedTuple):
    """What was there before: the size of the file (None: no file, or unknown), and its attributes for a name."""

    size: int | None
    attr: Any = None
    replaced: Any = None


def quoted(text: str) -> bytes:
    """A JSON string. Text that is no Unicode (a path of other bytes) has its bytes as ``\\udcXX``."""
    try:
        return encode_basestring(text).encode()
    except UnicodeEncodeError:
        return encode_basestring_ascii(text).encode()


def quoted_path(path: bytes) -> bytes:
    return quoted(path.decode(errors="surrogateescape"))


class Audit:
    """The audit of ``vfs``, kept in ``directory``. ``reads``: also of what changes nothing.

    ``max_bytes`` and ``max_age`` (seconds) bound it. Raises OSError when the directory can't be had.
    """

    def __init__(self, vfs: Vfs, directory: Path, *, max_bytes: int, max_age: float, reads: bool = False) -> None:
        self._vfs = vfs
        self._volumes = vfs.table.volumes
        self.log = SegmentLog(directory, "log", max_bytes, max_age)
        self.errors = SegmentLog(directory, "errors", min(ERRORS_BYTES, max_bytes), max_age)
        self.reads: Collection[str] = READS if reads else ()
        self.silent: set[int] = set()
        """Volumes, by number, whose being read is not worth a line."""
        self._seq = _last_seq(directory)
        self._actors = Actors(time.time_ns)
        self._who: dict[Caller, _Actor] = {}
        self._paths: dict[int, bytes] = {}
        self._directories: dict[int, bytes] = {}
        self._second = -1
        self._second_text = b""
        self._lost = 0

    # -- what the funnels tell

    def before(self, op: str, ino: int, args: tuple[Any, ...]) -> Before | None:
        """To be called before a change, and its result given to ``done``."""
        try:
            if op in _MAKES:
                return Before(_size(self._peek(ino, args[0]))) if op == "create" else None
            if op in _REMOVES:
                found = self._peek(ino, args[0])
                return Before(_size(found), found)
            if op == "rename":
                found = self._peek(ino, args[0])
                return Before(_size(found), found, self._peek(args[1], args[2]))
            return Before(self._size(args[2] if op == "copy_range" else ino))
        except Exception:
            log.exception("audit of %s", op)
            return None

    def done(
        self, before: Before | None, op: str, caller: Caller, ino: int, args: tuple[Any, ...], result: Any
    ) -> None:
        """A change was made."""
        try:
            now = time.time_ns()
            if op == "write":
                size = before.size if before is not None else None
                what = self._path(ino)
                after = self._size(ino)
                self._write(now, b'"op":"write",%b,"size":[%b,%b]' % (what, _number(size), _number(after)), caller)
            else:
                self._write(now, self._change(before, op, ino, args, result), caller)
        except Exception:
            log.exception("audit of %s", op)

    def saw(self, op: str, caller: Caller, ino: int) -> None:
        """Something was read, and reads are wanted."""
        if ino >> NODE_BITS in self.silent:
            return
        try:
            self._write(time.time_ns(), b'"op":"%b",%b' % (READS[op].encode(), self._path(ino)), caller)
        except Exception:
            log.exception("audit of %s", op)

    def failed(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...], error: BaseException) -> None:
        """A change was not made, or something worth a line could not be observed."""
        try:
            if op in _MAKES or op in _REMOVES:
                what = b'"path":%b' % self._name(ino, args[0])
            elif op == "rename":
                what = b'"path":%b,"path2":%b' % (self._name(ino, args[0]), self._name(args[1], args[2]))
            elif op == "link":
                what = b'%b,"path2":%b' % (self._path(ino), self._name(args[0], args[1]))
            elif op == "lookup":
                what = b'"path":%b' % self._name(ino, args[0])
            else:
                what = self._path(args[2] if op == "copy_range" else ino)
            self._fail(_called(op, args), what, caller, error)
        except Exception:
            log.exception("audit of a failed %s", op)

    def unseen(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...], error: OSError) -> None:
        """Something could not be observed."""
        if error.errno in REFUSALS:
            self.failed(op, caller, ino, args, error)

    # -- what others tell

    def refused(self, message: Mapping[str, Any], caller: Caller, error: OSError) -> None:
        """A request of the tool door failed; it has its line already if a funnel refused it."""
        op = str(message["action"] if message.get("op") == "checkpoint" and "action" in message else message.get("op"))
        if "audited" in error.__dict__ or (op not in TOOL_CHANGES and error.errno not in REFUSALS):
            return
        try:
            path, path2 = message.get("path", message.get("old")), message.get("new")
            what = b'"path":%b' % (quoted_path(path) if type(path) is bytes else _NULL)
            if type(path2) is bytes:
                what += b',"path2":%b' % quoted_path(path2)
            self._fail(op, what, caller, error)
        except Exception:
            log.exception("audit of a refused %s", op)

    def restored(self, op: str, checkpoint: str, changes: int, caller: Caller) -> None:
        """The tree went back to a checkpoint."""
        self._forget_paths()
        what = b'"op":%b,"path":"/","checkpoint":%b,"changes":%d' % (quoted(op), quoted(checkpoint), changes)
        self._write(time.time_ns(), what, caller)

    # -- lines

    def _write(self, now: int, what: bytes, caller: Caller, result: bytes = b'"ok"') -> bytes:
        second, rest = divmod(now, 1_000_000_000)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        who = self._who.get(caller)
        if who is None or now >= who[1]:
            who = self._ask(caller, now)
        if self._lost:
            self._tell_lost()
        self._seq += 1
        line = b'{"seq":%d,"time":"%b.%06dZ",%b,"result":%b,%b}\n' % (
            self._seq, self._second_text, rest // 1000, what, result, who[0],
        )  # fmt: skip
        try:
            self.log.append(line)
        except OSError as exc:
            self._lost += 1
            if self._lost == 1:
                log.error("the audit log can't be written: %s", exc.strerror)
        return line

    def _tell_lost(self) -> None:
        """That there was no room for lines, as soon as there is."""
        note = b'{"seq":%d,"time":"%b.000000Z","op":"lost","count":%d,"result":"ok","door":"daemon"}\n'
        with contextlib.suppress(OSError):
            self.log.append(note % (self._seq + 1, self._second_text, self._lost))
            self._seq += 1
            self._lost = 0

    def _fail(self, op: str, what: bytes, caller: Caller, error: BaseException) -> None:
        if isinstance(error, OSError) and error.errno is not None:
            name, text = errno.errorcode.get(error.errno, str(error.errno)), str(error.strerror)
            error.__dict__["audited"] = True
        elif isinstance(error, Exception):
            name, text = "EIO", f"a fault of the daemon: {type(error).__name__}"
        else:
            name, text = "EINTR", "cancelled; it may have been done or not"
        result = b'%b,"error":%b' % (quoted(name), quoted(text))
        line = self._write(time.time_ns(), b'"op":%b,%b' % (quoted(op), what), caller, result)
        try:
            self.errors.append(line)
        except OSError as exc:
            log.error("the audit log of errors can't be written: %s", exc.strerror)

    def _ask(self, caller: Caller, now: int) -> _Actor:
        """The end of a line: who it was."""
        actor, until = self._actors.of(caller.pid, now)
        parts = [b'"door":%b' % quoted(caller.door)]
        if caller.tool:
            parts.append(b'"tool":%b' % quoted(caller.tool))
        call = caller.call_id or ("" if actor.mark is None else actor.mark.call)
        if call:
            parts.append(b'"call":%b' % quoted(call))
        if actor.mark is not None:
            parts.append(b'"execute":%b' % quoted(actor.mark.execute))
        parts.append(b'"pid":%d,"uid":%d' % (actor.pid, caller.uid))
        if actor.command:
            parts.append(b'"command":%b' % quoted(actor.command))
        if len(self._who) >= _CACHED:
            self._who.clear()
        who = self._who[caller] = (b",".join(parts), until)
        return who

    def _change(self, before: Before | None, op: str, ino: int, args: tuple[Any, ...], result: Any) -> bytes:
        """What was done, but for a write."""
        was = before or Before(None)
        if op in _MAKES:
            attr = result[0] if op == "create" else result
            told = b'"op":"%b","path":%b,"ino":%d' % (op.encode(), self._name(ino, args[0]), attr.ino)
            if not stat.S_ISREG(attr.mode):
                return told
            return told + b',"size":[%b,%b]' % (_number(was.size), _number(attr.size))
        if op in _REMOVES:
            told = b'"op":"%b","path":%b' % (op.encode(), self._name(ino, args[0]))
            if was.attr is not None:
                told += b',"ino":%d' % was.attr.ino
                self._gone(was.attr, ino, args[0])
            return told if was.size is None else told + b',"size":[%d,null]' % was.size
        if op == "rename":
            return self._renamed(was, ino, args)
        if op == "link":
            return b'"op":"link",%b,"path2":%b' % (self._path(ino), self._name(args[0], args[1]))
        if op == "tmpfile":
            return b'"op":"tmpfile","path":null,"ino":%d,"size":[null,0]' % result[0].ino
        if op == "copy_range":
            ino = args[2]
        told = b'"op":"%b",%b' % (_called(op, args).encode(), self._path(ino))
        if op in ("setxattr", "removexattr"):
            return told + b',"name":%b' % quoted_path(args[0])
        if op == "setattr":
            told += _attributes(args[0])
        after = self._size(ino)
        return told if after is None else told + b',"size":[%b,%b]' % (_number(was.size), _number(after))

    def _renamed(self, was: Before, ino: int, args: tuple[Any, ...]) -> bytes:
        moved, replaced = was.attr, was.replaced
        told = b'"op":"rename","path":%b,"path2":%b' % (self._name(ino, args[0]), self._name(args[1], args[2]))
        if moved is None or stat.S_ISDIR(moved.mode) or (replaced is not None and stat.S_ISDIR(replaced.mode)):
            self._forget_paths()
        if moved is not None:
            self._paths.pop(moved.ino, None)
            told += b',"ino":%d' % moved.ino
        if args[3] & 2:  # RENAME_EXCHANGE
            told += b',"exchange":true'
            if replaced is not None:
                self._paths.pop(replaced.ino, None)
        elif replaced is not None:
            told += b',"replaced":%d' % replaced.ino
            if moved is None or replaced.ino != moved.ino:
                self._gone(replaced, args[1], args[2])
        return told if was.size is None else told + b',"size":[%d,%d]' % (was.size, was.size)

    # -- paths and sizes

    def _path(self, ino: int) -> bytes:
        """The fields ``path`` and ``ino`` of a file; a path of several is that by which it was found last."""
        known = self._paths.get(ino)
        if known is None:
            path = self._vfs.path_of(ino)
            known = b'"path":%b,"ino":%d' % (_NULL if path is None else quoted_path(path), ino)
            if self._is_ours(ino):
                if len(self._paths) >= _CACHED:
                    self._paths.clear()
                self._paths[ino] = known
        return known

    def _name(self, parent: int, name: bytes) -> bytes:
        """The path of an entry, as a JSON string."""
        above = self._directories.get(parent)
        if above is None:
            path = self._vfs.path_of(parent)
            above = b'"?/' if path is None else quoted_path(path.rstrip(b"/") + b"/")[:-1]
            if self._is_ours(parent):
                if len(self._directories) >= _CACHED:
                    self._directories.clear()
                self._directories[parent] = above
        return above + quoted_path(name)[1:]

    def _is_ours(self, ino: int) -> bool:
        """Whether nobody but us renames what is there."""
        return bool(self._volumes[ino >> NODE_BITS].cache_seconds >= 3600.0)

    def _forget_paths(self) -> None:
        self._paths.clear()
        self._directories.clear()

    def _gone(self, attr: Any, parent: int, name: bytes) -> None:
        """A name of it is gone. Who has it open may go on writing, to what then is told of by its last path."""
        if stat.S_ISDIR(attr.mode):
            self._forget_paths()
        elif attr.nlink == 0:  # the live node of a volume of ours
            self._paths[attr.ino] = b'"path":%b,"ino":%d,"unlinked":true' % (self._name(parent, name), attr.ino)
        else:
            self._paths.pop(attr.ino, None)

    def _attr(self, ino: int) -> Any:
        """The attributes as far as they are known without waiting."""
        volume = self._volumes[ino >> NODE_BITS]
        tree = getattr(volume, "tree", None)
        if tree is not None:
            return tree.nodes.get(ino & NODE_MASK)
        try:
            return volume.getattr(ino)
        except OSError:
            return None

    def _peek(self, parent: int, name: bytes) -> Any:
        try:
            return self._volumes[parent >> NODE_BITS].peek(parent, name)
        except OSError:
            return None

    def _size(self, ino: int) -> int | None:
        return _size(self._attr(ino))

    # -- housekeeping

    @property
    def dirty(self) -> bool:
        """Whether there are lines that power loss would take."""
        return self.log.dirty or self.errors.dirty

    def sync(self) -> None:
        """All lines survive power loss. For any thread; OSError."""
        self.log.sync()
        self.errors.sync()

    def maintain(self) -> None:
        """Drop what is too old; OSError."""
        self.log.maintain()
        self.errors.maintain()

    def counters(self) -> dict[str, int]:
        return {"audit_seq": self._seq, "audit_bytes": self.log.end - self.log.origin, "audit_lost": self._lost}

    def close(self) -> None:
        self._actors.close()
        self.log.close()
        self.errors.close()


def _size(attr: Any) -> int | None:
    return attr.size if attr is not None and stat.S_ISREG(attr.mode) else None


def _number(value: int | None) -> bytes:
    return _NULL if value is None else b"%d" % value


def _called(op: str, args: tuple[Any, ...]) -> str:
    """The name that a line has for an operation: of a setattr what it is asked for."""
    if op == "setattr":
        to: SetAttr = args[0]
        if to.size is not None:
            return "truncate"
        if to.perm is not None:
            return "chmod"
        return "chown" if to.uid is not None or to.gid is not None else "utime"
    return "truncate" if op == "open" and args[0] & os.O_TRUNC else op


def _attributes(to: SetAttr) -> bytes:
    told = b"" if to.perm is None else b',"mode":"%04o"' % to.perm
    told += b"" if to.uid is None else b',"to_uid":%d' % to.uid
    return told + (b"" if to.gid is None else b',"to_gid":%d' % to.gid)


def _last_seq(directory: Path) -> int:
    """The number of the last line, 0 without one."""
    for line in lines_back(directory, "log"):
        try:
            return int(json.loads(line)["seq"])
        except (ValueError, KeyError, TypeError):  # a lost machine may leave anything
            continue
    return 0
