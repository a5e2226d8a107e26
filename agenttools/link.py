"""One connection to the daemon, shared by any number of threads, and what ``asynclink`` has in common with it.

Owns the socket, who receives for whom, and what is known of a request when the connection breaks. Must not know when
to connect again (``client`` does) nor what an operation means.

Invariants: exactly one caller receives at a time, and hands the lead on before it leaves, whatever ends its wait;
a request counts as delivered once its last byte was handed to the kernel, because only whole frames are carried out;
a cancelled caller never leaves half a frame behind on the socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from agenttools import wire

_HELLO = 1
_SEND = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class VfsdUnavailable(ConnectionError):
    """No daemon answers on the socket; the message says how to start one."""


class VfsdInterrupted(ConnectionError):
    """The connection broke before the answer came. ``delivered``: the request may have been carried out."""

    def __init__(self, path: str, op: str, delivered: bool) -> None:
        if delivered:
            text = f"the connection to {path} broke before the answer to '{op}' came: it may or may not have been done"
        else:
            text = f"the connection to {path} broke before '{op}' was sent: it was not done"
        super().__init__(text)
        self.errno = errno.ECONNRESET
        self.delivered = delivered


class Waiter:
    """One caller's place: filled with the reply, or with the end of the connection.

    Defaults are the class's, which makes one cheap.
    """

    op = ""
    reply: wire.Message | None = None
    error: OSError | None = None
    sent = False
    end = 0
    wake: Any = None

    @property
    def done(self) -> bool:
        """Nothing is left to wait for."""
        return self.reply is not None or self.error is not None


def _connect(path: str, blocking: bool) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(blocking)
        sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError, BlockingIOError) as exc:
        sock.close()
        missing = VfsdUnavailable(f"no daemon on {path}; start one with: vfsd mount {_name_option(path)}MOUNTPOINT")
        missing.errno = exc.errno
        raise missing from None
    except OSError as exc:
        sock.close()
        number = exc.errno or errno.ENAMETOOLONG
        raise OSError(number, f"cannot connect to the daemon on {path}: {exc.strerror or exc}", path) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _name_option(path: str) -> str:
    """What makes ``vfsd mount`` serve on socket ``path``, where a name can."""
    directory, file = os.path.split(path)
    name = file.removesuffix(".sock")
    if name in (file, "default") or directory != wire.runtime_dir():
        return ""
    return f"--name {name} "


class BaseLink:
    """What both kinds of link share: numbering, encoding, and what a message from the daemon means."""

    def __init__(
        self, path: str, first: list[wire.Message], greeted: Callable[[wire.Message], None], blocking: bool
    ) -> None:
        self.path = path
        self.dead = False
        self.closed = False
        self._reason: OSError | None = None
        self._greeted = greeted
        self._decoder = wire.Decoder()
        self._encoder = wire.Encoder()
        self._waiters: dict[int, Waiter] = {}
        self._number = self._firsts = _HELLO + len(first) - 1
        self._sock = _connect(path, blocking)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wire.SOCKET_BUFFER)
        # A fresh socket's buffer takes this whole; should the daemon be gone already, the first request finds out.
        with contextlib.suppress(OSError):
            for number, message in enumerate(first, _HELLO):
                self._sock.sendall(b"".join(self._encoder.encode({"id": number, **message})))

    def _taken(self, message: wire.Message) -> Waiter | None:
        """Whom ``message`` is for. OSError when it says that the daemon does not want this connection."""
        number = message.get("id")
        waiter = self._waiters.pop(number, None) if isinstance(number, int) else None
        if waiter is not None:
            if type(message.get("ok")) is not bool:
                raise wire.WireError("a reply without ok")
            waiter.reply = message
        elif number == _HELLO and message.get("ok") is True:
            self._greeted(message)
        elif isinstance(number, int) and number <= self._firsts and message.get("ok") is not True:
            raise wire.error_of(message)
        return waiter

    def _broken(self, op: str, delivered: bool) -> OSError:
        if self._reason is not None:
            return wire.error_of(wire.error_reply(0, self._reason))
        return VfsdInterrupted(self.path, op, delivered)

    def close(self) -> None:
        """End the connection; its callers get VfsdInterrupted. May be called from any thread."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Let go of the descriptor and nothing else: for the child of a fork, whose parent still uses the socket."""
        self.dead = True
        self._sock.close()


