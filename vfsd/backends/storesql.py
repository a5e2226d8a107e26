"""Stores that SQL reaches: LangGraph's SqliteStore and PostgresStore, with transactions and cheap looks for changes.

The tables are LangGraph's (langgraph-checkpoint-sqlite 3, langgraph-checkpoint-postgres 3: ``store`` with prefix, key,
value, updated_at), set up by its own classes. What goes beyond their interface: a compare and a put, or a whole move,
in one transaction, and a look at row versions instead of at all contents.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vfsd.backends import items
from vfsd.backends.remote import ABSENT, ANY, Expect, Found, Moved, News, RemoteError, fail
from vfsd.backends.store import StoreRemote

WAIT_SECONDS = 5.0
"""How long a connection, or a lock of another writer, is waited for."""


class Row(NamedTuple):
    """An item as ``StoreRemote`` reads one."""

    key: str
    value: Any
    updated_at: Any


class SqlRemote(StoreRemote):
    """What both have in common; ``_rows``, ``_tokens`` and ``_transaction`` are the engine's."""

    def __init__(self, location: str, namespace: tuple[str, ...], owner: tuple[int, int]) -> None:
        super().__init__(location, namespace, owner)
        self._seen: dict[str, Hashable] = {}
        self._prefixes = (".".join(namespace), ".".join(self.side))

    def _all(self, namespace: tuple[str, ...]) -> Iterator[Any]:
        yield from self._rows(".".join(namespace))

    def scan(self, directory: bytes) -> list[Found]:
        # What changes between the two looks is seen at the next one.
        self._changed()
        seen = self._tokens()
        found = list(super().scan(directory))
        self._seen = seen
        return found

    def _rows(self, prefix: str) -> list[Row]:
        raise NotImplementedError

    def _tokens(self) -> dict[str, Hashable]:
        """Per key something that changes with its item or its record."""
        raise NotImplementedError

    def _changed(self) -> bool:
        """False when certainly nobody else has written since the last call."""
        raise NotImplementedError

    def poll(self, known: Mapping[bytes, Hashable], again: bool) -> News | None:
        if not self._changed() and not again:
            return None
        if again:
            return super().poll(known, again)
        tokens = self._tokens()
        fresh: list[Found] = []
        gone: list[bytes] = []
        changed = [key for key, token in tokens.items() if self._seen.get(key) != token]
        changed += [key for key in self._seen if key not in tokens]
        for path, found in self._get_many([k for k in changed if k == "/" or items.path_of(k) is not None]):
            if found is None:
                if path in known:
                    gone.append(path)
            elif path not in known or found.etag != known[path]:
                fresh.append(found)
        self._seen = tokens
        return News(fresh, gone) if fresh or gone else None

    def _get_many(self, keys: Sequence[str]) -> Iterator[tuple[bytes, Found | None]]:
        for start in range(0, len(keys), 250):
            part = keys[start : start + 250]
            got = self._batch([self._get_op(ns, key) for key in part for ns in (self.namespace, self.side)])
            for key, item, record in zip(part, got[::2], got[1::2], strict=True):
                path = key.encode()
                side = None if record is None else record.value
                if item is not None:
                    yield path, self._file(item, side)
                else:
                    yield path, None if side is None else self._alone(key, side)


