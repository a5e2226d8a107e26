"""Contents named by their sha256, in a directory of the host: ``<directory>/<64 hex digits>``.

Immutable: what is under a name has been hashed before it got the name. A content is written under ``.tmp/``, synced,
renamed, and the directory synced, so that a crash leaves either nothing or the whole. Several daemons may share one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from vfsd.backends.remote import ABSENT, Expect, Found, Meta, Moved, News, Source, fail
from vfsd.core.types import FILE_MAX, StatFs

NAME = re.compile(rb"/[0-9a-f]{64}")
"""The path of a blob."""

_FRESH_NS = 100_000_000
"""A directory changed this recently may change again within the same tick of its file system's clock."""

STALE_SECONDS = 86400
"""Age of a file under ``.tmp/`` that nobody can be writing any more."""


class BlobRemote:
    """What both places of blobs have in common. ``owner`` (uid, gid) owns every blob."""

    kind = "blob"
    lazy = False
    ranges = True
    verifies = True
    keeps = frozenset[str]()
    poll_seconds = 0.5
    cache_seconds = 86400.0
    max_size = FILE_MAX

    def __init__(self, location: str, owner: tuple[int, int]) -> None:
        self.location = location
        self.owner = owner

    def check(self, path: bytes) -> None:
        if not NAME.fullmatch(path):
            raise fail(errno.EINVAL, "a blob's name is the sha256 of its content, in 64 hex digits")

    def found(self, path: bytes, size: int, mtime_ns: int) -> Found:
        """A blob as it shows."""
        meta = Meta(stat.S_IFREG | 0o444, *self.owner, 0, mtime_ns, mtime_ns, mtime_ns)
        return Found(path, False, size, mtime_ns, meta, None, meta)

    def keep(self, metas: Sequence[tuple[bytes, Meta]]) -> None:
        """Nothing is kept but contents."""

    def move(self, moves: Sequence[Moved]) -> None:
        raise fail(errno.EPERM)

    def statfs(self) -> StatFs | None:
        return None


class BlobDirectory(BlobRemote):
    """Blobs in directory ``location``."""

    keeps = frozenset(("times",))

    def __init__(self, location: str, owner: tuple[int, int]) -> None:
        super().__init__(location, owner)
        self.directory = Path(location)
        self._tmp = self.directory / ".tmp"
        self._changed_ns = 0
        self._looked_ns = 0

    def open(self) -> None:
        self._tmp.mkdir(mode=0o700, parents=True, exist_ok=True)
        oldest = time.time() - STALE_SECONDS
        for entry in os.scandir(self._tmp):
            with contextlib.suppress(OSError):
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)

    def close(self) -> None:
        """There is nothing to let go of."""

    def _at(self, path: bytes) -> Path:
        return self.directory / os.fsdecode(path[1:])

    def scan(self, directory: bytes) -> Iterable[Found]:
        self._looked_ns = time.time_ns()
        self._changed_ns = os.stat(self.directory).st_mtime_ns
        found = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                path = b"/" + os.fsencode(entry.name)
                if NAME.fullmatch(path) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        st = entry.stat(follow_symlinks=False)
                        found.append(self.found(path, st.st_size, st.st_mtime_ns))
        return found

    def probe(self, path: bytes) -> Found | None:
        """A blob by its name, which another daemon may just have made."""
        try:
            st = os.lstat(self._at(path))
        except FileNotFoundError:
            return None
        return self.found(path, st.st_size, st.st_mtime_ns)

    def get(self, path: bytes) -> Found:
        with open(self._at(path), "rb") as file:
            st = os.fstat(file.fileno())
            return self.found(path, st.st_size, st.st_mtime_ns)._replace(data=file.read())

    def read(self, path: bytes, offset: int, length: int) -> bytes:
        fd = os.open(self._at(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, length, offset)
        finally:
            os.close(fd)

    def put(self, path: bytes, source: Source, meta: Meta, expect: Expect) -> Hashable:
        """EBADMSG when the content is not the one the name says."""
        at = self._at(path)
        if expect == ABSENT and at.exists():
            raise fail(errno.EEXIST)
        temporary = self._tmp / os.urandom(16).hex()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        try:
            digest = hashlib.sha256()
            for piece in source.pieces():
                digest.update(piece)
                view = memoryview(piece)
                while view:
                    view = view[os.write(fd, view) :]
            if digest.hexdigest() != at.name:
                raise wrong_digest(at.name, digest.hexdigest())
            os.fsync(fd)
            # One that is there already is the same: nothing else could have got the name.
            os.rename(temporary, at)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        self._sync_directory()
        return None

    def keep(self, metas: Sequence[tuple[bytes, Meta]]) -> None:
        """Times alone, and only later ones: who collects unused blobs goes by them."""
        for path, meta in metas:
            with contextlib.suppress(FileNotFoundError):
                at = self._at(path)
                if meta.mtime_ns > os.lstat(at).st_mtime_ns:
                    os.utime(at, ns=(meta.atime_ns, meta.mtime_ns))

    def remove(self, paths: Sequence[bytes]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._at(path))
        self._sync_directory()

    def _sync_directory(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def poll(self, known: Mapping[bytes, Hashable], again: Collection[bytes]) -> News | None:
        changed = os.stat(self.directory).st_mtime_ns
        if changed == self._changed_ns and not again and self._looked_ns - changed > _FRESH_NS:
            return None
        return difference(list(self.scan(b"/")), known)

    def statfs(self) -> StatFs | None:
        s = os.statvfs(self.directory)
        return StatFs(
            s.f_bsize, s.f_frsize, s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_favail, s.f_namemax
        )


def wrong_digest(name: str, digest: str) -> OSError:
    """What a content that is not what its name says fails with."""
    return fail(errno.EBADMSG, f"the content's sha256 is {digest}, not {name}")


def difference(found: Sequence[Found], known: Mapping[bytes, Hashable]) -> News | None:
    """What a whole listing tells beside what is known: files come and go, none changes."""
    fresh = [f for f in found if f.path not in known]
    gone = list(known.keys() - {f.path for f in found})
    return News(fresh, gone) if fresh or gone else None
