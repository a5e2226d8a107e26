"""The tool door: a Unix stream socket that speaks ``agenttools.wire``.

Owns connections: who may connect, the order of reading and answering, what a connection may hold. Must not know what
an operation does (``rpcops`` does), nor anything of ``agenttools`` but ``wire``.

    door = RpcDoor(vfs, hello={"name": ..., "mountpoint": b..., ...}, status=..., shutdown=...)
    async with trio.open_nursery() as nursery:
        await nursery.start(door.serve, socket_path)       # returns when connections are accepted; cancel to stop

How a request runs: the task that reads a connection starts the request itself. Nearly all finish without suspending,
and are answered there and then. One that suspends keeps the task, and another task reads on; so there is no task to
spawn, no hop, and no need to know beforehand which will wait.

Invariants: at most one task reads a connection; a peer that does not read its replies is not read from either, so a
connection holds at most one frame, OUTBOX_MAX and MAX_PENDING results, and all together at most ROOM bytes of frames
of more than CHUNK bytes that are not whole yet; what a peer opened is released when it goes;
a reply to a mutation is sent after ``feed.settled``; no exception of a request ends more than its own connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import trio

import vfsd.doors.rpcadmin
import vfsd.doors.rpcfiles
import vfsd.doors.rpcrules  # noqa: F401 - these register their operations
from agenttools.wire import (
    CHUNK,
    MAX_PENDING,
    SOCKET_BUFFER,
    VERSION,
    Decoder,
    Encoder,
    Message,
    Packed,
    PackedMap,
    WireError,
    default_socket,
    error_of,
    error_reply,
    ignored_variables,
    make_runtime_dir,
    one_line,
    runtime_dir,
)
from vfsd.core.ids import squashed
from vfsd.core.types import Caller
from vfsd.doors.byhand import carry_on
from vfsd.doors.rpcops import OPS, Session
from vfsd.doors.rpcroom import PATIENCE_S, ROOM, Room
from vfsd.doors.tally import Tally, took
from vfsd.doors.turns import Turns
from vfsd.paths import Paths
from vfsd.vfs import Vfs

if TYPE_CHECKING:
    from vfsd.past.checkpoints import Checkpoints
    from vfsd.rules.book import Rulebook

__all__ = [
    "VERSION",
    "Decoder",
    "Encoder",
    "RpcDoor",
    "WireError",
    "default_socket",
    "error_of",
    "ignored_variables",
    "listen",
    "make_runtime_dir",
    "one_line",
    "runtime_dir",
]

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
OUTBOX_MAX = 1 << 20
"""Bytes of replies the kernel would not take yet above which no more requests are read."""

_PIECE_MAX = 2000
"""Values packed at a stretch, which takes about a millisecond."""

_TEXT_MAX = 256
"""Characters of ``tool`` and ``call_id`` that are kept."""


class RpcDoor:
    """Serves one mount.

    ``hello``: what is told of the mount besides the protocol's own fields, read anew at each hello. ``status``: the
    reply to ``status``, without ``connections``. ``shutdown``: begins a clean unmount and returns at once. ``binds``:
    the host directories that commands may have over routes, for ``stub``.
    ``allow_uids``: who may connect besides root and the daemon's own user. ``root_squash``: root acts as nobody.
    """

    def __init__(
        self,
        vfs: Vfs,
        *,
        hello: Mapping[str, Any],
        status: Callable[[], dict[str, Any]],
        shutdown: Callable[[], object],
        version: str = "",
        checkpoints: Checkpoints | None = None,
        rules: Rulebook | None = None,
        binds: Callable[[], list[Message]] = list,
        allow_uids: Collection[int] = (),
        root_squash: bool = False,
    ) -> None:
        self.vfs = vfs
        self.checkpoints = checkpoints
        self.rules = rules
        self.binds = binds
        self.paths = Paths(vfs)
        self.tally = Tally()
        self.status = status
        self.shutdown = shutdown
        self.uploaded = 0
        self.connections = 0
        self.room = Room()
        self.turns = Turns()
        self._hello = hello
        self._version = version
        self._caller = squashed if root_squash else lambda caller: caller
        self._uids = {0, os.geteuid(), *allow_uids}

    def counters(self) -> dict[str, int]:
        """For status: clients, and bytes of their unfinished uploads."""
        return {"connections": self.connections, "uploading": self.uploaded}

    def hello(self) -> Message:
        """What every client is told first."""
        return {
            "version": VERSION,
            "vfsd": self._version,
            "pid": os.getpid(),
            "uid": os.geteuid(),
            "ops": sorted([*OPS, "cancel", "hello"]),
            **self._hello,
        }

    async def serve(
        self,
        path: str | os.PathLike[str],
        passed: socket.socket | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen on ``path`` (mode 0600) until cancelled, then remove it.

        A socket nobody listens on any more is replaced; OSError EADDRINUSE when somebody does. One that was ``passed``
        to us, listening and non-blocking, is served instead, and its path stays.
        """
        path = os.fspath(path)
        listener = passed or listen(path)
        mine = None if passed else os.stat(path).st_ino
        trio.lowlevel.add_instrument(self.turns)
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    try:
                        sock, _ = listener.accept()
                    except (BlockingIOError, ConnectionAbortedError):
                        continue
                    except OSError as exc:
                        log.error("cannot accept a connection: %s", exc)
                        await trio.sleep(0.1)
                        continue
                    nursery.start_soon(self._connection, sock)
        finally:
            trio.lowlevel.remove_instrument(self.turns)
            listener.close()
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == mine:
                    os.unlink(path)

    async def _connection(self, sock: socket.socket) -> None:
        self.connections += 1
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
            pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in self._uids:
                log.warning("refused a connection of uid %d (pid %d)", uid, pid)
                _say(sock, OSError(errno.EACCES, f"this mount belongs to uid {os.geteuid()}; uid {uid} may not use it"))
            elif self.connections > MAX_CONNECTIONS:
                _say(sock, OSError(errno.EMFILE, f"more than {MAX_CONNECTIONS} connections"))
            else:
                await Connection(self, sock, self._caller(Caller(uid, gid, pid, "rpc"))).run()
        except Exception:
            log.exception("a connection ended")
        finally:
            self.connections -= 1
            sock.close()


