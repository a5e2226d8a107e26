"""The operations of the tool door: one coroutine each, from a request's parameters to a reply's fields.

Here those for tools and the daemon's own; in ``rpcfiles`` those like os's, in ``rpcadmin`` those for the whole mount.

Owns what a request must carry and what a connection holds (handles, uploads). Must not know sockets or frames.
``async op(session, message, caller) -> reply``; EINVAL names a parameter that is missing or of the wrong type, other
errnos are those of ``paths`` and ``vfs``. To add an operation: write and decorate it.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import trio
from xxhash import xxh3_64_intdigest

from vfsd import search
from vfsd.core.types import Attr, Caller
from vfsd.listing import Rest, list_page
from vfsd.paths import Paths, fail
from vfsd.vfs import Vfs

if TYPE_CHECKING:
    from vfsd.past.checkpoints import Checkpoints
    from vfsd.rules.book import Rulebook

Message = dict[str, Any]
_T = TypeVar("_T")

PIECE = 1 << 20
MAX_PIECE = 8 << 20
MAX_UPLOAD = 256 << 20
"""The limits of agenttools.wire, which only ``rpc`` may import."""

_MISSING: Any = object()


class Host(Protocol):
    """What the operations need of the door they are part of."""

    uploaded: int
    checkpoints: Checkpoints | None
    rules: Rulebook | None
    status: Callable[[], dict[str, Any]]
    shutdown: Callable[[], object]
    binds: Callable[[], list[Message]]

    def counters(self) -> dict[str, int]: ...


class Handle(NamedTuple):
    """One open file: ``fh`` is the vfs's."""

    ino: int
    fh: int
    flags: int
    directory: bool


class Session:
    """What one connection holds."""

    def __init__(self, vfs: Vfs, paths: Paths, host: Host) -> None:
        self.vfs = vfs
        self.paths = paths
        self.host = host
        self.handles: dict[int, Handle] = {}
        self.uploads: dict[int, list[bytes]] = {}
        self.unseen: set[str] = set()
        self.listing: Rest | None = None
        """Of the directory that was listed last, when that has more to tell."""
        # Numbers of their own in every connection, so that one from before a reconnect fits nothing.
        self._next = secrets.randbits(48) << 8

    def number(self) -> int:
        """A number nothing else here has."""
        self._next += 1
        return self._next

    def handle(self, message: Message) -> Handle:
        """The handle a request names; EBADF."""
        handle = self.handles.get(want(message, "fh", int))
        if handle is None:
            fail(errno.EBADF)
        return handle

    def forget_upload(self, number: int) -> list[bytes] | None:
        """End an upload and give back its share of what all may hold."""
        pieces = self.uploads.pop(number, None)
        if pieces is not None:
            self.host.uploaded -= sum(map(len, pieces))
        return pieces

    def end_unseen(self, execute: str) -> None:
        """An execute whose processes have no pid here has ended; nothing for another."""
        if execute in self.unseen:
            self.unseen.discard(execute)
            if self.vfs.witness is not None:
                self.vfs.witness.ended(execute)

    async def close(self) -> None:
        """Release all; nobody is there any more to tell errors to."""
        for execute in list(self.unseen):
            self.end_unseen(execute)
        for number in list(self.uploads):
            self.forget_upload(number)
        while self.handles:
            _, handle = self.handles.popitem()
            with contextlib.suppress(OSError):
                await release(self.vfs, handle)


async def release(vfs: Vfs, handle: Handle) -> None:
    """Give a handle back to the vfs."""
    if handle.directory:
        await vfs.releasedir(handle.ino, handle.fh)
    else:
        await vfs.release(handle.ino, handle.fh)


Operation = Callable[[Session, Message, Caller], Awaitable[Message]]
OPS: dict[str, Operation] = {}


def op(function: Operation) -> Operation:
    """Register ``function`` under its name, which may end in ``_`` to keep off a name in use."""
    OPS[function.__name__.removesuffix("_")] = function
    return function


def want(message: Message, key: str, kind: type[_T], default: _T = _MISSING) -> _T:
    """Parameter ``key``, which must be a ``kind`` (and is not optional without ``default``); EINVAL."""
    value = message.get(key, _MISSING)
    if type(value) is kind:
        return value
    if value is _MISSING and default is not _MISSING:
        return default
    raise OSError(errno.EINVAL, f"'{message.get('op')}' needs '{key}' as {_NAMES[kind]}")


_NAMES = {bytes: "bin", str: "text", list: "a list", dict: "a map", bool: "a boolean", int: "an integer"}


