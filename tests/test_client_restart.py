"""The client when the daemon goes away: what is asked again, what never is, and what the caller is told."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from rpc_server import Server

from agenttools.client import Client, VfsdInterrupted, VfsdUnavailable
from agenttools.wire import Decoder, Encoder
from vfsd.doors import rpc

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


class Fake:
    """A daemon that does what the test says: answers hello, then calls ``act(connection, request)`` for each."""

    def __init__(self, path: Path, act: Callable[[socket.socket, dict[str, Any]], None]) -> None:
        self.path = str(path)
        self.requests: list[str] = []
        self._act = act
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                decoder = Decoder()
                try:
                    while data := sock.recv(65536):
                        decoder.receive(data)
                        while (message := decoder.next()) is not None:
                            if message["op"] == "quit":
                                return
                            if message["op"] == "hello":
                                answer(sock, {"id": message["id"], "ok": True, "version": 1})
                            else:
                                self.requests.append(message["op"])
                                self._act(sock, message)
                except OSError:
                    pass

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        assert not self._thread.is_alive()


def answer(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(b"".join(Encoder().encode(message)))


def hang_up(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def test_the_next_call_after_a_restart_works(tmp_path: Path, run: Any) -> None:
    server = Server(tmp_path / "s.sock")
    client = Client(server.path)

    async def write() -> None:
        await client.acall("write", path=b"/b", data=b"2")

    async def main() -> None:
        await write()
        server.__exit__()
        with pytest.raises(VfsdUnavailable):
            await client.acall("stat", path=b"/")
        server.__enter__()
        await write()

    with server:
        client.call("write", path=b"/a", data=b"1")
    with pytest.raises(VfsdUnavailable):
        client.call("write", path=b"/a", data=b"2")
    with server:
        client.call("write", path=b"/a", data=b"3")
        assert client.call("read", path=b"/a")["data"] == b"3"
        run(main)
    client.close()


def test_a_mutation_finds_out_about_a_restart_before_it_is_sent(tmp_path: Path) -> None:
    server = Server(tmp_path / "s.sock")
    with Client(server.path) as client:
        for i in range(5):
            with server:
                client.call("write", path=b"/a", data=b"%d" % i)
                seq = server.vfs.feed.seq
            with server:
                client.call("write", path=b"/a", data=b"again")
                assert server.vfs.feed.seq == seq + 1


def test_a_call_during_a_restart_waits_for_it(tmp_path: Path) -> None:
    server = Server(tmp_path / "s.sock")
    with Client(server.path) as client:
        with server:
            client.call("write", path=b"/a", data=b"1")
        timer = threading.Timer(0.3, server.__enter__)
        timer.start()
        assert client.call("read", path=b"/a")["data"] == b"1"
        timer.join()
        server.__exit__()


def test_a_mutation_whose_answer_is_lost_is_never_repeated(tmp_path: Path, run: Any) -> None:
    with Fake(tmp_path / "f.sock", hang_up) as fake, Client(fake.path) as client:
        with pytest.raises(VfsdInterrupted, match="may or may not have been done") as caught:
            client.call("write", path=b"/a", data=b"1")
        assert caught.value.delivered
        with pytest.raises(VfsdInterrupted, match="may or may not"):
            run(lambda: client.acall("unlink", path=b"/a"))
        assert fake.requests == ["write", "unlink"]


def test_a_read_whose_answer_is_lost_is_asked_again_once(tmp_path: Path, run: Any) -> None:
    def act(sock: socket.socket, message: dict[str, Any]) -> None:
        if len(fake.requests) % 2:
            hang_up(sock, message)
        else:
            answer(sock, {"id": message["id"], "ok": True, "data": b"x"})

    with Fake(tmp_path / "f.sock", act) as fake, Client(fake.path) as client:
        assert client.call("read", path=b"/a")["data"] == b"x"
        client.close()
        assert run(lambda: client.acall("read", path=b"/a"))["data"] == b"x"
        assert fake.requests == ["read"] * 4


def test_a_daemon_that_talks_nonsense_is_named(tmp_path: Path, run: Any) -> None:
    def act(sock: socket.socket, message: dict[str, Any]) -> None:
        sock.sendall(b"\x00\x00\x00\x02\xc1\xc1")

    with Fake(tmp_path / "f.sock", act) as fake, Client(fake.path) as client:
        with pytest.raises(OSError, match="another protocol"):
            client.call("write", path=b"/a", data=b"1")
        with pytest.raises(OSError, match="another protocol"):
            run(lambda: client.acall("write", path=b"/a", data=b"1"))


def test_another_version_is_the_daemons_word(server: Server, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setattr(rpc, "VERSION", 2)
    with Client(server.path) as client:
        with pytest.raises(OSError, match="protocol version 1, this vfsd 2") as caught:
            client.call("stat", path=b"/")
        assert caught.value.errno == errno.EPROTONOSUPPORT
        with pytest.raises(OSError, match="update the client"):
            run(lambda: client.acall("stat", path=b"/"))


def test_the_child_of_a_fork_has_a_connection_of_its_own(server: Server, client: Client) -> None:
    client.call("write", path=b"/f", data=b"parent")
    code = os.fork()
    if code == 0:
        try:
            os._exit(0 if client.call("read", path=b"/f")["data"] == b"parent" else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(code, 0)[1]) == 0
    assert client.call("read", path=b"/f")["data"] == b"parent"


def test_the_client_is_usable_again_after_close(client: Client) -> None:
    client.call("stat", path=b"/")
    client.close()
    client.close()
    assert client.call("stat", path=b"/")["ok"]


def test_results_of_hello_are_kept(server: Server, client: Client, run: Any) -> None:
    async def main() -> None:
        assert (await client.ahello())["name"] == "test"

    run(main)
    before = client.call("status")["counters"]
    run(main)
    assert client.hello["name"] == "test"
    assert client.call("status")["counters"]["observed"] == before["observed"]
