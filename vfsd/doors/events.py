"""Wakes who watches files in the mount (inotify) when a tool has changed them.

The kernel tells watchers of what goes through its own calls, and no FUSE notification makes it tell of anything else
(docs/decisions/0007). So where somebody watches, a helper process does once more on the mount what the tool did, and
the door plays along: it shows the helper the state before, takes its call, and changes nothing.

Invariants: the helper can change nothing, since all that it asks for but the happening at hand is refused; nothing it
asks for is judged or recorded; only ``run``'s own task waits for it; nobody else sees a state before, for what names
are is not cached meanwhile. Without watchers there is no helper and the door is as it was.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trio

from vfsd.core.plans import fail
from vfsd.core.types import DAEMON, NODE_MASK, Attr, Caller, SetAttr
from vfsd.doors import player, watches
from vfsd.doors.fuse import FuseDoor, Opened
from vfsd.doors.happenings import ATTRIB, CREATE, MODIFY, REMOVE, RENAME, Happening, happenings
from vfsd.doors.known import InvalEntry, Invalidation, InvalInode
from vfsd.readonly import ShownAttr

if TYPE_CHECKING:
    from vfsd.feed import Commit

log = logging.getLogger(__name__)

PENDING_MAX = 10_000
"""Happenings that wait to be told; later ones are lost to watchers."""
SCAN_SHARE = 100
"""A look for watchers is taken at most so many times its own duration apart, so that it costs 1 % of one processor."""
SCAN_SECONDS = 0.25
"""The least between two looks."""
PATIENCE = 5.0
"""Seconds for one call of the helper."""


class Events:
    """``run`` it while ``door`` serves ``mountpoint``; ``device`` gives its st_dev, None while it is not mounted."""

    def __init__(self, door: FuseDoor, mountpoint: str, device: Callable[[], int | None]) -> None:
        self._door = door
        self._vfs = door.vfs
        self._mountpoint = os.fsencode(mountpoint)
        self._device = device
        self._pending: deque[Happening] = deque()
        self._news = trio.Event()
        self._watched: set[int] = set()
        self._next_scan = 0.0
        self._helper: trio.Process | None = None
        self._at: Happening | None = None
        self._ghosts = 0

    async def run(self) -> None:
        """Until cancelled."""
        self._vfs.feed.subscribe(self._committed, shell=False)
        try:
            while True:
                await self._news.wait()
                self._news = trio.Event()
                try:
                    await self._tell()
                except OSError as exc:
                    log.warning("those who watch files in the mount are not told: %s", exc)
                    self._pending.clear()
                    await self._dismiss()
        finally:
            with trio.CancelScope(shield=True):
                await self._dismiss()

    def _committed(self, commit: Commit) -> None:
        pending = self._pending
        for one in happenings(commit.base, commit.op, commit.changes):
            if len(pending) < PENDING_MAX and (not pending or pending[-1] != one):
                pending.append(one)
        if pending:
            self._news.set()

    async def _tell(self) -> None:
        await self._vfs.feed.settled(self._vfs.feed.seq)
        if trio.current_time() >= self._next_scan:
            await self._look()
        late: list[Happening] = []
        while self._pending:
            one = self._pending.popleft()
            if self._is_watched(one):
                await self._play(one)
            else:
                late.append(one)
        if late:
            # Somebody may have begun to watch since the last look.
            await trio.sleep_until(self._next_scan)
            await self._look()
            for one in late:
                if self._is_watched(one):
                    await self._play(one)
        if not self._watched:
            await self._dismiss()

    async def _look(self) -> None:
        self._watched, cost = await trio.to_thread.run_sync(self._scan)
        self._next_scan = trio.current_time() + max(SCAN_SECONDS, SCAN_SHARE * cost)

    def _scan(self) -> tuple[set[int], float]:
        """(the inos that are watched, seconds of processor time it took); on a thread."""
        device, began = self._device(), time.thread_time()
        return set() if device is None else watches.watched(device), time.thread_time() - began

    def _is_watched(self, one: Happening) -> bool:
        if not self._watched:
            return False
        try:
            above = 0 if one.parent else self._vfs.parent_of(one.ino)
        except OSError:  # it is no more
            above = 0
        return bool({one.ino, one.parent, one.new_parent, one.replaced, above} & self._watched)

    # ---- the helper

    async def _play(self, one: Happening) -> None:
        try:
            words = await self._words(one)
        except OSError:  # it is no more
            return
        if words is None:
            return
        try:
            code = await self._ask(one, words)
        except OSError as exc:
            log.info("%s: another one", exc)
            await self._dismiss()
            code = await self._ask(one, words)
        if code:
            log.debug("%s of %d is not told to watchers: %s", one.kind, one.ino, os.strerror(code))
        if one.kind in (REMOVE, RENAME):
            # The kernel has counted links down that were gone before.
            self._drop([InvalInode(ino, True) for ino in (one.ino, one.replaced) if ino])

    def _drop(self, stale: list[Invalidation]) -> None:
        if stale and self._door.invalidate is not None:
            self._door.invalidate(stale)

    async def _ask(self, one: Happening, words: list[Any]) -> int:
        """The errno of the helper's call, 0 for none. Raises OSError when there is no answer."""
        if self._helper is None:
            await self._engage()
        assert self._helper is not None
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        self._at = one
        try:
            # The kernel must ask for these names, though somebody has looked at what they are now; and from here on
            # whoever asks may not keep the answer.
            self._drop([InvalEntry(p, n) for p, n in ((one.parent, one.name), (one.new_parent, one.new_name)) if p])
            await self._vfs.feed.settled(self._vfs.feed.seq)
            with trio.fail_after(PATIENCE):
                await self._helper.stdin.send_all(json.dumps(words).encode() + b"\n")
                answer = b""
                while not answer.endswith(b"\n"):
                    piece = await self._helper.stdout.receive_some()
                    if not piece:
                        raise OSError(errno.EPIPE, "the helper ended")
                    answer += piece
        except (trio.TooSlowError, trio.BrokenResourceError) as exc:
            raise OSError(errno.ETIMEDOUT, f"the helper does not answer ({one.kind})") from exc
        finally:
            self._at = None
        return int(answer)

    async def _words(self, one: Happening) -> list[Any] | None:
        """What to say to the helper; None for what can't be told now."""
        guard = self._vfs.guard
        if guard is not None and guard.hiding:
            return None
        if one.kind in (MODIFY, ATTRIB):
            at = self._vfs.path_of(one.ino)
            mode = 0 if at is None else (await self._vfs.getattr(one.ino, DAEMON)).mode
            if at is None or stat.S_ISLNK(mode):
                return None
            # An open for writing would keep somebody from executing it (ETXTBSY).
            plain = stat.S_ISREG(mode) and not mode & 0o111
            return [one.kind if plain else ATTRIB, os.fsdecode(self._mountpoint + at)]
        path = self._path(one.parent, one.name)
        if path is None or self._vfs.table.hides(one.parent, one.name, one.ino):
            return None
        if one.kind == RENAME:
            new = self._path(one.new_parent, one.new_name)
            return None if new is None else [RENAME, path, new]
        if one.kind == REMOVE:
            return [REMOVE, path, stat.S_IFDIR if one.is_dir else stat.S_IFREG]
        mode = (await self._vfs.lookup(one.parent, one.name, DAEMON)).mode
        return [CREATE, path, stat.S_IFMT(mode)]

    def _path(self, parent: int, name: bytes) -> str | None:
        above = self._vfs.path_of(parent)
        return None if above is None else os.fsdecode(self._mountpoint + above.rstrip(b"/") + b"/" + name)

    async def _engage(self) -> None:
        self._helper = await trio.lowlevel.open_process(
            [sys.executable, "-I", "-S", player.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for name in _PLAYED:
            setattr(self._door, name, getattr(self, f"_{name}"))

    async def _dismiss(self) -> None:
        helper = self._helper
        if helper is None:
            return
        helper.kill()
        for stream in (helper.stdin, helper.stdout):
            if stream is not None:
                await trio.aclose_forcefully(stream)
        # Until it has ended it may have a call under way, which nobody may take for another program's.
        with trio.move_on_after(PATIENCE):
            await helper.wait()
        self._helper = None
        for name in _PLAYED:
            delattr(self._door, name)

    # ---- the door's handlers while there is a helper

    def _is_helper(self, caller: Caller) -> bool:
        return self._helper is not None and caller.pid == self._helper.pid

    def _entry_ttl(self, parent: int) -> float:
        at = self._at
        if at is not None and parent in (at.parent, at.new_parent):
            return 0.0
        return type(self._door).entry_ttl(self._door, parent)

    async def _lookup(self, parent: int, name: bytes, caller: Caller) -> Attr | None:
        if not self._is_helper(caller):
            return await type(self._door).lookup(self._door, parent, name, caller)
        at = self._at
        if at is not None and at.kind == RENAME and (parent, name) == (at.new_parent, at.new_name):
            if at.replaced and self._door.known.lookups(at.replaced):
                return await self._ghost(at.replaced, False)
            raise fail(errno.ENOENT, name)
        if at is not None and (parent, name) == (at.parent, at.name):
            if at.kind == CREATE:
                raise fail(errno.ENOENT, name)
            if at.kind == RENAME:
                with contextlib.suppress(OSError):  # it is no more
                    return self._given(await self._vfs.getattr(at.ino, DAEMON))
            return await self._ghost(at.ino, at.is_dir)
        # On the way: neither judged, nor recorded, nor squashed.
        return await FuseDoor.lookup(self._door, parent, name, DAEMON)

    def _given(self, attr: Attr) -> Attr:
        self._door.known.looked_up(attr.ino)
        return attr

    async def _ghost(self, ino: int, is_dir: bool) -> Attr:
        """What was removed, as it was: itself if the kernel still has it (it may be watched), else a likeness."""
        if self._door.known.lookups(ino):
            a = await self._vfs.getattr(ino, DAEMON)
            self._door.known.looked_up(ino)
        else:
            self._ghosts += 1
            ino = NODE_MASK - self._ghosts % (1 << 20)
            mode = stat.S_IFDIR | 0o700 if is_dir else stat.S_IFREG | 0o600
            a = ShownAttr(ino, mode, 0, os.geteuid(), os.getegid(), 0, 0, 0, 0, 0, 0)
        links = 2 if stat.S_ISDIR(a.mode) else a.nlink + 1
        return ShownAttr(ino, a.mode, links, a.uid, a.gid, a.rdev, a.size, a.blocks, a.atime_ns, a.mtime_ns, a.ctime_ns)

    def _check(self, kind: str, parent: int, name: bytes) -> None:
        """EPERM for anything but the happening at hand."""
        at = self._at
        if at is None or (at.kind, at.parent, at.name) != (kind, parent, name):
            raise fail(errno.EPERM, name)

    async def _made(self, parent: int, name: bytes) -> Attr:
        self._check(CREATE, parent, name)
        return self._given(await self._vfs.lookup(parent, name, DAEMON))

    async def _mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller, umask: int = 0) -> Attr:
        if not self._is_helper(caller):
            return await type(self._door).mknod(self._door, parent, name, mode, rdev, caller, umask)
        return await self._made(parent, name)

    async def _mkdir(self, parent: int, name: bytes, perm: int, caller: Caller, umask: int = 0) -> Attr:
        if not self._is_helper(caller):
            return await type(self._door).mkdir(self._door, parent, name, perm, caller, umask)
        return await self._made(parent, name)

    async def _symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attr:
        if not self._is_helper(caller):
            return await type(self._door).symlink(self._door, parent, name, target, caller)
        return await self._made(parent, name)

    async def _unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        if not self._is_helper(caller):
            return await type(self._door).unlink(self._door, parent, name, caller)
        return self._check(REMOVE, parent, name)

    async def _rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        if not self._is_helper(caller):
            return await type(self._door).rmdir(self._door, parent, name, caller)
        return self._check(REMOVE, parent, name)

    async def _rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        if not self._is_helper(caller):
            return await type(self._door).rename(self._door, parent, name, new_parent, new_name, flags, caller)
        self._check(RENAME, parent, name)
        if self._at is None or (new_parent, new_name) != (self._at.new_parent, self._at.new_name):
            raise fail(errno.EPERM, new_name)
        return None

    async def _setattr(self, ino: int, change: SetAttr, fh: int | None, caller: Caller) -> Attr:
        if not self._is_helper(caller):
            return await type(self._door).setattr(self._door, ino, change, fh, caller)
        return await self._door.getattr(ino, None, DAEMON)

    async def _open(self, ino: int, flags: int, caller: Caller, *, clear_suid: bool = False) -> Opened:
        if not self._is_helper(caller):
            return await type(self._door).open(self._door, ino, flags, caller, clear_suid=clear_suid)
        if self._at is None or (self._at.kind, self._at.ino) != (MODIFY, ino):
            raise fail(errno.EPERM)
        return Opened(0, keep_cache=True)

    async def _release(self, ino: int, fh: int) -> None:
        if fh:
            await type(self._door).release(self._door, ino, fh)


_PLAYED = (
    "lookup", "mknod", "mkdir", "symlink", "unlink", "rmdir", "rename", "setattr", "open", "release",
    "entry_ttl",
)  # fmt: skip
"""Handlers that have a part in it."""
