"""What a state volume was at its checkpoints: rows kept before they change, and the past read from them.

Owns the tables ``checkpoint`` and ``old_*``. A checkpoint is a number, its epoch; taking one writes a single row. The
first fold that changes a row after the newest checkpoint keeps the row as it was, under that checkpoint's epoch (with
NULLs where there was none). So a row at checkpoint E is its kept state of the smallest epoch that is E or later, and
where none is kept, the row as it is now. Must not know the core or the data file; extents are opaque but for the ranges
of the data file they take.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import msgpack

from vfsd.backends.base import Stored

NOW = 1 << 62
"""The epoch of the present: nothing is kept under it or later."""

SCHEMA = """
CREATE TABLE checkpoint (
  epoch INTEGER PRIMARY KEY,    -- rises; blocks given out before it was taken have epochs up to this
  id    TEXT NOT NULL UNIQUE,   -- what users name it by
  label TEXT NOT NULL,
  cause TEXT NOT NULL,          -- user, auto (by policy), restore or undo (before one), moment (to read the present)
  time  INTEGER NOT NULL        -- nanoseconds since the epoch of Unix
);
CREATE TABLE old_node (         -- as `node`; mode NULL: there was none
  id INTEGER NOT NULL, epoch INTEGER NOT NULL,
  mode INTEGER, nlink INTEGER, uid INTEGER, gid INTEGER, rdev INTEGER, size INTEGER,
  atime INTEGER, mtime INTEGER, ctime INTEGER, target BLOB,
  PRIMARY KEY (id, epoch)
) WITHOUT ROWID;
CREATE TABLE old_dentry (       -- as `dentry`; node NULL: there was none
  parent INTEGER NOT NULL, name BLOB NOT NULL, epoch INTEGER NOT NULL, node INTEGER,
  PRIMARY KEY (parent, name, epoch)
) WITHOUT ROWID;
CREATE TABLE old_xattr (        -- as `xattr`; value NULL: there was none
  node INTEGER NOT NULL, name BLOB NOT NULL, epoch INTEGER NOT NULL, value BLOB,
  PRIMARY KEY (node, name, epoch)
) WITHOUT ROWID;
CREATE TABLE old_map (          -- all extents of a file, msgpack [[offset, length, disk, epoch], ...]
  node INTEGER NOT NULL, epoch INTEGER NOT NULL, extents BLOB NOT NULL,
  PRIMARY KEY (node, epoch)
) WITHOUT ROWID;
CREATE INDEX dentry_node ON dentry (node);
CREATE INDEX old_dentry_node ON old_dentry (node) WHERE node IS NOT NULL;
CREATE INDEX old_node_epoch ON old_node (epoch);
CREATE INDEX old_dentry_epoch ON old_dentry (epoch);
CREATE INDEX old_xattr_epoch ON old_xattr (epoch);
CREATE INDEX old_map_epoch ON old_map (epoch);
"""

_NODE = "mode, nlink, uid, gid, rdev, size, atime, mtime, ctime, target"

_MANY = 500
"""Numbers asked for in one statement (SQLite's own limit has long been 999)."""

Extents = list[tuple[int, int, int, int]]
Runs = list[tuple[int, int]]


class Checkpoint(NamedTuple):
    """One checkpoint; ``time_ns`` since the epoch of Unix, ``cause`` as in the table."""

    epoch: int
    id: str
    label: str
    cause: str
    time_ns: int


def checkpoints(db: sqlite3.Connection) -> list[Checkpoint]:
    """All of them, oldest first."""
    return [
        Checkpoint(*row) for row in db.execute("SELECT epoch, id, label, cause, time FROM checkpoint ORDER BY epoch")
    ]


def newest(db: sqlite3.Connection) -> int:
    """The newest checkpoint's epoch, 0 for none."""
    return int(db.execute("SELECT coalesce(max(epoch), 0) FROM checkpoint").fetchone()[0])


def keep(
    db: sqlite3.Connection,
    nodes: Iterable[int],
    dentries: Iterable[tuple[int, bytes]],
    xattrs: Iterable[tuple[int, bytes]],
    maps: Iterable[int],
    drops: Iterable[int],
) -> None:
    """Before a fold changes these rows, keep each that is not kept since the newest checkpoint."""
    epoch = newest(db)
    if not epoch:
        return
    many = db.executemany
    gone = list(drops)
    rows = [(epoch, n) for n in {*nodes, *gone}]
    many(f"INSERT OR IGNORE INTO old_node SELECT id, ?, {_NODE} FROM node WHERE id=?", rows)
    many("INSERT OR IGNORE INTO old_node (epoch, id) VALUES (?,?)", rows)
    names = [(epoch, *key) for key in dentries]
    many("INSERT OR IGNORE INTO old_dentry SELECT parent, name, ?, node FROM dentry WHERE parent=? AND name=?", names)
    many("INSERT OR IGNORE INTO old_dentry (epoch, parent, name) VALUES (?,?,?)", names)
    names = [(epoch, *key) for key in xattrs]
    many("INSERT OR IGNORE INTO old_xattr SELECT node, name, ?, value FROM xattr WHERE node=? AND name=?", names)
    many("INSERT OR IGNORE INTO old_xattr (epoch, node, name) VALUES (?,?,?)", names)
    many(
        "INSERT OR IGNORE INTO old_xattr SELECT node, name, ?, value FROM xattr WHERE node=?",
        [(epoch, n) for n in gone],
    )
    for node in {*maps, *gone}:
        if db.execute("SELECT 1 FROM old_map WHERE node=? AND epoch=?", (node, epoch)).fetchone() is None:
            packed = msgpack.packb(_live_map(db, node))
            db.execute("INSERT INTO old_map VALUES (?,?,?)", (node, epoch, packed))


def _live_map(db: sqlite3.Connection, node: int) -> Extents:
    query = "SELECT offset, length, disk, epoch FROM extent WHERE node=? ORDER BY offset"
    return db.execute(query, (node,)).fetchall()


class Past:
    """A volume as it was at a checkpoint, or with NOW as of the last fold; read through ``db``."""

    def __init__(self, db: sqlite3.Connection, epoch: int) -> None:
        self._db = db
        self.epoch = epoch

    def _one(self, query: str, *args: object) -> Any:
        return self._db.execute(query, args).fetchone()

    def _all(self, query: str, *args: object) -> list[Any]:
        return self._db.execute(query, args).fetchall()

    def node(self, node: int) -> Stored | None:
        """The node's attributes; None where there was none."""
        row = self._one(f"SELECT {_NODE} FROM old_node WHERE id=? AND epoch>=? ORDER BY epoch", node, self.epoch)
        if row is None:
            row = self._one(f"SELECT {_NODE} FROM node WHERE id=?", node)
        if row is None or row[0] is None:
            return None
        return Stored._make((node, *row, sum(e[1] for e in self.map(node)) // 512))

    def nodes(self, wanted: Collection[int]) -> dict[int, Stored]:
        """``node`` of many at once, without those that were none."""
        found: dict[int, Stored] = {}
        numbers = list(wanted)
        for start in range(0, len(numbers), _MANY):
            part = numbers[start : start + _MANY]
            marks = ",".join("?" * len(part))
            rows = {r[0]: r for r in self._all(f"SELECT id, {_NODE} FROM node WHERE id IN ({marks})", *part)}
            kept = f"SELECT id, {_NODE} FROM old_node WHERE id IN ({marks}) AND epoch>=? ORDER BY epoch DESC"
            rows |= {r[0]: r for r in self._all(kept, *part, self.epoch)}
            sums = f"SELECT node, sum(length) FROM extent WHERE node IN ({marks}) GROUP BY node"
            used = dict(self._all(sums, *part))
            kept = f"SELECT node, extents FROM old_map WHERE node IN ({marks}) AND epoch>=? ORDER BY epoch DESC"
            used |= {n: sum(e[1] for e in msgpack.unpackb(p)) for n, p in self._all(kept, *part, self.epoch)}
            for number, row in rows.items():
                if row[1] is not None:
                    found[number] = Stored._make((*row, used.get(number, 0) // 512))
        return found

    def maps(self, wanted: Collection[int]) -> dict[int, Extents]:
        """``map`` of at most _MANY at once."""
        marks = ",".join("?" * len(wanted))
        found: dict[int, Extents] = {}
        live = f"SELECT node, offset, length, disk, epoch FROM extent WHERE node IN ({marks}) ORDER BY node, offset"
        for node, *extent in self._all(live, *wanted):
            found.setdefault(node, []).append(tuple(extent))
        kept = f"SELECT node, extents FROM old_map WHERE node IN ({marks}) AND epoch>=? ORDER BY epoch DESC"
        for node, packed in self._all(kept, *wanted, self.epoch):
            found[node] = [tuple(e) for e in msgpack.unpackb(packed)]
        return found

    def all_xattrs(self, wanted: Collection[int]) -> dict[tuple[int, bytes], bytes]:
        """``xattrs`` of at most _MANY at once, by node and name."""
        marks = ",".join("?" * len(wanted))
        found = {(n, name): v for n, name, v in self._all(f"SELECT * FROM xattr WHERE node IN ({marks})", *wanted)}
        kept = f"SELECT node, name, value FROM old_xattr WHERE node IN ({marks}) AND epoch>=? ORDER BY epoch DESC"
        found |= {(n, name): v for n, name, v in self._all(kept, *wanted, self.epoch)}
        return {key: value for key, value in found.items() if value is not None}

    def all_nodes(self) -> Iterator[list[int]]:
        """The numbers of all nodes that had a link, in parts."""
        query = """SELECT id FROM node WHERE nlink>0 AND id NOT IN (SELECT id FROM old_node WHERE epoch>=?1)
        UNION ALL SELECT id FROM old_node o WHERE nlink>0 AND epoch=
        (SELECT min(epoch) FROM old_node WHERE id=o.id AND epoch>=?1) ORDER BY id"""
        rows = self._db.execute(query, (self.epoch,))
        while part := [n for (n,) in rows.fetchmany(_MANY)]:
            yield part

    def totals(self) -> tuple[int, int, int]:
        """How many regular files and directories there were, and the sum of the files' sizes."""
        query = """SELECT mode>>12, size FROM node WHERE nlink>0 AND id NOT IN (SELECT id FROM old_node WHERE epoch>=?1)
        UNION ALL SELECT mode>>12, size FROM old_node o WHERE nlink>0 AND epoch=
        (SELECT min(epoch) FROM old_node WHERE id=o.id AND epoch>=?1)"""
        counts = {8: 0, 4: 0}
        total = 0
        for kind, size in self._db.execute(query, (self.epoch,)):
            if kind in counts:
                counts[kind] += 1
            if kind == 8:
                total += size
        return counts[8], counts[4], total

    def map(self, node: int) -> Extents:
        """The file's extents."""
        row = self._one("SELECT extents FROM old_map WHERE node=? AND epoch>=? ORDER BY epoch", node, self.epoch)
        if row is None:
            return _live_map(self._db, node)
        return [tuple(e) for e in msgpack.unpackb(row[0])]

    def child(self, parent: int, name: bytes) -> int | None:
        """The node that the entry led to; None where there was none."""
        query = "SELECT node FROM old_dentry WHERE parent=? AND name=? AND epoch>=? ORDER BY epoch"
        row = self._one(query, parent, name, self.epoch)
        if row is None:
            row = self._one("SELECT node FROM dentry WHERE parent=? AND name=?", parent, name)
        return None if row is None or row[0] is None else int(row[0])

    def children(self, parent: int) -> dict[bytes, int]:
        """All entries of a directory, name to node."""
        found = dict(self._all("SELECT name, node FROM dentry WHERE parent=?", parent))
        query = "SELECT name, node FROM old_dentry WHERE parent=? AND epoch>=? ORDER BY epoch DESC"
        for name, node in self._all(query, parent, self.epoch):
            if node is None:
                found.pop(name, None)
            else:
                found[name] = node
        return found

    def xattrs(self, node: int) -> dict[bytes, bytes]:
        """The node's extended attributes."""
        found = dict(self._all("SELECT name, value FROM xattr WHERE node=?", node))
        query = "SELECT name, value FROM old_xattr WHERE node=? AND epoch>=? ORDER BY epoch DESC"
        for name, value in self._all(query, node, self.epoch):
            if value is None:
                found.pop(name, None)
            else:
                found[name] = value
        return found

    def path(self, node: int) -> bytes | None:
        """One path of the node; None when it had none."""
        parts: list[bytes] = []
        while node != 1:
            link = next(self.links(node), None)
            if link is None or len(parts) > 4096:
                return None
            node = link[0]
            parts.append(link[1])
        return b"/" + b"/".join(reversed(parts))

    def paths(self, node: int) -> Iterator[bytes]:
        """Every path of the node."""
        for parent, name in self.links(node):
            above = self.path(parent)
            if above is not None:
                yield above.rstrip(b"/") + b"/" + name

    def links(self, node: int) -> Iterator[tuple[int, bytes]]:
        """Every entry that led to the node: (parent, name)."""
        now = self._all("SELECT parent, name FROM dentry WHERE node=?", node)
        then = self._all("SELECT parent, name FROM old_dentry WHERE node=? AND epoch>=?", node, self.epoch)
        for parent, name in [*then, *now]:
            if self.child(parent, name) == node:
                yield parent, name


class Touched(NamedTuple):
    """The rows that may differ between two moments."""

    nodes: set[int]
    dentries: set[tuple[int, bytes]]


def touched(db: sqlite3.Connection, since: int, until: int = NOW) -> Touched:
    """What changed from checkpoint ``since`` to checkpoint ``until``."""
    span = (since, until)
    nodes: set[int] = set()
    for column, table in (("id", "old_node"), ("node", "old_map"), ("node", "old_xattr")):
        nodes |= {n for (n,) in db.execute(f"SELECT {column} FROM {table} WHERE epoch>=? AND epoch<?", span)}
    return Touched(nodes, set(db.execute("SELECT parent, name FROM old_dentry WHERE epoch>=? AND epoch<?", span)))


def drop(db: sqlite3.Connection, epoch: int) -> Runs:
    """Forget a checkpoint, in the caller's transaction; returns the runs of the data file that only it needed.

    A restore brings old blocks back, so that what needs a block may be any other checkpoint, before or after, or the
    present, under any node.
    """
    before = db.execute("SELECT max(epoch) FROM checkpoint WHERE epoch<?", (epoch,)).fetchone()[0]
    rows = db.execute("SELECT extents FROM old_map WHERE epoch=?", (epoch,)).fetchall()
    runs = [(e[2], e[1]) for (packed,) in rows for e in msgpack.unpackb(packed)]
    for table in ("old_node", "old_dentry", "old_xattr", "old_map"):
        if before is not None:
            # Where the checkpoint before has no row of its own, it sees this one.
            db.execute(f"UPDATE OR IGNORE {table} SET epoch=? WHERE epoch=?", (before, epoch))
        db.execute(f"DELETE FROM {table} WHERE epoch=?", (epoch,))
    db.execute("DELETE FROM checkpoint WHERE epoch=?", (epoch,))
    if not runs:
        return []
    bounds = (max(start + n for start, n in runs), min(start for start, _ in runs))
    live = db.execute("SELECT disk, length FROM extent WHERE disk<? AND disk+length>?", bounds).fetchall()
    return _without(runs, live + kept_runs(db))


def _merged(runs: Runs) -> Runs:
    """The same bytes as sorted runs that do not touch."""
    out: Runs = []
    for start, length in sorted(runs):
        if out and start <= out[-1][0] + out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], start + length - out[-1][0]))
        else:
            out.append((start, length))
    return out


def _without(runs: Runs, others: Runs) -> Runs:
    """The parts of ``runs`` that no run of ``others`` covers."""
    covers = iter(_merged(others))
    cover = next(covers, None)
    out: Runs = []
    for start, length in _merged(runs):
        end = start + length
        while cover is not None and cover[0] < end:
            if cover[0] + cover[1] > start:
                if cover[0] > start:
                    out.append((start, cover[0] - start))
                start = cover[0] + cover[1]
                if start >= end:
                    break
            cover = next(covers, None)
        if start < end:
            out.append((start, end - start))
    return out


def kept_runs(db: sqlite3.Connection) -> Runs:
    """Every run of the data file that a checkpoint may show and the present does not."""
    return [(e[2], e[1]) for (packed,) in db.execute("SELECT extents FROM old_map") for e in msgpack.unpackb(packed)]
