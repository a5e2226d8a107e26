"""A daemon's socket door over memory volumes in a thread of the test, without a mount."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

from vfsd.backends.memory import MemoryBackend
from vfsd.doors.rpc import RpcDoor
from vfsd.feed import Feed
from vfsd.routes import Route, RouteTable
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume


def memory_vfs(*prefixes: bytes) -> Vfs:
    """A tree of memory volumes, one for each prefix besides the root, with the host's system directories."""
    feed, table = Feed(), RouteTable()
    for prefix in (b"/", *prefixes):
        volume = TreeVolume(table.next_base(), MemoryBackend(), feed, time.time_ns, owner=(os.geteuid(), os.getegid()))
        table.mount(Route(prefix, "memory", "", volume))
    system = SystemEntries(table, feed, time.time_ns)
    system.add_host()
    return Vfs(table, feed, system)


@contextlib.contextmanager
def serving(socket: Path, *prefixes: bytes, mountpoint: bytes = b"/mnt/tree") -> Iterator[Vfs]:
    """Serve a new tree on ``socket`` until the block ends; only the server's thread may touch the Vfs given."""
    started = threading.Event()
    stop: list[Any] = []
    failed: list[BaseException] = []
    vfs = memory_vfs(*prefixes)

    async def serve() -> None:
        hello = {"name": "test", "thread": "t", "mountpoint": mountpoint, "routes": []}

        async def shutdown(**_: Any) -> None:
            raise AssertionError

        door = RpcDoor(vfs, hello=hello, status=dict, shutdown=shutdown)
        async with trio.open_nursery() as nursery:
            await nursery.start(door.serve, socket)
            token = trio.lowlevel.current_trio_token()
            stop.append(lambda: token.run_sync_soon(nursery.cancel_scope.cancel))
            started.set()

    def run() -> None:
        try:
            trio.run(serve)
        except BaseException as exc:
            failed.append(exc)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="tool server", daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        if not failed:
            yield vfs
    finally:
        for end in stop:
            end()
        thread.join(10)
        if failed:
            raise failed[0]
        assert not thread.is_alive()