class Connection:
    """One peer: ``run`` until it goes or breaks the protocol."""

    def __init__(self, door: RpcDoor, sock: socket.socket, caller: Caller) -> None:
        self._door = door
        self._feed = door.vfs.feed
        self._sock = sock
        self._caller = caller
        self._session = Session(door.vfs, door.paths, door)
        self._decoder = Decoder(requests=True)
        self._encoder = Encoder()
        self._greeted = False
        self._outbox: deque[memoryview] = deque()
        self._owed = 0
        self._drained: trio.Event | None = None
        self._running: dict[int, trio.CancelScope] = {}
        self._cancelled: set[int] = set()
        self._reading = False
        self._has_room = False
        self._nursery: trio.Nursery

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._reading = True
                nursery.start_soon(self._read)
        finally:
            self._decoder.drop()
            self._door.room.give(self)
            with trio.CancelScope(shield=True):
                await self._session.close()

    # -- reading

    async def _read(self) -> None:
        """Take requests and start each; when one suspends, see it through and let another task read on."""
        while True:
            with trio.CancelScope() as scope:
                started = await self._until_one_waits()
                if started is None:
                    self._nursery.cancel_scope.cancel()
                    return
                number, request, trap = started
                self._running[number] = scope
                self._reading = len(self._running) < MAX_PENDING
                if self._reading:
                    self._nursery.start_soon(self._read)
                try:
                    await carry_on(request, trap)
                finally:
                    self._running.pop(number, None)
                    self._cancelled.discard(number)
            if self._reading:
                return
            self._reading = True

    async def _until_one_waits(self) -> tuple[int, Coroutine[Any, Any, None], Any] | None:
        """The first request that suspends (its id, itself, what it waits for); None when the peer is gone."""
        decoder, sock, turns = self._decoder, self._sock, self._door.turns
        while True:
            if self._owed > OUTBOX_MAX:
                self._drained = trio.Event()
                await self._drained.wait()
            try:
                await turns.mine()
                message = decoder.next()
                if message is None:
                    if not self._has_room and decoder.missing + decoder.pending > CHUNK:
                        await self._door.room.take(self, decoder.missing + decoder.pending, self._evict)
                        self._has_room = True
                    await trio.lowlevel.wait_readable(sock)
                    count = sock.recv_into(decoder.space())
                    if not count:
                        return None
                    decoder.received(count)
                    continue
                if self._has_room:
                    self._has_room = False
                    self._door.room.give(self)
                number = message.get("id")
                if type(number) is not int or not 0 < number < 1 << 63 or number in self._running:
                    raise WireError("a request needs an id of its own, a positive integer")
            except BlockingIOError:
                continue
            except WireError as exc:
                log.warning("pid %d: %s", self._caller.pid, exc)
                self._reply(error_reply(0, OSError(errno.EPROTO, f"protocol error: {exc}")))
                return None
            except OSError:
                return None
            request = self._answer(number, message)
            try:
                trap = request.send(None)
            except StopIteration:
                continue
            return number, request, trap

    def _evict(self) -> None:
        why = f"more than {ROOM >> 20} MiB of requests not whole yet; this one took longer than {PATIENCE_S:g} seconds"
        log.warning("pid %d: %s", self._caller.pid, why)
        self._reply(error_reply(0, OSError(errno.ENOBUFS, why)))
        self._nursery.cancel_scope.cancel()

    # -- answering

    async def _answer(self, number: int, message: Message) -> None:
        began = time.perf_counter()
        op = message.get("op")
        name = op if type(op) is str and (op in OPS or op in ("hello", "cancel")) else "other"
        try:
            await self._answered(number, message, name)
        finally:
            took(self._door.tally.row(name), time.perf_counter() - began)

    async def _answered(self, number: int, message: Message, name: str) -> None:
        failed = self._door.tally.failed
        try:
            reply = await self._result(message)
        except OSError as exc:
            failed[name, exc.errno or errno.EIO] += 1
            reply = error_reply(number, exc)
            path = message.get("path", message.get("old"))
            if type(path) is bytes:
                reply["path"] = path
        except trio.Cancelled:
            failed[name, errno.ECANCELED] += 1
            if number in self._cancelled:
                self._reply(error_reply(number, OSError(errno.ECANCELED, "cancelled by the client")))
            raise
        except Exception:
            failed[name, errno.EIO] += 1
            log.exception("request %r failed", message.get("op"))
            reply = error_reply(number, OSError(errno.EIO, "the daemon met an error of its own; its log has it"))
        else:
            reply["id"] = number
            reply["ok"] = True
        self._reply(reply)

    async def _result(self, message: Message) -> Message:
        op = message.get("op")
        if not self._greeted or op == "hello":
            return self._hello(message)
        if op == "cancel":
            return self._cancel(message)
        handler = OPS.get(op) if type(op) is str else None
        if handler is None:
            raise OSError(errno.ENOSYS, f"no such operation: {op!r}")
        caller = self._caller
        if "tool" in message or "call_id" in message:
            caller = caller._replace(tool=_text(message, "tool"), call_id=_text(message, "call_id"))
        if type(message.get("approved")) is bool:
            caller = caller._replace(approved=message["approved"])
        feed = self._feed
        before = feed.seq
        try:
            reply = await handler(self._session, message, caller)
        except OSError as exc:
            if self._door.vfs.witness is not None:
                self._door.vfs.witness.refused(message, caller, exc)
            raise
        finally:
            # Also after a failure: what was done until then (half a tree removed) must show in the shell as well.
            if feed.seq != before and feed.settler is not None:
                await feed.settled(feed.seq)
        for key in ("matches", "entries"):
            if len(values := reply.get(key, ())) > _PIECE_MAX:
                reply[key] = await _packed(values, Packed())
        if type(changes := (result := reply.get("result", {})).get("changes")) is list and len(changes) > _PIECE_MAX:
            del result["changes"]
            reply["result"] = await _packed(changes, PackedMap(result, "changes"))
        return reply

    def _hello(self, message: Message) -> Message:
        if message.get("op") != "hello":
            raise OSError(errno.EPROTO, "the first request must be hello")
        version = message.get("version")
        if version != VERSION:
            older = "vfsd" if type(version) is int and version > VERSION else "the client"
            text = f"the client speaks protocol version {version!r}, this vfsd {VERSION}: update {older}"
            raise OSError(errno.EPROTONOSUPPORT, text)
        self._greeted = True
        return self._door.hello()

    def _cancel(self, message: Message) -> Message:
        target = message.get("target")
        scope = self._running.get(target) if type(target) is int else None
        if scope is None:
            return {"cancelled": False}
        assert type(target) is int
        self._cancelled.add(target)
        scope.cancel()
        return {"cancelled": True}

    def _reply(self, message: Message) -> None:
        """Hand the reply to the kernel at once, or keep what it does not take for the writer."""
        try:
            parts = self._encoder.encode(message)
        except (WireError, TypeError, ValueError, OverflowError) as exc:
            log.error("a reply cannot be sent: %s", exc)
            parts = self._encoder.encode(error_reply(message["id"], OSError(errno.EMSGSIZE, f"the reply: {exc}")))
        sent = 0
        if not self._outbox:
            try:
                sent = self._sock.send(parts[0]) if len(parts) == 1 else self._sock.sendmsg(parts)
            except BlockingIOError:
                pass
            except OSError:
                self._nursery.cancel_scope.cancel()
                return
        idle = not self._outbox
        for part in parts:
            if sent >= len(part):
                sent -= len(part)
                continue
            # A copy: what a read gave may be the live content, which can change before the kernel takes it.
            rest = memoryview(bytes(memoryview(part)[sent:]))
            sent = 0
            self._outbox.append(rest)
            self._owed += len(rest)
        if idle and self._outbox:
            self._nursery.start_soon(self._write)

    async def _write(self) -> None:
        outbox, sock = self._outbox, self._sock
        while outbox:
            await trio.lowlevel.wait_writable(sock)
            try:
                sent = sock.send(outbox[0])
            except BlockingIOError:
                continue
            except OSError:
                self._nursery.cancel_scope.cancel()
                return
            self._owed -= sent
            if sent == len(outbox[0]):
                outbox.popleft()
            else:
                outbox[0] = outbox[0][sent:]
            if self._drained is not None and self._owed <= OUTBOX_MAX // 2:
                self._drained.set()
                self._drained = None


