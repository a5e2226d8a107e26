"""One connection to the daemon, shared by the tasks of one event loop, and what that needs of asyncio and trio.

Whoever waits for a reply does the work: a task takes the roles that are free (receiving, sending what did not fit)
and leaves them when it has its reply or is cancelled. Imports neither asyncio nor trio: whichever runs is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from agenttools import wire
from agenttools.link import BaseLink, Waiter, advance


class AsyncLink(BaseLink):
    """A connection the tasks of one event loop use at once."""

    def __init__(
        self, path: str, first: list[wire.Message], greeted: Callable[[wire.Message], None], loop: Loop
    ) -> None:
        super().__init__(path, first, greeted, blocking=False)
        self._loop = loop
        self._unsent: deque[memoryview] = deque()
        self._queued = 0
        self._done = 0
        self._reading = False
        self._writing = False

    async def request(self, op: str, params: wire.Message) -> wire.Message:
        """Send one request and return its reply, ``ok`` or not. Raises VfsdInterrupted. Cancelling it cancels it."""
        if self.dead:
            raise self._broken(op, delivered=False)
        self._number = number = self._number + 1
        waiter = Waiter()
        waiter.op = op
        self._waiters[number] = waiter
        try:
            self._queue({"id": number, "op": op, **params})
            waiter.end = self._queued
            self._flush()
            while not waiter.done:
                await self._turn(waiter)
        finally:
            if self._waiters.pop(number, None) is not None and not self.dead:
                self._number += 1
                self._queue({"id": self._number, "op": "cancel", "target": number})
                self._flush()
            self._hand_on()
        if waiter.reply is None:
            assert waiter.error is not None
            raise waiter.error
        return waiter.reply

    async def _turn(self, waiter: Waiter) -> None:
        """Do what nobody else does (receive, send the rest), or sleep until someone leaves a role or has the reply."""
        read = not self._reading
        write = bool(self._unsent) and not self._writing
        if not read and not write:
            waiter.wake = self._loop.event()
            await waiter.wake.wait()
            waiter.wake = None
            return
        self._reading |= read
        self._writing |= write
        try:
            await self._loop.wait(self._sock, read, write)
        finally:
            if read:
                self._reading = False
            if write:
                self._writing = False
        if write:
            self._flush()
        if read:
            self._receive()

    def _queue(self, message: wire.Message) -> None:
        for buffer in self._encoder.encode(message):
            view = memoryview(buffer).cast("B")
            self._unsent.append(view)
            self._queued += len(view)

    def _flush(self) -> None:
        """Send as much of what is queued as the kernel takes."""
        views = self._unsent
        try:
            while views:
                count = self._sock.send(views[0], socket.MSG_NOSIGNAL)
                self._done += count
                advance(views, count)
        except BlockingIOError:
            pass
        except OSError:
            while not self.dead and self._receive():
                pass
            self._fail(None)

    def _receive(self) -> bool:
        """One recv and all the replies in it; False when there was nothing to receive."""
        decoder = self._decoder
        try:
            count = self._sock.recv_into(decoder.space())
            if not count:
                self._fail(None)
                return False
            decoder.received(count)
            while (message := decoder.next()) is not None:
                waiter = self._taken(message)
                if waiter is not None and waiter.wake is not None:
                    waiter.wake.set()
        except (BlockingIOError, InterruptedError):
            return False
        except wire.WireError as exc:
            self._fail(OSError(errno.EPROTO, f"the daemon on {self.path} speaks another protocol: {exc}"))
        except ConnectionError:
            self._fail(None)
        except OSError as exc:
            self._fail(exc)
        return True

    def _hand_on(self) -> None:
        if self.dead:
            if not self._reading and not self._writing:
                self._sock.close()
            return
        if self._reading and (self._writing or not self._unsent):
            return
        for waiter in self._waiters.values():
            if waiter.wake is not None and not waiter.wake.is_set():
                waiter.wake.set()
                return

    def _fail(self, reason: OSError | None) -> None:
        if self.dead:
            return
        self.dead = True
        self._reason = reason
        # Whoever waits for the socket is woken by this; the last of them closes it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for waiter in self._waiters.values():
            waiter.error = self._broken(waiter.op, delivered=self._done >= waiter.end)
            if waiter.wake is not None:
                waiter.wake.set()
        self._waiters.clear()
        self._unsent.clear()

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._waiters:
            self._fail(None)
            self._sock.close()


class Loop:
    """What an AsyncLink needs of an event loop; equal for the same loop, so that it can be a key."""

    __slots__ = ("token",)

    def __init__(self, token: Any) -> None:
        self.token = token

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loop) and other.token is self.token

    def __hash__(self) -> int:
        return id(self.token)

    @property
    def closed(self) -> bool:
        """The loop has ended and will run nothing any more."""
        raise NotImplementedError

    def event(self) -> Any:
        """Something with ``set()``, ``is_set()`` and ``await wait()``."""
        raise NotImplementedError

    async def wait(self, sock: socket.socket, read: bool, write: bool) -> None:
        """Return once ``sock`` can be read or written, whichever of the two is asked for."""
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


class _Asyncio(Loop):
    __slots__ = ()

    @property
    def closed(self) -> bool:
        return bool(self.token.is_closed())

    def event(self) -> Any:
        return sys.modules["asyncio"].Event()

    async def wait(self, sock: socket.socket, read: bool, write: bool) -> None:
        loop, number = self.token, sock.fileno()
        future = loop.create_future()

        def ready() -> None:
            if not future.done():
                future.set_result(None)

        if read:
            loop.add_reader(number, ready)
        if write:
            loop.add_writer(number, ready)
        try:
            await future
        finally:
            if read:
                loop.remove_reader(number)
            if write:
                loop.remove_writer(number)

    async def sleep(self, seconds: float) -> None:
        await sys.modules["asyncio"].sleep(seconds)


class _Trio(Loop):
    __slots__ = ()

    @property
    def closed(self) -> bool:
        try:
            self.token.run_sync_soon(int)
        except sys.modules["trio"].RunFinishedError:
            return True
        return False

    def event(self) -> Any:
        return sys.modules["trio"].Event()

    async def wait(self, sock: socket.socket, read: bool, write: bool) -> None:
        trio = sys.modules["trio"]
        if not write:
            await trio.lowlevel.wait_readable(sock)
        elif not read:
            await trio.lowlevel.wait_writable(sock)
        else:
            async with trio.open_nursery() as nursery:

                async def readable() -> None:
                    await trio.lowlevel.wait_readable(sock)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(readable)
                await trio.lowlevel.wait_writable(sock)
                nursery.cancel_scope.cancel()

    async def sleep(self, seconds: float) -> None:
        await sys.modules["trio"].sleep(seconds)


def current_loop() -> Loop:
    """The event loop the caller runs in. RuntimeError outside of asyncio and trio."""
    trio = sys.modules.get("trio")
    if trio is not None:
        with contextlib.suppress(RuntimeError):
            return _Trio(trio.lowlevel.current_trio_token())
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        with contextlib.suppress(RuntimeError):
            return _Asyncio(asyncio.get_running_loop())
    raise RuntimeError("acall works inside asyncio and trio; use call elsewhere")
