"""Operations cancelled at each of their waits: done or not done, and nothing of them is left."""

from __future__ import annotations

import itertools
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from makers import ME, open_volume
from waiting import open_remote, store_at

from vfsd.check import check_volume
from vfsd.doors import rpc
from vfsd.doors.rpcops import OPS, Session
from vfsd.feed import Feed
from vfsd.paths import Paths
from vfsd.routes import Route, RouteTable
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs

assert rpc.OPS is OPS  # importing it registers all operations

Tree = dict[bytes, Any]


class Cancelling(trio.abc.Instrument):
    """Cancels ``scope`` when the task that made this has suspended for the ``at``-th time; 0: before it does."""

    def __init__(self, at: int, scope: trio.CancelScope) -> None:
        self._task, self._at, self._scope = trio.lowlevel.current_task(), at, scope
        self.waits = 0
        if at == 0:
            scope.cancel()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self.waits += 1
            if self.waits == self._at:
                self._scope.cancel()


class World:
    """A tree of one route, and a connection's session on it."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind, self.place = kind, place
        table, feed = RouteTable(), Feed()
        if kind == "store":
            self.volume = open_remote(store_at(place), feed, base=table.next_base()).volume
        else:
            self.volume = open_volume(kind, place, feed, base=table.next_base())
        table.mount(Route(b"/", kind, str(place), self.volume))
        self.vfs = Vfs(table, feed, SystemEntries(table, feed, time.time_ns))
        self.paths = Paths(self.vfs)
        host = SimpleNamespace(uploaded=0, connections=0, checkpoints=None, rules=None, status=dict, shutdown=dict)
        self.session = Session(self.vfs, self.paths, host)

    async def call(self, op: str, **message: Any) -> dict[str, Any]:
        return await OPS[op](self.session, {"op": op, **message}, ME)

    async def ino(self, path: bytes) -> int:
        return (await self.paths.resolve(path, ME, False)).ino

    async def prepare(self) -> None:
        for path in (b"/d/f", b"/d/g", b"/d/sub/h"):
            await self.call("write", path=path, data=b"old text of %b\n" % path)
        await self.call("mkdir", path=b"/e")
        await self.call("setxattr", path=b"/d/f", name=b"user.b", value=b"b")

    async def tree(self) -> Tree:
        """All that is there, by path: the mode of a directory, a link's target, and all of a file but times."""
        found: Tree = {}
        todo = [(b"/", self.vfs.root_ino)]
        while todo:
            path, ino = todo.pop()
            for name, attr in list(await self.vfs.children(ino, ME)):
                below = path + name
                if stat.S_ISLNK(attr.mode):
                    found[below] = await self.vfs.readlink(attr.ino, ME)
                elif stat.S_ISDIR(attr.mode):
                    found[below] = stat.S_IMODE(attr.mode)
                    todo.append((below + b"/", attr.ino))
                else:
                    data = bytes(await self.vfs.read(attr.ino, 0, 0, 1 << 20, ME))
                    xattrs = sorted(await self.vfs.listxattr(attr.ino, ME))
                    found[below] = (stat.S_IMODE(attr.mode), attr.nlink, data, xattrs)
        return found

    async def let_go(self) -> None:
        """The connection ends; then nothing may be held by anybody."""
        await self.session.close()
        assert self.vfs.counters()["open"] == 0
        if self.kind == "store":
            with trio.fail_after(5):
                async with self.volume.lane.whole():
                    assert not self.volume.lane._busy
        if self.kind == "state":
            with trio.fail_after(5):
                async with self.volume.store.busy:
                    pass
        if self.kind != "local":
            assert [node.id for node in self.volume.tree.nodes.values() if node.pins] == []


Operation = Callable[[World], Awaitable[object]]


async def through_a_handle(w: World) -> None:
    fh = (await w.call("open", path=b"/d/f", flags=os.O_RDWR))["fh"]
    await w.call("pwrite", fh=fh, offset=0, data=b"new text of /d/f\n")
    await w.call("fsync", fh=fh)
    await w.call("close", fh=fh)


async def upload(w: World) -> None:
    number = (await w.call("upload_begin"))["upload"]
    await w.call("upload_piece", upload=number, data=b"uploaded\n" * 1000)
    await w.call("upload_commit", upload=number, path=b"/d/f")


