"""The client of the daemon's socket: thread-safe, from sync code and from asyncio and trio, reconnecting.

    with Client() as client:
        client.call("read", path=b"/plan.md", offset=0, length=1 << 20)["data"]
        await client.acall("stat", path=b"/plan.md")

Names, paths and contents are bytes; results are dicts as in ``agenttools.wire``. A refusal raises the OSError subclass
of its errno, ``filename`` as text; no daemon raises VfsdUnavailable; a connection that broke under a mutation raises
VfsdInterrupted, because it may have been done. Reads are asked again after a reconnect, mutations never are.

There is no background thread and no background task. The waiting callers receive for each other: one of them, the
leader, reads the socket, hands every reply to its caller, and passes the lead on when it has its own. Sync callers
share one connection, and each event loop has one.

Must not import vfsd, and imports neither asyncio nor trio: whichever runs is loaded already.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgpack

from agenttools import wire
from agenttools.arguments import check
from agenttools.link import BaseLink, Link, VfsdInterrupted, VfsdUnavailable

if TYPE_CHECKING:
    from agenttools.asynclink import AsyncLink, Loop

__all__ = ["Client", "VfsdInterrupted", "VfsdUnavailable"]

_Request = tuple[str, wire.Message]
_Steps = Generator[_Request, wire.Message, wire.Message]

_RETRY_S = (0.0, 0.05, 0.2, 0.5)
"""Seconds before each attempt to reach a daemon again that was there a moment ago: a restart takes about that long."""


class _Attempts:
    """When one call may be asked again after its connection broke."""

    def __init__(self, op: str) -> None:
        self._repeatable = op in wire.REPEATABLE
        self._delays: Iterator[float] | None = None

    def delay_after(self, exc: VfsdInterrupted | VfsdUnavailable, link: BaseLink | None) -> float:
        """Seconds to wait before the next attempt; raises ``exc`` when there must be none."""
        if isinstance(exc, VfsdInterrupted):
            if (link is not None and link.closed) or (exc.delivered and not self._repeatable):
                raise exc
            if self._delays is None:
                self._delays = iter(_RETRY_S)
        elif self._delays is None:
            # There was no daemon to begin with.
            raise exc
        for delay in self._delays:
            return delay
        raise exc


class Client:
    """A client of one daemon: ``socket`` a path, or ``name`` of the mount, else ``VFSD_SOCKET``, else "default".

    ``client`` names the program in the daemon's log. ``timeout``: seconds a sync call waits for its reply
    (TimeoutError, and a mutation may have been done); None waits for ever. Async callers have their own cancel scopes.
    ``first``: requests made on every new connection before all others, which fail as these do. Nothing is connected
    before the first call. ValueError for a name that can't be a mount's, and for an empty ``socket``.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        name: str | None = None,
        *,
        client: str = "agenttools",
        timeout: float | None = 300.0,
        first: Sequence[wire.Message] = (),
    ) -> None:
        check(Client.__init__, {"socket": socket, "name": name, "client": client, "timeout": timeout, "first": first})
        if socket is not None:
            self.socket = os.fspath(socket)
            if not self.socket:
                raise ValueError("socket is empty: give the path of a daemon's socket, or leave it out")
        elif name is not None:
            self.socket = wire.default_socket(name)
        else:
            self.socket = os.environ.get("VFSD_SOCKET") or wire.default_socket()
        self._program = client
        self._timeout = timeout
        self._first = [{"op": "hello", **self._hello_request()}, *first]
        self._hello: wire.Message | None = None
        self._start()

    def _start(self) -> None:
        """Begin without connections; also in the child of a fork, which must not touch its parent's."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._async: dict[Loop, AsyncLink] = {}

    # ------------------------------------------------------------------ sync

    def call(self, op: str, /, **params: Any) -> wire.Message:
        """Ask for ``op`` and wait for its result.

        Raises OSError (the subclass of the daemon's errno), VfsdUnavailable, VfsdInterrupted, TimeoutError;
        wire.WireError when the request cannot be sent. ``write`` takes up to wire.MAX_UPLOAD bytes of data at once.
        """
        if op == "write" and _is_large(params.get("data")):
            return self._drive(_upload(params))
        try:
            return self._call(op, params)
        except TypeError as exc:
            raise _unsendable(op, params) or exc from None

    def _call(self, op: str, params: wire.Message) -> wire.Message:
        attempts: _Attempts | None = None
        while True:
            link = self._link
            try:
                if link is None or link.dead or self._pid != os.getpid():
                    link = self._connect()
                reply = link.request(op, params)
                break
            except (VfsdInterrupted, VfsdUnavailable) as exc:
                attempts = attempts or _Attempts(op)
                time.sleep(attempts.delay_after(exc, link))
        if reply["ok"] is True:
            return reply
        raise wire.error_of(reply)

    def _drive(self, steps: _Steps) -> wire.Message:
        reply: wire.Message | None = None
        while True:
            try:
                op, params = steps.send(reply) if reply is not None else next(steps)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            reply = self._call(op, params)

    def _connect(self) -> Link:
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            if self._link is None or self._link.dead:
                self._link = Link(self.socket, self._first, self._greeted, self._timeout)
            return self._link

    def _hello_request(self) -> wire.Message:
        return {"version": wire.VERSION, "client": self._program}

    def _greeted(self, reply: wire.Message) -> None:
        self._hello = reply

    @property
    def hello(self) -> wire.Message:
        """What the daemon said of itself when last connected to (connects, blocking, if it never was)."""
        if self._hello is None:
            self.call("hello", **self._hello_request())
        assert self._hello is not None
        return self._hello

    # ------------------------------------------------------------------ async

    async def acall(self, op: str, /, **params: Any) -> wire.Message:
        """Like ``call``, for the event loop that runs: asyncio's or trio's. Cancelling it cancels the request."""
        if op == "write" and _is_large(params.get("data")):
            steps = _upload(params)
            reply: wire.Message | None = None
            while True:
                try:
                    op, step = steps.send(reply) if reply is not None else next(steps)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]
                reply = await self._acall(op, step)
        try:
            return await self._acall(op, params)
        except TypeError as exc:
            raise _unsendable(op, params) or exc from None

    async def _acall(self, op: str, params: wire.Message) -> wire.Message:
        from agenttools.asynclink import current_loop

        loop = current_loop()
        attempts: _Attempts | None = None
        while True:
            link = self._async.get(loop)
            try:
                if link is None or link.dead or self._pid != os.getpid():
                    link = self._aconnect(loop)
                reply = await link.request(op, params)
                break
            except (VfsdInterrupted, VfsdUnavailable) as exc:
                attempts = attempts or _Attempts(op)
                await loop.sleep(attempts.delay_after(exc, link))
        if reply["ok"] is True:
            return reply
        raise wire.error_of(reply)

    def _aconnect(self, loop: Loop) -> AsyncLink:
        from agenttools.asynclink import AsyncLink

        if self._pid != os.getpid():
            self._start()
        with self._lock:
            for gone in [other for other in self._async if other.closed]:
                self._async.pop(gone).close()
            # A connect to a Unix socket is done at once or refused.
            link = AsyncLink(self.socket, self._first, self._greeted, loop)
            self._async[loop] = link
            return link

    async def ahello(self) -> wire.Message:
        """``hello`` for the event loop that runs."""
        if self._hello is None:
            await self.acall("hello", **self._hello_request())
        assert self._hello is not None
        return self._hello

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Close every connection; callers that wait get VfsdInterrupted. The client may be used again."""
        with self._lock:
            links: list[BaseLink] = [*([self._link] if self._link else []), *self._async.values()]
            self._link = None
            self._async = {}
        for link in links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _is_large(data: object) -> bool:
    return isinstance(data, (bytes, bytearray, memoryview)) and len(data) > wire.MAX_PIECE


def _unsendable(op: str, params: wire.Message) -> TypeError | None:
    """What names the parameter that the wire has nothing for."""
    for name, value in params.items():
        try:
            msgpack.packb(value)
        except TypeError:
            return TypeError(f"{op}: {name} can't be sent: it is of type {type(value).__name__}")
        except (ValueError, OverflowError):
            continue
    return None


def _upload(params: wire.Message) -> _Steps:
    """The requests that make one ``write`` of content too large for a frame: all of it arrives, then one commit."""
    data = memoryview(params["data"]).cast("B")
    if len(data) > wire.MAX_UPLOAD:
        raise OSError(errno.EFBIG, f"more than {wire.MAX_UPLOAD} bytes at once; write it through the mount")
    upload = (yield "upload_begin", {})["upload"]
    for start in range(0, len(data), wire.PIECE):
        yield "upload_piece", {"upload": upload, "data": data[start : start + wire.PIECE]}
    rest = {key: value for key, value in params.items() if key != "data"}
    return (yield "upload_commit", {**rest, "upload": upload})
