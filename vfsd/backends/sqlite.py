"""A state volume on disk: the tree in SQLite, the contents in one extent file beside it.

Owns the directory ``DIR``: ``tree.db`` (WAL), ``data``, ``lock`` and ``ballast``. Must not know POSIX rules or the kernel.

A commit is one SQLite transaction with synchronous=NORMAL: it survives the death of the daemon at once and, after
``sync`` (data first, then the write-ahead log), power loss. Crash window: bytes written in place before a commit that
then fails or is never reached may be there without their mtime; they were not acknowledged.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import trio

from vfsd.backends import schema
from vfsd.backends.base import Stored, VolumeError
from vfsd.backends.extents import BLOCK, Extent, ExtentFile, host_fallocate
from vfsd.core.changes import Change, Dentry, Drop, NoDentry, Put, Reserve, Target, Write, Xattr, Zero
from vfsd.core.plans import fail
from vfsd.core.types import StatFs

log = logging.getLogger(__name__)

_BALLAST = 4 << 20
_WAL_BOUND = 64 << 20
_HUGE = 1 << 31


def lock_volume(directory: Path) -> int:
    """Take the volume's lock; returns its descriptor. Raises VolumeError naming the pid that has it."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise VolumeError(f"volume {directory} is in use by pid {holder}; unmount it first (vfsd status)") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def connect(directory: Path, *, new: bool = True) -> sqlite3.Connection:
    """Open the volume's database, made when absent and ``new``. Raises VolumeError (corrupt, newer, unreadable)."""
    path = directory / "tree.db"
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
        db.execute("PRAGMA journal_mode=WAL").fetchone()
        db.execute("PRAGMA synchronous=NORMAL")
        # A checkpoint inside a commit would hold the loop for an fsync; maintain() runs them in a thread.
        db.execute("PRAGMA wal_autocheckpoint=0")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > schema.FORMAT:
            raise VolumeError(
                f"volume {directory} has format {version}, this vfsd reads up to {schema.FORMAT}: upgrade vfsd"
            )
        if version == 0 and new:
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise VolumeError(f"{path} is not a vfsd volume (an unrelated SQLite database)")
            db.executescript(
                f"BEGIN; {schema.SCHEMA} PRAGMA application_id={schema.APPLICATION_ID};"
                f"PRAGMA user_version={schema.FORMAT}; COMMIT"
            )
        db.execute("SELECT id FROM node LIMIT 1").fetchone()
    except sqlite3.OperationalError as error:
        raise VolumeError(f"volume {directory} can't be opened: {error}") from None
    except sqlite3.DatabaseError as error:
        raise VolumeError(
            f"volume {directory} is corrupt ({error}); run `vfsd check --location {directory}` or restore a backup"
        ) from None
    return db