class Link(BaseLink):
    """A connection any number of threads use at once. ``timeout``: seconds to wait for one reply; None: no limit."""

    def __init__(
        self,
        path: str,
        first: list[wire.Message],
        greeted: Callable[[wire.Message], None],
        timeout: float | None,
    ) -> None:
        super().__init__(path, first, greeted, blocking=True)
        self._timeout = timeout
        if timeout is not None:
            # Unlike settimeout this costs no poll(2) before each recv(2).
            micro = max(1, int(timeout * 1e6))
            interval = struct.pack("@ll", micro // 1_000_000, micro % 1_000_000)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        self._lock = threading.Lock()
        self._send_lock = threading.RLock()
        self._leading = False

    def request(self, op: str, params: wire.Message) -> wire.Message:
        """Send one request and return its reply, ``ok`` or not; ``params`` gets ``op`` and ``id`` added.

        Raises VfsdInterrupted, TimeoutError.
        """
        waiter = Waiter()
        waiter.op = params["op"] = op
        with self._send_lock:
            if self.dead:
                raise self._broken(op, delivered=False)
            self._number = params["id"] = number = self._number + 1
            buffers = self._encoder.encode(params)
            self._waiters[number] = waiter
            try:
                self._send(buffers)
            except OSError:
                self._drain()
                raise self._broken(op, delivered=False) from None
            except BaseException:
                # Half a frame may be out: nothing sensible can follow it.
                self._fail(None)
                raise
            waiter.sent = True
        try:
            self._wait(waiter)
        except BaseException:
            if self._waiters.pop(number, None) is not None:
                self._cancel(number)
            self._hand_on()
            raise
        reply = waiter.reply
        if reply is None:
            raise waiter.error or self._broken(op, delivered=True)
        return reply

    def _send(self, buffers: list[wire.Buffer]) -> None:
        done = 0
        if len(buffers) == 1:
            try:
                done = self._sock.send(buffers[0], _SEND)
            except BlockingIOError:
                done = 0
            if done == len(buffers[0]):
                return
        views = deque(memoryview(buffer).cast("B") for buffer in buffers)
        advance(views, done)
        while views:
            done = self._send_some(views)
            advance(views, done)
            if not done:
                self._wait_writable()

    def _send_some(self, buffers: deque[memoryview]) -> int:
        try:
            return self._sock.sendmsg(buffers, (), _SEND)
        except BlockingIOError:
            return 0

    def _wait_writable(self) -> None:
        """Wait for room to send; receive meanwhile if nobody does: until then the daemon may not read either."""
        poll = select.poll()
        with self._lock:
            lead = not self._leading
            self._leading = True
        if not lead:
            poll.register(self._sock, select.POLLOUT)
            poll.poll(100)
            return
        try:
            poll.register(self._sock, select.POLLOUT | select.POLLIN)
            if any(events & ~select.POLLOUT for _, events in poll.poll()):
                self._receive()
        finally:
            self._resign()

    def _wait(self, waiter: Waiter) -> None:
        deadline: float | None = None
        while True:
            with self._lock:
                if waiter.done:
                    return
                lead = not self._leading
                if lead:
                    self._leading = True
                else:
                    waiter.wake = wake = threading.Lock()
                    wake.acquire()
            if lead:
                try:
                    self._lead(waiter, deadline)
                finally:
                    self._resign()
                return
            if deadline is None and self._timeout is not None:
                deadline = time.monotonic() + self._timeout
            if not wake.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
                with self._lock:
                    woken, waiter.wake = waiter.wake is None, None
                if not woken:
                    raise self._late(waiter)

    def _lead(self, waiter: Waiter, deadline: float | None) -> None:
        """Receive until ``waiter`` has its reply. The kernel times the first wait, the clock is only for more."""
        try:
            self._receive()
            while waiter.reply is None and waiter.error is None:
                if self._timeout is not None:
                    now = time.monotonic()
                    if deadline is None:
                        deadline = now + self._timeout
                    if now > deadline:
                        raise self._late(waiter)
                self._receive()
        except BlockingIOError:
            raise self._late(waiter) from None

    def _late(self, waiter: Waiter) -> TimeoutError:
        return TimeoutError(errno.ETIMEDOUT, f"no answer to '{waiter.op}' from the daemon", self.path)

    def _receive(self) -> None:
        """One recv(2) and all the replies in it. BlockingIOError past the timeout."""
        decoder = self._decoder
        try:
            # The rest of a large reply in one call, without waking for each part of it.
            whole = decoder.pending and decoder.missing > wire.CHUNK
            count = self._sock.recv_into(decoder.space(), 0, socket.MSG_WAITALL if whole else 0)
            if not count:
                self._fail(None)
                return
            decoder.received(count)
            while (message := decoder.next()) is not None:
                with self._lock:
                    waiter = self._taken(message)
                    if waiter is not None and waiter.wake is not None:
                        waiter.wake.release()
                        waiter.wake = None
        except (BlockingIOError, InterruptedError):
            raise
        except wire.WireError as exc:
            self._fail(OSError(errno.EPROTO, f"the daemon on {self.path} speaks another protocol: {exc}"))
        except ConnectionError:
            self._fail(None)
        except OSError as exc:
            self._fail(exc)

    def _resign(self) -> None:
        with self._lock:
            self._leading = False
            waiting = bool(self._waiters)
        if waiting:
            self._hand_on()

    def _hand_on(self) -> None:
        """Wake someone who waits, to lead, unless there is a leader."""
        with self._lock:
            if self._leading:
                return
            for waiter in self._waiters.values():
                if waiter.wake is not None:
                    waiter.wake.release()
                    waiter.wake = None
                    return

    def _drain(self) -> None:
        """The daemon closed: take what it said last (why it did, and replies), then fail everyone else."""
        with self._lock:
            lead = not self._leading
            self._leading = True
        if lead:
            try:
                self._sock.setblocking(False)
                while not self.dead:
                    self._receive()
            except OSError:
                pass
            finally:
                self._resign()
        self._fail(None)

    def _fail(self, reason: OSError | None) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._reason is None:
                self._reason = reason
            self.dead = True
            for waiter in self._waiters.values():
                waiter.error = self._broken(waiter.op, waiter.sent)
                if waiter.wake is not None:
                    waiter.wake.release()
                    waiter.wake = None
            self._waiters.clear()
        with self._send_lock:
            self._sock.close()

    def _cancel(self, target: int) -> None:
        """Tell the daemon that nobody waits for ``target`` any more, if that can be told at once."""
        if not self._send_lock.acquire(blocking=False):
            return
        try:
            self._number = number = self._number + 1
            self._send(self._encoder.encode({"id": number, "op": "cancel", "target": target}))
        except OSError:
            pass
        finally:
            self._send_lock.release()

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            idle = not self._leading
        if idle:
            self._fail(None)


def advance(views: deque[memoryview], sent: int) -> None:
    """Drop the first ``sent`` bytes of ``views``."""
    while views and sent >= len(views[0]):
        sent -= len(views.popleft())
    if sent:
        views[0] = views[0][sent:]
