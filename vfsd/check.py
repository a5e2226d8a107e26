"""fsck of a state volume: what must hold in a volume at rest; used by the command line and by tests.

Folds a journal left by a killed daemon first, as a start would, and changes nothing else. A mounted volume is judged as
of its last fold.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from vfsd.backends.base import VolumeError
from vfsd.backends.database import FORMAT, connect, lock_volume, recover
from vfsd.backends.journal import Journal

_RULES: tuple[tuple[str, str], ...] = (
    (
        "the root directory is missing",  # a volume that was killed before its first commit has none, nor anything else
        "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM node WHERE id=1 AND mode>>12=4)"
        " AND (EXISTS (SELECT 1 FROM node) OR EXISTS (SELECT 1 FROM dentry))",
    ),
    (
        "entry {1!r} of node {0} leads to node {2}, which does not exist",
        "SELECT parent, name, node FROM dentry WHERE node NOT IN (SELECT id FROM node)",
    ),
    (
        "entry {1!r} is in node {0}, which is not a directory",
        "SELECT parent, name FROM dentry WHERE parent NOT IN (SELECT id FROM node WHERE mode>>12=4)",
    ),
    (
        "directory {0} has {1} entries that lead to it",
        "SELECT node, count(*) FROM dentry WHERE node IN (SELECT id FROM node WHERE mode>>12=4)"
        " GROUP BY node HAVING count(*)>1",
    ),
    (
        "node {0} has nlink {1}, its entries make {2}",
        "SELECT id, nlink, (SELECT count(*) FROM dentry WHERE node=id) AS n FROM node WHERE mode>>12<>4 AND nlink<>n",
    ),
    (
        "directory {0} has nlink {1}, its subdirectories make {2}",
        "SELECT id, nlink, 2 + (SELECT count(*) FROM dentry d JOIN node k ON k.id=d.node"
        " WHERE d.parent=node.id AND k.mode>>12=4) AS n FROM node WHERE mode>>12=4 AND nlink<>0 AND nlink<>n",
    ),
    (
        "node {0} can't be reached from the root",
        "WITH RECURSIVE seen(id) AS (SELECT 1 UNION SELECT d.node FROM dentry d JOIN seen ON d.parent=seen.id)"
        " SELECT id FROM node WHERE nlink<>0 AND id NOT IN seen",
    ),
    (
        "node {0} is a symlink without a target, or has one and is none",
        "SELECT id FROM node WHERE (mode>>12=10) <> (target IS NOT NULL)",
    ),
    (
        "extended attribute {1!r} is of node {0}, which does not exist",
        "SELECT node, name FROM xattr WHERE node NOT IN (SELECT id FROM node)",
    ),
    (
        "node {0} has contents but is not a regular file",
        "SELECT DISTINCT node FROM extent WHERE node NOT IN (SELECT id FROM node WHERE mode>>12=8)",
    ),
    (
        "node {0} has an extent of {2} bytes at {1}, not in blocks of 4096",
        "SELECT node, offset, length, disk FROM extent WHERE offset%4096 OR length%4096 OR disk%4096 OR length<=0",
    ),
    (
        "extents of node {0} overlap at {1}",
        "SELECT node, offset FROM (SELECT node, offset, lag(offset+length) OVER (PARTITION BY node ORDER BY offset) e"
        " FROM extent) WHERE offset<e",
    ),
    (
        "block {1} of the data file belongs to node {0} and to another",
        "SELECT node, disk FROM (SELECT node, disk, lag(disk+length) OVER (ORDER BY disk) e FROM extent) WHERE disk<e",
    ),
)


def check_volume(directory: Path) -> list[str]:
    """Every violation found in the volume, a sentence each; empty when it is sound."""
    if not (directory / "tree.db").exists():
        return [f"{directory} holds no volume (no tree.db)"]
    try:
        db = connect(directory, new=False)
        _recover_if_at_rest(db, directory)
    except (VolumeError, OSError) as error:
        return [str(error)]
    try:
        problems = [row[0] for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        for sentence, query in _RULES:
            problems += [sentence.format(*row) for row in db.execute(query)]
        end = db.execute("SELECT coalesce(max(disk + length), 0) FROM extent").fetchone()[0]
        size = os.stat(directory / "data").st_size
        if size + 4096 <= end:
            problems.append(f"the data file has {size} bytes, extents reach to {end}")
        if db.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            problems.append("the volume has another format than this vfsd writes")
        return problems
    except (sqlite3.DatabaseError, OSError) as error:
        return [f"{directory}: {error}"]
    finally:
        db.close()


def _recover_if_at_rest(db: sqlite3.Connection, directory: Path) -> None:
    try:
        lock = lock_volume(directory)
    except VolumeError:
        return
    try:
        journal = Journal(directory)
        try:
            recover(db, journal, directory)
        finally:
            journal.close()
    finally:
        os.close(lock)