async def _packed(values: list[Any], packed: Packed) -> Packed:
    while values:
        packed.take(values, _PIECE_MAX)
        await trio.lowlevel.checkpoint()
    return packed


def _text(message: Message, key: str) -> str:
    value = message.get(key, "")
    if type(value) is not str:
        raise OSError(errno.EINVAL, f"'{key}' must be text")
    return value[:_TEXT_MAX]


def _say(sock: socket.socket, why: OSError) -> None:
    """Tell a peer that is not served why."""
    with contextlib.suppress(OSError):
        sock.sendmsg(Encoder().encode(error_reply(0, why)))


def listen(path: str) -> socket.socket:
    """A socket that listens on ``path``, mode 0600, in place of one nobody listens on. OSError EADDRINUSE."""
    if os.path.lexists(path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except (ConnectionRefusedError, FileNotFoundError):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            except BlockingIOError:
                raise OSError(errno.EADDRINUSE, "another daemon listens on this socket", path) from None
            else:
                raise OSError(errno.EADDRINUSE, "another daemon listens on this socket", path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Before bind: Linux gives the file the socket's own mode, so that it never is open to others.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        listener.setblocking(False)
        listener.listen(128)
    except OSError as exc:
        listener.close()
        # One whose path is too long has no errno.
        raise OSError(exc.errno or errno.ENAMETOOLONG, exc.strerror or str(exc), path) from None
    return listener
