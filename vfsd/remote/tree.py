"""The tree of a route that waits: what a remote has, kept in memory, and how changes made elsewhere come into it.

Owns what is known of each path at the remote (``Known``), which contents are cached, and the rounds that ask for news.
Must not know what callers may do; that is ``remotevolume``. Invariants: a remote is called on worker threads only, once
the loop runs; names change only while the whole of ``lane`` is held, those of new files and what a part's holder finds
changed apart; what is dirty is never overwritten by news.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import trio
import xxhash

from vfsd.backends.memory import MemoryBackend
from vfsd.backends.remote import Found, Meta, Remote, shown, split
from vfsd.core import plans
from vfsd.core.changes import Change, Drop, Put, Write, Xattr, Zero
from vfsd.core.plans import fail
from vfsd.core.tree import Node
from vfsd.core.types import DAEMON, ROOT_NODE, Caller, StatFs
from vfsd.feed import Feed
from vfsd.remote.known import Etags, Known, answer, scratch_file, words
from vfsd.remote.lane import Lane
from vfsd.volume import TreeVolume

log = logging.getLogger(__name__)
T = TypeVar("T")

START_SECONDS = 10.0
"""How long a mount waits for a remote before it goes on without."""

THREADS = 8
"""Calls of a remote at once that change something, and as many that read."""

CACHE_BYTES = 256 << 20
"""Contents kept of a remote; above it the oldest unused ones go."""

_SLICE_S = 0.002


class RemoteTree(TreeVolume):
    """A tree volume whose truth is at ``remote``; ``label`` names the route in messages.

    ``scratch``: a directory for contents on their way, where they may be too large for memory.
    """

    inline = False

    def __init__(
        self,
        base: int,
        remote: Remote,
        feed: Feed,
        *,
        owner: tuple[int, int],
        read_only: bool = False,
        label: str = "/",
        scratch: Path | None = None,
    ) -> None:
        self.remote = remote
        self.owner = owner
        self.label = label
        self.lane = Lane()
        self.problem: str | None = "not opened yet"
        """Why the remote could not be read when it was last tried; None while it can."""
        self._loaded = False
        self._known: dict[bytes, Known] = {}
        self._absent: set[int] = set()
        self._dirty: set[int] = set()
        self._version: dict[int, int] = {}
        self._unlisted: set[int] = {ROOT_NODE} if remote.lazy else set()
        self._explicit: set[int] = {ROOT_NODE}
        self._stale_dirs: set[int] = set()
        self._links: dict[str, int] = {}
        self._cached: dict[int, int] = {}
        self._cached_bytes = 0
        self._fresh_until: dict[int, float] = {}
        self._touched: dict[bytes, int] = {}
        self._round = 0
        self._again: set[bytes] = set()
        self._covered: set[bytes] = set()
        self._following: set[int] = set()
        self._space: StatFs | None = None
        self._changers = trio.CapacityLimiter(THREADS)
        self._threads = trio.CapacityLimiter(THREADS)
        # Whole microseconds, as an item's modified_at can hold: else every file would need a record for the rest.
        super().__init__(
            base, MemoryBackend(scratch_file(scratch)), feed, lambda: time.time_ns() // 1000 * 1000, owner=owner
        )
        self.kind = remote.kind
        self.cache_seconds = remote.cache_seconds
        self.read_only = read_only

    # -- calling the remote

    async def _call(self, what: str, function: Callable[..., T], *args: object, wait: bool = True) -> T:
        """``function(*args)`` on a worker thread; its refusals as they are, all else as EIO with the reason in the log.

        ``wait`` False: a caller that is interrupted need not wait for the answer.
        """
        if self.problem is not None and self._loaded and self.remote.kind == "store":
            # Not one after the other into the same time limit, while the round of news finds out when it is back.
            raise OSError(errno.EIO, f"{self.kind}: {what}: {self.problem}")
        try:
            return await trio.to_thread.run_sync(
                lambda: function(*args), abandon_on_cancel=not wait,
                limiter=self._changers if wait else self._threads,
            )  # fmt: skip
        except Exception as exc:
            raise answer(exc, self.kind, what, f"route {self.label}") from exc

    def _need_loaded(self) -> None:
        """EIO with the reason while the remote was never read."""
        if not self._loaded:
            raise OSError(errno.EIO, f"route {self.label} is not available: {self.problem}")

    # -- starting and following

    def start(self, seconds: float = START_SECONDS) -> None:
        """Read the remote before the mount; past ``seconds`` or on failure the route waits for it in ``follow``."""
        done: list[Iterable[Found]] = []
        failed: list[Exception] = []

        def read() -> None:
            try:
                done.append(self._read_all())
            except Exception as exc:
                failed.append(exc)

        thread = threading.Thread(target=read, daemon=True, name=f"vfsd-start-{self.kind}")
        thread.start()
        thread.join(seconds)
        if done:
            for _ in self._absorb(done[0], ()):
                pass
            self._ready()
        else:
            self._failed(words(failed[0]) if failed else f"no answer within {seconds:g} s")

    def _read_all(self) -> Sequence[Found]:
        self.remote.open()
        # With ``lazy`` a listing of the root shows whether it answers at all.
        return list(self.remote.scan(b"/"))

    def _ready(self) -> None:
        self.problem = None
        self._loaded = True
        if self.remote.lazy:
            self._unlisted.discard(ROOT_NODE)

    def _failed(self, reason: str) -> None:
        if reason != self.problem:
            log.warning("route %s (%s %s): %s", self.label, self.kind, shown(self.remote.location), reason)
        self.problem = reason

    async def follow(self) -> None:
        """Ask for news, and bring out what waits, until cancelled."""
        while True:
            # A remote that takes long to tell is asked less often, so that it has time for other things too.
            began = trio.current_time()
            await self._round_of_news()
            spent = 0.0 if self.problem is not None else trio.current_time() - began
            await trio.sleep(max(self.remote.poll_seconds, min(3 * spent, 30.0)))

    async def _round_of_news(self) -> None:
        try:
            if not self._loaded:
                found = await trio.to_thread.run_sync(self._read_all, limiter=self._threads, abandon_on_cancel=True)
                async with self.lane.whole():
                    await self._absorb_gently(found, ())
                    self._ready()
                log.info("route %s answers", self.label)
                return
            await self.bring_in()
            self._space = await trio.to_thread.run_sync(self.remote.statfs, limiter=self._threads)
            if self.problem is not None:
                log.info("route %s answers again", self.label)
                self.problem = None
            await self.settle()
        except Exception as exc:
            self._failed(words(exc))

    async def bring_in(self) -> None:
        """Take in what others changed since the last time."""
        self._round += 1
        mine, again = self._round, frozenset(self._again)
        known = Etags(dict(self._known))
        news = await trio.to_thread.run_sync(
            self.remote.poll, known, again, limiter=self._threads, abandon_on_cancel=True
        )
        self._again -= again
        if news is None:
            return
        # What we changed ourselves since the question was asked is newer than the answer.
        paths = {*(f.path for f in news.found), *news.gone}
        if any(self._touched.get(path, 0) < mine for path in paths):
            async with self.lane.whole():
                newer = {path for path in paths if self._touched.get(path, 0) >= mine}
                found = [f for f in news.found if f.path not in newer]
                await self._absorb_gently(found, [path for path in news.gone if path not in newer])
                self._again |= newer
        else:
            self._again |= paths
        self._touched = {path: n for path, n in self._touched.items() if n >= mine}

    async def settle(self) -> None:
        """Bring out what waits; ``remotevolume`` has it."""

    def _touch(self, *paths: bytes) -> None:
        for path in paths:
            self._touched[path] = self._round

    # -- taking in

    async def _absorb_gently(self, found: Iterable[Found], gone: Iterable[bytes]) -> None:
        began = time.perf_counter()
        for _ in self._absorb(found, gone):
            if time.perf_counter() - began > _SLICE_S:
                await trio.lowlevel.checkpoint()
                began = time.perf_counter()

    def _absorb(self, found: Iterable[Found], gone: Iterable[bytes]) -> Iterator[None]:
        """Make the tree what the remote is at these paths; a step at each ``next``.

        Hold the lane, or the part of the one file.
        """
        below = sorted(found, key=lambda f: f.path)
        for path in sorted(gone, reverse=True):
            self._take_out(path)
            yield
        for f in below:
            try:
                self._take_in(f)
            except OSError as exc:
                log.warning("route %s: %r is not shown: %s", self.label, os.fsdecode(f.path), exc.strerror)
            yield
        for f in below:
            # Last: what was taken into a directory has changed its times.
            node = self.find(f.path) if f.is_dir and f.meta is not None else None
            if node is not None and f.meta is not None:
                self._set_meta(node, f.meta)
                yield

    def find(self, path: bytes) -> Node | None:
        """The node at a path as far as is in memory."""
        node: Node | None = self.tree.nodes[ROOT_NODE]
        for part in path.split(b"/"):
            if part and node is not None:
                node = node.children.get(part) if node.children else None
        return node

    def _apply(self, op: str, changes: Sequence[Change]) -> None:
        """Commit what the remote has already: also on a route that is read-only for callers."""
        was, self.read_only = self.read_only, False
        try:
            super()._commit(DAEMON, op, changes)
        finally:
            self.read_only = was
        self._after(changes)

    def _after(self, changes: Sequence[Change]) -> None:
        """Forget what is no more."""
        for c in changes:
            if type(c) is Drop:
                node = c.node
                self._cached_bytes -= self._cached.pop(node, 0)
                self._version.pop(node, None)
                self._fresh_until.pop(node, None)
                for known in (
                    self._absent, self._dirty, self._unlisted, self._explicit, self._stale_dirs, self._following,
                ):  # fmt: skip
                    known.discard(node)

    def _ensure_dir(self, path: bytes) -> Node:
        """The directory at a path, made where an item below it says that it is there."""
        node = self.tree.nodes[ROOT_NODE]
        for part in path.split(b"/"):
            if not part:
                continue
            child = node.children.get(part) if node.children else None
            if child is not None and not child.is_dir:
                at = self.tree.path(child) or b""
                self._take_out(at)
                self._cover(at)
                child = None
            if child is None:
                number = self.tree.next_node
                caller = Caller(*self.owner)
                self._apply("remote", plans.make(self.tree, node, part, stat.S_IFDIR | 0o755, caller, self._clock()))
                child = self.tree.nodes[number]
                if self.remote.lazy:
                    self._unlisted.add(number)
            node = child
        return node

    def _take_in(self, f: Found) -> None:
        if f.is_dir:
            node = self._ensure_dir(f.path)
            if f.meta is not None:
                self._explicit.add(node.id)
            self._known[f.path] = Known(f.etag, None, 0, f.meta)
            return
        above, name = split(f.path)
        node_at = self.find(f.path)
        if node_at is not None and node_at.is_dir:
            self._cover(f.path)
            self._known[f.path] = Known(f.etag, None, f.size, None)
            return
        parent = self._ensure_dir(above)
        mode = f.meta.mode if f.meta is not None else stat.S_IFREG | 0o644
        target = f.meta.target if f.meta is not None else None
        if node_at is not None and (stat.S_IFMT(node_at.mode) != stat.S_IFMT(mode) or node_at.target != target):
            self._take_out(f.path)
            node_at = self.find(f.path)
            parent = self._ensure_dir(above)
        known = self._known.get(f.path)
        digest = None if f.data is None else xxhash.xxh3_64_intdigest(f.data)
        self._known[f.path] = Known(f.etag, digest, f.size, f.meta)
        linked = self._links.get(f.meta.link) if f.meta is not None and f.meta.link else None
        if node_at is None and linked is not None and linked in self.tree.nodes:
            self._apply("remote", plans.link(self.tree, self.tree.nodes[linked], parent, name, self._clock()))
            node_at = self.tree.nodes[linked]
        # Of two names that others wrote, the later one's content is the file's.
        stays = node_at is not None and node_at.id in self._following and f.mtime_ns < node_at.mtime_ns
        if node_at is None:
            node_at = self._make_found(f, parent, name, mode)
        elif (
            stat.S_ISREG(mode)
            and node_at.id not in self._dirty
            and (digest is None or known is None or known.digest != digest)
        ):
            if not stays:
                self._set_content(node_at, f)
            if node_at.nlink > 1:
                # One name was written elsewhere; the others have items of their own, which are to follow.
                self._following.add(node_at.id)
        if f.meta is not None and not stays and (known is None or known.meta != f.meta):
            self._set_meta(node_at, f.meta)
        if f.meta is not None and f.meta.link:
            self._links[f.meta.link] = node_at.id

    def _make_found(self, f: Found, parent: Node, name: bytes, mode: int) -> Node:
        number = self.tree.next_node
        m = f.meta
        uid, gid = self.owner if m is None else (m.uid, m.gid)
        changes = plans.make(
            self.tree, parent, name, mode, Caller(uid, gid), self._clock(), rdev=m.rdev if m is not None else 0,
            target=m.target if m is not None and stat.S_ISLNK(mode) else None,
        )  # fmt: skip
        first = changes[0]
        assert isinstance(first, Put)
        atime, mtime, ctime = (f.mtime_ns,) * 3 if m is None else (m.atime_ns, m.mtime_ns, m.ctime_ns)
        size = f.size if stat.S_ISREG(mode) else first.size
        changes[0] = first._replace(gid=gid, size=size, atime_ns=atime, mtime_ns=mtime, ctime_ns=ctime)
        if stat.S_ISREG(mode):
            if f.data is None:
                self._absent.add(number)
            elif f.data:
                changes.insert(1, Write(number, 0, f.data))
                self._cache(number, len(f.data))
        self._apply("remote", changes)
        self._evict()
        return self.tree.nodes[number]

    def _set_content(self, node: Node, f: Found) -> None:
        """The content as the remote has it now, or that it is to be fetched."""
        changes: list[Change] = [Zero(node.id, 0, None)]
        mtime = f.mtime_ns
        if f.data is None:
            self._absent.add(node.id)
            self._uncache(node.id)
        else:
            self._absent.discard(node.id)
            changes.append(Write(node.id, 0, f.data))
            self._cache(node.id, len(f.data))
        changes.append(plans.put(node, self._clock(), size=f.size)._replace(mtime_ns=mtime))
        self._version[node.id] = self._version.get(node.id, 0) + 1
        self._apply("remote", changes)
        self._evict()

    def _cover(self, path: bytes) -> None:
        """A file gives way to a directory: there are files below it."""
        if path not in self._covered:
            self._covered.add(path)
            log.warning("route %s: the file %r is not shown: there are files below it", self.label, os.fsdecode(path))

    def _set_meta(self, node: Node, m: Meta | None) -> None:
        if m is None:
            return
        changes: list[Change] = []
        now = (node.mode, node.uid, node.gid, node.atime_ns, node.mtime_ns, node.ctime_ns)
        to = (m.mode, m.uid, m.gid, m.atime_ns, m.mtime_ns, m.ctime_ns)
        if now != to and node.id not in self._dirty:
            changes.append(
                plans.put(node, 0)._replace(
                    mode=m.mode, uid=m.uid, gid=m.gid, atime_ns=m.atime_ns, mtime_ns=m.mtime_ns, ctime_ns=m.ctime_ns
                )
            )
        have, want = self.backend.xattrs(node.id), dict(m.xattrs)
        changes += [Xattr(node.id, name, None) for name in have if name not in want]
        changes += [Xattr(node.id, name, value) for name, value in want.items() if have.get(name) != value]
        if changes:
            self._apply("remote", changes)

    def _take_out(self, path: bytes) -> None:
        """The remote has nothing at this path any more."""
        self._known.pop(path, None)
        node = self.find(path)
        if node is None or node.id == ROOT_NODE:
            return
        if node.is_dir:
            self._explicit.discard(node.id)
            self._prune(node)
            return
        if node.id in self._dirty:
            return  # whoever has it open writes it anew at close, as NFS does
        above, name = split(path)
        parent = self.find(above)
        assert parent is not None
        self._apply("remote", plans.unlink(self.tree, parent, name, self._clock()))
        self._prune(parent)

    def _prune(self, node: Node) -> None:
        """Directories that were there only for what was in them."""
        while node.id != ROOT_NODE and node.id not in self._explicit and not node.children and node.parent is not None:
            if node.id in self._unlisted:
                return
            parent, path = node.parent, self.tree.path(node) or b""
            self._apply("remote", plans.rmdir(self.tree, parent, node.name, self._clock()))
            if path in self._covered:
                self._covered.discard(path)
                self._known.pop(path, None)
                self._again.add(path)
            node = parent

    # -- contents in memory

    def _cache(self, node: int, size: int) -> None:
        """Count a content, as the newest."""
        self._cached_bytes += size - self._cached.pop(node, 0)
        self._cached[node] = size

    def _uncache(self, node: int) -> None:
        self._cached_bytes -= self._cached.pop(node, 0)

    def _evict(self) -> None:
        """Let go of contents that the remote has, the oldest first, while there is too much."""
        if self._cached_bytes <= CACHE_BYTES:
            return
        for number in list(self._cached):
            if self._cached_bytes <= CACHE_BYTES * 3 // 4:
                return
            node = self.tree.nodes.get(number)
            if node is not None and (node.id in self._dirty or not node.nlink):
                continue
            self._uncache(number)
            if node is not None:
                self.backend.commit([Zero(number, 0, None)])
                self._absent.add(number)

    async def _fetch(self, node: Node) -> None:
        """Bring the content of a node into memory; ESTALE when it is no more, EIO."""
        path = self.tree.path(node)
        if path is None:
            raise fail(errno.ESTALE)
        found = await self._call(f"read {os.fsdecode(path)}", self.remote.get, path, wait=False)
        if node.id not in self._absent:
            return
        assert found.data is not None
        data = found.data
        if data:
            self.backend.commit([Zero(node.id, 0, None), Write(node.id, 0, data)])
        self._absent.discard(node.id)
        self._fresh_until[node.id] = time.monotonic() + self.cache_seconds
        self._cache(node.id, len(data))
        node.blocks = self.backend.blocks(node.id)
        known = self._known.get(path)
        if known is not None:
            self._known[path] = known._replace(digest=xxhash.xxh3_64_intdigest(data), size=len(data))
        if node.size != len(data):
            # The listing had guessed, or it changed meanwhile: whoever knows the old size must be told.
            self._apply("remote", [plans.put(node, self._clock(), size=len(data))])
            await self._feed.settled(self._feed.seq)
        self._evict()
