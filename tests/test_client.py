"""The client: many threads and tasks on one object, giving up on an answer, and what it says without a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from rpc_server import Server

from agenttools.client import Client, VfsdInterrupted, VfsdUnavailable
from vfsd.doors.rpcops import OPS

RUNNERS: dict[str, Callable[[Callable[[], Awaitable[Any]]], Any]] = {
    "asyncio": lambda main: asyncio.run(main()),  # type: ignore[arg-type]
    "trio": lambda main: trio.run(main),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "s.sock") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.path, timeout=20) as client:
        yield client


@pytest.fixture(params=list(RUNNERS))
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[Any]]], Any]:
    return RUNNERS[request.param]


async def together(*functions: Callable[[], Awaitable[Any]]) -> None:
    """All at once, under whichever loop runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        async with trio.open_nursery() as nursery:
            for function in functions:
                nursery.start_soon(function)
    else:
        await asyncio.gather(*(function() for function in functions))


# ---------------------------------------------------------------------- importing


def test_importing_is_quick_and_drags_in_no_event_loop() -> None:
    code = (
        "import time, sys; t = time.process_time(); import agenttools.client; t = time.process_time() - t; "
        "assert not {'trio', 'asyncio', 'vfsd'} & set(sys.modules), sys.modules.keys(); print(t)"
    )
    taken = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5))
    assert taken < 0.1


# ---------------------------------------------------------------------- no daemon


@pytest.mark.parametrize("stale", [False, True])
def test_no_daemon_is_said_with_what_to_do(tmp_path: Path, stale: bool, run: Any) -> None:
    path = tmp_path / "no.sock"
    if stale:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    client = Client(path)
    for call in (lambda: client.call("stat", path=b"/"), lambda: run(lambda: client.acall("stat", path=b"/"))):
        with pytest.raises(VfsdUnavailable) as caught:
            call()
        assert str(caught.value) == f"no daemon on {path}; start one with: vfsd mount MOUNTPOINT"
        assert caught.value.errno in (errno.ENOENT, errno.ECONNREFUSED)


def test_no_daemon_of_that_name_is_said_with_how_to_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name, options in (("work", "--name work "), ("default", "")):
        with pytest.raises(VfsdUnavailable, match=f"start one with: vfsd mount {options}MOUNTPOINT"):
            Client(name=name).call("stat", path=b"/")


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot connect to the daemon on ") as caught:
        Client(tmp_path / ("x" * 200)).call("stat", path=b"/")
    assert caught.value.errno == errno.ENAMETOOLONG


def test_the_socket_is_found_by_name_or_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("VFSD_SOCKET", raising=False)
    assert Client().socket == str(tmp_path / "vfsd/default.sock")
    assert Client(name="work").socket == str(tmp_path / "vfsd/work.sock")
    monkeypatch.setenv("VFSD_SOCKET", "/x.sock")
    assert Client().socket == "/x.sock"
    assert Client(name="work").socket == str(tmp_path / "vfsd/work.sock")
    assert Client("/y.sock", "work").socket == "/y.sock"


def test_acall_outside_of_an_event_loop_says_so(client: Client) -> None:
    with pytest.raises(RuntimeError, match="use call"):
        client.acall("stat", path=b"/").send(None)


# ---------------------------------------------------------------------- many callers


def test_many_threads_share_one_connection(server: Server, client: Client) -> None:
    wrong: list[Any] = []

    def work(number: int) -> None:
        for i in range(100):
            data = b"%d-%d" % (number, i) * (1 + i * 10)
            client.call("write", path=b"/t%d" % number, data=data)
            if client.call("read", path=b"/t%d" % number)["data"] != data:
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not wrong
    assert client.call("status")["connections"] == 1


def test_large_contents_both_ways_from_many_threads(client: Client) -> None:
    """Full socket buffers on both sides: whoever sends must not wait for one who waits for it."""
    data = os.urandom(4 << 20)
    client.call("write", path=b"/big", data=data)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(3):
            client.call("write", path=b"/big%d" % number, data=data)
            if client.call("read", path=b"/big", length=8 << 20)["data"] != data:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    assert not wrong


def test_many_tasks_share_one_connection(client: Client, run: Any) -> None:
    wrong: list[Any] = []

    async def main() -> None:
        def worker(number: int) -> Callable[[], Awaitable[None]]:
            async def work() -> None:
                for i in range(30):
                    data = b"%d-%d" % (number, i) * (1 + i * 1000)
                    await client.acall("write", path=b"/a%d" % number, data=data)
                    if (await client.acall("read", path=b"/a%d" % number))["data"] != data:
                        wrong.append((number, i))

            return work

        await together(*(worker(n) for n in range(20)))
        assert (await client.acall("status"))["connections"] == 1

    run(main)
    assert not wrong


def test_large_contents_both_ways_from_many_tasks(client: Client, run: Any) -> None:
    data = os.urandom(4 << 20)
    client.call("write", path=b"/big", data=data)
    wrong: list[int] = []

    async def main() -> None:
        async def work() -> None:
            for _ in range(2):
                await client.acall("write", path=b"/other", data=data)
                if (await client.acall("read", path=b"/big", length=8 << 20))["data"] != data:
                    wrong.append(1)

        await together(*[work] * 5)

    run(main)
    assert not wrong


