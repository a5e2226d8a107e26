"""The SQLite database of a state volume: schema, opening, and folding journal records into it.

Must not know extents' meaning or the core. Times are nanoseconds, sizes and offsets bytes, names and values blobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from vfsd.backends import history
from vfsd.backends.base import DiskFull, VolumeError
from vfsd.backends.journal import Journal, Rows

APPLICATION_ID = 0x76667364  # "vfsd"
FORMAT = 1
"""Raised whenever a volume written by this code can't be read by older code."""

_CONTENTS = ("data", "journal.0", "journal.1")

SCHEMA = """
CREATE TABLE node (             -- one file, directory, symlink, FIFO, socket or device; 1 is the root directory
  id     INTEGER PRIMARY KEY,
  mode   INTEGER NOT NULL,      -- type bits and permission bits
  nlink  INTEGER NOT NULL,      -- 0: unlinked while open, purged at the next start
  uid    INTEGER NOT NULL,
  gid    INTEGER NOT NULL,
  rdev   INTEGER NOT NULL,      -- device number; of all else the time of birth, 0 while the access time is that
  size   INTEGER NOT NULL,
  atime  INTEGER NOT NULL,
  mtime  INTEGER NOT NULL,
  ctime  INTEGER NOT NULL,
  target BLOB                   -- of a symlink
);
CREATE TABLE dentry (           -- name -> node
  parent INTEGER NOT NULL,
  name   BLOB NOT NULL,
  node   INTEGER NOT NULL,
  PRIMARY KEY (parent, name)
) WITHOUT ROWID;
CREATE TABLE xattr (
  node  INTEGER NOT NULL,
  name  BLOB NOT NULL,
  value BLOB NOT NULL,
  PRIMARY KEY (node, name)
) WITHOUT ROWID;
CREATE TABLE extent (           -- bytes [offset, offset + length) of node are at `disk` in the data file
  node   INTEGER NOT NULL,
  offset INTEGER NOT NULL,
  length INTEGER NOT NULL,
  disk   INTEGER NOT NULL,
  epoch  INTEGER NOT NULL,      -- the epoch the blocks were given out in: the number of the next checkpoint then
  PRIMARY KEY (node, offset)
) WITHOUT ROWID;
CREATE TABLE folded (           -- one row: the last journal record that the tables above contain
  seq INTEGER NOT NULL
);
INSERT INTO folded VALUES (0);
"""

PUT, TARGET, DROP, DENTRY, NO_DENTRY, XATTR, EXTENT, PATCH = range(8)
"""First element of a journal row; the rest are the fields of the change of that name (EXTENT: extents.Row; PATCH: an
offset in the data file and the bytes there)."""

_PUT = """INSERT INTO node (id, mode, nlink, uid, gid, rdev, size, atime, mtime, ctime) VALUES (?,?,?,?,?,?,?,?,?,?)
ON CONFLICT (id) DO UPDATE SET mode=excluded.mode, nlink=excluded.nlink, uid=excluded.uid, gid=excluded.gid,
size=excluded.size, atime=excluded.atime, mtime=excluded.mtime, ctime=excluded.ctime"""


