"""A new thread's state volumes, made of a checkpoint: its rows, and its contents packed into a data file of their own.

Owns the directory it makes, which is there whole or not at all. Runs in a thread, on a connection of its own; the
caller sees to it that the checkpoint stays.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from vfsd.backends import database
from vfsd.backends.base import VolumeError
from vfsd.backends.history import Past
from vfsd.backends.sqlite import SqliteBackend

_PIECE = 8 << 20
_NO_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


def volume_directory(home: Path, prefix: str) -> Path:
    """Where a thread's volume of the route at ``prefix`` (slashes at both ends) lives when nothing else is said."""
    return home / "root" if prefix == "/" else home / "routes" / quote(prefix.strip("/"), safe="")


def fork_volume(home: Path, parts: Sequence[tuple[bytes, SqliteBackend, int]]) -> list[str]:
    """Make ``home`` with a volume for each part (prefix, store, epoch); their directories.

    EEXIST when it is there, ENOSPC, EIO; then nothing is left.
    """
    if os.path.lexists(home):
        raise OSError(errno.EEXIST, f"thread {home.name!r} exists already ({home}); nothing was changed")
    fresh = home.with_name(f".{home.name}.new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True, mode=0o700)
        places = [volume_directory(fresh, os.fsdecode(prefix)) for prefix, _, _ in parts]
        for place, (_, store, epoch) in zip(places, parts, strict=True):
            place.mkdir(parents=True, mode=0o700)
            _copy(place, store, epoch)
            for above in place.relative_to(fresh).parents:
                database.sync_directory(fresh / above)
        os.rename(fresh, home)
        database.sync_directory(home.parent)
    except (sqlite3.Error, VolumeError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
        raise OSError(errno.ENOSPC if full else errno.EIO, f"the fork can't be written: {error}") from error
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return [str(home / place.relative_to(fresh)) for place in places]


def _copy(place: Path, store: SqliteBackend, epoch: int) -> None:
    source = store.connect_past()
    target = database.connect(place)
    fd = os.open(place / "data", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        past, end = Past(source, epoch), 0
        target.execute("BEGIN IMMEDIATE")
        for numbers in past.all_nodes():
            stored = past.nodes(numbers)
            rows = [(s.node, *s[1:10], s.target) for s in stored.values()]
            target.executemany("INSERT INTO node VALUES (?,?,?,?,?,?,?,?,?,?,?)", rows)
            values = [(*key, value) for key, value in past.all_xattrs(numbers).items()]
            target.executemany("INSERT INTO xattr VALUES (?,?,?)", values)
            for s in stored.values():
                if s.mode >> 12 == 4:
                    names = [(s.node, name, child) for name, child in past.children(s.node).items()]
                    target.executemany("INSERT INTO dentry VALUES (?,?,?)", names)
            extents: list[tuple[int, int, int, int]] = []
            runs: list[tuple[int, int]] = []
            for node, found in past.maps(numbers).items():
                for offset, length, disk, _ in found:
                    extents.append((node, offset, length, end))
                    end += length
                    if runs and sum(runs[-1]) == disk:
                        runs[-1] = (runs[-1][0], runs[-1][1] + length)
                    else:
                        runs.append((disk, length))
            target.executemany("INSERT INTO extent VALUES (?,?,?,?,1)", extents)
            at = end - sum(length for _, length in runs)
            for disk, length in runs:
                _copy_bytes(store.data_fd, disk, fd, at, length)
                at += length
        os.ftruncate(fd, end)
        os.fsync(fd)
        target.execute("COMMIT")
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        os.close(fd)
        target.close()
        source.close()
    database.sync_directory(place)


def _copy_bytes(source: int, start: int, target: int, at: int, length: int) -> None:
    """By the kernel, which may share the blocks, or else by hand. What is past the end of the source is zeros."""
    end = start + length
    while start < end:
        try:
            n = os.copy_file_range(source, target, end - start, start, at)
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            n = os.pwrite(target, os.pread(source, min(_PIECE, end - start), start), at)
        if not n:
            return
        start, at = start + n, at + n
