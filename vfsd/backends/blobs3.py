"""Contents named by their sha256 in a bucket, ``s3://BUCKET/PREFIX``, through obstore, with a bounded cache here.

A content is hashed before it is sent, goes up under its final name in one request or one multipart upload (which a
failure aborts), and what comes down whole is hashed again. Credentials, region and endpoint are the environment's
(``AWS_*``), as obstore reads it. The cache holds whole blobs and pieces, named by digest and offset; any of it may be
deleted at any time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vfsd.backends.blob import BlobRemote, difference, wrong_digest
from vfsd.backends.remote import ABSENT, Expect, Found, Meta, News, RemoteError, Source, fail

log = logging.getLogger(__name__)

BLOCK = 1 << 20
"""Bytes fetched at once, where a part of a blob is read."""

CACHE_BYTES = 1 << 30
"""Size of the cache; the longest unread goes first."""

LIST_SECONDS = 5.0
"""Between two listings of the bucket; what a listing does not show yet is found by its name all the same."""


class BlobBucket(BlobRemote):
    """Blobs in a bucket; ``cache`` is a directory of this machine."""

    poll_seconds = LIST_SECONDS

    def __init__(self, location: str, owner: tuple[int, int], cache: Path) -> None:
        super().__init__(location, owner)
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._bucket = bucket
        self._cache = cache / hashlib.sha256(location.encode()).hexdigest()[:16]
        self._store: Any = None
        self._cached = 0

    def open(self) -> None:
        try:
            from obstore.store import S3Store
        except ImportError:
            raise RemoteError("obstore is not installed: pip install 'vfsd[s3]'") from None
        if self._store is None:
            from datetime import timedelta

            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
            options: Any = {
                "timeout": timedelta(seconds=20), "connect_timeout": timedelta(seconds=5),
                "allow_http": endpoint.startswith("http:"),
            }  # fmt: skip
            retry: Any = {
                "max_retries": 4,
                "retry_timeout": timedelta(seconds=20),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=2),
                    "base": 2.0,
                },
            }
            config: Any = {"endpoint": endpoint} if endpoint else {}
            self._store = S3Store(self._bucket, config=config, client_options=options, retry_config=retry)
        self._cached = sum(size for _, size, _ in self._cache_files())

    def close(self) -> None:
        self._store = None

    def _key(self, path: bytes) -> str:
        return self._prefix + os.fsdecode(path[1:])

    # -- reading

    def scan(self, directory: bytes) -> Iterable[Found]:
        found = []
        for page in self._store.list(prefix=self._prefix or None):
            for entry in page:
                path = b"/" + os.fsencode(entry["path"].removeprefix(self._prefix))
                with contextlib.suppress(OSError):
                    self.check(path)
                    found.append(self.found(path, entry["size"], _ns(entry["last_modified"])))
        return found

    def get(self, path: bytes) -> Found:
        name = os.fsdecode(path[1:])
        whole = self._cache / name
        if not whole.exists():
            data = self._checked(self._ask(lambda: self._store.get(self._key(path)).bytes()), name)
            self._keep(whole, data)
            return self.found(path, len(data), time.time_ns())._replace(data=data)
        data = whole.read_bytes()
        return self.found(path, len(data), time.time_ns())._replace(data=data)

    def probe(self, path: bytes) -> Found | None:
        """A blob by its name, which a listing may not show yet."""
        try:
            head = self._store.head(self._key(path))
        except FileNotFoundError:
            return None
        return self.found(path, head["size"], _ns(head["last_modified"]))

    def _ask(self, ask: Any) -> bytes:
        try:
            return bytes(ask())
        except FileNotFoundError:
            raise fail(errno.ENOENT) from None

    @staticmethod
    def _checked(data: bytes, name: str) -> bytes:
        """EIO for a content that is not what it is called: it was damaged where it lies or on its way."""
        digest = hashlib.sha256(data).hexdigest()
        if digest != name:
            raise RemoteError(f"the bucket's content of {name} has sha256 {digest}")
        return data

    def read(self, path: bytes, offset: int, length: int) -> bytes:
        name = os.fsdecode(path[1:])
        whole = self._cache / name
        if whole.exists():
            return _part(whole, offset, length)
        out = bytearray()
        at = offset - offset % BLOCK
        while at < offset + length:
            piece = self._piece(path, name, at)
            out += piece[max(0, offset - at) : offset + length - at]
            if len(piece) < BLOCK:
                break
            at += BLOCK
        return bytes(out)

    def _piece(self, path: bytes, name: str, at: int) -> bytes:
        """One block, from the cache or the bucket."""
        kept = self._cache / f"{name}.{at // BLOCK}"
        try:
            data = kept.read_bytes()
        except FileNotFoundError:
            head = self._store.head(self._key(path))
            end = min(at + BLOCK, head["size"])
            if end <= at:
                return b""
            if at == 0 and end == head["size"]:
                data = self._checked(self._ask(lambda: self._store.get(self._key(path)).bytes()), name)
                self._keep(self._cache / name, data)
                return data
            try:
                data = self._ask(lambda: self._store.get_range(self._key(path), start=at, end=end))
            except Exception as exc:
                if "non-partial" not in str(exc):
                    raise
                # A server that knows no ranges (obstore will not take the whole for a part).
                whole = self._checked(self._ask(lambda: self._store.get(self._key(path)).bytes()), name)
                self._keep(self._cache / name, whole)
                return whole[at:end]
            if len(data) != end - at:
                raise RemoteError(f"the bucket gave {len(data)} of {end - at} bytes of {name}") from None
            self._keep(kept, data)
        else:
            os.utime(kept)
        return data

    # -- the cache

    def _cache_files(self) -> list[tuple[float, int, str]]:
        files = []
        for entry in os.scandir(self._cache):
            with contextlib.suppress(OSError):
                st = entry.stat()
                files.append((st.st_mtime, st.st_size, entry.path))
        return files

    def _keep(self, at: Path, data: bytes) -> None:
        """Best effort: a cache that can't be written is no reason to fail."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._cache, delete=False) as file:
                file.write(data)
            os.rename(file.name, at)
            self._cached += len(data)
            if self._cached > CACHE_BYTES:
                files = sorted(self._cache_files())
                self._cached = sum(size for _, size, _ in files)
                while self._cached > CACHE_BYTES * 3 // 4 and files:
                    _, size, path = files.pop(0)
                    os.unlink(path)
                    self._cached -= size
        except OSError as exc:
            log.warning("blobs %s: the cache %s can't be written: %s", self.location, self._cache, exc.strerror)

    # -- writing

    def put(self, path: bytes, source: Source, meta: Meta, expect: Expect) -> Hashable:
        name = os.fsdecode(path[1:])
        digest = hashlib.sha256()
        for piece in source.pieces():
            digest.update(piece)
        if digest.hexdigest() != name:
            raise wrong_digest(name, digest.hexdigest())
        try:
            there = self._store.head(self._key(path))["size"] == source.size
        except FileNotFoundError:
            there = False
        if there:
            if expect == ABSENT:
                raise fail(errno.EEXIST)
            return None
        # In pieces only where there is more than one request to make; obstore aborts a multipart upload that fails.
        self._store.put(self._key(path), source.data() if source.size <= 8 << 20 else _iterate(source))
        if self._store.head(self._key(path))["size"] != source.size:
            with contextlib.suppress(Exception):
                self._store.delete(self._key(path))
            raise RemoteError(f"the bucket kept another size of {name} than it was sent")
        return None

    def remove(self, paths: Sequence[bytes]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._store.delete(self._key(path))
            for kept in self._cache.glob(os.fsdecode(path[1:]) + "*"):
                with contextlib.suppress(OSError):
                    kept.unlink()

    def poll(self, known: Mapping[bytes, Hashable], again: Collection[bytes]) -> News | None:
        return difference(list(self.scan(b"/")), known)


def _iterate(source: Source) -> Iterator[bytes]:
    yield from source.pieces()


def _part(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), length, offset)


def _ns(moment: Any) -> int:
    return int(moment.timestamp() * 1_000_000) * 1000