class SqliteBackend:
    """Implements ``Backend`` in a directory of the host."""

    kind = "state"

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = lock_volume(directory)
        except OSError as error:
            raise VolumeError(f"volume {directory} can't be opened: {error.strerror}") from None
        try:
            self._db = connect(directory)
            self._execute = self._db.execute
            fd = os.open(directory / "data", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            os.close(self._lock)
            raise VolumeError(f"volume {directory} can't be opened: {error.strerror}") from None
        except VolumeError:
            os.close(self._lock)
            raise
        self._data = ExtentFile(fd, self._fetch)
        self.read = self._data.read
        self.seek = self._data.seek
        self._find_free_space()
        self._last_node = self.next_node() - 1
        self._nodes: int = self._execute("SELECT count(*) FROM node").fetchone()[0]
        self._dirty = True
        self._xattr_nodes: set[int] = {n for (n,) in self._execute("SELECT DISTINCT node FROM xattr")}
        self._wal = os.open(directory / "tree.db-wal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._fill_ballast()

    # -- loading

    def _fetch(self, node: int) -> list[Extent]:
        return self._execute("SELECT offset, length, disk FROM extent WHERE node=? ORDER BY offset", (node,)).fetchall()

    def _find_free_space(self) -> None:
        free = self._data.free
        free.end = self._execute("SELECT coalesce(max(disk + length), 0) FROM extent").fetchone()[0]
        gaps = self._execute(
            "SELECT at, disk - at FROM (SELECT disk, lag(disk + length, 1, 0) OVER (ORDER BY disk) AS at FROM extent)"
            " WHERE disk > at"
        )
        for start, length in gaps:
            free.give(start, length)

    def root(self) -> Stored | None:
        row = self._execute(f"SELECT {schema.STORED} FROM node n WHERE id=1").fetchone()
        return None if row is None else Stored(*row)

    def next_node(self) -> int:
        return int(self._execute("SELECT coalesce(max(id), 0) + 1 FROM node").fetchone()[0])

    def orphans(self) -> Sequence[Stored]:
        return [Stored(*row) for row in self._execute(f"SELECT {schema.STORED} FROM node n WHERE nlink=0")]

    def load(self, directory: int) -> Iterable[tuple[bytes, Stored]]:
        rows = self._execute(
            f"SELECT d.name, {schema.STORED} FROM dentry d JOIN node n ON n.id=d.node WHERE d.parent=?", (directory,)
        )
        return [(row[0], Stored(*row[1:])) for row in rows]

    def xattrs(self, node: int) -> dict[bytes, bytes]:
        if node not in self._xattr_nodes:
            return {}
        return dict(self._execute("SELECT name, value FROM xattr WHERE node=?", (node,)).fetchall())

    def blocks(self, node: int) -> int:
        return self._data.map(node).used // 512

    # -- committing

    def commit(self, changes: Sequence[Change]) -> None:
        try:
            self._commit(changes)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._make_room(changes):
                raise
            self._commit(changes)

    def _commit(self, changes: Sequence[Change]) -> None:
        data, execute = self._data, self._execute
        self._dirty = True
        try:
            for c in changes:
                kind = type(c)
                if kind is Write:
                    data.write(c.node, c.offset, c.data)  # type: ignore[union-attr]
                elif kind is Zero:
                    data.zero(c.node, c.offset, c.end)  # type: ignore[union-attr]
                elif kind is Reserve:
                    data.reserve(c.node, c.offset, c.end)  # type: ignore[union-attr]
                elif kind is Drop:
                    data.drop(c.node)  # type: ignore[union-attr]
                elif kind is Put and c.node > self._last_node:  # type: ignore[union-attr]
                    self._last_node = c.node  # type: ignore[union-attr]
                    data.new(c.node)  # type: ignore[union-attr]
            rows = data.rows
            if len(changes) == 1 or (len(changes) == 2 and not rows and type(changes[0]) is Write):
                if type(changes[-1]) is Put and not rows:
                    execute(schema.PUT, changes[-1])  # one statement is its own transaction
                    data.end(True)
                    return
            execute("BEGIN IMMEDIATE")
            for c in changes:
                self._store(c)
            for node, offset, length, disk in rows:
                if length is None:
                    execute("DELETE FROM extent WHERE node=? AND offset=?", (node, offset))
                else:
                    execute("INSERT OR REPLACE INTO extent VALUES (?,?,?,?)", (node, offset, length, disk))
            execute("COMMIT")
        except BaseException as error:
            data.end(False)
            if self._db.in_transaction:
                execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._errno(error) from error
            raise
        data.end(True)
        for c in changes:
            if type(c) is Xattr and c.value is not None:
                self._xattr_nodes.add(c.node)
            elif type(c) is Drop:
                self._xattr_nodes.discard(c.node)
                self._nodes -= 1
            elif type(c) is Dentry:
                self._nodes += 1

    def _store(self, c: Change) -> None:
        execute = self._execute
        kind = type(c)
        if kind is Put:
            execute(schema.PUT, c)
        elif kind is Dentry:
            execute("INSERT OR REPLACE INTO dentry VALUES (?,?,?)", c)
        elif kind is NoDentry:
            execute("DELETE FROM dentry WHERE parent=? AND name=?", c[:2])
        elif kind is Target:
            execute("UPDATE node SET target=? WHERE id=?", (c.target, c.node))  # type: ignore[union-attr]
        elif kind is Xattr:
            if c.value is None:  # type: ignore[union-attr]
                execute("DELETE FROM xattr WHERE node=? AND name=?", c[:2])
            else:
                execute("INSERT OR REPLACE INTO xattr VALUES (?,?,?)", c)
        elif kind is Drop:
            node = (c.node,)  # type: ignore[union-attr]
            execute("DELETE FROM node WHERE id=?", node)
            execute("DELETE FROM extent WHERE node=?", node)
            if c.node in self._xattr_nodes:  # type: ignore[union-attr]
                execute("DELETE FROM xattr WHERE node=?", node)

    def _errno(self, error: sqlite3.Error) -> OSError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return fail(errno.ENOSPC)
        log.error("volume %s: %s", self._dir, error)
        return fail(errno.EROFS if code == sqlite3.SQLITE_READONLY else errno.EIO)

    # -- space

    def _make_room(self, changes: Sequence[Change]) -> bool:
        """On a full disk: use blocks waiting in quarantine, and for a change that frees space the ballast too."""
        roomier = False
        if self._data.quarantined():
            runs = self._data.drain()
            self._fdatasync()
            self._data.punch(runs)
            self._data.release(runs)
            roomier = True
        if not any(type(c) in (Write, Reserve, Dentry) for c in changes) and os.path.exists(self._dir / "ballast"):
            os.unlink(self._dir / "ballast")
            roomier = True
        return roomier

    def _fill_ballast(self) -> None:
        """Keep some space in hand so that files can still be deleted on a full disk (each commit grows the WAL)."""
        path = self._dir / "ballast"
        if path.exists():
            return
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                host_fallocate(fd, 0, 0, _BALLAST)
            finally:
                os.close(fd)
        except OSError:
            path.unlink(missing_ok=True)

    def statfs(self) -> StatFs:
        host = os.fstatvfs(self._data.fd)
        scale = host.f_frsize / BLOCK
        total, free, available = (int(n * scale) for n in (host.f_blocks, host.f_bfree, host.f_bavail))
        return StatFs(BLOCK, BLOCK, total, free, available, _HUGE, _HUGE - self._nodes, _HUGE - self._nodes)

    def counts(self) -> tuple[int, int]:
        return self._nodes, os.fstat(self._data.fd).st_blocks * 512

    # -- durability

    def _fdatasync(self) -> None:
        os.fdatasync(self._data.fd)
        os.fdatasync(self._wal)

    async def sync(self) -> None:
        runs = self._data.drain()
        await trio.to_thread.run_sync(self._fdatasync)
        self._data.release(runs)

    async def maintain(self) -> None:
        if not self._dirty:
            return
        self._dirty = False
        runs = self._data.drain()
        await trio.to_thread.run_sync(self._checkpoint, runs)
        self._data.release(runs)
        if os.fstat(self._wal).st_size > _WAL_BOUND:
            # Under steady load the thread never catches up with the last frames; a log that is fully checkpointed
            # starts again from its beginning (sqlite.org/wal.html, "avoiding excessively large WAL files").
            self._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._fill_ballast()

    def _checkpoint(self, runs: list[tuple[int, int]]) -> None:
        self._fdatasync()
        db = sqlite3.connect(self._dir / "tree.db", isolation_level=None)
        try:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        finally:
            db.close()
        self._data.punch(runs)

    def close(self) -> None:
        self._fdatasync()
        self._db.close()
        for fd in (self._data.fd, self._wal, self._lock):
            os.close(fd)
