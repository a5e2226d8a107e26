"""A LangGraph BaseStore as a remote: one item a file, as Deep Agents' StoreBackend has it (``items``).

Works with any BaseStore through ``batch`` alone: contents are compared to see what others changed, and a comparison
before a put is a moment before it. The stores that SQL reaches do better (``storesql``). langgraph is imported only
when a store is opened.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import stat
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from vfsd.backends import items
from vfsd.backends.factory import build
from vfsd.backends.remote import ABSENT, ANY, Expect, Found, Meta, Moved, News, RemoteError, Source, fail, shown
from vfsd.core.types import StatFs

log = logging.getLogger(__name__)

PAGE = 1000
"""Items asked for at once."""

MOVING = "moving"
"""Key of the note about a rename; no path, since it does not begin with a slash."""

MAX_SIZE = 64 << 20
"""Bytes in one item: LangGraph carries it as one JSON text."""

Key = tuple[tuple[str, ...], str]


class StoreRemote:
    """The files of one namespace of a store. ``owner`` (uid, gid) owns what has no record."""

    kind = "store"
    lazy = False
    ranges = False
    verifies = False
    keeps = frozenset(("modes", "links", "symlinks", "special", "xattrs", "dirs"))
    poll_seconds = 0.5
    cache_seconds = 86400.0
    max_size = MAX_SIZE

    def __init__(self, location: str, namespace: tuple[str, ...], owner: tuple[int, int]) -> None:
        self.location = location
        self.namespace = namespace
        self.side = (items.SIDE, *namespace)
        self.owner = owner
        self._store: Any = None
        self._stamps: dict[bytes, tuple[str | None, str | None]] = {}
        """created_at and modified_at of the items, which a put keeps and a record refers to."""
        self._records: set[bytes] = set()
        self._odd: set[object] = set()
        self._serial: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """Around each use of a store that is not made for several threads at once."""
        self._lock = threading.Lock()
        """Held around what belongs together on this side; the store has its own."""

    # -- the store itself

    def open(self) -> None:
        if self._store is None:
            self._store = self._connect()
            if type(self._store).__module__ == "langgraph.store.memory":
                # A dict that is searched must not grow meanwhile.
                self._serial = threading.Lock()
        # Whether it is a store, and answers.
        self._batch([self._get_op(self.namespace, "/")])
        self._finish_move()

    def _connect(self) -> Any:
        if self.location == "memory:":
            from langgraph.store.memory import InMemoryStore

            return InMemoryStore()
        store = build(self.location)
        if not callable(getattr(store, "batch", None)) or not callable(getattr(store, "search", None)):
            raise RemoteError(f"{self.location} made {type(store).__name__}, which is no LangGraph BaseStore")
        return store

    def close(self) -> None:
        self._store = None

    def statfs(self) -> StatFs | None:
        return None

    def check(self, path: bytes) -> None:
        items.key_of(path)

    def _batch(self, ops: Sequence[Any]) -> list[Any]:
        with self._serial:
            return list(self._store.batch(ops))

    def _get_op(self, namespace: tuple[str, ...], key: str) -> Any:
        from langgraph.store.base import GetOp

        return GetOp(namespace, key, False)

    def _put_op(self, namespace: tuple[str, ...], key: str, value: items.Value | None) -> Any:
        from langgraph.store.base import PutOp

        return PutOp(namespace, key, value)

    def _all(self, namespace: tuple[str, ...]) -> Iterator[Any]:
        """Every item of exactly this namespace; pages may shift under a search, so each key is given once."""
        seen: set[str] = set()
        offset = 0
        while True:
            with self._serial:
                page = self._store.search(namespace, limit=PAGE, offset=offset, refresh_ttl=False)
            for item in page:
                if tuple(item.namespace) == namespace and item.key not in seen:
                    seen.add(item.key)
                    yield item
            if len(page) < PAGE:
                return
            offset += len(page)

    # -- reading

    def scan(self, directory: bytes) -> Iterable[Found]:
        records = {item.key: item.value for item in self._all(self.side) if item.key != MOVING}
        found = [f for item in self._all(self.namespace) if (f := self._file(item, records.pop(item.key, None)))]
        lost: list[str] = []
        for key, record in records.items():
            alone = self._alone(key, record)
            if alone is not None:
                found.append(alone)
            elif items.path_of(key) is not None:
                lost.append(key)
        self._drop_records(lost)
        return found

    def _drop_records(self, keys: Sequence[str]) -> None:
        """Records of files whose items others have removed: a new file of that name is to have nothing of them."""
        if keys:
            self._in_batches([self._put_op(self.side, key, None) for key in keys])
            with self._lock:
                self._records.difference_update(filter(None, map(items.path_of, keys)))

    def _file(self, item: Any, record: object) -> Found | None:
        """An item as a file, with its record if it has one."""
        path = items.path_of(item.key)
        if path is None:
            self._say_odd(item.key, "its key is no path of a file")
            return None
        try:
            data = items.content_of(item.value)
            meta = items.joined(item.value, record, self.owner, item.updated_at)
        except RemoteError as exc:
            self._say_odd(item.key, str(exc))
            return None
        with self._lock:
            self._stamps[path] = _stamps(item.value)
            (self._records.discard if record is None else self._records.add)(path)
        return Found(path, False, len(data), meta.mtime_ns, self._etag(data, meta), data, meta)

    def _alone(self, key: str, record: object) -> Found | None:
        """A record without an item: a directory, a symlink, a special file. One of a file was left behind: None."""
        path = b"/" if key == "/" else items.path_of(key)
        try:
            if path is None:
                raise RemoteError("its key is no path")
            meta = items.meta_of(record)
        except RemoteError as exc:
            self._say_odd(key, str(exc))
            return None
        if stat.S_ISREG(meta.mode):
            return None
        with self._lock:
            self._records.add(path)
        is_dir = stat.S_ISDIR(meta.mode)
        return Found(path, is_dir, len(meta.target or b""), meta.mtime_ns, self._etag(b"", meta), None, meta)

    @staticmethod
    def _etag(data: bytes, meta: Meta) -> Hashable:
        return xxhash.xxh3_64_intdigest(data), meta

    def _say_odd(self, key: object, why: str) -> None:
        if key not in self._odd:
            self._odd.add(key)
            log.warning(
                "store %s, namespace %s: item %r is not shown: %s", shown(self.location), self.namespace, key, why
            )

    def get(self, path: bytes) -> Found:
        key = items.key_of(path) if path != b"/" else "/"
        item, record = self._batch([self._get_op(self.namespace, key), self._get_op(self.side, key)])
        side = None if record is None else record.value
        found = self._file(item, side) if item is not None else self._alone(key, side) if side is not None else None
        if found is None:
            raise fail(errno.ENOENT)
        return found

    def probe(self, path: bytes) -> Found | None:
        try:
            return self.get(path)
        except FileNotFoundError:
            return None

    def read(self, path: bytes, offset: int, length: int) -> bytes:
        data = self.get(path).data
        return b"" if data is None else data[offset : offset + length]

    # -- writing

    def put(self, path: bytes, source: Source, meta: Meta, expect: Expect) -> Hashable:
        data, key = source.data(), items.key_of(path)
        if len(data) > self.max_size:
            raise fail(errno.EFBIG)
        value = items.value_of(data, meta.mtime_ns, self._stamps.get(path, (None, None))[0])
        stamps = _stamps(value)
        record = items.record_of(meta, stamps[1]) if items.needs_record(meta, self.owner) else None
        self._swap(key, value, record, path in self._records, expect)
        with self._lock:
            self._stamps[path] = stamps
            (self._records.add if record is not None else self._records.discard)(path)
        return self._etag(data, meta)

    def _swap(self, key: str, value: items.Value, record: items.Value | None, had_record: bool, expect: Expect) -> None:
        """Write an item and its record if what is there is as expected: EEXIST, ESTALE."""
        if expect != ANY:
            self.compare(self._batch([self._get_op(self.namespace, key)])[0], expect)
        ops = [self._put_op(self.namespace, key, value)]
        if record is not None or had_record:
            ops.append(self._put_op(self.side, key, record))
        self._batch(ops)

    @staticmethod
    def compare(item: Any, expect: Expect) -> None:
        """Raises EEXIST or ESTALE unless the item (None: none) is as expected."""
        if expect == ABSENT:
            if item is not None:
                raise fail(errno.EEXIST)
        elif item is None or xxhash.xxh3_64_intdigest(items.content_of(item.value)) != expect:
            raise fail(errno.ESTALE)

    def modified(self, path: bytes) -> str | None:
        """The modified_at of a path's item."""
        return self._stamps.get(path, (None, None))[1]

    def keep(self, metas: Sequence[tuple[bytes, Meta]]) -> None:
        ops = []
        for path, meta in metas:
            key = "/" if path == b"/" else items.key_of(path)
            needed = not stat.S_ISREG(meta.mode) or items.needs_record(meta, self.owner)
            if needed or path in self._records:
                record = items.record_of(meta, self.modified(path)) if needed else None
                ops.append(self._put_op(self.side, key, record))
            with self._lock:
                (self._records.add if needed else self._records.discard)(path)
        self._in_batches(ops)

    def remove(self, paths: Sequence[bytes]) -> None:
        ops = []
        for path in paths:
            key = items.key_of(path)
            ops += [self._put_op(self.namespace, key, None), self._put_op(self.side, key, None)]
        self._in_batches(ops)
        with self._lock:
            self._records.difference_update(paths)
            for path in paths:
                self._stamps.pop(path, None)

    def move(self, moves: Sequence[Moved]) -> None:
        """New names first, then the old ones go. What is under way stands in a note, by which ``open`` finishes it."""
        fresh = {move.new for move in moves}
        stale = [move.old for move in moves if move.old not in fresh]
        swaps = len(stale) < len(moves)
        note = [[items.key_of(m.old), items.key_of(m.new), m.has_content] for m in moves if not swaps]
        if note:
            self._batch([self._put_op(self.side, MOVING, {"moves": note})])
        size = len(moves) if swaps else PAGE // 4
        for start in range(0, len(moves), size):
            self._copy(moves[start : start + size])
        self.remove(stale)
        if note:
            self._batch([self._put_op(self.side, MOVING, None)])

    def _finish_move(self) -> None:
        """See a rename through that its daemon did not live to finish."""
        note = self._batch([self._get_op(self.side, MOVING)])[0]
        if note is None:
            return
        log.warning("store %s, namespace %s: finishing an interrupted rename", shown(self.location), self.namespace)
        for old, new, _ in note.value["moves"]:
            ops: list[Any] = []
            for namespace in (self.namespace, self.side):
                item = self._batch([self._get_op(namespace, old)])[0]
                if item is not None:
                    ops.append(self._put_op(namespace, new, dict(item.value)))
            self._batch(ops)
            self._batch([self._put_op(namespace, old, None) for namespace in (self.namespace, self.side)])
        self._batch([self._put_op(self.side, MOVING, None)])

    def _copy(self, moves: Sequence[Moved]) -> None:
        """The items under their new names, in one batch: of an exchange both must be read before either is written."""
        got = self._batch([self._get_op(self.namespace, items.key_of(m.old)) for m in moves if m.has_content] or [])
        contents = iter(got)
        ops = []
        for move in moves:
            key = items.key_of(move.new)
            if move.has_content:
                item = next(contents)
                if item is None:
                    raise fail(errno.ENOENT)
                ops.append(self._put_op(self.namespace, key, dict(item.value)))
                self._stamps[move.new] = _stamps(item.value)
            else:
                ops.append(self._put_op(self.namespace, key, None))
            needed = not move.has_content or items.needs_record(move.meta, self.owner)
            if needed or move.new in self._records:
                record = items.record_of(move.meta, self.modified(move.new)) if needed else None
                ops.append(self._put_op(self.side, key, record))
            with self._lock:
                (self._records.add if needed else self._records.discard)(move.new)
        self._batch(ops)

    def _in_batches(self, ops: Sequence[Any]) -> None:
        for start in range(0, len(ops), PAGE // 2):
            self._batch(ops[start : start + PAGE // 2])

    def everything(self) -> Iterator[bytes]:
        """What all items of the store say, of all namespaces; on a connection of its own, without ``open``."""
        self._store = self._connect()
        offset = 0
        while page := self._store.search((), limit=PAGE, offset=offset, refresh_ttl=False):
            for item in page:
                yield from items.texts_of(item.value)
            offset += len(page)

    # -- what others did

    def poll(self, known: Mapping[bytes, Hashable], again: Collection[bytes]) -> News | None:
        found = {f.path: f for f in self.scan(b"/")}
        fresh = [f for path, f in found.items() if path not in known or f.etag != known[path]]
        gone = []
        for path in known.keys() - found.keys():
            # A page that shifted while it was read may have hidden it: only the store's own word counts.
            try:
                fresh.append(self.get(path))
            except FileNotFoundError:
                gone.append(path)
        return News(fresh, gone) if fresh or gone else None


def _stamps(value: Mapping[str, Any]) -> tuple[str | None, str | None]:
    created, modified = value.get("created_at"), value.get("modified_at")
    return created if isinstance(created, str) else None, modified if isinstance(modified, str) else None
