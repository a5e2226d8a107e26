"""The wait of the native engine's loop: nothing else of the event loop is left waiting behind it."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio

from vfsd.doors.engines.native import waiter as module
from vfsd.doors.engines.native.waiter import Waiter

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(params=["epoll", "turns"], autouse=True)
def event_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both with trio's epoll descriptor and, as with a trio that hides it, without."""
    if request.param == "turns":
        monkeypatch.setattr(module, "_event_loop", lambda: None)
    return str(request.param)


@pytest.fixture
def device() -> Iterator[tuple[int, int]]:
    """A pipe for a device: (what the loop reads, what sends it a request)."""
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def serve(device: int, beside: Callable[[], Awaitable[None]], *, eat: bool = True) -> int:
    """Serves requests (bytes) until ``beside`` has ended; how many there were. ``eat``: they are taken, not left."""
    served = 0

    async def main() -> None:
        nonlocal served
        waiter = Waiter(device)
        await waiter.start()
        async with trio.open_nursery() as nursery:

            async def other() -> None:
                await beside()
                nursery.cancel_scope.cancel()

            nursery.start_soon(other)
            while True:
                if not waiter.has_request():
                    await waiter.turn()
                    continue
                served += 1
                if eat:
                    os.read(device, 1)
        waiter.close()

    trio.run(main)
    return served


def test_deadlines_come_while_no_request_does(device: tuple[int, int]) -> None:
    async def beside() -> None:
        for _ in range(5):
            await trio.sleep(0.01)

    assert serve(device[0], beside) == 0


def test_threads_and_sockets_are_heard(device: tuple[int, int]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:

        async def beside() -> None:
            async def wake() -> None:
                await trio.to_thread.run_sync(theirs.send, b"hello")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wake)
                await trio.lowlevel.wait_readable(ours)
            assert ours.recv(9) == b"hello"

        assert serve(device[0], beside) == 0


def test_requests_without_end_leave_others_their_turn(device: tuple[int, int]) -> None:
    os.write(device[1], b"x")
    ours, theirs = socket.socketpair()
    with ours, theirs:

        async def beside() -> None:
            theirs.send(b"hello")
            await trio.lowlevel.wait_readable(ours)
            await trio.sleep(0.01)

        assert serve(device[0], beside, eat=False) > 1


def test_what_can_run_is_not_left_waiting(device: tuple[int, int]) -> None:
    async def beside() -> None:
        events = [trio.Event() for _ in range(50)]

        async def pass_on(mine: trio.Event, following: trio.Event) -> None:
            await mine.wait()
            following.set()

        async with trio.open_nursery() as nursery:
            for mine, following in itertools.pairwise(events):
                nursery.start_soon(pass_on, mine, following)
            events[0].set()

    assert serve(device[0], beside) == 0


def test_a_request_ends_the_wait(device: tuple[int, int]) -> None:
    seen = threading.Event()

    async def beside() -> None:
        def later() -> None:
            time.sleep(0.05)
            os.write(device[1], b"x")
            seen.set()

        await trio.to_thread.run_sync(later)
        await trio.sleep(0.01)

    assert serve(device[0], beside) == 1
    assert seen.is_set()


def test_requests_are_served_beside_a_task_that_can_always_run(device: tuple[int, int]) -> None:
    """A search gives way by checkpoints, and so can run at each turn."""
    count = 50

    async def beside() -> None:
        os.write(device[1], b"x" * count)
        for _ in range(5 * count):
            await trio.lowlevel.checkpoint()

    assert serve(device[0], beside) == count
