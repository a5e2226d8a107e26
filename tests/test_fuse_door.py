"""The FUSE door and its notifier over a real tree in memory, with a kernel played by the test."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from vfsd.backends.memory import MemoryBackend
from vfsd.core.types import Caller, SetAttr
from vfsd.doors import events as events_module
from vfsd.doors import notify
from vfsd.doors.events import Events
from vfsd.doors.fuse import FuseDoor, errno_of
from vfsd.doors.known import NEGATIVE_MAX, InvalEntry, InvalInode, Known
from vfsd.doors.notify import Notifier
from vfsd.feed import Feed
from vfsd.routes import Route, RouteTable
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume

SHELL = Caller(0, 0, 1)
TOOL = Caller(0, 0, 2, "rpc")


class Kernel:
    """Records notifications; ``hold`` makes them wait as the kernel's do."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.hold = threading.Event()
        self.hold.set()

    def inval_inode(self, ino: int, offset: int, length: int) -> None:
        self.threads.add(threading.get_ident())
        self.hold.wait(10)
        self.told.append(("inode", ino, offset))

    def inval_entry(self, parent: int, name: bytes) -> None:
        self.threads.add(threading.get_ident())
        self.hold.wait(10)
        self.told.append(("entry", parent, name))


def make_vfs() -> Vfs:
    feed, table = Feed(), RouteTable()
    volume = TreeVolume(0, MemoryBackend(), feed, time.time_ns)
    table.mount(Route(b"/", "memory", "", volume))
    return Vfs(table, feed, SystemEntries(table, feed, time.time_ns))