async def as_a_program(w: World) -> None:
    """What the kernel sends for open(O_CREAT), write, close."""
    attr, fh = await w.vfs.create(await w.ino(b"/d"), b"made", 0o644, os.O_WRONLY, ME)
    try:
        await w.vfs.write(attr.ino, fh, 0, b"by a program\n", ME)
        await w.vfs.flush(attr.ino, fh, ME)
    finally:
        with trio.CancelScope(shield=True):
            await w.vfs.release(attr.ino, fh)


async def exchange(w: World) -> None:
    await w.vfs.rename(await w.ino(b"/d"), b"f", await w.ino(b"/d"), b"g", 2, ME)


WHOLE: dict[str, Operation] = {
    "write new": lambda w: w.call("write", path=b"/d/new", data=b"new\n"),
    "write over": lambda w: w.call("write", path=b"/d/f", data=b"new text\n"),
    "edit": lambda w: w.call("edit", path=b"/d/f", old_text=b"old", new_text=b"newer"),
    "delete": lambda w: w.call("delete", path=b"/d/f"),
    "mkdir": lambda w: w.call("mkdir", path=b"/e/x"),
    "rmdir": lambda w: w.call("rmdir", path=b"/e"),
    "rename": lambda w: w.call("rename", old=b"/d/f", new=b"/e/f"),
    "rename over": lambda w: w.call("rename", old=b"/d/f", new=b"/d/g"),
    "rename a directory": lambda w: w.call("rename", old=b"/d", new=b"/e/d"),
    "exchange": exchange,
    "chmod": lambda w: w.call("chmod", path=b"/d/f", perm=0o600),
    "utime": lambda w: w.call("utime", path=b"/d/f", atime_ns=1, mtime_ns=2),
    "symlink": lambda w: w.call("symlink", path=b"/d/l", target=b"f"),
    "link": lambda w: w.call("link", old=b"/d/f", new=b"/e/hard"),
    "unlink": lambda w: w.call("unlink", path=b"/d/sub/h"),
    "truncate": lambda w: w.call("truncate", path=b"/d/f", size=3),
    "setxattr": lambda w: w.call("setxattr", path=b"/d/f", name=b"user.a", value=b"v"),
    "removexattr": lambda w: w.call("removexattr", path=b"/d/f", name=b"user.b"),
    "upload": upload,
}
"""Each is one change."""

STEPS: dict[str, Operation] = {
    "write with parents": lambda w: w.call("write", path=b"/p/q/new", data=b"new\n"),
    "delete all": lambda w: w.call("delete", path=b"/d"),
    "through a handle": through_a_handle,
    "as a program": as_a_program,
}
"""Each is several, of which the first few may have been made."""

READS: dict[str, Operation] = {
    "list": lambda w: w.call("list", path=b"/d"),
    "read": lambda w: w.call("read", path=b"/d/f"),
    "glob": lambda w: w.call("glob", pattern="**/*"),
    "grep": lambda w: w.call("grep", pattern=b"text", path=b"/"),
    "sync": lambda w: w.call("sync"),
}


async def cancelled(w: World, at: int, operation: Operation) -> bool:
    """Whether the operation ended before its wait number ``at``, and so was not cancelled."""
    with trio.CancelScope() as scope:
        instrument = Cancelling(at, scope)
        trio.lowlevel.add_instrument(instrument)
        try:
            await operation(w)
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return not scope.cancel_called


def trees(kind: str, place: Path, operation: Operation) -> tuple[Tree, Tree]:
    """The tree before the operation and after it, undisturbed."""

    async def both(w: World) -> tuple[Tree, Tree]:
        await w.prepare()
        before = await w.tree()
        await operation(w)
        await w.session.close()
        return before, await w.tree()

    w = World(kind, place)
    try:
        return trio.run(both, w)
    finally:
        w.volume.close()