def test_one_client_serves_loop_after_loop_and_threads(server: Server, client: Client) -> None:
    async def main() -> None:
        assert (await client.acall("stat", path=b"/"))["ok"]

    for _ in range(3):
        asyncio.run(main())
        trio.run(main)
        client.call("stat", path=b"/")
    # Those of ended loops are closed when the next one connects.
    assert client.call("status")["connections"] <= 3


def test_errors_are_raised_in_tasks_as_in_threads(client: Client, run: Any) -> None:
    async def main() -> None:
        with pytest.raises(FileNotFoundError, match="/none"):
            await client.acall("read", path=b"/none")
        with pytest.raises(IsADirectoryError):
            await client.acall("read", path=b"/")

    run(main)


def test_a_large_write_from_a_task_is_one_commit(server: Server, client: Client, run: Any) -> None:
    async def main() -> None:
        before = server.vfs.feed.seq
        await client.acall("write", path=b"/big", data=bytes(20 << 20))
        assert server.vfs.feed.seq == before + 1

    run(main)
    assert client.call("stat", path=b"/big")["attr"]["size"] == 20 << 20


def test_a_large_contents_buffer_may_be_any_buffer(client: Client) -> None:
    client.call("write", path=b"/f", data=memoryview(bytearray(b"x" * (9 << 20))))
    assert client.call("stat", path=b"/f")["attr"]["size"] == 9 << 20


# ---------------------------------------------------------------------- waiting, giving up


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``statfs`` never answers; the list tells what became of it."""
    happened: list[str] = []

    async def never(*args: Any) -> Any:
        happened.append("started")
        try:
            await trio.sleep_forever()
        finally:
            happened.append("ended")

    monkeypatch.setitem(OPS, "statfs", never)
    return happened


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_timeout_ends_the_wait_and_the_request_but_not_the_connection(server: Server, slow: list[str]) -> None:
    with Client(server.path, timeout=0.2) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer to 'statfs'"):
            client.call("statfs")
        assert 0.15 < time.monotonic() - began < 2
        assert client.call("stat", path=b"/")["ok"]
        eventually(lambda: slow == ["started", "ended"])
        assert client.call("status")["connections"] == 1


def test_a_thread_that_waits_leaves_others_their_replies(server: Server, slow: list[str]) -> None:
    with Client(server.path, timeout=1.0) as client:
        late: list[float] = []

        def wait() -> None:
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                client.call("statfs")
            late.append(time.monotonic() - began)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(slow) == 3)
        for _ in range(20):
            began = time.monotonic()
            client.call("stat", path=b"/")
            assert time.monotonic() - began < 0.5
        for thread in threads:
            thread.join(10)
        assert len(late) == 3
        assert max(late) < 2.5
        assert client.call("stat", path=b"/")["ok"]


def test_cancelling_a_task_cancels_its_request(server: Server, client: Client, slow: list[str], run: Any) -> None:
    async def main() -> None:
        if run is RUNNERS["trio"]:
            with trio.move_on_after(0.1):
                await client.acall("statfs")
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.acall("statfs"), 0.1)
        assert (await client.acall("stat", path=b"/"))["ok"]
        assert (await client.acall("status"))["connections"] == 1

    run(main)
    eventually(lambda: slow == ["started", "ended"])


def test_cancelling_the_task_that_receives_leaves_others_their_replies(
    client: Client, slow: list[str], run: Any
) -> None:
    got: list[bool] = []

    async def main() -> None:
        async def first() -> None:
            if run is RUNNERS["trio"]:
                with trio.move_on_after(0.2):
                    await client.acall("statfs")
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.acall("statfs"), 0.2)

        async def later() -> None:
            sleep = trio.sleep if run is RUNNERS["trio"] else asyncio.sleep
            await sleep(0.05)
            # Its reply comes while the first still leads, and another after that one has gone.
            got.append((await client.acall("stat", path=b"/"))["ok"])
            await sleep(0.05)
            reply = await client.acall("read", path=b"/slow", length=10)
            got.append(reply["ok"])

        client.call("write", path=b"/slow", data=b"x")
        await together(first, later, later, later)

    run(main)
    assert got == [True] * 6


def test_cancelling_a_large_write_half_way_breaks_nothing(client: Client, run: Any) -> None:
    async def main() -> None:
        for delay in (0.0, 0.0005, 0.002):
            if run is RUNNERS["trio"]:
                with trio.move_on_after(delay):
                    await client.acall("write", path=b"/w", data=bytes(8 << 20))
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.acall("write", path=b"/w", data=bytes(8 << 20)), delay)
            assert (await client.acall("stat", path=b"/"))["ok"]
        assert (await client.acall("status"))["connections"] == 1

    run(main)


@pytest.mark.parametrize("by", ["client", "daemon"])
def test_closing_wakes_who_waits(server: Server, slow: list[str], by: str) -> None:
    client = Client(server.path)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            client.call("statfs")
        except OSError as exc:
            raised.append(exc)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(slow) == 3)
    if by == "client":
        client.close()
    else:
        server.__exit__()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert [type(exc) for exc in raised] == [VfsdInterrupted if by == "client" else VfsdUnavailable] * 3
    client.close()


def test_closing_wakes_tasks_that_wait(server: Server, slow: list[str], run: Any) -> None:
    client = Client(server.path)

    async def main() -> None:
        async def wait() -> None:
            with pytest.raises(VfsdInterrupted):
                await client.acall("statfs")

        async def close() -> None:
            await (trio.sleep if run is RUNNERS["trio"] else asyncio.sleep)(0.1)
            client.close()

        await together(wait, wait, close)

    run(main)