def natural(message: Message, key: str, default: int = _MISSING, *, end: int = 1 << 63) -> int:
    """Like ``want``, for an integer from 0 up to ``end``."""
    value = want(message, key, int, default)
    if not 0 <= value < end:
        raise OSError(errno.EINVAL, f"'{key}' is out of range")
    return value


def flags_of(message: Message, key: str = "flags") -> int:
    """An integer that is a C int to the system call it is for."""
    return natural(message, key, 0, end=1 << 31)


def content_of(message: Message) -> bytes:
    """The bytes of one piece; EMSGSIZE."""
    data = want(message, "data", bytes)
    if len(data) > MAX_PIECE:
        raise OSError(errno.EMSGSIZE, f"more than {MAX_PIECE} bytes at once; send it in pieces")
    return data


def perm_of(message: Message, key: str, default: int) -> int:
    """Permission bits."""
    return natural(message, key, default) & 0o7777


def packed(attr: Attr) -> Message:
    """``attr`` as it goes over the wire."""
    return {
        "ino": attr.ino,
        "mode": attr.mode,
        "nlink": attr.nlink,
        "uid": attr.uid,
        "gid": attr.gid,
        "rdev": attr.rdev,
        "size": attr.size,
        "blocks": attr.blocks,
        "atime_ns": attr.atime_ns,
        "mtime_ns": attr.mtime_ns,
        "ctime_ns": attr.ctime_ns,
    }


# ---------------------------------------------------------------------- for tools


@op
async def stat_(s: Session, m: Message, caller: Caller) -> Message:
    """{path, follow=true} -> {attr}"""
    attr = await s.paths.resolve(want(m, "path", bytes), caller, want(m, "follow", bool, True))
    return {"attr": packed(attr)}


@op
async def list_(s: Session, m: Message, caller: Caller) -> Message:
    """{path, continue?: bytes} -> {entries: [[name, mode, size, mtime_ns]...] by name, more, continue?}"""
    rest, s.listing = s.listing, None
    after = want(m, "continue", bytes, b"")
    entries, rest = await list_page(s.paths, want(m, "path", bytes), caller, after, rest)
    if rest is None:
        return {"entries": entries, "more": False}
    s.listing = rest
    return {"entries": entries, "more": True, "continue": rest.after}


@op
async def read(s: Session, m: Message, caller: Caller) -> Message:
    """{path, offset=0, length=PIECE} -> {data, size, mode, mtime_ns}; fewer bytes than asked for only at the end"""
    length = min(natural(m, "length", PIECE), MAX_PIECE)
    attr, data = await s.paths.read_file(want(m, "path", bytes), natural(m, "offset", 0), length, caller)
    return {"data": data, "size": attr.size, "mode": attr.mode, "mtime_ns": attr.mtime_ns}


async def _before(s: Session, m: Message, caller: Caller) -> None:
    """A tool call is about to change the file it names."""
    if s.host.checkpoints is not None:
        path = want(m, "path", bytes).decode(errors="replace")
        await s.host.checkpoints.before_call(f"{caller.tool or m['op']} {path}", caller.call_id, caller)


async def _write(s: Session, m: Message, data: bytes | list[bytes], caller: Caller) -> Message:
    expect = m.get("expect")
    if expect is not None and (type(expect) is not int or not 0 <= expect < 1 << 64):
        raise OSError(errno.EINVAL, "'expect' must be a 64-bit xxh3 hash")
    return await _write_over(s, m, data, caller, expect)


async def _write_over(s: Session, m: Message, data: bytes | list[bytes], caller: Caller, expect: int | None) -> Message:
    await _before(s, m, caller)
    created, attr = await s.paths.write_file(
        want(m, "path", bytes),
        data,
        caller,
        expect=expect,
        parents=want(m, "parents", bool, True),
        perm=perm_of(m, "mode", 0o644),
        exclusive=want(m, "exclusive", bool, False),
    )
    return {"created": created, "size": attr.size, "mtime_ns": attr.mtime_ns}


@op
async def write(s: Session, m: Message, caller: Caller) -> Message:
    """{path, data, parents=true, expect?: u64, mode=0o644, exclusive=false} -> {created, size, mtime_ns}

    ``expect``: xxh3_64 of the present content, else ESTALE.
    """
    return await _write(s, m, content_of(m), caller)


