"""Stores that SQL reaches: the tables of LangGraph's SqliteStore and PostgresStore.

The tables are those of langgraph-checkpoint-sqlite and -postgres 3: ``store`` with prefix, key, value, created_at,
updated_at. They are read and written here, as those classes do it, and not through them: importing them takes over a
second and 100 MB, and their interface has no compare and put, no move in one transaction, and no look at row versions
instead of at all contents. PostgreSQL's tables are made by LangGraph, in a process of its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vfsd.backends import items
from vfsd.backends.remote import ABSENT, ANY, Expect, Found, Moved, News, RemoteError, fail
from vfsd.backends.store import MOVING, StoreRemote

_ASIDE = "!moving "

WAIT_SECONDS = 5.0
"""How long a connection, or a lock of another writer, is waited for."""


class Row(NamedTuple):
    """An item as ``StoreRemote`` reads one."""

    key: str
    value: Any
    updated_at: Any


class _Op(NamedTuple):
    """One read or write: ``which`` 0 is the item under ``key``, 1 its record; a write of None deletes."""

    which: int
    key: str
    writes: bool = False
    value: items.Value | None = None


class SqlRemote(StoreRemote):
    """What both have in common; ``_rows``, ``_tokens`` and ``_transaction`` are the engine's."""

    def __init__(self, location: str, namespace: tuple[str, ...], owner: tuple[int, int]) -> None:
        super().__init__(location, namespace, owner)
        self._seen: dict[str, Hashable] = {}
        self._at: Hashable = None
        self._prefixes = (".".join(namespace), ".".join(self.side))

    def _all(self, namespace: tuple[str, ...]) -> Iterator[Any]:
        yield from self._rows(".".join(namespace))

    def scan(self, directory: bytes) -> list[Found]:
        # What changes between the looks is seen at the next one.
        version, seen = self._version(), self._tokens()
        found = list(super().scan(directory))
        self._at, self._seen = version, seen
        return found

    def _rows(self, prefix: str, keys: Sequence[str] | None = None) -> list[Row]:
        """All items of a prefix, or those with these keys."""
        raise NotImplementedError

    def _tokens(self) -> dict[str, Hashable]:
        """Per key something that changes with its item or its record."""
        raise NotImplementedError

    def _version(self) -> Hashable:
        """The same as at the last call when certainly nobody else has written since."""
        raise NotImplementedError

    def poll(self, known: Mapping[bytes, Hashable], again: Collection[bytes]) -> News | None:
        version = self._version()
        if version == self._at and not again:
            return None
        tokens = self._tokens()
        fresh: list[Found] = []
        gone: list[bytes] = []
        changed = [key for key, token in tokens.items() if self._seen.get(key) != token]
        # Not only those seen before: what was put here since, and removed by others, was in no look yet.
        changed += [key for path in known if (key := _key(path)) not in tokens]
        changed = list({**dict.fromkeys(changed), **dict.fromkeys(map(_key, again))})
        for key in changed:
            if key not in ("/", MOVING) and items.path_of(key) is None:
                self._say_odd(key, "its key is no path of a file")
        for path, found in self._get_many([k for k in changed if k == "/" or items.path_of(k) is not None]):
            if found is None:
                if path in known:
                    gone.append(path)
            elif path not in known or found.etag != known[path]:
                fresh.append(found)
        self._at, self._seen = version, tokens
        return News(fresh, gone) if fresh or gone else None

    def _get_many(self, keys: Sequence[str]) -> Iterator[tuple[bytes, Found | None]]:
        for start in range(0, len(keys), 250):
            part = keys[start : start + 250]
            got = self._batch([self._get_op(ns, key) for key in part for ns in (self.namespace, self.side)])
            for key, item, record in zip(part, got[::2], got[1::2], strict=True):
                path = b"/" if key == "/" else items.path_of(key)
                assert path is not None
                side = None if record is None else record.value
                if item is not None:
                    yield path, self._file(item, side)
                    continue
                found = None if side is None else self._alone(key, side)
                if side is not None and found is None:
                    self._drop_records([key])
                yield path, found

    # -- ops as the base class makes them, done by SQL

    def _get_op(self, namespace: tuple[str, ...], key: str) -> Any:
        return _Op(int(namespace == self.side), key)

    def _put_op(self, namespace: tuple[str, ...], key: str, value: items.Value | None) -> Any:
        return _Op(int(namespace == self.side), key, True, value)

    def _batch(self, ops: Sequence[_Op]) -> list[Any]:
        got: dict[tuple[int, str], Row] = {}
        for which in (0, 1):
            keys = [op.key for op in ops if op.which == which and not op.writes]
            if keys:
                got |= {(which, row.key): row for row in self._rows(self._prefixes[which], keys)}
        if any(op.writes for op in ops):
            with self._transaction() as db:
                for op in ops:
                    if op.writes:
                        self._set(db, op.which, op.key, op.value)
        return [None if op.writes else got.get((op.which, op.key)) for op in ops]

    def _swap(self, key: str, value: items.Value, record: items.Value | None, had_record: bool, expect: Expect) -> None:
        with self._transaction() as db:
            if expect != ANY:
                self.compare(self._locked_row(db, key), expect)
            self._set(db, 0, key, value)
            if record is not None or had_record:
                self._set(db, 1, key, record)

    def move(self, moves: Sequence[Moved]) -> None:
        """Rename rows in one transaction: out of the way first, so that names may be exchanged."""
        fresh: list[bytes] = []
        stamps: dict[bytes, tuple[str | None, str | None]] = {}
        with self._transaction() as db:
            for move in moves:
                old = items.key_of(move.old)
                if move.has_content and not self._rename(db, old, _ASIDE + old):
                    raise fail(errno.ENOENT)
                self._set(db, 1, old, None)
            for move in moves:
                old, new = items.key_of(move.old), items.key_of(move.new)
                self._set(db, 0, new, None)
                if move.has_content:
                    self._rename(db, _ASIDE + old, new)
                stamps[move.new] = self._stamps.get(move.old, (None, None))
                record = None
                if not move.has_content or items.needs_record(move.meta, self.owner):
                    record = items.record_of(move.meta, stamps[move.new][1])
                    fresh.append(move.new)
                self._set(db, 1, new, record)
        with self._lock:
            for move in moves:
                self._stamps.pop(move.old, None)
                self._records.discard(move.old)
                self._records.discard(move.new)
            self._stamps |= stamps
            self._records.update(fresh)

    def everything(self) -> Iterator[bytes]:
        self._store = self._connect()
        for row in self._each("SELECT value FROM store"):
            yield from items.texts_of(json.loads(row[0]) if isinstance(row[0], (str, bytes)) else row[0])

    # -- what each engine does its own way; ``db`` is in a transaction

    def _each(self, query: str) -> Iterator[Any]:
        """The rows of a query that may give many."""
        raise NotImplementedError

    def _transaction(self) -> contextlib.AbstractContextManager[Any]:
        raise NotImplementedError

    def _locked_row(self, db: Any, key: str) -> Row | None:
        """The item as it will be until the transaction ends."""
        raise NotImplementedError

    def _set(self, db: Any, which: int, key: str, value: items.Value | None) -> None:
        """Write one row as LangGraph would, or delete it."""
        raise NotImplementedError

    def _rename(self, db: Any, old: str, new: str) -> bool:
        """Give an item another key; False when there is none."""
        raise NotImplementedError


