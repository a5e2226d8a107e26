"""Many requests at once, and what no client can do to the daemon: garbage, half frames, floods, silence, chance."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from makers import KINDS, close_vfs, open_vfs
from rpc_server import Raw, Server, errno_of

from agenttools import wire
from agenttools.client import Client
from agenttools.wire import Encoder
from vfsd.doors import rpc, rpcroom, turns
from vfsd.doors.rpcops import OPS


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "s.sock") as server:
        yield server


# ---------------------------------------------------------------------- many at once


def test_a_thousand_pipelined_requests_are_all_answered(server: Server) -> None:
    with Raw(server) as raw:
        message = {"op": "write", "path": b"/f", "data": b"x" * 100}
        blob = b"".join(b"".join(Encoder().encode({"id": i, **message})) for i in range(2, 1002))
        sender = threading.Thread(target=raw.sock.sendall, args=(blob,))
        sender.start()
        answered = {raw.receive()["id"] for _ in range(1000)}
        sender.join(10)
        assert answered == set(range(2, 1002))


def test_a_turn_of_the_loop_answers_few_of_many_clients(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes a millisecond a look: others have theirs between, however many clients have asked."""
    looks = itertools.count(time.perf_counter(), 0.001)
    answered: list[int] = []

    async def beside() -> None:
        while True:
            answered.append(server.vfs.counters()["observed"])
            await trio.lowlevel.checkpoint()

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(server)) for _ in range(40)]
        server.on_loop(trio.lowlevel.spawn_system_task, beside)
        held = threading.Event()
        holder = threading.Thread(target=server.on_loop, args=(held.wait, 5))
        holder.start()
        for client in clients:
            client.send(id=2, op="stat", path=b"/")
        monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: next(looks)))
        held.set()
        holder.join(5)
        assert all(client.receive()["ok"] for client in clients)
    each = [after - before for before, after in itertools.pairwise(answered)]
    assert 0 < max(each) <= 4


def test_a_slow_request_holds_up_nothing_and_can_be_cancelled(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def slow(*args: Any) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("slow")

    monkeypatch.setitem(OPS, "statfs", slow)
    with Raw(server) as raw:
        raw.send(id=10, op="statfs")
        raw.send(id=11, op="stat", path=b"/")
        assert raw.receive()["id"] == 11
        raw.send(id=12, op="cancel", target=10)
        replies = {reply["id"]: reply for reply in (raw.receive(), raw.receive())}
        assert replies[12]["cancelled"] is True
        assert replies[10]["errno"] == errno.ECANCELED
        raw.send(id=13, op="cancel", target=10)
        assert raw.receive()["cancelled"] is False
        raw.send(id=10, op="stat", path=b"/")
        assert raw.receive()["ok"]
    assert ended == ["slow"]


def test_only_so_many_requests_run_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, go = [0], [0], [trio.Event()]

    async def slow(*args: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await go[0].wait()
        running[0] -= 1
        return {}

    monkeypatch.setitem(OPS, "statfs", slow)
    monkeypatch.setattr(rpc, "MAX_PENDING", 4)
    with Raw(server) as raw:
        for i in range(2, 22):
            raw.send(id=i, op="statfs")
        deadline = time.monotonic() + 5
        while most[0] < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert most[0] == 4
        server.on_loop(go[0].set)
        assert {raw.receive()["id"] for _ in range(20)} == set(range(2, 22))
        assert most[0] <= 5


def test_a_disconnect_cancels_what_runs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), threading.Event()

    async def slow(*args: Any) -> Any:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    monkeypatch.setitem(OPS, "statfs", slow)
    with Raw(server) as raw:
        raw.send(id=2, op="statfs")
        assert started.wait(5)
    assert ended.wait(5)
    with Client(server.path) as client:
        assert client.call("status")["connections"] == 1


def test_a_reply_to_a_mutation_waits_until_the_kernel_follows(server: Server) -> None:
    settled: list[int] = []

    async def settler(seq: int) -> None:
        await trio.sleep(0.05)
        settled.append(seq)

    server.vfs.feed.settler = settler
    with Raw(server) as raw:
        raw.send(id=2, op="write", path=b"/f", data=b"1")
        raw.send(id=3, op="read", path=b"/f")
        first, second = raw.receive(), raw.receive()
        assert (first["id"], first["data"], second["id"]) == (3, b"1", 2)
        assert settled == [server.vfs.feed.seq]
        raw.send(id=4, op="write", path=b"/", data=b"1")
        assert raw.receive()["errno"] == errno.EISDIR
        assert len(settled) == 1


def test_an_error_of_the_daemon_itself_is_logged_and_ends_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*args: Any) -> Any:
        raise ZeroDivisionError

    async def unsendable(*args: Any) -> Any:
        return {"x": object()}

    monkeypatch.setitem(OPS, "statfs", broken)
    monkeypatch.setitem(OPS, "status", unsendable)
    with Client(server.path) as client:
        assert errno_of(client.call, "statfs") == "EIO"
        assert errno_of(client.call, "status") == "EMSGSIZE"
        assert client.call("stat", path=b"/")["ok"]
    assert "ZeroDivisionError" in caplog.text