class SqliteRemote(SqlRemote):
    """``sqlite:PATH``: a file that SqliteStore made or will; several daemons and StoreBackends may use it at once."""

    def _connect(self) -> Any:
        from langgraph.store.sqlite import SqliteStore

        path = Path(self.location.partition(":")[2])
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, mode=0o700)
        # Owner only from the first moment: SQLite gives its -wal and -shm files the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(
            path, timeout=WAIT_SECONDS, check_same_thread=False, isolation_level=None, cached_statements=256
        )
        try:
            # A reader must not keep a writer waiting; FULL, so that what a close waited for survives power loss.
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            store = SqliteStore(connection)
            store.setup()
        except BaseException:
            connection.close()
            raise
        self._version: int | None = None
        return store

    def close(self) -> None:
        if self._store is not None:
            self._store.conn.close()
            self._store = None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._store.lock:
            connection: sqlite3.Connection = self._store.conn
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException as exc:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if isinstance(exc, sqlite3.OperationalError) and "full" in str(exc):
                    raise fail(errno.ENOSPC) from exc
                raise

    def _read(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._store.lock:
            return list(self._store.conn.execute(query, parameters))

    def _rows(self, prefix: str) -> list[Row]:
        rows = self._read("SELECT key, value, updated_at FROM store WHERE prefix = ?", (prefix,))
        return [Row(key, _json(value), updated) for key, value, updated in rows]

    def _tokens(self) -> dict[str, Hashable]:
        # A row written again gets a number above all others; that number can come back only after a deletion, and
        # then the end of the value, where StoreBackend's modified_at stands, is another.
        query = (
            "SELECT key, prefix = ?, rowid, substr(value, -64) FROM store WHERE prefix IN (?, ?) ORDER BY prefix, key"
        )
        tokens: dict[str, Hashable] = {}
        for key, mine, number, tail in self._read(query, (self._prefixes[0], *self._prefixes)):
            tokens[key] = (tokens.get(key), mine, number, tail)
        return tokens

    def _changed(self) -> bool:
        version = int(self._read("PRAGMA data_version")[0][0])
        changed = version != self._version
        self._version = version
        return changed

    def _swap(self, key: str, value: items.Value, record: items.Value | None, had_record: bool, expect: Expect) -> None:
        with self._transaction() as db:
            if expect != ANY:
                row = db.execute(
                    "SELECT value FROM store WHERE prefix = ? AND key = ?", (self._prefixes[0], key)
                ).fetchone()
                self.compare(None if row is None else Row(key, _json(row[0]), None), expect)
            self._set(db, 0, key, value)
            if record is not None or had_record:
                self._set(db, 1, key, record)

    def _set(self, db: sqlite3.Connection, which: int, key: str, value: items.Value | None) -> None:
        """One row, written as SqliteStore would."""
        if value is None:
            db.execute("DELETE FROM store WHERE prefix = ? AND key = ?", (self._prefixes[which], key))
            return
        db.execute(
            "INSERT OR REPLACE INTO store (prefix, key, value, created_at, updated_at)"
            " VALUES (?, ?, ?, CURRENT_TIMESTAMP, CURRENT_TIMESTAMP)",
            (self._prefixes[which], key, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()),
        )

    def move(self, moves: Sequence[Moved]) -> None:
        with self._transaction() as db:
            _move(lambda query, values: db.execute(query, values), "?", self, moves)


class PostgresRemote(SqlRemote):
    """``postgresql://...``: the tables of PostgresStore, for more than one machine."""

    poll_seconds = 0.4

    def _connect(self) -> Any:
        import psycopg
        from langgraph.store.postgres import PostgresStore
        from psycopg.rows import dict_row
        from psycopg_pool import ConnectionPool

        settings = {
            "autocommit": True, "prepare_threshold": 0, "row_factory": dict_row, "connect_timeout": int(WAIT_SECONDS),
            "keepalives_idle": 10, "keepalives_interval": 3, "keepalives_count": 3, "tcp_user_timeout": 15000,
            "options": "-c statement_timeout=20000 -c lock_timeout=10000", "application_name": "vfsd",
        }  # fmt: skip
        # First without the pool, which would only say that it waited in vain.
        psycopg.connect(self.location, **settings).close()  # type: ignore[arg-type]
        self._pool: Any = ConnectionPool(
            self.location, min_size=1, max_size=4, kwargs=settings, timeout=WAIT_SECONDS, open=True,
            check=ConnectionPool.check_connection, reconnect_timeout=0, name="vfsd",
        )  # fmt: skip
        try:
            store = PostgresStore(self._pool)
            store.setup()
        except BaseException:
            self._pool.close()
            raise
        self._digest: object = None
        return store

    def close(self) -> None:
        if self._store is not None:
            self._store = None
            self._pool.close(timeout=2)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        with self._pool.connection() as connection, connection.transaction():
            yield connection

    def _read(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._pool.connection() as connection:
            return list(connection.execute(query, parameters).fetchall())

    def _rows(self, prefix: str) -> list[Row]:
        rows = self._read("SELECT key, value, updated_at FROM store WHERE prefix = %s", (prefix,))
        return [Row(row["key"], row["value"], row["updated_at"]) for row in rows]

    def _tokens(self) -> dict[str, Hashable]:
        # xmin names the transaction that wrote the row version (PostgreSQL, System Columns).
        rows = self._read(
            "SELECT key, prefix, xmin::text AS written, updated_at FROM store WHERE prefix IN (%s, %s)"
            " ORDER BY prefix, key",
            self._prefixes,
        )
        tokens: dict[str, Hashable] = {}
        for row in rows:
            tokens[row["key"]] = (tokens.get(row["key"]), row["prefix"], row["written"], row["updated_at"])
        return tokens

    def _changed(self) -> bool:
        row = self._read(
            "SELECT count(*) AS n, coalesce(sum(hashtextextended(key || ' ' || xmin::text || updated_at::text, 0)), 0)"
            " AS digest FROM store WHERE prefix IN (%s, %s)",
            self._prefixes,
        )[0]
        digest = (row["n"], row["digest"])
        changed = digest != self._digest
        self._digest = digest
        return changed

    def _swap(self, key: str, value: items.Value, record: items.Value | None, had_record: bool, expect: Expect) -> None:
        with self._transaction() as db:
            if expect == ABSENT:
                # Not a look before: two may look at once, only one can insert.
                made = db.execute(
                    "INSERT INTO store (prefix, key, value) VALUES (%s, %s, '{}') ON CONFLICT DO NOTHING",
                    (self._prefixes[0], key),
                )
                if made.rowcount != 1:
                    raise fail(errno.EEXIST)
            elif expect != ANY:
                row = db.execute(
                    "SELECT value FROM store WHERE prefix = %s AND key = %s FOR UPDATE", (self._prefixes[0], key)
                ).fetchone()
                self.compare(None if row is None else Row(key, row["value"], None), expect)
            self._set(db, 0, key, value)
            if record is not None or had_record:
                self._set(db, 1, key, record)

    def _set(self, db: Any, which: int, key: str, value: items.Value | None) -> None:
        """One row, written as PostgresStore would."""
        from psycopg.types.json import Jsonb

        if value is None:
            db.execute("DELETE FROM store WHERE prefix = %s AND key = %s", (self._prefixes[which], key))
            return
        db.execute(
            "INSERT INTO store (prefix, key, value) VALUES (%s, %s, %s) ON CONFLICT (prefix, key) DO UPDATE"
            " SET value = EXCLUDED.value, updated_at = CURRENT_TIMESTAMP, expires_at = NULL, ttl_minutes = NULL",
            (self._prefixes[which], key, Jsonb(value)),
        )

    def move(self, moves: Sequence[Moved]) -> None:
        with self._transaction() as db:
            _move(lambda query, values: db.execute(query, values), "%s", self, moves)


def _move(execute: Callable[[str, Sequence[Any]], Any], mark: str, remote: Any, moves: Sequence[Moved]) -> None:
    """Rename rows in one transaction: out of the way first, so that names may be exchanged."""
    place = f"prefix = {mark} AND key = {mark}"
    rename, drop = f"UPDATE store SET key = {mark} WHERE {place}", f"DELETE FROM store WHERE {place}"
    item_prefix, side_prefix = remote._prefixes
    aside = "!moving "
    for move in moves:
        if move.has_content:
            old = items.key_of(move.old)
            if execute(rename, (aside + old, item_prefix, old)).rowcount != 1:
                raise fail(errno.ENOENT)
        execute(drop, (side_prefix, items.key_of(move.old)))
    with remote._lock:
        remote._records.difference_update(move.old for move in moves)
        stamps = {move.old: remote._stamps.pop(move.old) for move in moves if move.old in remote._stamps}
    for move in moves:
        old, new = items.key_of(move.old), items.key_of(move.new)
        execute(drop, (item_prefix, new))
        if move.has_content:
            execute(rename, (new, item_prefix, aside + old))
        needed = not move.has_content or items.needs_record(move.meta, remote.owner)
        if needed:
            remote._set(_Executor(execute), 1, new, items.record_of(move.meta, stamps.get(move.old, (None, None))[1]))
        else:
            execute(drop, (side_prefix, new))
        with remote._lock:
            (remote._records.add if needed else remote._records.discard)(move.new)
            if move.old in stamps:
                remote._stamps[move.new] = stamps[move.old]


class _Executor:
    """Something with ``execute``."""

    def __init__(self, execute: Callable[[str, Sequence[Any]], Any]) -> None:
        self.execute = execute


def _json(value: bytes | str) -> Any:
    return json.loads(value)


def open_store(location: str, namespace: tuple[str, ...], owner: tuple[int, int]) -> StoreRemote:
    """The remote for a location; RemoteError for a scheme nobody knows. Nothing is opened yet."""
    scheme = location.partition(":")[0]
    if scheme == "sqlite" and location.partition(":")[2]:
        return SqliteRemote(location, namespace, owner)
    if scheme in ("postgresql", "postgres"):
        return PostgresRemote(location, namespace, owner)
    if location == "memory:" or scheme == "factory":
        return StoreRemote(location, namespace, owner)
    raise RemoteError(
        f"unknown store {location!r}: use sqlite:PATH, postgresql://USER@HOST/DATABASE, memory: or"
        " factory:MODULE:FUNCTION"
    )
