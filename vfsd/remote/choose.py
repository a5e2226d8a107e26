"""From a route of the configuration to the volume that serves it: which remote is behind a store, blob or backend.

A place that can't be used, or does not answer, is no reason not to mount: its route is there, says why it does not
work, and is tried again. Packages that only one kind needs are imported when a route of that kind is opened.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from vfsd.backends import items
from vfsd.backends.blob import BlobDirectory
from vfsd.backends.foreign import ForeignRemote
from vfsd.backends.remote import Expect, Found, Meta, Moved, News, Remote, RemoteError, Source, shown
from vfsd.backends.storesql import open_store
from vfsd.config import RouteSpec, state_home
from vfsd.core.types import StatFs
from vfsd.feed import Feed
from vfsd.remote.volume import RemoteVolume


class Unusable:
    """The remote of a route that can't work as it is written: always says why."""

    lazy = ranges = verifies = False
    keeps: frozenset[str] = frozenset()
    poll_seconds = 60.0
    cache_seconds = 1.0
    max_size = 0

    def __init__(self, kind: str, location: str, reason: str) -> None:
        self.kind = kind
        self.location = location
        self._reason = reason

    def open(self) -> None:
        raise RemoteError(self._reason)

    def close(self) -> None:
        """Nothing was opened."""

    def check(self, path: bytes) -> None:
        self.open()

    def statfs(self) -> StatFs | None:
        return None

    def scan(self, directory: bytes) -> Iterable[Found]:
        raise RemoteError(self._reason)

    def get(self, path: bytes) -> Found:
        raise RemoteError(self._reason)

    def probe(self, path: bytes) -> Found | None:
        raise RemoteError(self._reason)

    def read(self, path: bytes, offset: int, length: int) -> bytes:
        raise RemoteError(self._reason)

    def put(self, path: bytes, source: Source, meta: Meta, expect: Expect) -> Hashable:
        raise RemoteError(self._reason)

    def keep(self, metas: Sequence[tuple[bytes, Meta]]) -> None:
        self.open()

    def remove(self, paths: Sequence[bytes]) -> None:
        self.open()

    def move(self, moves: Sequence[Moved]) -> None:
        self.open()

    def poll(self, known: Mapping[bytes, Hashable], again: Collection[bytes]) -> News | None:
        raise RemoteError(self._reason)


def place_of(spec: RouteSpec) -> str:
    """Where a route's files are, as it may be shown: without a password."""
    return shown(spec.uri) if spec.uri else str(spec.location or "")


def remote_of(spec: RouteSpec, owner: tuple[int, int]) -> Remote:
    """The remote of a store, blob or backend route, not yet opened."""
    if spec.home is not None and str(spec.home) not in sys.path:
        # A factory's module lies where the configuration does, or where the command was given.
        sys.path.append(str(spec.home))
    try:
        return _make(spec, owner)
    except RemoteError as exc:
        return Unusable(spec.kind, place_of(spec), str(exc))


def _make(spec: RouteSpec, owner: tuple[int, int]) -> Remote:
    if spec.kind == "store":
        if spec.uri == f"sqlite:{state_home() / os.path.basename(spec.uri)}":
            state_home().mkdir(mode=0o700, parents=True, exist_ok=True)
        return open_store(spec.uri, items.namespace(spec.namespace, dict(spec.values)), owner)
    if spec.kind == "blob":
        if not spec.uri:
            return BlobDirectory(str(spec.location), owner)
        from vfsd.backends.blobs3 import BlobBucket

        return BlobBucket(spec.uri, owner, state_home() / "cache")
    return ForeignRemote(spec.uri, owner)


def open_remote(spec: RouteSpec, base: int, feed: Feed, *, read_only: bool) -> RemoteVolume:
    """The volume of such a route; its ``problem`` says when it can't be used for now."""
    owner = (os.geteuid(), os.getegid())
    remote: Any = remote_of(spec, owner)
    scratch = None
    if spec.kind == "blob":
        scratch = spec.location if spec.location is not None else state_home() / "cache"
    volume = RemoteVolume(
        base, remote, feed, owner=owner, read_only=read_only, label=spec.prefix,
        scratch=None if scratch is None else scratch / ".tmp",
    )  # fmt: skip
    volume.start()
    return volume