# ---------------------------------------------------------------------- hostile clients


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def assert_alive(server: Server) -> None:
    with Client(server.path, timeout=10) as client:
        assert client.call("stat", path=b"/")["ok"]


@pytest.mark.parametrize(
    "junk",
    [
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", wire.MAX_FRAME + 1),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 1) + b"\x90",
        struct.pack(">I", 0),
        struct.pack(">I", 5004) + b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0",
    ],
)
@pytest.mark.parametrize("hello", [True, False])
def test_garbage_is_answered_with_the_reason_and_cut_off(server: Server, junk: bytes, hello: bool) -> None:
    with Raw(server, hello=hello) as raw:
        raw.sock.sendall(junk)
        reply = raw.receive()
        assert (reply["id"], reply["errno"]) == (0, errno.EPROTO)
        assert raw.closed()
    assert_alive(server)


@pytest.mark.parametrize("number", [None, 0, -1, "1", 1.5, True, [1], 1 << 63])
def test_a_request_without_a_proper_id_is_cut_off(server: Server, number: Any) -> None:
    with Raw(server) as raw:
        raw.send(id=number, op="stat", path=b"/")
        assert raw.receive()["errno"] == errno.EPROTO
        assert raw.closed()
    assert_alive(server)


def test_an_id_in_use_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(*args: Any) -> Any:
        await trio.sleep_forever()

    monkeypatch.setitem(OPS, "statfs", slow)
    with Raw(server) as raw:
        raw.send(id=5, op="statfs")
        raw.send(id=5, op="statfs")
        assert raw.receive()["errno"] == errno.EPROTO
        assert raw.closed()
    assert_alive(server)


@pytest.mark.parametrize("op", [None, 5, b"stat", [], {}, "x" * 1000, "__class__", "statfs_"])
def test_any_op_that_is_none_is_enosys(server: Server, op: Any) -> None:
    with Raw(server) as raw:
        raw.send(id=2, op=op)
        assert raw.receive()["errno"] == errno.ENOSYS


def test_half_frames_and_silence_hold_up_nobody(server: Server) -> None:
    whole = b"".join(Encoder().encode({"id": 2, "op": "write", "path": b"/half", "data": bytes(100_000)}))
    raws = [Raw(server) for _ in range(20)]
    for i, raw in enumerate(raws):
        raw.sock.sendall(whole[: 1 + i * 5000])
    assert_alive(server)
    for raw in raws:
        raw.sock.close()
    with Client(server.path) as client:
        assert errno_of(client.call, "stat", path=b"/half") == "ENOENT"


