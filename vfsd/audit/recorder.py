"""One line for each change and each refusal, whatever door: when, what, on which path, with what result, and by whom.

Owns what is worth a line, its number, time and result, and who did it (``docs/audit.md`` has the fields). Called by the
funnels of ``vfs`` at each exit, and by the tool door for what fails before it reaches them. Must not know how lines are
kept, nor doors.

Invariants: an exit is told of once; a line is in the kernel's hands before the door answers; nothing here makes an
operation fail or wait: a line that can't be written is counted, and the count is written when that is possible again.
The daemon's own log has it once, when it begins, and once when it has ended for good.
No contents: a line has names, numbers and the command line of who did it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from time import time_ns
from typing import Any

from vfsd.audit.actors import Actors, Mark
from vfsd.audit.line import NOTHING, READS, Args, Before, Lines, quoted, quoted_path
from vfsd.audit.log import SegmentLog, lines_back
from vfsd.core.types import NODE_BITS, Caller
from vfsd.vfs import Vfs

log = logging.getLogger(__name__)

ERRORS_BYTES = 1 << 20
"""Bytes kept of lines about what failed, besides those in the whole log."""

REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ECANCELED})
"""Failures to observe that are worth a line. All others only say what is there and what not (ENOENT, ENODATA)."""

TOOL_CHANGES = frozenset({
    "write", "edit", "upload_commit", "delete", "mkdir", "rmdir", "unlink", "rename", "link", "symlink", "chmod",
    "chown", "utime", "truncate", "mknod", "setxattr", "removexattr", "pwrite", "ftruncate", "fallocate", "restore",
    "undo",
})  # fmt: skip
"""Operations of the tool door whose failure is worth a line, whatever the reason."""

WRITES_OUT = frozenset({"flush", "fsync"})
"""Operations that bring out what was written before: when they fail, a change was not made, whatever the reason."""

_CACHED = 8192

_LINE = b'{"seq":%d,"time":"%b.%06dZ",%b,"result":%b,%b}\n'

_Actor = tuple[bytes, int]
"""The end of a line, and until when it counts."""


class Audit:
    """The audit of ``vfs``, kept in ``directory``. ``reads``: also of what changes nothing.

    ``max_bytes`` and ``max_age`` (seconds) bound it. Raises OSError when the directory can't be had.
    """

    def __init__(self, vfs: Vfs, directory: Path, *, max_bytes: int, max_age: float, reads: bool = False) -> None:
        self._lines = Lines(vfs)
        self.log = SegmentLog(directory, "log", max_bytes, max_age)
        self.errors = SegmentLog(directory, "errors", min(ERRORS_BYTES, max_bytes), max_age)
        self.reads: Collection[str] = READS if reads else ()
        self.silent: set[int] = set()
        """Volumes, by number, whose being read is not worth a line."""
        self._seq = _last_seq(directory)
        self._actors = Actors(time_ns)
        self._who: dict[Caller, _Actor] = {}
        self._befores, self._afters = self._lines.befores, self._lines.afters
        self._append = self.log.append
        self._unseen: dict[str, Mark] = {}
        self._caller: Caller | None = None
        self._whom, self._until = b"", 0
        self._second = 0
        self._second_text = b""
        self._lost = 0
        self._missing, self._still = 0, False
        """Lines lost since the log could be written last, and whether any was since the last ``maintain``."""

    # -- what the funnels tell

    def before(self, op: str, ino: int, args: Args) -> Before:
        """A change is about to be made."""
        try:
            known = self._befores.get(op)
            return self._lines.before(op, ino, args) if known is None else known(ino, args)
        except Exception:
            log.exception("audit of %s", op)
            return NOTHING

    def done(self, before: Before, op: str, caller: Caller, ino: int, args: Args, result: Any) -> None:
        """A change was made."""
        try:
            known = self._afters.get(op)
            if known is None:
                what = self._lines.changed(before, op, ino, args)
            else:
                what = known(before, ino, args, result)
            self._write(what, caller)
        except Exception:
            log.exception("audit of %s", op)

    def saw(self, op: str, caller: Caller, ino: int) -> None:
        """Something was read, and reads are wanted."""
        if ino >> NODE_BITS in self.silent:
            return
        try:
            what = b'"op":"%b",%b' % (READS[op].encode(), self._lines.path(ino))
            self._write(what, caller)
        except Exception:
            log.exception("audit of %s", op)

    def failed(self, op: str, caller: Caller, ino: int, args: Args, error: BaseException) -> None:
        """A change was not made, or something worth a line could not be observed."""
        try:
            self._fail(self._lines.failed(op, ino, args), caller, error)
        except Exception:
            log.exception("audit of a failed %s", op)

    def unseen(self, op: str, caller: Caller, ino: int, args: Args, error: OSError) -> None:
        """Something could not be observed."""
        if op in WRITES_OUT or error.errno in REFUSALS:
            self.failed(op, caller, ino, args, error)

    # -- what others tell

    def refused(self, message: Mapping[str, Any], caller: Caller, error: OSError) -> None:
        """A request of the tool door failed; it has its line already if a funnel refused it."""
        op = str(message["action"] if message.get("op") == "checkpoint" and "action" in message else message.get("op"))
        if "audited" in error.__dict__ or (op not in TOOL_CHANGES and error.errno not in REFUSALS):
            return
        try:
            path, path2 = message.get("path", message.get("old")), message.get("new")
            if op in ("restore", "undo"):
                path = b"/"
            what = b'"op":%b,"path":%b' % (quoted(op), quoted_path(path) if type(path) is bytes else b"null")
            if type(path2) is bytes:
                what += b',"path2":%b' % quoted_path(path2)
            self._fail(what, caller, error)
        except Exception:
            log.exception("audit of a refused %s", op)

    def began(self, execute: str, call: str) -> None:
        """An execute begins whose processes the kernel has no pid for here, so that only the time tells what it did."""
        self._unseen[execute] = Mark(execute, call)
        self._forget_unseen()

    def ended(self, execute: str) -> None:
        """... and has ended."""
        self._unseen.pop(execute, None)
        self._forget_unseen()

    def _forget_unseen(self) -> None:
        self._until = 0
        self._who = {caller: who for caller, who in self._who.items() if caller.pid}

    def restored(self, op: str, checkpoint: str, changes: int, caller: Caller) -> None:
        """The tree went back to a checkpoint."""
        self._lines.forget_paths()
        what = b'"op":%b,"path":"/","checkpoint":%b,"changes":%d' % (quoted(op), quoted(checkpoint), changes)
        self._write(what, caller)

    # -- lines

    def _write(self, what: bytes, caller: Caller, result: bytes = b'"ok"') -> bytes:
        now = time_ns()
        rest = now - self._second
        if not 0 <= rest < 1_000_000_000:
            rest = now % 1_000_000_000
            self._second = now - rest
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1_000_000_000)).encode()
        if caller is not self._caller or now >= self._until:
            who = self._who.get(caller)
            if who is None or now >= who[1]:
                who = self._ask(caller, now)
            self._caller = caller
            self._whom, self._until = who
        if self._lost:
            self._tell_lost()
        self._seq = seq = self._seq + 1
        line = _LINE % (seq, self._second_text, rest // 1000, what, result, self._whom)
        try:
            self._append(line)
        except OSError as exc:
            self._lost += 1
            self._miss(exc)
        return line

    def _miss(self, error: OSError) -> None:
        if not self._missing:
            log.error("the audit log can't be written: %s", error.strerror)
        self._missing += 1
        self._still = True

    def _tell_lost(self) -> None:
        """That there was no room for lines, as soon as there is."""
        note = b'{"seq":%d,"time":"%b.000000Z","op":"lost","count":%d,"result":"ok","door":"daemon"}\n'
        with contextlib.suppress(OSError):
            self.log.append(note % (self._seq + 1, self._second_text, self._lost))
            self._seq += 1
            self._lost = 0

    def _fail(self, what: bytes, caller: Caller, error: BaseException) -> None:
        if isinstance(error, OSError) and error.errno is not None:
            name, text = errno.errorcode.get(error.errno, str(error.errno)), str(error.strerror)
            error.__dict__["audited"] = True
        elif isinstance(error, Exception):
            name, text = "EIO", f"a fault of the daemon: {type(error).__name__}"
        else:
            name, text = "EINTR", "cancelled; it may have been done or not"
        result = b'%b,"error":%b' % (quoted(name), quoted(text))
        line = self._write(what, caller, result)
        try:
            self.errors.append(line)
        except OSError as exc:
            self._miss(exc)

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
        if caller.pid == 0 and caller.door == "fuse" and self._unseen:
            among = [b'{"execute":%b,"call":%b}' % (quoted(m.execute), quoted(m.call)) for m in self._unseen.values()]
            parts.append(b'"among":[%b]' % b",".join(among))
        parts.append(b'"pid":%d,"uid":%d' % (actor.pid, caller.uid))
        if actor.command:
            parts.append(b'"command":%b' % quoted(actor.command))
        if len(self._who) >= _CACHED:
            self._who.clear()
        who = self._who[caller] = (b",".join(parts), until)
        return who

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
        if self._missing and not self._still:
            log.warning("the audit log can be written again; %d lines are missing", self._missing)
            self._missing = 0
        self._still = False
        self.log.maintain()
        self.errors.maintain()

    def counters(self) -> dict[str, int]:
        return {"audit_seq": self._seq, "audit_bytes": self.log.end - self.log.origin, "audit_lost": self._lost}

    def close(self) -> None:
        self._actors.close()
        self.log.close()
        self.errors.close()


def _last_seq(directory: Path) -> int:
    """The number of the last line, 0 without one."""
    for line in lines_back(directory, "log"):
        try:
            return int(json.loads(line)["seq"])
        except (ValueError, KeyError, TypeError):  # a lost machine may leave anything
            continue
    return 0
