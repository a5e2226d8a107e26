"""An RPC door over a memory volume, served by a trio loop in a thread: what the client and door tests talk to."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import trio

from vfsd.backends.memory import MemoryBackend
from vfsd.doors.rpc import RpcDoor
from vfsd.feed import Feed
from vfsd.routes import Route, RouteTable
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume


def make_vfs(*prefixes: bytes, owner: tuple[int, int] = (0, 0)) -> Vfs:
    """A tree of memory volumes: ``/`` and one for each of ``prefixes``."""
    feed, table = Feed(), RouteTable()
    for prefix in (b"/", *prefixes):
        volume = TreeVolume(table.next_base(), MemoryBackend(), feed, time.time_ns, owner=owner)
        table.mount(Route(prefix, "memory", "", volume))
    return Vfs(table, feed, SystemEntries(table, feed, time.time_ns))


class Server:
    """``with Server(path) as server``: serving at ``path`` inside, gone after. Use it again to restart."""

    def __init__(self, path: str | os.PathLike[str], vfs: Vfs | None = None) -> None:
        self.path = os.fspath(path)
        self.vfs = vfs or make_vfs()
        self.asked: list[dict[str, bool]] = []
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

    async def _shutdown(self, **how: bool) -> None:
        self.asked.append(how)
        self._scope.cancel()