def test_half_frames_of_all_connections_together_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests go through at once, large ones when who does not finish has been cut off, which is told."""
    monkeypatch.setattr(rpcroom, "PATIENCE_S", 0.5)
    half = b"".join(Encoder().encode({"id": 2, "op": "write", "path": b"/half", "data": bytes(16 << 20)}))[:-1]
    before = rss()
    raws = [Raw(server) for _ in range(32)]
    try:
        threads = [threading.Thread(target=send_all, args=(raw.sock, half), daemon=True) for raw in raws]
        for thread in threads:
            thread.start()
        with Client(server.path) as client:
            for _ in range(20):
                client.call("write", path=b"/small", data=bytes(50_000))
            assert rss() - before < 300 << 20
            client.call("write", path=b"/large", data=bytes(8 << 20))
            assert client.call("stat", path=b"/large")["attr"]["size"] == 8 << 20
        assert rss() - before < 300 << 20
        reply = raws[0].receive()
        assert (reply["id"], reply["errno"]) == (0, errno.ENOBUFS)
        assert "128 MiB" in reply["message"]
        assert raws[0].closed()
    finally:
        for raw in raws:
            raw.sock.close()
        for thread in threads:
            thread.join(10)
    with Client(server.path) as client:
        assert errno_of(client.call, "stat", path=b"/half") == "ENOENT"
        for _ in range(17):  # and all that was taken has been given back
            client.call("write", path=b"/large", data=bytes(8 << 20))


def send_all(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


def test_a_client_that_never_reads_replies_is_not_read_and_does_not_grow_the_daemon(server: Server) -> None:
    with Client(server.path) as client:
        client.call("write", path=b"/f", data=bytes(1 << 20))
    request = b"".join(Encoder().encode({"id": 2, "op": "read", "path": b"/f", "offset": 0, "length": 1 << 20}))
    before = rss()
    with Raw(server) as raw:
        raw.sock.settimeout(0)
        stuck = sent = 0
        while stuck < 20:
            try:
                sent += raw.sock.send(request)
                stuck = 0
            except BlockingIOError:
                stuck += 1
                time.sleep(0.02)
        assert sent > 10 * len(request)
        assert rss() - before < 64 << 20
        assert_alive(server)
        # Once it reads, all is answered.
        raw.sock.settimeout(10)
        for _ in range(50):
            assert len(raw.receive()["data"]) == 1 << 20
    assert_alive(server)


def test_disconnects_at_every_point_of_a_conversation(server: Server) -> None:
    hello = b"".join(Encoder().encode({"id": 1, "op": "hello", "version": 1}))
    write = b"".join(Encoder().encode({"id": 2, "op": "write", "path": b"/x", "data": bytes(20_000)}))
    read = b"".join(Encoder().encode({"id": 3, "op": "read", "path": b"/x"}))
    stream = hello + write + read * 50
    for cut in [0, 1, 4, 5, len(hello), len(hello) + 3, len(hello) + 9000, len(hello + write) + 7, len(stream)]:
        with Raw(server, hello=False) as raw:
            raw.sock.sendall(stream[:cut])
            if cut % 2:
                raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert_alive(server)


def test_more_connections_than_allowed_are_told_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_CONNECTIONS", 3)
    with Raw(server), Raw(server), Raw(server), Raw(server, hello=False) as fourth:
        reply = fourth.receive()
        assert (reply["id"], reply["errno"]) == (0, errno.EMFILE)
        assert fourth.closed()


@pytest.mark.parametrize("kind", KINDS)
def test_random_messages_never_take_the_daemon_down(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(20261201)
    odd: list[Any] = [
        None, True, -1, 0, 1, 5, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, 1.5, "", "x", b"", b"/", b"/f", b"/a/../..",
        b"\0", b"x" * 300, [], {}, [b"/x"], {"a": 1}, b"user.x", b"trusted.x",
    ]  # fmt: skip
    keys = [
        "path", "old", "new", "target", "data", "offset", "length", "fh", "flags", "mode", "perm", "size", "uid",
        "gid", "name", "value", "pattern", "glob", "max_count", "paths", "follow", "parents", "recursive", "expect",
        "upload", "whence", "rdev", "atime_ns", "mtime_ns", "continue", "tool", "call_id", "exclusive",
    ]  # fmt: skip
    ops = [*sorted(set(OPS) - {"shutdown", "sync"}), "hello", "cancel", "open", "open", "write"]
    vfs = open_vfs({"/": (kind, tmp_path / "volume")})
    numbers = [0]
    try:
        with Server(tmp_path / "s.sock", vfs) as server, Raw(server) as raw:
            for i in range(2, 3000):
                params = {key: rng.choice(odd) for key in rng.sample(keys, rng.randrange(8))}
                if rng.random() < 0.7:
                    params["path"] = rng.choice([b"/", b"/f", b"/d", b"/d/e"])
                if rng.random() < 0.7:
                    params["fh"] = rng.choice(numbers)
                if rng.random() < 0.5:
                    params.update(offset=rng.choice([0, 1 << 20, 1 << 43]), length=rng.choice([0, 10]), data=b"x")
                raw.send(**{**params, "id": i, "op": rng.choice(ops)})
                reply = raw.receive()
                assert reply["id"] == i
                if "fh" in reply:
                    numbers.append(reply["fh"])
            assert_alive(server)
    finally:
        close_vfs(vfs)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
