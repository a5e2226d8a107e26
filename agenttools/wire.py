"""The wire format between a tool and the daemon: frames, errors, limits, and where the socket is.

Sans-IO: nothing here touches a socket, so both ends (and a fuzz test) use the same code. The daemon's RPC door imports
this module and nothing else of ``agenttools``.

The rules of a connection
    A frame is a big-endian u32 length and one msgpack map of that many bytes. Names, paths and contents are ``bin``
    (bytes), texts are ``str``.
    request   ``{id: int, op: str, ...parameters}``; any request may carry ``tool`` and ``call_id`` (str) for the audit
    reply     ``{id, ok: true, ...result}`` or ``{id, ok: false, errno: int, message: str, path?: bytes}``
    hello     the first request: ``{op: "hello", version, client}``; requests may follow it without waiting
    cancel    ``{op: "cancel", target: id}``: the target is answered with ECANCELED if it was still running
    Requests may be pipelined and are answered in any order. An ``id`` is in use until its reply.
    A peer that breaks these rules is told so once (``id`` 0, EPROTO) and cut off.

Invariants: a decoder yields whole messages or raises WireError, and never holds more than a frame and what came with
it; decoding a request never allocates much more than the frame's own size (``MAX_ITEMS``).
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from typing import Any

import msgpack

VERSION = 1
"""Protocol version in hello. Raised when an old peer would misread a new one."""

MAX_PIECE = 8 << 20
"""Bytes of content in one ``read``, ``pread``, ``write``, ``pwrite`` or ``upload_piece``; larger goes in pieces."""

PIECE = 1 << 20
"""Bytes of content to ask for at once: large enough to hide the round trip, small enough to interleave."""

MAX_FRAME = (16 << 20) + 65536
"""Bytes in one frame, the length word not counted: two pieces (an edit's old and new) and room for the rest."""

MAX_PENDING = 32
"""Requests of one connection that may be running at once; the daemon reads no further ones until some are done."""

MAX_UPLOAD = 256 << 20
"""Bytes the daemon keeps for all unfinished uploads together (EFBIG above it): they are in memory until committed."""

MAX_ITEMS = 65536
"""Elements a request's lists and maps may have in all."""

CHUNK = 65536
"""Bytes to receive at once when it is not known how many are to come."""

_KEEP = PIECE + 65536
"""Bytes of a receive buffer that are kept for the next frame."""

SOCKET_BUFFER = 1 << 20
"""What to ask of the kernel as SO_SNDBUF, which gives less: a large piece then crosses in fewer turns."""

_MAX_LIST = 4096
_MAX_MAP = 64
_MAX_STR = 1 << 20
_VECTOR_MIN = 16384
"""Contents from this size on go to the kernel as they are; below it one copy is cheaper than a second buffer."""

REPEATABLE = frozenset(
    ["hello", "status", "stat", "list", "read", "glob", "grep", "readlink", "getxattr", "listxattr", "statfs", "sync"],
)
"""Operations that change nothing a second time: a client whose connection broke may ask them again."""

Message = dict[str, Any]
Buffer = bytes | bytearray | memoryview

_length = struct.Struct(">I")
_unpack = msgpack.unpackb


class WireError(Exception):
    """The peer sent something that is not this protocol, or a message cannot be sent by it; says what."""


class Decoder:
    """Bytes in, messages out.

    Receive into ``space()`` and say how much came with ``received``, or give bytes to ``receive``; then call ``next``
    until it returns None. After a WireError the stream has no meaning any more. ``requests``: bound what a message may
    unpack to, and take memory only as bytes arrive, for the end that trusts its peer less.
    """

    __slots__ = ("_buffer", "_counts", "_end", "_items", "_max_frame", "_max_list", "_max_map", "_max_str", "_start")

    def __init__(self, *, requests: bool = False, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray(CHUNK)
        self._start = self._end = 0
        self._items = 0
        self._max_frame = max_frame
        self._counts = requests
        self._max_list = _MAX_LIST if requests else max_frame
        self._max_map = _MAX_MAP if requests else max_frame
        self._max_str = _MAX_STR if requests else max_frame

    @property
    def pending(self) -> int:
        """Bytes received and not yet part of a message that was taken."""
        return self._end - self._start

    @property
    def missing(self) -> int:
        """Bytes still to come of the frame that has begun; 0 when its length is not known or allowed."""
        pending = self._end - self._start
        if pending < 4:
            return 0
        (size,) = _length.unpack_from(self._buffer, self._start)
        return max(0, size + 4 - pending) if size <= self._max_frame else 0

    def space(self) -> memoryview:
        """Where to put what is received next: room for CHUNK bytes, or for the rest of a larger frame.

        Release it, or let go of it, before the next call of anything here.
        """
        want, pending = CHUNK, self._end - self._start
        if pending:
            want = max(want, self.missing if not self._counts else min(self.missing, pending))
        self._make_room(want)
        return memoryview(self._buffer)[self._end : self._end + want]

    def received(self, count: int) -> None:
        """``count`` bytes were put into the last ``space``."""
        self._end += count

    def receive(self, data: Buffer) -> None:
        """Take bytes that were received elsewhere. WireError when the messages already here were not taken first."""
        self._make_room(len(data))
        self._buffer[self._end : self._end + len(data)] = data
        self._end += len(data)

    def _make_room(self, want: int) -> None:
        start, end = self._start, self._end
        if start == end:
            self._start = self._end = start = end = 0
            if want <= CHUNK and len(self._buffer) > _KEEP:
                self._buffer = bytearray(CHUNK)
        if end - start > self._max_frame + 4:
            raise WireError("more received before the messages at hand were taken")
        if end + want <= len(self._buffer):
            return
        pending = end - start
        # Never resized in place: a view that is still about would forbid it.
        buffer = self._buffer if pending + want <= len(self._buffer) else bytearray(pending + want)
        buffer[:pending] = self._buffer[start:end]
        self._buffer, self._start, self._end = buffer, 0, pending

    def next(self) -> Message | None:
        """The next whole message, or None when more bytes are needed."""
        buffer, start = self._buffer, self._start
        have = self._end - start - 4
        if have < 0:
            return None
        (size,) = _length.unpack_from(buffer, start)
        if size > self._max_frame:
            raise WireError(f"a frame of {size} bytes; at most {self._max_frame} are allowed")
        if have < size:
            return None
        self._items = 0
        hook = self._count if self._counts else None  # kept, it would keep this and its buffer for the collector
        try:
            message = _unpack(
                memoryview(buffer)[start + 4 : start + 4 + size],
                raw=False,
                strict_map_key=True,
                list_hook=hook,
                object_hook=hook,
                max_array_len=self._max_list,
                max_map_len=self._max_map,
                max_str_len=self._max_str,
                max_ext_len=0,
            )
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as exc:
            raise WireError(f"not a msgpack message: {exc or type(exc).__name__}") from exc
        if type(message) is not dict:
            raise WireError(f"a message must be a map, not {type(message).__name__}")
        self._start = start + 4 + size
        return message

    def drop(self) -> None:
        """Give the memory up, whoever still refers to this (a traceback, say). Nothing more can be received."""
        self._buffer = bytearray()
        self._start = self._end = 0

    def end(self) -> None:
        """The peer closed its end. WireError when that was in the middle of a frame."""
        if self.pending:
            raise WireError("the connection ended in the middle of a frame")

    def _count(self, container: Any) -> Any:
        self._items += len(container) + 1
        if self._items > MAX_ITEMS:
            raise WireError(f"a message of more than {MAX_ITEMS} elements")
        return container


class Packed:
    """A long list in a message, packed piece by piece before the message is, so that nobody waits for it at a stretch.

    One of a message's values at most.
    """

    __slots__ = ("_count", "_parts")

    def __init__(self) -> None:
        self._count = 0
        self._parts: list[bytes] = []

    def take(self, values: list[Any], count: int) -> None:
        """The last ``count`` values (up to 65535), which leave their list and come before those taken already."""
        piece = values[-count:]
        del values[-count:]
        self._parts.append(_pack_piece(piece)[1 if len(piece) < 16 else 3 :])
        self._count += len(piece)

    def whole(self) -> bytes:
        """The list as msgpack has it: an array of 32-bit length."""
        return b"\xdd" + _length.pack(self._count) + b"".join(reversed(self._parts))


class PackedMap(Packed):
    """The same within a map, as its last value: ``rest`` is the map without it, ``key`` what it is there."""

    __slots__ = ("_key", "_rest")

    def __init__(self, rest: Message, key: str) -> None:
        super().__init__()
        self._rest = rest
        self._key = key

    def whole(self) -> bytes:
        """The map as msgpack has it, of up to 15 pairs."""
        rest = _pack_piece(self._rest)
        if len(self._rest) > 14:
            raise WireError("a map of more than 15 pairs")
        return b"%c%b%b%b" % (rest[0] + 1, rest[1:], _pack_piece(self._key), super().whole())


def _pack_piece(piece: Any) -> bytes:
    packed: bytes = msgpack.packb(piece, use_bin_type=True, unicode_errors="surrogateescape")
    return packed


class Encoder:
    """Messages in, buffers out. Not thread-safe: one for each connection, under its lock."""

    __slots__ = ("_pack",)

    def __init__(self) -> None:
        self._pack = msgpack.Packer(use_bin_type=True, unicode_errors="surrogateescape").pack

    def encode(self, message: Message) -> list[Buffer]:
        """The frame of ``message`` as buffers to send in order; large ``data`` is the caller's own buffer, uncopied.

        WireError when the frame would be too large; TypeError, OverflowError for what msgpack cannot say.
        """
        data = message.get("data")
        for key, value in message.items():
            if isinstance(value, Packed):
                return self._encode_packed(message, key, value.whole())
        if not isinstance(data, Buffer) or len(data) < _VECTOR_MIN or len(message) > 15:
            body = self._pack(message)
            if len(body) > MAX_FRAME:
                raise WireError(f"a message of {len(body)} bytes; at most {MAX_FRAME} are allowed: send it in pieces")
            return [_length.pack(len(body)) + body]
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        rest = self._pack({key: value for key, value in message.items() if key != "data"})
        total = len(rest) + 10 + size
        if total > MAX_FRAME:
            raise WireError(f"a message of {total} bytes; at most {MAX_FRAME} are allowed: send it in pieces")
        # A map of n < 15 pairs is the byte 0x80 | n and its pairs, so a last pair can be put behind it.
        head = b"%b%c%b\xa4data\xc6%b" % (_length.pack(total), rest[0] + 1, rest[1:], _length.pack(size))
        return [head, data]

    def _encode_packed(self, message: Message, key: str, packed: bytes) -> list[Buffer]:
        rest = self._pack({k: v for k, v in message.items() if k != key})
        name = self._pack(key)
        total = len(rest) + len(name) + len(packed)
        if total > MAX_FRAME or len(message) > 15:
            raise WireError(f"a message of {total} bytes; at most {MAX_FRAME} are allowed: send it in pieces")
        return [b"%b%c%b%b" % (_length.pack(total), rest[0] + 1, rest[1:], name), packed]


def error_reply(request_id: int, exc: OSError) -> Message:
    """The reply that tells of ``exc``; without an errno it is EIO."""
    number = exc.errno or errno.EIO
    reply: Message = {
        "id": request_id,
        "ok": False,
        "errno": number,
        "message": exc.strerror or str(exc) or os.strerror(number),
    }
    if exc.filename is not None and not isinstance(exc.filename, int):
        reply["path"] = os.fsencode(exc.filename)
    if getattr(exc, "approval", False):
        reply["approval"] = True
    return reply


class NeedsApproval(PermissionError):
    """Refused for want of a person's yes; with ``approved`` in the request it goes on."""


def error_of(reply: Message) -> OSError:
    """The exception a failed ``reply`` stands for: the subclass Python has for its errno, ``filename`` as text."""
    number, message, path = reply.get("errno"), reply.get("message"), reply.get("path")
    if type(number) is not int or not 0 < number < 4096:
        number = errno.EIO
    if type(message) is not str or not message:
        message = os.strerror(number)
    kind = NeedsApproval if reply.get("approval") is True and number == errno.EACCES else OSError
    if isinstance(path, bytes):
        return kind(number, message, os.fsdecode(path))
    return kind(number, message)


def runtime_dir() -> str:
    """The directory of this user's sockets: ``$XDG_RUNTIME_DIR/vfsd``, root's ``/run/vfsd``, else ``TMPDIR/vfsd-UID``.

    The last is in a directory anyone can write, so it is refused (PermissionError) when another user made it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base.startswith("/"):
        return os.path.join(base, "vfsd")
    uid = os.geteuid()
    if uid == 0:
        return "/run/vfsd"
    path = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"vfsd-{uid}")
    if os.path.lexists(path):
        _check_private(path)
    return path


def one_line(text: str) -> str:
    """Text in a sentence for a person: whoever chose it, it can't begin a line, move the cursor or start an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def ignored_variables(*names: str) -> list[str]:
    """A sentence for each of these variables that is no absolute path, and so, by the XDG Base Directory Specification
    (0.8), to be ignored."""
    given = ((name, os.environ.get(name, "")) for name in names)
    return [
        f"{name} is ignored: {value!r} is not an absolute path" for name, value in given if value and value[0] != "/"
    ]


def make_runtime_dir() -> str:
    """``runtime_dir()``, made if missing (0700). PermissionError when it is not this user's own, private directory."""
    path = runtime_dir()
    os.makedirs(path, mode=0o700, exist_ok=True)
    _check_private(path)
    return path


def _check_private(path: str) -> None:
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "must be a directory that only its owner, you, can write to", path)


def _in_runtime_dir(name: str, suffix: str) -> str:
    if not name or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(f"not a name for a mount: {name!r}")
    return os.path.join(runtime_dir(), name + suffix)


def default_socket(name: str = "default") -> str:
    """The socket of the daemon called ``name``."""
    return _in_runtime_dir(name, ".sock")


def info_file(name: str = "default") -> str:
    """The JSON file beside the socket that says who serves it: pid, mountpoint, thread, socket."""
    return _in_runtime_dir(name, ".json")