def lock_volume(directory: Path) -> int:
    """Make the directory if need be and take its lock; returns the lock's descriptor.

    Raises VolumeError naming the pid that has it, or why the directory can't be used.
    """
    try:
        missing = [place for place in (directory, *directory.parents) if not place.exists()]
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for place in missing:
            sync_directory(place.parent)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise VolumeError(f"volume {directory} can't be opened: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise VolumeError(f"volume {directory} is in use by pid {holder}; unmount it first (vfsd status)") from None
    with contextlib.suppress(OSError):  # a full disk, and a new volume
        os.pwrite(fd, b"%-20d\n" % os.getpid(), 0)  # always as long, so that there is room for it next time
    return fd


def sync_directory(directory: Path) -> None:
    """The names in it survive power loss; syncing a file promises nothing about its name (fsync(2)). Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def corrupt(directory: Path, error: sqlite3.Error) -> str:
    """The sentence for a database that SQLite can't make sense of."""
    return f"volume {directory} is corrupt ({error}); run `vfsd check --location {directory}` or restore a backup"


def connect_again(directory: Path) -> sqlite3.Connection:
    """A further connection to a volume that is open, for the thread that folds; its commits survive power loss."""
    # Never one of its own making, should somebody have removed the file.
    path = (directory / "tree.db").absolute().as_uri() + "?mode=rw"
    db = sqlite3.connect(path, uri=True, isolation_level=None, timeout=30)
    db.execute("PRAGMA synchronous=FULL")
    # A checkpoint inside a commit would come at a time of SQLite's choosing; the fold runs one when it is done.
    db.execute("PRAGMA wal_autocheckpoint=0")
    return db


def shorten(db: sqlite3.Connection) -> None:
    """Empty the database's own log, unless somebody still reads by it: a diff may, for long, and this is no hurry."""
    db.execute("PRAGMA busy_timeout=0")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def connect(directory: Path, *, new: bool = True, alone: bool = False) -> sqlite3.Connection:
    """Open the volume's database, made when absent and ``new``. ``alone``: with nothing written until a commit, and no
    other connection. Raises VolumeError (corrupt, newer, unreadable), DiskFull."""
    path = directory / "tree.db"
    db, opened = None, False
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        if alone:
            for pragma in ("locking_mode=EXCLUSIVE", "cache_spill=OFF", "temp_store=MEMORY"):
                db.execute(f"PRAGMA {pragma}")
        db.execute("PRAGMA journal_mode=WAL").fetchone()
        db.execute("PRAGMA synchronous=FULL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > FORMAT:
            raise VolumeError(f"volume {directory} has format {version}, this vfsd reads up to {FORMAT}: upgrade vfsd")
        if version == 0 and new:
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise VolumeError(f"{path} is not a vfsd volume (an unrelated SQLite database)")
            if any(os.path.exists(p) and os.stat(p).st_size for p in map(directory.joinpath, _CONTENTS)):
                raise VolumeError(
                    f"volume {directory} has contents, but its tree.db is missing or empty: "
                    "put that back from a backup, or remove the directory to begin anew"
                )
            db.executescript(
                f"BEGIN; {SCHEMA} {history.SCHEMA} PRAGMA application_id={APPLICATION_ID};"
                f"PRAGMA user_version={FORMAT}; COMMIT"
            )
        db.execute("SELECT seq FROM folded").fetchone()
        opened = True
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE):
            raise DiskFull(f"volume {directory} can't be opened: the disk is full") from None
        raise VolumeError(f"volume {directory} can't be opened: {error}") from None
    except sqlite3.DatabaseError as error:
        raise VolumeError(corrupt(directory, error)) from None
    finally:
        if db is not None and not opened:
            db.close()
    return db


def recover(db: sqlite3.Connection, journal: Journal, directory: Path, *, keep: bool = True) -> None:
    """Fold what a daemon that ended without warning left in the journal, then empty it. Not ``keep``: only as this
    connection sees it, and the journal stays. Raises VolumeError, DiskFull."""
    try:
        after = db.execute("SELECT seq FROM folded").fetchone()[0]
        batch = list(journal.replay(after))
        if batch:
            whole = _end(db) <= os.stat(directory / "data").st_size
            _patch(batch, directory)
            db.execute("BEGIN IMMEDIATE")
            _apply(db, batch, journal.seq)
            if keep:
                db.execute("COMMIT")
            if whole:
                _lengthen(db, directory)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise DiskFull(f"volume {directory} can't be opened: the disk is full") from None
        raise VolumeError(
            f"volume {directory}: the journal can't be folded into the database ({error}); "
            f"run `vfsd check --location {directory}` or restore a backup"
        ) from None
    if keep:
        journal.reset()


def _patch(batch: Iterable[Rows], directory: Path) -> None:
    """Write the bytes that records hold to the data file again: power loss may have taken them from there."""
    fd = os.open(directory / "data", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for rows in batch:
            for kind, *row in rows:
                if kind == PATCH:
                    os.pwrite(fd, row[1], row[0])
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _lengthen(db: sqlite3.Connection, directory: Path) -> None:
    """Power loss may take an unsynced write from the data file and leave its record: its blocks then read as zeros.

    Not so what was folded: without that the file has been cut off."""
    end, path = _end(db), directory / "data"
    if os.stat(path).st_size < end:
        os.truncate(path, end)


def _end(db: sqlite3.Connection) -> int:
    """How long the data file is at least."""
    return int(db.execute("SELECT coalesce(max(disk + length), 0) FROM extent").fetchone()[0])


T = TypeVar("T")


def fold(
    db: sqlite3.Connection,
    batch: Iterable[Rows],
    seq: int,
    then: Callable[[sqlite3.Connection], T] | None = None,
) -> T | None:
    """Make the rows of whole records so, and do ``then``, in one transaction. Raises sqlite3.Error.

    Only the last state of each row counts, so a directory that took a thousand files is written once.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        _apply(db, batch, seq)
        result = then(db) if then is not None else None
        db.execute("COMMIT")
        return result
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _apply(db: sqlite3.Connection, batch: Iterable[Rows], seq: int) -> None:
    """Inside a transaction: make the rows so."""
    puts: dict[int, tuple[Any, ...]] = {}
    targets: dict[int, bytes] = {}
    dentries: dict[tuple[int, bytes], int | None] = {}
    xattrs: dict[int, dict[bytes, bytes | None]] = {}
    extents: dict[int, dict[int, tuple[Any, ...]]] = {}
    drops: set[int] = set()
    for rows in batch:
        for kind, node, *row in rows:
            if kind == PUT:
                puts[node] = (node, *row)
            elif kind == DENTRY:
                dentries[node, row[0]] = row[1]
            elif kind == EXTENT:
                extents.setdefault(node, {})[row[0]] = (node, *row)
            elif kind == NO_DENTRY:
                dentries[node, row[0]] = None
            elif kind == DROP:
                # What came before is moot; a restore may bring the node back within the batch.
                drops.add(node)
                for known in (puts, targets, xattrs, extents):
                    known.pop(node, None)
            elif kind == TARGET:
                targets[node] = row[0]
            elif kind == XATTR:
                xattrs.setdefault(node, {})[row[0]] = row[1]
    names = [(node, name, value) for node, values in xattrs.items() for name, value in values.items()]
    pieces = [extent for file in extents.values() for extent in file.values()]
    many = db.executemany
    history.keep(db, {*puts, *targets}, dentries, [n[:2] for n in names], extents, drops)
    for table, column in (("node", "id"), ("extent", "node"), ("xattr", "node")):
        many(f"DELETE FROM {table} WHERE {column}=?", [(n,) for n in drops])
    many(_PUT, puts.values())
    many("UPDATE node SET target=? WHERE id=?", [(t, n) for n, t in targets.items()])
    many("DELETE FROM dentry WHERE parent=? AND name=?", [k for k, n in dentries.items() if n is None])
    many("INSERT OR REPLACE INTO dentry VALUES (?,?,?)", [(*k, n) for k, n in dentries.items() if n is not None])
    many("DELETE FROM extent WHERE node=? AND offset=?", [e[:2] for e in pieces if e[2] is None])
    many("INSERT OR REPLACE INTO extent VALUES (?,?,?,?,?)", [e for e in pieces if e[2] is not None])
    many("DELETE FROM xattr WHERE node=? AND name=?", [n[:2] for n in names if n[2] is None])
    many("INSERT OR REPLACE INTO xattr VALUES (?,?,?)", [n for n in names if n[2] is not None])
    db.execute("UPDATE folded SET seq=?", (seq,))