class SqliteRemote(SqlRemote):
    """``sqlite:PATH``: a file that SqliteStore made or will; several daemons and StoreBackends may use it at once."""

    def _connect(self) -> Any:
        path = Path(self.location.partition(":")[2])
        # Owner only from the first moment: SQLite gives its -wal and -shm files the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, timeout=WAIT_SECONDS, check_same_thread=False, isolation_level=None)
        try:
            # A reader must not keep a writer waiting; FULL, so that what a close waited for survives power loss.
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'store'").fetchone() is None:
                db.executescript(_SQLITE_TABLES)
        except BaseException:
            db.close()
            raise
        self._one_at_a_time = threading.Lock()
        return db

    def close(self) -> None:
        if self._store is not None:
            with self._one_at_a_time:
                self._store.close()
            self._store = None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        with self._one_at_a_time:
            db: sqlite3.Connection = self._store
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException as exc:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                if isinstance(exc, sqlite3.OperationalError) and "full" in str(exc):
                    raise fail(errno.ENOSPC) from exc
                raise

    def _read(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._one_at_a_time:
            return list(self._store.execute(query, parameters))

    def _each(self, query: str) -> Iterator[Any]:
        yield from self._store.execute(query)

    def _rows(self, prefix: str, keys: Sequence[str] | None = None) -> list[Row]:
        query, values = "SELECT key, value, updated_at FROM store WHERE prefix = ?", [prefix]
        if keys is not None:
            query += f" AND key IN ({','.join('?' * len(keys))})"
            values += keys
        return [Row(key, json.loads(value), updated) for key, value, updated in self._read(query, values)]

    def _tokens(self) -> dict[str, Hashable]:
        # A row written again gets a number above all others; that number can come back only after a deletion, and
        # then the end of the value, where StoreBackend's modified_at stands, is another.
        query = "SELECT key, prefix = ?, rowid, substr(value, -64) FROM store WHERE prefix IN (?, ?) ORDER BY prefix"
        tokens: dict[str, Hashable] = {}
        for key, mine, number, tail in self._read(query, (self._prefixes[0], *self._prefixes)):
            tokens[key] = (tokens.get(key), mine, number, tail)
        return tokens

    def _version(self) -> Hashable:
        # Another connection has committed (SQLite, PRAGMA data_version).
        return int(self._read("PRAGMA data_version")[0][0])

    def _locked_row(self, db: Any, key: str) -> Row | None:
        row = db.execute(
            "SELECT value, updated_at FROM store WHERE prefix = ? AND key = ?", (self._prefixes[0], key)
        ).fetchone()
        return None if row is None else Row(key, json.loads(row[0]), row[1])

    def _set(self, db: Any, which: int, key: str, value: items.Value | None) -> None:
        if value is None:
            db.execute("DELETE FROM store WHERE prefix = ? AND key = ?", (self._prefixes[which], key))
            return
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        db.execute(
            "INSERT OR REPLACE INTO store (prefix, key, value, created_at, updated_at)"
            " VALUES (?, ?, ?, CURRENT_TIMESTAMP, CURRENT_TIMESTAMP)",
            (self._prefixes[which], key, text),
        )

    def _rename(self, db: Any, old: str, new: str) -> bool:
        changed = db.execute("UPDATE store SET key = ? WHERE prefix = ? AND key = ?", (new, self._prefixes[0], old))
        return bool(changed.rowcount)


class PostgresRemote(SqlRemote):
    """``postgresql://...``: the tables of PostgresStore, for more than one machine."""

    poll_seconds = 0.4

    def _connect(self) -> Any:
        import psycopg
        from psycopg_pool import ConnectionPool

        settings: dict[str, Any] = {
            "autocommit": True, "prepare_threshold": None, "connect_timeout": int(WAIT_SECONDS),
            "keepalives_idle": 10, "keepalives_interval": 3, "keepalives_count": 3, "tcp_user_timeout": 15000,
            "options": "-c statement_timeout=20000 -c lock_timeout=10000", "application_name": "vfsd",
        }  # fmt: skip
        # First without the pool, which would only say that it waited in vain.
        with psycopg.connect(self.location, **settings) as db:
            row = db.execute("SELECT to_regclass('store') IS NOT NULL").fetchone()
            if row is None or not row[0]:
                _set_up(_POSTGRES_SETUP, self.location)
        return ConnectionPool(
            self.location, min_size=1, max_size=16, kwargs=settings, timeout=WAIT_SECONDS, open=True,
            check=ConnectionPool.check_connection, reconnect_timeout=0, name="vfsd",
        )  # fmt: skip

    def close(self) -> None:
        if self._store is not None:
            self._store.close(timeout=2)
            self._store = None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        with self._store.connection() as connection, connection.transaction():
            yield connection

    def _read(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._store.connection() as connection:
            return list(connection.execute(query, parameters).fetchall())

    def _each(self, query: str) -> Iterator[Any]:
        with self._store.connection() as connection, connection.transaction(), connection.cursor("vfsd") as rows:
            yield from rows.execute(query)

    def everything(self) -> Iterator[bytes]:
        yield from super().everything()
        # What an agent's conversation says, where LangGraph keeps it in the same database.
        for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            if self._read("SELECT to_regclass(%s) IS NOT NULL", [table])[0][0]:
                for row in self._each(f"SELECT * FROM {table}"):
                    for value in row:
                        yield value if isinstance(value, bytes) else str(value).encode(errors="replace")

    def _rows(self, prefix: str, keys: Sequence[str] | None = None) -> list[Row]:
        query, values = "SELECT key, value, updated_at FROM store WHERE prefix = %s", list[Any]([prefix])
        if keys is not None:
            query += " AND key = ANY(%s)"
            values.append(list(keys))
        return [Row(*row) for row in self._read(query, values)]

    def _tokens(self) -> dict[str, Hashable]:
        # xmin names the transaction that wrote the row version (PostgreSQL, System Columns).
        rows = self._read(
            "SELECT key, prefix, xmin::text, updated_at FROM store WHERE prefix IN (%s, %s) ORDER BY prefix",
            self._prefixes,
        )
        tokens: dict[str, Hashable] = {}
        for key, *token in rows:
            tokens[key] = (tokens.get(key), *token)
        return tokens

    def _version(self) -> Hashable:
        found: tuple[Any, ...] = self._read(
            "SELECT count(*), sum(hashtextextended(key || ' ' || xmin::text || updated_at::text, 0))"
            " FROM store WHERE prefix IN (%s, %s)",
            self._prefixes,
        )[0]
        return found

    def _swap(self, key: str, value: items.Value, record: items.Value | None, had_record: bool, expect: Expect) -> None:
        from psycopg.types.json import Jsonb

        if expect not in (ANY, ABSENT):
            super()._swap(key, value, record, had_record, expect)
            return
        both = record is not None or had_record
        # One statement is a transaction by itself, with two trips less.
        with self._transaction() if both else self._store.connection() as db:
            if expect == ANY:
                self._set(db, 0, key, value)
            else:
                # Not a look before: two may look at once, only one can insert.
                made = db.execute(
                    "INSERT INTO store (prefix, key, value) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
                    (self._prefixes[0], key, Jsonb(value)),
                )
                if made.rowcount != 1:
                    raise fail(errno.EEXIST)
            if both:
                self._set(db, 1, key, record)

    def _locked_row(self, db: Any, key: str) -> Row | None:
        row = db.execute(
            "SELECT value, updated_at FROM store WHERE prefix = %s AND key = %s FOR UPDATE", (self._prefixes[0], key)
        ).fetchone()
        return None if row is None else Row(key, row[0], row[1])

    def _set(self, db: Any, which: int, key: str, value: items.Value | None) -> None:
        from psycopg.types.json import Jsonb

        if value is None:
            db.execute("DELETE FROM store WHERE prefix = %s AND key = %s", (self._prefixes[which], key))
            return
        db.execute(
            "INSERT INTO store (prefix, key, value) VALUES (%s, %s, %s) ON CONFLICT (prefix, key) DO UPDATE"
            " SET value = EXCLUDED.value, updated_at = CURRENT_TIMESTAMP, expires_at = NULL, ttl_minutes = NULL",
            (self._prefixes[which], key, Jsonb(value)),
        )

    def _rename(self, db: Any, old: str, new: str) -> bool:
        changed = db.execute("UPDATE store SET key = %s WHERE prefix = %s AND key = %s", (new, self._prefixes[0], old))
        return bool(changed.rowcount)


_SQLITE_TABLES = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS store_migrations (v INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS store (
    prefix text NOT NULL,
    key text NOT NULL,
    value text NOT NULL,
    created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
    updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
    expires_at TIMESTAMP,
    ttl_minutes REAL,
    PRIMARY KEY (prefix, key)
);
CREATE INDEX IF NOT EXISTS store_prefix_idx ON store (prefix);
CREATE INDEX IF NOT EXISTS idx_store_expires_at ON store (expires_at) WHERE expires_at IS NOT NULL;
INSERT OR IGNORE INTO store_migrations (v) VALUES (0), (1), (2), (3), (4);
COMMIT;
"""
"""What SqliteStore.setup leaves behind its first five migrations; those that come later it adds itself."""


def _key(path: bytes) -> str:
    return "/" if path == b"/" else items.key_of(path)


_POSTGRES_SETUP = """
import sys
from langgraph.store.postgres import PostgresStore
with PostgresStore.from_conn_string(sys.stdin.read()) as store:
    store.setup()
"""


def _set_up(program: str, location: str) -> None:
    """Have LangGraph make its tables; the location goes by standard input, for it may hold a password."""
    ran = subprocess.run(
        [sys.executable, "-c", program], input=location, capture_output=True, text=True, timeout=60, check=False
    )
    if ran.returncode:
        last = ran.stderr.strip().rpartition("\n")[2]
        if "ModuleNotFoundError" in last:
            raise NotInstalled(f"LangGraph's store is not installed ({last}): pip install 'vfsd[store]'")
        raise RemoteError(f"LangGraph could not make its tables: {last}")


class NotInstalled(RemoteError):
    """A package that this kind of location needs is missing."""


def open_store(location: str, namespace: tuple[str, ...], owner: tuple[int, int]) -> StoreRemote:
    """The remote for a location, as ``check_place`` lets it pass. Nothing is opened yet."""
    scheme = location.partition(":")[0]
    kind = {"sqlite": SqliteRemote, "postgresql": PostgresRemote, "postgres": PostgresRemote}.get(scheme, StoreRemote)
    return kind(location, namespace, owner)
