"""An RPC door over a memory volume, served by a trio loop in a thread, and a client that says what it is told."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import pytest
import trio

from agenttools.wire import Decoder, Encoder
from vfsd.backends.memory import MemoryBackend
from vfsd.doors.rpc import RpcDoor
from vfsd.feed import Feed
from vfsd.routes import Route, RouteTable
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume


def make_vfs(*prefixes: bytes) -> Vfs:
    """A tree of memory volumes of the user's: ``/`` and one for each of ``prefixes``."""
    feed, table = Feed(), RouteTable()
    for prefix in (b"/", *prefixes):
        volume = TreeVolume(table.next_base(), MemoryBackend(), feed, time.time_ns, owner=(os.geteuid(), os.getegid()))
        table.mount(Route(prefix, "memory", "", volume))
    return Vfs(table, feed, SystemEntries(table, feed, time.time_ns))


class Server:
    """``with Server(path) as server``: serving at ``path`` inside, gone after. Use it again to restart."""

    def __init__(self, path: str | os.PathLike[str], vfs: Vfs | None = None) -> None:
        self.path = os.fspath(path)
        self.vfs = vfs or make_vfs()
        self.asked = 0
        self.door: RpcDoor
        self._token: trio.lowlevel.TrioToken
        self._scope: trio.CancelScope
        self._thread: threading.Thread

    def __enter__(self) -> Self:
        up = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main, up))
        self._thread.start()
        assert up.wait(5)
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(5)
        assert not self._thread.is_alive()

    def on_loop(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn`` called on the server's loop."""
        return trio.from_thread.run_sync(fn, *args, trio_token=self._token)

    async def _main(self, up: threading.Event) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self.door = RpcDoor(
            self.vfs,
            hello={"name": "test", "mountpoint": b"/mnt/test", "routes": []},
            status=lambda: {"name": "test", "counters": self.vfs.counters()},
            shutdown=self._shutdown,
            version="0",
        )
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.door.serve, self.path)
                up.set()

    def _shutdown(self) -> None:
        self.asked += 1
        self._scope.cancel()


class Raw:
    """A client without manners: sends what it is told, byte for byte."""

    def __init__(self, server: Server, *, hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(server.path)
        self.encoder, self.decoder = Encoder(), Decoder()
        if hello:
            self.send(id=1, op="hello", version=1, client="test")
            assert self.receive()["ok"]

    def send(self, **message: Any) -> None:
        self.sock.sendall(b"".join(self.encoder.encode(message)))

    def receive(self) -> dict[str, Any]:
        while (message := self.decoder.next()) is None:
            data = self.sock.recv(1 << 20)
            if not data:
                raise EOFError
            self.decoder.receive(data)
        return message

    def closed(self) -> bool:
        """True once the daemon has closed the connection."""
        try:
            while self.sock.recv(1 << 20):
                pass
        except ConnectionResetError:
            pass
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()


def errno_of(call: Any, *args: Any, **params: Any) -> str:
    with pytest.raises(OSError) as caught:
        call(*args, **params)
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]
