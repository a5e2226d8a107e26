"""A state volume on disk: a journal that takes each commit, SQLite behind it, the contents in an extent file.

Owns the directory ``DIR``: ``journal.0``, ``journal.1``, ``tree.db`` (WAL), ``data``, ``lock``, ``ballast``. Must not
know POSIX rules.

A commit writes new bytes to the data file, then one journal record; it survives the death of the daemon at once and,
after ``sync`` (data first, then the journal), power loss. ``maintain`` folds the records into SQLite in a thread; a
start replays what was not folded. Invariants:
- The journal file being folded is emptied only after the database has its records durably.
- Whatever has records not yet folded is in memory: nodes and loaded directories in the core's tree, extent maps and
  extended attributes here. So what is read from the database is never out of date.
- A sync that failed ends all writing: the kernel would tell the next one that all is well.
- Without the room to open it a volume is read-only, its journal folded in this process's memory, until there is.
Crash window: bytes written in place before a record that is never written may be there without their mtime; they were
not acknowledged. A full disk opens no such window, for the record's room is made sure of before. Why a journal:
docs/decisions/0003-journal-before-sqlite.md.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import trio

from vfsd.backends import database, history
from vfsd.backends.ballast import Ballast, deletes
from vfsd.backends.base import DiskFull, Stored, VolumeError
from vfsd.backends.database import EXTENT, PATCH, connect, lock_volume
from vfsd.backends.extents import ExtentFile
from vfsd.backends.filemap import Extent
from vfsd.backends.freespace import BLOCK, joined
from vfsd.backends.history import Checkpoint
from vfsd.backends.journal import Journal, Rows
from vfsd.backends.loading import Loading
from vfsd.backends.places import Places
from vfsd.backends.sqlitereads import Reads
from vfsd.core.changes import Change, Content, Dentry, Drop, NoDentry, Put, Reserve, Target, Write, Xattr, Zero
from vfsd.core.plans import fail

log = logging.getLogger(__name__)
T = TypeVar("T")

QUICK = 0.5e-3
"""Seconds of a sync after which the next is made on the loop: with a thread it would take longer for who asks."""
_CODES: dict[type, int] = {kind: code for code, kind in enumerate((Put, Target, Drop, Dentry, NoDentry, Xattr))}
assert list(_CODES.values()) == list(range(EXTENT))

FULL = "the disk is full; read-only until there is room"
"""The problem that goes by itself."""


class SqliteBackend(Loading, Reads):
    """Implements ``Backend`` in a directory of the host. Raises VolumeError when it can't be opened."""

    kind = "state"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._pending: list[Rows] = []
        self._batch: list[Rows] = []
        self._batch_seq = 0
        self._again = False
        self.folds = 0
        """Folds done since the volume was opened."""
        self._xattrs: dict[int, dict[bytes, bytes]] = {}
        self.busy = trio.Lock()
        self.problem: str | None = None
        """Why it is read-only."""
        self.sync_waits = True
        self._waits = False
        """It is read-only until the disk has room."""
        self._ballast = Ballast(directory)
        self._lock = lock_volume(directory)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock)
            try:
                self._ballast.lend()
                self._open(directory, undo)
            except OSError as error:
                raise VolumeError(f"volume {directory} can't be opened: {error.strerror}") from None
            except sqlite3.Error as error:
                raise VolumeError(database.corrupt(directory, error)) from None
            undo.pop_all()
        self._ballast.fill()

    def _open(self, directory: Path, undo: contextlib.ExitStack) -> None:
        self._journal = Journal(directory)
        undo.callback(self._journal.close)
        fd = os.open(directory / "data", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, fd)
        database.sync_directory(directory)
        try:
            self._connect()
        except DiskFull as error:
            self._connect_alone(error)
        undo.callback(lambda: self._db.close())
        self._data = ExtentFile(fd, self._fetch, self.keeps)
        self.read, self.seek, self.contents = self._data.read, self._data.seek, self._data.contents
        self.begin, self.lay, self.leave = self._data.begin, self._data.lay, self._data.leave
        self.forget_maps, self.new = self._data.forget_maps, self._data.new
        self._find_free_space()
        self._data.freeze(history.newest(self._db))
        youngest = self._execute("SELECT coalesce(max(epoch), 1) FROM extent").fetchone()[0]
        self._data.epoch = max(self._data.frozen + 1, youngest)
        self._last_node = self.next_node() - 1
        self._nodes: int = self._execute("SELECT count(*) FROM node").fetchone()[0]
        self._xattr_nodes: set[int] = {n for (n,) in self._execute("SELECT DISTINCT node FROM xattr")}
        # Asked for again when the tree is built: whatever can't be read of the start is found here.
        self.root()
        self.orphans()

    def _connect(self, alone: bool = False) -> None:
        """Raises VolumeError, DiskFull; then nothing is open."""
        db = connect(self._dir, alone=alone)
        try:
            database.recover(db, self._journal, self._dir, keep=not alone)
        except BaseException:
            db.close()
            raise
        self._db, self._execute = db, db.execute
        self._places = Places(self._dir)

    def _connect_alone(self, error: DiskFull) -> None:
        self._connect(alone=True)
        self._journal.doubt()
        self._waits = True
        self.problem = FULL
        log.error("%s; until there is room it is read-only", error)

    def _become_writable(self) -> None:
        """If the disk has room by now. Raises VolumeError."""
        if not self._ballast.has_room():
            return
        self._db.close()
        try:
            self._connect()
        except DiskFull as error:
            self._connect_alone(error)
            return
        self.problem, self._waits = None, False
        self._ballast.fill()
        log.warning("volume %s is writable again: the disk has room", self._dir)

    # -- loading

    def _fetch(self, node: int) -> list[Extent]:
        return self._rows("SELECT offset, length, disk, epoch FROM extent WHERE node=? ORDER BY offset", node)

    def _find_free_space(self) -> None:
        used, kept = self._execute("SELECT disk, length FROM extent ORDER BY disk"), history.kept_runs(self._db)
        self._data.free.leave(used if not kept else sorted({*used, *kept}))
        # Less a block, whose end may be past the file's.
        self._data.file.size = max(self._data.file.size, self._data.free.end - BLOCK + 1)
        self._look()

    def orphans(self) -> Sequence[Stored]:
        # While it is read-only they can't be purged; the next start will.
        return [] if self.problem is not None else super().orphans()

    def xattrs(self, node: int) -> dict[bytes, bytes]:
        found = self._xattrs.get(node)
        if found is not None:
            return found
        if node not in self._xattr_nodes:
            return {}
        return dict(self._rows("SELECT name, value FROM xattr WHERE node=?", node))

    def blocks(self, node: int) -> int:
        return self._data.map(node).used // 512

    # -- committing

    def commit(self, changes: Sequence[Change]) -> None:
        if self.problem is not None:
            raise fail(errno.EROFS)
        if self._ballast.owed and not deletes(changes):
            self._make_room()
            if not self._ballast.fill():
                raise fail(errno.ENOSPC)
        try:
            self._commit(changes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            roomier = self._make_room()
            if not (deletes(changes) and self._ballast.give_up()) and not roomier:
                raise
            self._commit(changes)

    def _commit(self, changes: Sequence[Change]) -> None:
        data = self._data
        rows: Rows = []
        # First of all: what is written in place below can't be undone if there is no room for the record.
        self._journal.ensure_room()
        try:
            for c in changes:
                code = _CODES.get(type(c))
                if code is not None:
                    rows.append((code, *c))
                    if type(c) is Put:
                        if c.node > self._last_node:
                            self._last_node = c.node
                            self._nodes += 1
                            data.new(c.node)
                    elif type(c) is Drop:
                        data.drop(c.node)
                elif type(c) is Write:
                    data.write(c.node, c.offset, c.data)
                elif type(c) is Zero:
                    data.zero(c.node, c.offset, c.end)
                elif type(c) is Reserve:
                    data.reserve(c.node, c.offset, c.end)
                elif type(c) is Content:
                    data.restore(c.node, list(c.extents))
            if data.rows:
                rows += [(EXTENT, *row) for row in data.rows]
            if data.patches:
                rows += [(PATCH, *patch) for patch in data.patches]
            self._journal.append(rows)
        except BaseException:
            data.end(False)
            raise
        data.end(True)
        self._pending.append(rows)
        unfolded = self._unfolded
        for c in changes:
            unfolded.add(c.node)
            if type(c) is Put:
                continue
            if type(c) is NoDentry:
                self._note_gone(c.parent, c.name)
            elif type(c) is Dentry:
                if self._gone and c.parent in self._gone:
                    self._gone[c.parent].discard(c.name)
            elif type(c) is Xattr:
                self._note_xattr(c)
            elif type(c) is Drop:
                self._nodes -= 1
                self._xattr_nodes.discard(c.node)
                self._xattrs.pop(c.node, None)

    def revived(self, count: int) -> None:
        """So many of the nodes of the last commit had been there before."""
        self._nodes += count

    def _note_xattr(self, c: Xattr) -> None:
        values = dict(self.xattrs(c.node))
        if c.value is None:
            values.pop(c.name, None)
        else:
            values[c.name] = c.value
        self._xattrs[c.node] = values
        self._xattr_nodes.add(c.node)

    # -- space

    def _make_room(self) -> bool:
        """On a full disk: use the blocks waiting in quarantine, False when there are none. Raises OSError."""
        if not self._data.quarantined():
            return False
        with self._freed() as runs:
            self._fdatasync()
            self._data.punch(runs)
        return True

    # -- durability

    def _fdatasync(self, *, journal: bool = True) -> None:
        """May be called in a thread."""
        try:
            begun = time.perf_counter()
            self._data.file.sync()
            if journal:
                self._journal.sync()
            self.sync_waits = time.perf_counter() - begun > QUICK
        except OSError as error:
            self._look()  # a file that is gone has a sentence of its own
            # The kernel forgets what it could not write, and would tell the next sync that all is well.
            self._fail_for_good(f"a sync failed ({error.strerror})")
            raise

    @contextlib.contextmanager
    def _freed(self, *, punched: bool = True) -> Iterator[list[tuple[int, int]]]:
        """The blocks freed so far: free to use once the block has made their freeing durable, else they wait on."""
        runs = self._data.drain()
        try:
            yield runs
        except BaseException:
            self._data.requeue(runs)
            raise
        self._data.release(runs, punched=punched)

    async def sync(self) -> None:
        # What waits for room has lost nothing: the journal has it, and syncing that takes no room.
        if self.problem not in (None, FULL):
            raise fail(errno.EIO)
        with self._freed(punched=False):
            if self.sync_waits:
                await trio.to_thread.run_sync(self._fdatasync)
            else:
                self._fdatasync()

    async def maintain(self) -> None:
        """Fold what there is; what can't be folded now stays in the journal until the next round."""
        if self.problem == FULL:
            async with self.busy:
                self._become_writable()
        self._look()
        if self.problem is None and self.unfolded:
            async with self.busy:
                try:
                    await self.fold()
                except OSError as error:
                    log.warning("volume %s: the journal is not folded yet: %s", self._dir, error.strerror)

    @property
    def unfolded(self) -> bool:
        """Whether there is anything to fold."""
        return bool(self._pending or self._batch)

    async def fold(self) -> None:
        """Fold all there is at this call, in a thread, for who holds ``busy``. Raises OSError."""
        with self._turn() as runs:
            await trio.to_thread.run_sync(self._fold, runs)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[list[tuple[int, int]]]:
        """Start a new journal file, unless a failed fold still needs the other; inside, fold, given the blocks freed.

        Raises OSError, for sqlite3.Error too, with the records still in the journal.
        """
        self._look()
        if self.problem is not None:
            raise OSError(errno.EROFS, f"nothing can be changed: {self.problem}")
        self._again = bool(self._batch)
        if not self._again:
            self._journal.rotate()
            self._batch, self._pending = self._pending, []
            self._batch_seq = self._journal.seq
            self._take_up()
            self._data.turn_log()
        try:
            with self._freed() as runs:
                yield runs
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
            if not full:
                self._fail_for_good(str(error))
            raise fail(errno.ENOSPC if full else errno.EIO) from error
        self._folded()

    def _fold(self, runs: list[tuple[int, int]], then: Callable[[sqlite3.Connection], T] | None = None) -> T | None:
        """The batch into the database, durably, ``then`` in the same transaction; ``runs`` go back to the host."""
        # Data first (as ext4's data=ordered), so that no row outlives power loss without the bytes it names. And when
        # it was tried before: records younger than the batch, which may have freed some of ``runs``.
        self._fdatasync(journal=self._again)
        db = database.connect_again(self._dir)
        try:
            try:
                result = database.fold(db, self._batch, self._batch_seq, then)
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_FULL:
                    raise
                # What has been freed is room for the database's own log, once the journal can't lose its freeing.
                self._fdatasync()
                self._data.punch(runs)
                result = database.fold(db, self._batch, self._batch_seq, then)
            if then is None:
                database.shorten(db)
        finally:
            db.close()
        runs[:] = joined(runs)
        self._data.punch(runs)
        self._journal.clear_folded()
        # Piece by piece, for nobody else gets a turn while a list of a hundred thousand rows goes.
        while self._batch:
            del self._batch[-100:]
        return result

    def _folded(self) -> None:
        self._data.log_emptied()
        self._taken_up()
        self.folds += 1
        if not self._pending:
            self._xattrs.clear()
        self._ballast.fill()

    def fold_now(self) -> None:
        """Fold all there is, on the loop, by who holds ``busy`` and is about to read the database. Raises OSError."""
        while self._pending or self._batch:
            with self._turn() as runs:
                self._fold(runs)

    # -- checkpoints

    async def checkpoint(self, name: str, label: str, cause: str, time_ns: int) -> Checkpoint:
        """Hold the volume as it is at this call, by who holds ``busy``. Raises OSError (ENOSPC, EIO, EROFS)."""
        with self._holding(name, label, cause, time_ns) as (made, runs, insert):
            await trio.to_thread.run_sync(self._fold, runs, insert)
        return made

    def checkpoint_now(self, name: str, label: str, cause: str, time_ns: int) -> Checkpoint:
        """``checkpoint`` on the loop."""
        with self._holding(name, label, cause, time_ns) as (made, runs, insert):
            self._fold(runs, insert)
        return made

    @contextlib.contextmanager
    def _holding(
        self, name: str, label: str, cause: str, time_ns: int
    ) -> Iterator[tuple[Checkpoint, list[tuple[int, int]], Callable[[sqlite3.Connection], None]]]:
        """What the fold inside needs to write a checkpoint of this moment."""
        if self.problem is not None:
            raise fail(errno.EROFS)
        while self._batch:
            self.fold_now()
        with self._turn() as runs:
            data = self._data
            made = Checkpoint(data.epoch, name, label, cause, time_ns)
            # From here on a change goes to new blocks, also while a thread still writes the checkpoint's row.
            data.freeze(data.epoch)
            data.epoch += 1

            def insert(db: sqlite3.Connection) -> None:
                db.execute("INSERT INTO checkpoint VALUES (?,?,?,?,?)", made)

            yield made, runs, insert

    async def drop_checkpoint(self, epoch: int) -> None:
        """Forget one and free what only it needed. Raises OSError."""
        async with self.busy:
            while self._batch:
                self.fold_now()
            data = self._data
            # While the thread works changes go on, and must leave the checkpoint whole: it may be there after a crash.
            data.begin_thaw(max((c.epoch for c in self.checkpoints() if c.epoch != epoch), default=0))
            try:
                with self._turn() as runs:
                    freed = await trio.to_thread.run_sync(self._fold, runs, lambda db: history.drop(db, epoch))
            except BaseException:
                data.end_thaw(False)
                raise
            data.end_thaw(True)
            if freed:
                await trio.to_thread.run_sync(data.punch, freed)
                data.release(freed)

    async def compact(self) -> None:
        """Give all free space back to the host, that of the database too. Raises OSError."""
        async with self.busy:
            self.fold_now()
            with self._data.free_runs() as free, self._turn() as runs:
                await trio.to_thread.run_sync(self._compact, runs, free)

    async def give_back(self) -> None:
        """Give the data file's free space back to the host."""
        async with self.busy:
            with self._data.free_runs() as free:
                await trio.to_thread.run_sync(self._data.punch, free)

    def _compact(self, runs: list[tuple[int, int]], free: list[tuple[int, int]]) -> None:
        self._fold(runs)
        self._data.punch(free)
        db = database.connect_again(self._dir)
        try:
            db.execute("VACUUM")
            database.shorten(db)
        finally:
            db.close()

    def _look(self) -> None:
        if self.problem is None and (found := self._places.wrong(self._data.file)) is not None:
            self._fail_for_good(*found)

    def _fail_for_good(self, why: str, then: str = "mount it again once the cause is gone") -> None:
        """Take no more: the journal keeps every record, so nothing acknowledged is lost, but nothing new is safe."""
        if self.problem in (None, FULL):
            log.error("volume %s is read-only from now on: %s; %s", self._dir, why, then)
            self.problem = why

    def close(self) -> None:
        """Fold what is left, if the database takes it; the next start does what could not be done."""
        try:
            if self.problem is None:
                self.fold_now()
                self._fdatasync()
        except OSError as error:
            log.warning("volume %s: the journal stays to be folded at the next start: %s", self._dir, error.strerror)
        self._journal.close()
        self._db.close()
        for fd in (self._data.fd, self._lock):
            os.close(fd)
