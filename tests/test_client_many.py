"""Many clients of one daemon, and many calls that are given up: nothing of them is left on either side."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from rpc_server import Server

from agenttools import tools
from agenttools.client import Client
from agenttools.wire import MAX_PENDING
from vfsd.doors.rpcops import OPS

CLIENTS = 64
ROUNDS = 5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "s.sock") as server:
        yield server


def test_64_clients_edit_one_file(server: Server) -> None:
    failed: list[str] = []
    ready = threading.Barrier(CLIENTS)

    def work(n: int) -> None:
        with Client(server.path, timeout=50) as client:
            ready.wait(40)
            for i in range(ROUNDS):
                results = [
                    tools.edit(client, "/f", f"<{n}={i}>", f"<{n}={i + 1}>"),
                    tools.write(client, f"/own/{n}", f"{n} {i}\n"),
                    tools.read(client, f"/own/{n}"),
                    tools.grep(client, f"<{n}={i + 1}>", "/f"),
                ]
                failed.extend(result.error for result in results if result.error is not None)

    with Client(server.path) as client:
        tools.write(client, "/f", "".join(f"<{n}=0>\n" for n in range(CLIENTS)))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert not failed
        assert tools.read(client, "/f").content == "".join(f"<{n}={ROUNDS}>\n" for n in range(CLIENTS))
        assert len(tools.ls(client, "/own").entries or []) == CLIENTS
        while client.call("status")["connections"] > 1:
            pass


def test_calls_that_are_cancelled_leave_no_ids(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled at any moment: before they are sent, while they run, when the answer is on its way."""

    async def late(*args: Any) -> dict[str, Any]:
        await trio.sleep(random.random() / 200)
        return {}

    monkeypatch.setitem(OPS, "statfs", late)

    async def main() -> None:
        async with Client(server.path) as client:
            await client.acall("stat", path=b"/")
            (link,) = client._async.values()
            for _ in range(20):
                calls = [asyncio.create_task(client.acall("statfs")) for _ in range(2 * MAX_PENDING)]
                for call in calls:
                    asyncio.get_running_loop().call_later(random.random() / 100, call.cancel)
                done = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(one) for one in done} <= {dict, asyncio.CancelledError}
                assert not link._waiters
            # As many as may run at once do: none of those before has kept a place.
            assert len(await asyncio.gather(*(client.acall("statfs") for _ in range(MAX_PENDING)))) == MAX_PENDING
            assert list(client._async.values()) == [link]

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12 on, for a fork among threads
def test_the_child_of_a_fork_has_connections_of_its_own(server: Server) -> None:
    """Forked among threads that are at work, it goes on by itself, and so does its parent."""
    client = Client(server.path)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            client.call("stat", path=b"/")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()

    async def twice() -> None:
        await asyncio.gather(*(tools.awrite(client, f"/{os.getpid()}-{n}", "x") for n in range(5)))

    asyncio.run(twice())
    child = os.fork()
    if not child:
        code = 1
        try:
            asyncio.run(twice())
            code = 0 if tools.read(client, f"/{os.getppid()}-0").error is None else 2
        finally:
            os._exit(code)
    try:
        asyncio.run(twice())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop.set()
        for thread in threads:
            thread.join(20)
        assert [tools.read(client, f"/{pid}-4").error for pid in (child, os.getpid())] == [None, None]
    finally:
        stop.set()
        client.close()
