"""What is read of a state volume besides its tree: the past, by whatever thread, and how much room it takes.

Owns no state: it is a part of ``SqliteBackend``, which has the connection and the data file. Must not change anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vfsd.backends import database, history
from vfsd.backends.extents import ExtentFile
from vfsd.backends.filemap import Extent, FileMap
from vfsd.backends.freespace import BLOCK
from vfsd.backends.history import Checkpoint, Past, Touched
from vfsd.core.plans import fail
from vfsd.core.types import StatFs

_HUGE = 1 << 31


class Reads:
    """The reading side of ``SqliteBackend``."""

    _db: sqlite3.Connection
    _execute: Callable[..., sqlite3.Cursor]
    _dir: Path
    _data: ExtentFile
    _waits: bool
    _nodes: int

    def checkpoints(self) -> list[Checkpoint]:
        """Oldest first."""
        return history.checkpoints(self._db)

    def past(self, epoch: int) -> Past:
        """The volume as it was at a checkpoint (NOW: as of the last fold), read on the loop."""
        return Past(self._db, epoch)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, all that is read of the past is of one moment, whatever a fold in its thread commits meanwhile."""
        if self._waits:
            yield
            return
        self._execute("BEGIN")
        try:
            yield
        finally:
            self._execute("COMMIT")

    def touched(self, since: int, until: int) -> Touched:
        """What may differ between two checkpoints; folded first by the caller when ``until`` is NOW."""
        return history.touched(self._db, since, until)

    def connect_past(self) -> sqlite3.Connection:
        """A connection of its own for the calling thread, on which all that is read is of one moment. EROFS."""
        if self._waits:
            raise fail(errno.EROFS)
        db = database.connect_again(self._dir)
        db.execute("BEGIN")
        return db

    def read_extents(self, extents: Sequence[Extent], offset: int, length: int) -> bytes:
        """Bytes by a map of the past; the caller clips to the size."""
        return self._data.read_map(FileMap(list(extents)), offset, length)

    def read_map(self, file: FileMap, offset: int, length: int) -> bytes:
        """As ``read_extents``, by a map that is kept; also for other threads."""
        return self._data.read_map(file, offset, length)

    @property
    def data_fd(self) -> int:
        """The data file, to read from."""
        return self._data.fd

    def counts(self) -> tuple[int, int]:
        return self._nodes, os.fstat(self._data.fd).st_blocks * 512

    def waste(self) -> int:
        """Bytes of the database file that hold nothing, which only ``compact`` gives back."""
        pages, size = (self._execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size"))
        return int(pages) * int(size)

    def slack(self) -> int:
        """Bytes of the data file that ``give_back`` may free."""
        return self._data.slack()

    def statfs(self) -> StatFs:
        host = os.fstatvfs(self._data.fd)
        scale = host.f_frsize / BLOCK
        total, free, available = (int(n * scale) for n in (host.f_blocks, host.f_bfree, host.f_bavail))
        return StatFs(BLOCK, BLOCK, total, free, available, _HUGE, _HUGE - self._nodes, _HUGE - self._nodes)

    def disk_used(self) -> int:
        """Bytes of the host's disk that the volume takes."""
        return sum(os.stat(entry).st_blocks * 512 for entry in os.scandir(self._dir))