@pytest.mark.parametrize("kind", ["state", "local", "store"])
@pytest.mark.parametrize("name", [*WHOLE, *STEPS, *READS])
def test_cancelled_at_each_wait(kind: str, name: str, tmp_path: Path) -> None:
    operation = (WHOLE | STEPS | READS)[name]
    before, after = trees(kind, tmp_path / "undisturbed", operation)

    async def session(w: World, at: int) -> bool:
        await w.prepare()
        ended = await cancelled(w, at, operation)
        await w.let_go()
        found = await w.tree()
        assert_between(name, found, before, after)
        # Nobody is in the way of who comes next.
        with trio.fail_after(5):
            await w.call("write", path=b"/d/f", data=b"later\n")
            assert bytes((await w.call("read", path=b"/d/f"))["data"]) == b"later\n"
        return ended

    async def again(w: World) -> Tree:
        return await w.tree()

    for at in itertools.count():
        place = tmp_path / f"at{at}"
        w = World(kind, place)
        try:
            ended = trio.run(session, w, at)
            live = trio.run(again, w)
        finally:
            w.volume.close()
        w = World(kind, place)
        try:
            assert trio.run(again, w) == live
        finally:
            w.volume.close()
        if kind == "state":
            assert check_volume(place) == []
        if ended:
            break
        assert at < 200, "it never ends"
    # One that waits for a store was cancelled in the midst of it, too.
    assert at > 1 or kind != "store" or name in READS


def assert_between(name: str, found: Tree, before: Tree, after: Tree) -> None:
    if name not in STEPS:
        assert found in (before, after)
        return
    for path in {*found, *before, *after}:
        allowed = [before.get(path), after.get(path)]
        if name in ("as a program", "through a handle"):
            allowed.append((0o644, 1, b"", []))  # made, and not yet written
        assert found.get(path) in allowed, path


class Hanging(trio.abc.Instrument):
    """Closes a client's socket when the tasks of the daemon have run for the ``at``-th time since the request."""

    def __init__(self, at: int, client: socket.socket) -> None:
        self._left, self._client = at, client

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            self._client.close()


DOOR: dict[str, dict[str, Any]] = {
    "write new": {"op": "write", "path": b"/d/new", "data": b"new\n"},
    "edit": {"op": "edit", "path": b"/d/f", "old_text": b"old", "new_text": b"newer"},
    "rename over": {"op": "rename", "old": b"/d/f", "new": b"/d/g"},
    "delete all": {"op": "delete", "path": b"/d"},
    "open": {"op": "open", "path": b"/d/f", "flags": os.O_RDWR},
    "grep": {"op": "grep", "pattern": b"text", "path": b"/"},
}


@pytest.mark.parametrize("kind", ["state", "store"])
@pytest.mark.parametrize("name", DOOR)
def test_a_client_that_goes_at_any_moment(kind: str, name: str, tmp_path: Path) -> None:
    async def alone(w: World) -> object:
        return await w.call(**DOOR[name])

    before, after = trees(kind, tmp_path / "undisturbed", alone)

    async def session(w: World, at: int) -> bool:
        """Whether the request was answered before the client went."""
        await w.prepare()
        door = rpc.RpcDoor(w.vfs, hello={}, status=dict, shutdown=dict)
        async with trio.open_nursery() as nursery:
            await nursery.start(door.serve, tmp_path / f"{at}.sock")
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(0)
            client.connect(str(tmp_path / f"{at}.sock"))
            for message in ({"id": 1, "op": "hello", "version": rpc.VERSION, "client": "t"}, {"id": 2, **DOOR[name]}):
                client.sendall(b"".join(rpc.Encoder().encode(message)))
            hanging = Hanging(at, client)
            trio.lowlevel.add_instrument(hanging)
            with trio.fail_after(20):
                answers = await receive(client)
                client.close()
                while door.connections:
                    await trio.sleep(0.001)
            trio.lowlevel.remove_instrument(hanging)
            nursery.cancel_scope.cancel()
        await w.let_go()
        assert_between(name, await w.tree(), before, after)
        return answers == 2

    async def receive(client: socket.socket) -> int:
        """How many replies came before the socket was closed."""
        decoder, count = rpc.Decoder(), 0
        while count < 2:
            try:
                decoder.receive(client.recv(1 << 16))
            except BlockingIOError:
                await trio.sleep(0.0005)
                continue
            except OSError:  # closed by the instrument
                break
            while (reply := decoder.next()) is not None:
                assert reply["ok"], reply
                count += 1
        return count

    for at in itertools.count(1):
        w = World(kind, tmp_path / f"at{at}")
        try:
            answered = trio.run(session, w, at)
        finally:
            w.volume.close()
        if answered:
            break
        assert at < 500, "it never ends"
    assert at > 2