@op
async def edit(s: Session, m: Message, caller: Caller) -> Message:
    """{path, old_text: bytes, new_text: bytes, all=false} -> {count, created, size, mtime_ns}, or as ``read`` does

    The plain case, in one request: ``old_text`` is in a text of at most PIECE bytes, once or ``all`` is true, and
    nowhere is a carriage return. Else nothing is changed: whoever asks sees to the other cases.
    """
    path, old, new = want(m, "path", bytes), want(m, "old_text", bytes), want(m, "new_text", bytes)
    found = await read(s, {"path": path}, caller)
    data = bytes(found["data"])
    if not old or found["size"] > len(data) or b"\r" in old or b"\r" in data or not search.is_text(data):
        return found
    count = data.count(old)
    if not count or (count > 1 and not want(m, "all", bool, False)):
        return found
    if old == new:
        return {"count": count, "created": False, "size": found["size"], "mtime_ns": found["mtime_ns"]}
    try:
        done = await _write_over(s, m, data.replace(old, new), caller, xxh3_64_intdigest(data))
    except OSError as exc:
        if exc.errno != errno.ESTALE:
            raise
        return await read(s, {"path": path}, caller)
    return {"count": count, **done}


@op
async def upload_begin(s: Session, m: Message, caller: Caller) -> Message:
    """{} -> {upload}: content too large for one ``write`` is collected and then written in one commit"""
    if len(s.uploads) >= 8:
        fail(errno.EMFILE)
    number = s.number()
    s.uploads[number] = []
    return {"upload": number}


@op
async def upload_piece(s: Session, m: Message, caller: Caller) -> Message:
    """{upload, data} -> {size}; EFBIG, and the upload is forgotten, when all uploads together hold too much"""
    number = want(m, "upload", int)
    held, data = s.uploads.get(number), content_of(m)
    if held is None:
        fail(errno.EBADF)
    if s.host.uploaded + len(data) > MAX_UPLOAD:
        s.forget_upload(number)
        raise OSError(errno.EFBIG, f"more than {MAX_UPLOAD} bytes at once; write it through the mount")
    held.append(data)
    s.host.uploaded += len(data)
    return {"size": sum(map(len, held))}


@op
async def upload_commit(s: Session, m: Message, caller: Caller) -> Message:
    """{upload, ...as for write} -> as for write"""
    data = s.forget_upload(want(m, "upload", int))
    if data is None:
        fail(errno.EBADF)
    try:
        return await _write(s, m, data, caller)
    finally:
        # To give that much memory back takes long as well.
        await trio.to_thread.run_sync(_drop, data)


def _drop(pieces: list[bytes]) -> None:
    while pieces:
        pieces.pop()


@op
async def delete(s: Session, m: Message, caller: Caller) -> Message:
    """{path, recursive=true} -> {}; a symlink goes, not its target"""
    await _before(s, m, caller)
    await s.paths.delete(want(m, "path", bytes), caller, recursive=want(m, "recursive", bool, True))
    return {}


@op
async def glob(s: Session, m: Message, caller: Caller) -> Message:
    """{pattern: str, path=b"/"} -> {matches: [[path, size, mtime_ns]...], truncated, reason?}"""
    found = await search.glob(s.paths, want(m, "pattern", str), want(m, "path", bytes, b"/"), caller)
    return {"matches": found.matches, "truncated": found.truncated, "reason": found.reason}


@op
async def grep(s: Session, m: Message, caller: Caller) -> Message:
    """{pattern: bytes, path=b"/", glob?: str, max_count?} -> {matches: [[path, line, text]...], truncated, reason?}"""
    found = await search.grep(
        s.paths,
        want(m, "pattern", bytes),
        want(m, "path", bytes, b"/"),
        caller,
        glob=None if m.get("glob") is None else want(m, "glob", str),
        max_count=None if m.get("max_count") is None else natural(m, "max_count"),
    )
    return {"matches": found.matches, "truncated": found.truncated, "reason": found.reason}


# ---------------------------------------------------------------------- the daemon itself


@op
async def status(s: Session, m: Message, caller: Caller) -> Message:
    """{} -> what ``vfsd status --json`` tells of a mount (docs/operations.md)"""
    return {**s.host.status(), **s.host.counters()}


@op
async def sync(s: Session, m: Message, caller: Caller) -> Message:
    """{} -> {}: all that was acknowledged survives power loss"""
    await s.vfs.sync_all()
    return {}


@op
async def stub(s: Session, m: Message, caller: Caller) -> Message:
    """{paths: [bytes]} -> {binds: [{path, location, dev, ino}]}: hidden places to bind host directories on, for
    ``execute``; and the host directories that may stand in the place of routes"""
    paths = want(m, "paths", list)
    if not all(type(path) is bytes for path in paths):
        raise OSError(errno.EINVAL, "'stub' needs 'paths' as a list of bin")
    for path in paths:
        s.vfs.add_stub(path)
    return {"binds": s.host.binds()}


@op
async def shutdown(s: Session, m: Message, caller: Caller) -> Message:
    """{} -> {}: a clean unmount begins; it is over when the daemon's process is"""
    s.host.shutdown()
    return {}
