"""The tool door over a real socket: what it does for a client, and what no client can do to it."""

from __future__ import annotations

import errno
import logging
import os
import random
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import trio
import xxhash
from build import KINDS, close_vfs, open_vfs
from rpc_server import Server, make_vfs

from agenttools import wire
from agenttools.client import Client, VfsdInterrupted
from agenttools.wire import Decoder, Encoder
from vfsd.doors import rpc


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "s.sock", make_vfs(b"/memories/")) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.path, timeout=10) as client:
        yield client


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


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# ---------------------------------------------------------------------- who and hello


def test_the_socket_is_private_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with Server(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(BaseExceptionGroup) as caught:
            trio.run(Server(path)._main, threading.Event())
        assert caught.group_contains(OSError, match="another daemon")
    assert not path.exists()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with Server(path), Client(path) as client:
        assert client.hello["name"] == "test"


def test_hello_tells_of_the_mount(client: Client) -> None:
    hello = client.hello
    assert hello["version"] == wire.VERSION
    assert hello["mountpoint"] == b"/mnt/test"
    assert hello["pid"] == os.getpid()
    assert {"read", "write", "cancel", "hello"} <= set(hello["ops"])


def test_another_version_is_refused_with_what_to_do(server: Server) -> None:
    with Raw(server, hello=False) as raw:
        raw.send(id=1, op="hello", version=99)
        reply = raw.receive()
        assert reply["errno"] == errno.EPROTONOSUPPORT
        assert "update vfsd" in reply["message"]


def test_hello_comes_first(server: Server) -> None:
    with Raw(server, hello=False) as raw:
        raw.send(id=1, op="write", path=b"/x", data=b"")
        assert raw.receive()["errno"] == errno.EPROTO
        raw.send(id=2, op="hello", version=1)
        assert raw.receive()["ok"]


def test_another_user_is_refused_with_a_reason(server: Server) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can connect as somebody else")
    server.door._uids -= {0}
    try:
        with Client(server.path) as client, pytest.raises(PermissionError, match="uid 0 may not"):
            client.call("stat", path=b"/")
    finally:
        server.door._uids |= {0}


# ---------------------------------------------------------------------- operations


def test_write_read_list_delete(client: Client) -> None:
    assert client.call("write", path=b"/a/b/f", data=b"one")["created"]
    assert not client.call("write", path=b"/a/b/f", data=b"three")["created"]
    reply = client.call("read", path=b"/a/b/f", offset=1, length=3)
    assert (reply["data"], reply["size"], stat.S_IMODE(reply["mode"])) == (b"hre", 5, 0o644)
    assert [entry[0] for entry in client.call("list", path=b"/a/b")["entries"]] == [b"f"]
    assert client.call("stat", path=b"/a/b/f")["attr"]["nlink"] == 1
    client.call("delete", path=b"/a")
    assert errno_of(client.call, "stat", path=b"/a") == "ENOENT"


def test_errors_name_the_whole_path_in_a_sentence(client: Client) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        client.call("read", path=b"/no/such", offset=0, length=1)
    assert str(caught.value) == f"[Errno 2] {os.strerror(2)}: '/no/such'"


def test_an_edit_is_compare_and_swap(client: Client) -> None:
    client.call("write", path=b"/f", data=b"old")
    old = xxhash.xxh3_64_intdigest(b"old")
    client.call("write", path=b"/f", data=b"new", expect=old)
    with pytest.raises(OSError, match="changed since it was read") as caught:
        client.call("write", path=b"/f", data=b"lost", expect=old)
    assert caught.value.errno == errno.ESTALE
    assert client.call("read", path=b"/f")["data"] == b"new"
    assert errno_of(client.call, "write", path=b"/none/f", data=b"", expect=old) == "ENOENT"
    assert errno_of(client.call, "stat", path=b"/none") == "ENOENT"


def test_two_clients_editing_at_once_lose_nothing(server: Server) -> None:
    with Client(server.path) as one:
        one.call("write", path=b"/n", data=b"0")

    def count() -> None:
        with Client(server.path) as client:
            for _ in range(100):
                while True:
                    data = client.call("read", path=b"/n")["data"]
                    try:
                        client.call(
                            "write", path=b"/n", data=b"%d" % (int(data) + 1), expect=xxhash.xxh3_64_intdigest(data)
                        )
                        break
                    except OSError as exc:
                        assert exc.errno == errno.ESTALE

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    with Client(server.path) as one:
        assert one.call("read", path=b"/n")["data"] == b"400"


def test_a_list_of_many_entries_comes_in_pieces(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfsd.doors.rpcops.LIST_BYTES", 1000)
    names = [b"%04d" % i for i in range(1000)]
    for name in names:
        client.call("write", path=b"/d/" + name, data=b"")
    reply = client.call("list", path=b"/d")
    listed = [entry[0] for entry in reply["entries"]]
    pieces = 1
    while reply["more"]:
        reply = client.call("list", path=b"/d", **{"continue": reply["continue"]})
        listed += [entry[0] for entry in reply["entries"]]
        pieces += 1
    assert listed == names
    assert pieces == 4


def test_glob_and_grep(client: Client) -> None:
    client.call("write", path=b"/src/a.py", data=b"x\nneedle\n")
    client.call("write", path=b"/src/b.txt", data=b"needle\n")
    assert [m[0] for m in client.call("glob", pattern="*.py", path=b"/")["matches"]] == [b"/src/a.py"]
    reply = client.call("grep", pattern=b"needle", path=b"/src", glob="*.py")
    assert reply["matches"] == [[b"/src/a.py", 2, b"needle"]]
    assert not reply["truncated"]


def test_like_os(client: Client) -> None:
    call = client.call
    call("mkdir", path=b"/d")
    assert errno_of(call, "mkdir", path=b"/d") == "EEXIST"
    call("mkdir", path=b"/d/e/f", parents=True)
    call("write", path=b"/d/f1", data=b"abc")
    call("link", old=b"/d/f1", new=b"/d/f2")
    call("symlink", target=b"f1", path=b"/d/s")
    assert call("readlink", path=b"/d/s")["target"] == b"f1"
    assert call("stat", path=b"/d/s")["attr"]["nlink"] == 2
    assert stat.S_ISLNK(call("stat", path=b"/d/s", follow=False)["attr"]["mode"])
    call("rename", old=b"/d/f2", new=b"/d/f3")
    assert errno_of(call, "rename", old=b"/d/f3", new=b"/d/f1", flags=1) == "EEXIST"
    call("chmod", path=b"/d/f1", perm=0o600)
    call("chown", path=b"/d/f1", uid=5, gid=6)
    call("utime", path=b"/d/f1", atime_ns=-1, mtime_ns=10**18 + 1)
    call("truncate", path=b"/d/f1", size=2)
    attr = call("stat", path=b"/d/f3")["attr"]
    assert (stat.S_IMODE(attr["mode"]), attr["uid"], attr["gid"], attr["size"]) == (0o600, 5, 6, 2)
    assert attr["atime_ns"] == -1
    call("setxattr", path=b"/d/f1", name=b"user.k", value=b"v")
    assert call("getxattr", path=b"/d/f3", name=b"user.k")["value"] == b"v"
    assert call("listxattr", path=b"/d/f1")["names"] == [b"user.k"]
    call("removexattr", path=b"/d/f1", name=b"user.k")
    assert errno_of(call, "getxattr", path=b"/d/f1", name=b"user.k") == "ENODATA"
    call("mknod", path=b"/d/fifo", mode=stat.S_IFIFO | 0o600)
    assert errno_of(call, "read", path=b"/d/fifo") == "EINVAL"
    assert errno_of(call, "open", path=b"/d/fifo") == "ENXIO"
    assert call("statfs")["namemax"] == 255
    assert errno_of(call, "rmdir", path=b"/d") == "ENOTEMPTY"
    assert errno_of(call, "rmdir", path=b"/") == "EBUSY"
    assert errno_of(call, "unlink", path=b"/d") == "EISDIR"
    call("unlink", path=b"/d/s")
    call("rmdir", path=b"/d/e/f")
    call("sync")


def test_handles(client: Client) -> None:
    call = client.call
    fh = call("open", path=b"/f", flags=os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)["fh"]
    assert call("pwrite", fh=fh, offset=4, data=b"tail")["written"] == 4
    assert call("pread", fh=fh, offset=0, length=100)["data"] == b"\0\0\0\0tail"
    call("ftruncate", fh=fh, size=6)
    call("fallocate", fh=fh, offset=0, length=10)
    assert call("fstat", fh=fh)["attr"]["size"] == 10
    assert call("seek", fh=fh, offset=0, whence=os.SEEK_DATA)["offset"] == 0
    call("unlink", path=b"/f")
    call("fsync", fh=fh)
    assert call("fstat", fh=fh)["attr"]["nlink"] == 0
    call("close", fh=fh)
    assert errno_of(call, "pread", fh=fh, offset=0) == "EBADF"
    call("write", path=b"/g", data=b"1")
    end = call("open", path=b"/g", flags=os.O_WRONLY | os.O_APPEND)["fh"]
    call("pwrite", fh=end, offset=0, data=b"2")
    assert errno_of(call, "pread", fh=end, offset=0) == "EBADF"
    assert call("read", path=b"/g")["data"] == b"12"
    directory = call("open", path=b"/", flags=os.O_DIRECTORY)["fh"]
    assert errno_of(call, "pread", fh=directory, offset=0) == "EISDIR"
    call("fsync", fh=directory)
    call("close", fh=directory)
    assert errno_of(call, "open", path=b"/g", flags=os.O_DIRECTORY) == "ENOTDIR"
    assert errno_of(call, "open", path=b"/", flags=os.O_RDWR) == "EISDIR"
    assert errno_of(call, "open", path=b"/g", flags=os.O_CREAT | os.O_EXCL) == "EEXIST"
    assert errno_of(call, "open", path=b"/none") == "ENOENT"


def test_a_handle_of_another_connection_is_no_handle(server: Server, client: Client) -> None:
    client.call("write", path=b"/f", data=b"")
    fh = client.call("open", path=b"/f")["fh"]
    with Client(server.path) as other:
        other.call("open", path=b"/f")
        assert errno_of(other.call, "fstat", fh=fh) == "EBADF"


def test_a_connection_has_a_bounded_number_of_handles(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfsd.doors.rpcfiles.MAX_HANDLES", 2)
    client.call("write", path=b"/f", data=b"")
    client.call("open", path=b"/f")
    client.call("open", path=b"/f")
    assert errno_of(client.call, "open", path=b"/f") == "EMFILE"


def test_what_a_connection_opened_is_released_when_it_goes(server: Server) -> None:
    with Client(server.path) as client:
        client.call("write", path=b"/f", data=b"x" * 100_000)
        ino = client.call("open", path=b"/f")["attr"]["ino"]
        client.call("upload_piece", upload=client.call("upload_begin")["upload"], data=b"x")
        client.call("unlink", path=b"/f")
        server.on_loop(server.vfs.table.volumes[0].getattr, ino)
        assert server.door.uploaded == 1
    deadline = time.monotonic() + 5
    while server.door.connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert errno_of(server.on_loop, server.vfs.table.volumes[0].getattr, ino) == "ESTALE"
    assert server.door.uploaded == 0


def test_a_write_larger_than_a_frame_is_one_commit(server: Server, client: Client) -> None:
    data = os.urandom(1 << 20) * 20
    before = server.vfs.feed.seq
    client.call("write", path=b"/big", data=data)
    assert server.vfs.feed.seq == before + 1
    read = bytearray()
    while piece := client.call("read", path=b"/big", offset=len(read), length=wire.MAX_PIECE)["data"]:
        read += piece
    assert bytes(read) == data
    assert errno_of(client.call, "write", path=b"/big", data=data, expect=1) == "ESTALE"


def test_uploads_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfsd.doors.rpcops.MAX_UPLOAD", 1000)
    upload = client.call("upload_begin")["upload"]
    client.call("upload_piece", upload=upload, data=bytes(600))
    assert errno_of(client.call, "upload_piece", upload=upload, data=bytes(600)) == "EFBIG"
    assert errno_of(client.call, "upload_commit", upload=upload, path=b"/x") == "EBADF"
    upload = client.call("upload_begin")["upload"]
    client.call("upload_piece", upload=upload, data=bytes(900))
    client.call("upload_commit", upload=upload, path=b"/x")
    assert client.call("stat", path=b"/x")["attr"]["size"] == 900


def test_a_route_root_is_not_deleted_with_what_is_above_it(client: Client) -> None:
    client.call("write", path=b"/memories/keep", data=b"1")
    assert errno_of(client.call, "delete", path=b"/memories") == "EBUSY"
    assert errno_of(client.call, "delete", path=b"/") == "EBUSY"
    assert client.call("read", path=b"/memories/keep")["data"] == b"1"


def test_status_stub_and_shutdown(server: Server, client: Client) -> None:
    assert client.call("status")["connections"] == 1
    client.call("stub", paths=[b"/opt/tools"])
    assert stat.S_ISDIR(client.call("stat", path=b"/opt/tools")["attr"]["mode"])
    assert b"opt" not in [entry[0] for entry in client.call("list", path=b"/")["entries"]]
    client.call("shutdown", lazy=True)
    assert server.asked == [{"lazy": True, "force": False}]


@pytest.mark.parametrize(
    ("op", "params"),
    [
        ("nothing", {}),
        ("read", {}),
        ("read", {"path": "/text"}),
        ("read", {"path": b"/f", "offset": -1}),
        ("read", {"path": b"/f", "offset": 1 << 63}),
        ("read", {"path": b"/f", "offset": True}),
        ("read", {"path": b"/f", "length": b"1"}),
        ("read", {"path": b"/f\0"}),
        ("read", {"path": b""}),
        ("read", {"path": b"/" + b"x" * 5000}),
        ("read", {"path": b"/" + b"x" * 256}),
        ("write", {"path": b"/f"}),
        ("write", {"path": b"/f", "data": "text"}),
        ("write", {"path": b"/f", "data": b"", "expect": "x"}),
        ("write", {"path": b"/f", "data": b"", "expect": -1}),
        ("write", {"path": b"/", "data": b""}),
        ("write", {"path": b"/f/", "data": b""}),
        ("open", {"path": b"/f", "flags": "r"}),
        ("pread", {"fh": 3, "offset": 0}),
        ("pread", {"fh": "x", "offset": 0}),
        ("chown", {"path": b"/", "uid": 1 << 40}),
        ("utime", {"path": b"/", "mtime_ns": "now"}),
        ("stub", {"paths": ["text"]}),
        ("stub", {"paths": [1]}),
        ("glob", {"pattern": "../x"}),
        ("grep", {"pattern": "text"}),
        ("grep", {"pattern": b"x", "max_count": -1}),
        ("cancel", {}),
        ("stat", {"path": b"/", "tool": 5}),
    ],
)
def test_wrong_parameters_are_errors_of_the_request_only(
    client: Client, caplog: pytest.LogCaptureFixture, op: str, params: dict[str, Any]
) -> None:
    if op == "cancel":
        assert client.call(op, **params)["cancelled"] is False
    else:
        with pytest.raises(OSError) as caught:
            client.call(op, **params)
        assert caught.value.errno not in (errno.EIO, None)
    assert client.call("stat", path=b"/")["ok"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


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


def test_a_slow_request_holds_up_nothing_and_can_be_cancelled(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def slow(*args: Any) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("slow")

    monkeypatch.setitem(rpc.OPS, "statfs", slow)
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

    monkeypatch.setitem(rpc.OPS, "statfs", slow)
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

    monkeypatch.setitem(rpc.OPS, "statfs", slow)
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

    monkeypatch.setitem(rpc.OPS, "statfs", broken)
    monkeypatch.setitem(rpc.OPS, "status", unsendable)
    with Client(server.path) as client:
        assert errno_of(client.call, "statfs") == "EIO"
        assert errno_of(client.call, "status") == "EMSGSIZE"
        assert client.call("stat", path=b"/")["ok"]
    assert "ZeroDivisionError" in caplog.text


# ---------------------------------------------------------------------- hostile clients


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

    monkeypatch.setitem(rpc.OPS, "statfs", slow)
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
                select.select([], [raw.sock], [], 0.05)
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
    keys = ["path", "old", "new", "target", "data", "offset", "length", "fh", "flags", "mode", "perm", "size", "uid", "gid", "name", "value", "pattern", "glob", "max_count", "paths", "follow", "parents", "recursive", "expect", "upload", "whence", "rdev", "atime_ns", "mtime_ns", "continue", "tool", "call_id", "exclusive"]
    ops = [*sorted(set(rpc.OPS) - {"shutdown", "sync"}), "hello", "cancel", "open", "open", "write"]
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


def test_the_audit_sees_who_called(server: Server, client: Client) -> None:
    seen: list[Any] = []
    server.vfs.feed.subscribe(lambda commit: seen.append(commit.caller))
    client.call("write", path=b"/f", data=b"", tool="write", call_id="c1")
    assert seen[0] == (os.geteuid(), os.getegid(), os.getpid(), "rpc", "write", "c1")


def test_unknown_parameters_are_ignored(server: Server) -> None:
    with Raw(server) as raw:
        raw.send(id=2, op="stat", path=b"/", later=1.5)
        assert raw.receive()["ok"]


def test_shutdown_breaks_waiting_clients_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(*args: Any) -> Any:
        await trio.sleep_forever()

    monkeypatch.setitem(rpc.OPS, "truncate", slow)
    with Server(tmp_path / "s.sock") as server, Client(server.path) as client:
        timer = threading.Timer(0.2, server.on_loop, (server._scope.cancel,))
        timer.start()
        with pytest.raises(VfsdInterrupted, match="may or may not have been done"):
            client.call("truncate", path=b"/x", size=0)
        timer.join()
