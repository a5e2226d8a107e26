"""What a state volume's database is asked for: nodes and entries, as they are once all that is committed is folded.

Owns the record of what the database does not have yet: nodes that changed, entries that went. Must not know extents or
the journal. Invariant: of a node that ``keeps`` does not name, the database has the attributes and every entry.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from vfsd.backends.base import Stored
from vfsd.core.plans import fail

log = logging.getLogger(__name__)

STORED = """n.id, n.mode, n.nlink, n.uid, n.gid, n.rdev, n.size, n.atime, n.mtime, n.ctime, n.target,
coalesce((SELECT sum(length) FROM extent WHERE node = n.id), 0) / 512"""

_NODE = f"SELECT {STORED} FROM node n WHERE id=?"
_ENTRY = f"SELECT {STORED} FROM dentry d JOIN node n ON n.id=d.node WHERE d.parent=? AND d.name=?"
_PAGE = f"""SELECT d.name, {STORED} FROM dentry d JOIN node n ON n.id=d.node WHERE d.parent=? AND d.name>?
ORDER BY d.name LIMIT ?"""

_MANY = 500
"""Numbers asked for in one statement."""


class Loading:
    """Reads through a connection that ``_execute`` stands for."""

    _execute: Callable[..., sqlite3.Cursor]

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._unfolded: set[int] = set()
        """Nodes of records that no fold has taken up, and of those that one has."""
        self._folding: set[int] = set()
        self._gone: dict[int, set[bytes]] = {}
        """Names that went from directories, likewise."""
        self._going: dict[int, set[bytes]] = {}

    def keeps(self, node: int) -> bool:
        """True while the database does not have the node, its extents and its entries as they are."""
        return node in self._unfolded or node in self._folding

    def _note_gone(self, directory: int, name: bytes) -> None:
        names = self._gone.get(directory)
        if names is None:
            self._gone[directory] = {name}
        else:
            names.add(name)

    def _is_gone(self, directory: int, name: bytes) -> bool:
        return name in self._gone.get(directory, ()) or name in self._going.get(directory, ())

    def _take_up(self) -> None:
        """A fold begins."""
        self._folding, self._unfolded = self._unfolded, set()
        self._going, self._gone = self._gone, {}

    def _taken_up(self) -> None:
        """It is done."""
        self._folding = set()
        self._going = {}

    def _rows(self, query: str, *args: object) -> list[Any]:
        """What the database has. Raises EIO."""
        try:
            return self._execute(query, args).fetchall()
        except sqlite3.Error as error:
            log.error("volume %s: node %d can't be read: %s", self._dir, args[0], error)
            raise fail(errno.EIO) from error

    def root(self) -> Stored | None:
        row = self._execute(_NODE, (1,)).fetchone()
        return None if row is None else Stored._make(row)

    def next_node(self) -> int:
        query = "SELECT max((SELECT coalesce(max(id), 0) FROM node), (SELECT coalesce(max(id), 0) FROM old_node)) + 1"
        return int(self._execute(query).fetchone()[0])

    def orphans(self) -> Sequence[Stored]:
        return [Stored(*row) for row in self._execute(f"SELECT {STORED} FROM node n WHERE nlink=0")]

    def node(self, node: int) -> Stored | None:
        """None for one that changed since: then it is not in memory because it went."""
        rows = [] if self.keeps(node) else self._rows(_NODE, node)
        return Stored._make(rows[0]) if rows else None

    def known(self, nodes: Iterable[int]) -> set[int]:
        """Those that there are. For who has folded all there is."""
        numbers, found = list(nodes), set[int]()
        for start in range(0, len(numbers), _MANY):
            part = numbers[start : start + _MANY]
            found.update(
                n for (n,) in self._rows(f"SELECT id FROM node WHERE id IN ({','.join('?' * len(part))})", *part)
            )
        return found

    def entry(self, directory: int, name: bytes) -> Stored | None:
        if self._is_gone(directory, name):
            return None
        rows = self._rows(_ENTRY, directory, name)
        return Stored._make(rows[0]) if rows else None

    def load(self, directory: int, after: bytes, limit: int) -> Sequence[tuple[bytes, Stored]]:
        gone = self._gone.get(directory, set()) | self._going.get(directory, set())
        if not gone:
            return [(row[0], Stored._make(row[1:])) for row in self._rows(_PAGE, directory, after, limit)]
        # Many may be gone: they are passed over by their names alone.
        try:
            query = "SELECT name FROM dentry WHERE parent=? AND name>? ORDER BY name"
            cursor = self._execute(query, (directory, after))
            names = list(islice((name for (name,) in cursor if name not in gone), limit))
            cursor.close()
        except sqlite3.Error as error:
            log.error("volume %s: node %d can't be read: %s", self._dir, directory, error)
            raise fail(errno.EIO) from error
        return [(name, Stored._make(self._rows(_ENTRY, directory, name)[0])) for name in names]

    def links(self, node: int) -> Iterable[tuple[int, bytes]]:
        return [
            link
            for link in self._rows("SELECT parent, name FROM dentry WHERE node=?", node)
            if not self._is_gone(*link)
        ]

    def allocated(self) -> int:
        return int(self._execute("SELECT coalesce(sum(length), 0) FROM extent").fetchone()[0]) // 512