def with_door(test: Callable[[FuseDoor, Vfs, Kernel], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            vfs, kernel = make_vfs(), Kernel()
            door = FuseDoor(vfs)
            with Notifier(vfs.feed, door, kernel.inval_inode, kernel.inval_entry):
                await test(door, vfs, kernel)
                kernel.hold.set()

        trio.run(main)

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    return run


class Helper:
    """A process that ends when the test lets it."""

    pid = 4711
    stdin = stdout = None

    def __init__(self) -> None:
        self.killed = False
        self.ended = trio.Event()

    def kill(self) -> None:
        self.killed = True

    async def wait(self) -> None:
        await self.ended.wait()


async def settle(vfs: Vfs) -> None:
    await vfs.feed.settled(vfs.feed.seq)


async def tool_write(vfs: Vfs, ino: int, data: bytes) -> None:
    await vfs.write(ino, 0, 0, data, TOOL)
    await settle(vfs)


@with_door
async def test_a_name_that_is_nothing_may_be_remembered(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    assert await door.lookup(1, b"no", SHELL) is None
    made, _ = await vfs.create(1, b"no", 0o100644, 0, TOOL)
    await settle(vfs)
    assert ("entry", 1, b"no") in kernel.told
    found = await door.lookup(1, b"no", SHELL)
    assert found is not None
    assert found.ino == made.ino


@with_door
async def test_other_errors_of_a_lookup_are_errors(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    with pytest.raises(OSError) as caught:
        await door.lookup(1, b"n" * 256, SHELL)
    assert caught.value.errno == errno.ENAMETOOLONG


@with_door
async def test_what_the_kernel_has_not_seen_costs_no_notification(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    directory = await vfs.mkdir(1, b"d", 0o755, TOOL)
    await settle(vfs)
    kernel.told.clear()
    made, _ = await vfs.create(directory.ino, b"f", 0o100644, 0, TOOL)
    await tool_write(vfs, made.ino, b"1")
    await vfs.rename(directory.ino, b"f", directory.ino, b"g", 0, TOOL)
    await vfs.unlink(directory.ino, b"g", TOOL)
    await settle(vfs)
    assert kernel.told == []


@with_door
async def test_a_shells_own_changes_are_not_told(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    attr, opened = await door.create(1, b"f", 0o100644, 2, SHELL)
    await door.write(attr.ino, opened.fh, 0, b"data", 2, SHELL)
    await door.unlink(1, b"f", SHELL)
    await settle(vfs)
    assert kernel.told == []


@with_door
async def test_a_tool_write_drops_attributes_and_pages_once(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    attr, opened = await door.create(1, b"f", 0o100644, 2, SHELL)
    await door.write(attr.ino, opened.fh, 0, b"data", 2, SHELL)
    await tool_write(vfs, attr.ino, b"DATA")
    assert kernel.told == [("inode", attr.ino, 0)]
    await tool_write(vfs, attr.ino, b"Data")  # the kernel has asked for nothing since
    assert kernel.told == [("inode", attr.ino, 0)]
    await door.read(attr.ino, opened.fh, 0, 4)
    await tool_write(vfs, attr.ino, b"dATA")
    assert kernel.told == [("inode", attr.ino, 0)] * 2


@with_door
async def test_without_pages_only_attributes_are_dropped(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    made, _ = await vfs.create(1, b"f", 0o100644, 0, TOOL)
    await settle(vfs)
    kernel.told.clear()
    assert await door.lookup(1, b"f", SHELL) is not None
    await tool_write(vfs, made.ino, b"data")
    assert kernel.told == [("inode", made.ino, -1)]


@with_door
async def test_chmod_keeps_the_pages(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    attr, opened = await door.create(1, b"f", 0o100644, 2, SHELL)
    await door.write(attr.ino, opened.fh, 0, b"data", 2, SHELL)
    await vfs.setattr(attr.ino, SetAttr(perm=0o600), TOOL)
    await settle(vfs)
    assert kernel.told == [("inode", attr.ino, -1)]


@with_door
async def test_unlink_and_rename_drop_names(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    first = await door.mknod(1, b"a", 0o100644, 0, SHELL)
    second = await door.mknod(1, b"b", 0o100644, 0, SHELL)
    await vfs.rename(1, b"a", 1, b"b", 0, TOOL)
    await settle(vfs)
    assert {("entry", 1, b"a"), ("entry", 1, b"b"), ("inode", first.ino, -1), ("inode", second.ino, -1)} <= set(
        kernel.told
    )
    kernel.told.clear()
    await door.lookup(1, b"b", SHELL)
    await vfs.unlink(1, b"b", TOOL)
    await settle(vfs)
    assert ("entry", 1, b"b") in kernel.told


@with_door
async def test_a_new_name_drops_a_cached_listing(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    opened = await door.opendir(1, SHELL)
    assert opened.cache_dir
    list(await door.readdir(1, opened.fh, 0, SHELL))
    await vfs.mkdir(1, b"d", 0o755, TOOL)
    await settle(vfs)
    assert kernel.told == [("entry", 1, b"d"), ("inode", 1, 0)]  # the name first: see Known.stale


@with_door
async def test_notifications_come_from_another_thread(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    attr, _ = await door.create(1, b"f", 0o100644, 2, SHELL)
    await tool_write(vfs, attr.ino, b"data")
    assert kernel.threads
    assert threading.get_ident() not in kernel.threads


@with_door
async def test_settled_waits_for_the_kernel_and_the_loop_goes_on(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    attr, _ = await door.create(1, b"f", 0o100644, 2, SHELL)
    kernel.hold.clear()
    await vfs.write(attr.ino, 0, 0, b"data", TOOL)
    with trio.move_on_after(0.05) as scope:
        await settle(vfs)
    assert scope.cancelled_caught
    assert kernel.told == []
    await vfs.feed.settled(vfs.feed.seq - 1)  # of an earlier commit nothing is pending
    kernel.hold.set()
    await settle(vfs)
    assert kernel.told == [("inode", attr.ino, -1)]


def test_past_the_bound_an_ino_is_served_uncached(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(notify, "PATIENCE", 0.05)

    @with_door
    async def check(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
        attr, _ = await door.create(1, b"f", 0o100644, 2, SHELL)
        kernel.hold.clear()
        await tool_write(vfs, attr.ino, b"data")
        assert door.ttl(attr.ino) == 0.0
        assert (await door.open(attr.ino, 0, SHELL)).direct
        assert door.ttl(1) > 0
        kernel.hold.set()
        with trio.fail_after(5):
            while door.ttl(attr.ino) == 0.0:
                await trio.sleep(0.005)

    with caplog.at_level(logging.WARNING):
        check()
    assert "has not dropped" in caplog.text


@with_door
async def test_lookup_counts_pin_and_let_go(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    attr = await door.mknod(1, b"f", 0o100644, 0, SHELL)
    ino = attr.ino
    await door.lookup(1, b"f", SHELL)
    await door.unlink(1, b"f", SHELL)
    door.forget(ino, 1)
    assert (await vfs.getattr(ino, SHELL)).nlink == 0  # one lookup is left: the node lives without a name
    door.forget(ino, 1)
    with pytest.raises(OSError) as caught:
        await vfs.getattr(ino, SHELL)
    assert caught.value.errno == errno.ESTALE


@with_door
async def test_listing_begins_with_the_dots_and_resumes(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    directory = await door.mkdir(1, b"d", 0o755, SHELL)
    for i in range(5):
        await door.mknod(directory.ino, b"f%d" % i, 0o100644, 0, SHELL)
    fh = (await door.opendir(directory.ino, SHELL)).fh
    entries = list(await door.readdir(directory.ino, fh, 0, SHELL))
    assert [entry.name for entry in entries[:2]] == [b".", b".."]
    assert [entry.attr.ino for entry in entries[:2]] == [directory.ino, 1]
    assert [entry.offset for entry in entries[:2]] == [1, 2]
    assert sorted(entry.name for entry in entries[2:]) == [b"f%d" % i for i in range(5)]
    for i, entry in enumerate(entries):
        rest = list(await door.readdir(directory.ino, fh, entry.offset, SHELL))
        assert [e.name for e in rest] == [e.name for e in entries[i + 1 :]]


@with_door
async def test_append_goes_to_the_true_end_and_the_kernel_is_told(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    append = 0o2001
    attr, opened = await door.create(1, b"f", 0o100644, append, SHELL)
    await door.write(attr.ino, opened.fh, 0, b"one", append, SHELL)
    await vfs.write(attr.ino, 0, 0, b"two", TOOL, append=True)
    await settle(vfs)
    kernel.told.clear()
    await door.write(attr.ino, opened.fh, 3, b"three", append, SHELL)  # the kernel still thinks the end is at 3
    assert bytes(await vfs.read(attr.ino, 0, 0, 100)) == b"onetwothree"
    await settle(vfs)
    assert kernel.told == [("inode", attr.ino, 0)]


@with_door
async def test_a_mapped_page_is_written_where_it_is_whatever_the_handle(
    door: FuseDoor, vfs: Vfs, kernel: Kernel
) -> None:
    append = 0o2001
    attr, opened = await door.create(1, b"f", 0o100644, append, SHELL)
    await door.write(attr.ino, opened.fh, 0, b"abcdef", append, SHELL)
    await door.write(attr.ino, opened.fh, 0, b"ABC", append, SHELL, from_cache=True)
    assert bytes(await vfs.read(attr.ino, 0, 0, 100)) == b"ABCdef"


@with_door
async def test_setuid_goes_when_others_change_contents(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    other = Caller(1000, 1000, 3)
    attr, opened = await door.create(1, b"f", 0o106777, 2, SHELL)
    await vfs.setattr(attr.ino, SetAttr(perm=0o6777), SHELL)
    await door.fallocate(attr.ino, opened.fh, 0, 0, 100, SHELL)
    assert (await vfs.getattr(attr.ino, SHELL)).mode & 0o7777 == 0o6777
    await door.fallocate(attr.ino, opened.fh, 0, 0, 200, other)
    assert (await vfs.getattr(attr.ino, SHELL)).mode & 0o7777 == 0o777
    await vfs.setattr(attr.ino, SetAttr(perm=0o6777), SHELL)
    await door.open(attr.ino, 0o1001, other, clear_suid=True)
    found = await vfs.getattr(attr.ino, SHELL)
    assert (found.mode & 0o7777, found.size) == (0o777, 0)


def test_known_forgets_with_the_last_lookup_and_survives_too_many() -> None:
    pinned: list[int] = []
    known = Known(pinned.append, pinned.remove)
    known.looked_up(5)
    known.looked_up(5)
    known.forget(5, 1)
    assert pinned == [5]
    known.forget(5, 9)
    known.forget(5, 1)
    assert pinned == []
    known.forget(1, 5)
    assert known.lookups(1) == 1


def test_known_gives_all_back_at_the_end() -> None:
    pinned: list[int] = []
    known = Known(pinned.append, pinned.remove)
    for ino in (5, 6, 6, 7):
        known.looked_up(ino)
    known.forget_all()
    assert pinned == []
    assert len(known) == 1


def test_too_many_negative_names_means_any() -> None:
    from vfsd.core.changes import Dentry

    known = Known(lambda ino: None, lambda ino: None)
    for i in range(NEGATIVE_MAX):
        known.negative(1, b"%d" % i)
    assert known.stale(0, "create", [Dentry(1, b"other", 9)]) == [InvalInode(1, True)]
    known.negative(1, b"one more")
    assert known.stale(0, "create", [Dentry(1, b"other", 9)]) == [InvalEntry(1, b"other")]


def test_errors_that_are_not_ours_to_give_become_eio(caplog: Any) -> None:
    assert errno_of(OSError(errno.ENOSPC, "full"), "a test") == errno.ENOSPC
    assert errno_of(OSError(errno.EMFILE, "ours"), "a test") == errno.ENFILE
    assert caplog.text == ""
    for exc in (ValueError("oops"), OSError("no number"), OSError(5000, "too large a number")):
        assert errno_of(exc, "a test") == errno.EIO
    assert "oops" in caplog.text


@with_door
async def test_what_a_killed_helper_still_asks_for_is_not_done(door: FuseDoor, vfs: Vfs, kernel: Kernel) -> None:
    """Its last call may reach us after the kill: what it only played must not come true."""
    events, helper = Events(door, "/", lambda: None), Helper()
    for name in events_module._PLAYED:
        setattr(door, name, getattr(events, f"_{name}"))
    events._helper = helper  # type: ignore[assignment]
    await vfs.mknod(1, b"f", 0o100644, 0, SHELL)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(events._dismiss)
        await trio.testing.wait_all_tasks_blocked()
        assert helper.killed
        with pytest.raises(PermissionError):
            await door.unlink(1, b"f", Caller(0, 0, helper.pid))
        helper.ended.set()
    await door.unlink(1, b"f", Caller(0, 0, helper.pid))
