"""The tool door over a real socket: what it does for a client, and what no client can do to it."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash
from local_volume import needs_root
from rpc_server import Raw, Server, errno_of, make_vfs

from agenttools import wire
from agenttools.client import Client, VfsdInterrupted
from vfsd.doors.rpcops import OPS


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "s.sock", make_vfs(b"/memories/")) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.path, timeout=10) as client:
        yield client


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


@pytest.mark.parametrize(
    ("data", "old", "new", "all_", "count", "after"),
    [
        (b"a b\n", b"b", b"c", False, 1, b"a c\n"),
        (b"b b\n", b"b", b"c", True, 2, b"c c\n"),
        (b"b b\n", b"b", b"b", True, 2, b"b b\n"),
        (b"b b\n", b"b", b"c", False, None, b"b b\n"),  # more than once
        (b"a\n", b"b", b"c", False, None, b"a\n"),  # nowhere
        (b"a\r\n", b"a", b"c", False, None, b"a\r\n"),  # line endings are the tool's business
        (b"a\n", b"a\r\n", b"c", False, None, b"a\n"),
        (b"a\0", b"a", b"c", False, None, b"a\0"),  # no text
        (b"a\xff", b"a", b"c", False, None, b"a\xff"),
        (b"a\n", b"", b"c", False, None, b"a\n"),
        (b"a" * (1 << 20) + b"b", b"b", b"c", False, None, b"a" * (1 << 20) + b"b"),  # more than a piece
    ],
)
def test_edit_does_the_plain_case_and_else_reads(
    client: Client, data: bytes, old: bytes, new: bytes, all_: bool, count: int | None, after: bytes
) -> None:
    client.call("write", path=b"/f", data=data)
    reply = client.call("edit", path=b"/f", old_text=old, new_text=new, all=all_)
    assert reply.get("count") == count
    if count is None:
        assert (reply["data"], reply["size"]) == (data[: 1 << 20], len(data))
    else:
        assert reply["size"] == len(after)
    rest = client.call("read", path=b"/f", offset=1 << 20)["data"]
    assert client.call("read", path=b"/f")["data"] + rest == after
    assert errno_of(client.call, "edit", path=b"/none", old_text=b"a", new_text=b"b") == "ENOENT"
    assert errno_of(client.call, "edit", path=b"/", old_text=b"a", new_text=b"b") == "EISDIR"


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
    monkeypatch.setattr("vfsd.listing.LIST_BYTES", 1000)
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


def test_a_list_goes_on_with_what_is_there_by_then(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfsd.listing.LIST_MAX", 700)
    for i in range(1500):
        client.call("write", path=b"/d/%04d" % i, data=b"")
    first = client.call("list", path=b"/d")
    assert [entry[0] for entry in first["entries"]] == [b"%04d" % i for i in range(700)]
    client.call("unlink", path=b"/d/1000")
    client.call("write", path=b"/d/1001", data=b"longer")
    with Client(server.path) as other:
        # Who was not told of the page before, and who was.
        for one in (other, client):
            second = one.call("list", path=b"/d", **{"continue": first["continue"]})
            sizes = {entry[0]: entry[2] for entry in second["entries"]}
            assert b"1000" not in sizes
            assert sizes[b"1001"] == 6
            third = one.call("list", path=b"/d", **{"continue": second["continue"]})
            names = [*sizes, *(entry[0] for entry in third["entries"])]
            assert names == [b"%04d" % i for i in range(700, 1500) if i != 1000]
            assert third["more"] is False


def test_glob_and_grep(client: Client) -> None:
    client.call("write", path=b"/src/a.py", data=b"x\nneedle\n")
    client.call("write", path=b"/src/b.txt", data=b"needle\n")
    assert [m[0] for m in client.call("glob", pattern="*.py", path=b"/")["matches"]] == [b"/src/a.py"]
    reply = client.call("grep", pattern=b"needle", path=b"/src", glob="*.py")
    assert reply["matches"] == [[b"/src/a.py", 2, b"needle"]]
    assert not reply["truncated"]


@needs_root
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
    assert client.call("shutdown")["ok"]
    assert server.asked == 1


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


# ---------------------------------------------------------------------- the rest


def test_the_audit_sees_who_called(server: Server, client: Client) -> None:
    seen: list[Any] = []
    server.vfs.feed.subscribe(lambda commit: seen.append(commit.caller))
    client.call("write", path=b"/f", data=b"", tool="write", call_id="c1")
    assert seen[0][:6] == (os.geteuid(), os.getegid(), os.getpid(), "rpc", "write", "c1")


def test_unknown_parameters_are_ignored(server: Server) -> None:
    with Raw(server) as raw:
        raw.send(id=2, op="stat", path=b"/", later=1.5)
        assert raw.receive()["ok"]


def test_shutdown_breaks_waiting_clients_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(*args: Any) -> Any:
        await trio.sleep_forever()

    monkeypatch.setitem(OPS, "truncate", slow)
    with Server(tmp_path / "s.sock") as server, Client(server.path) as client:
        timer = threading.Timer(0.2, server.on_loop, (server._scope.cancel,))
        timer.start()
        with pytest.raises(VfsdInterrupted, match="may or may not have been done"):
            client.call("truncate", path=b"/x", size=0)
        timer.join()
