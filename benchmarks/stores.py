"""A store route beside Deep Agents' own StoreBackend on the same store: medians in microseconds on 2,000 files.

    python -m benchmarks.stores [--postgres URI] [--rounds 15]

Files of 1.1 KB, 50 a directory. The tools go through the socket of a mount; StoreBackend is called in this process, as
an agent would. Both end with the same items, which is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agenttools import tools
from agenttools.client import Client

FILES = 2000
NAMESPACE = ("bench",)
TEXT = "a line of text that nobody is looking for\n" * 25 + "the needle\n"


@contextlib.contextmanager
def sqlite_store(path: Path) -> Iterator[Any]:
    """LangGraph's SqliteStore on a file."""
    from langgraph.store.sqlite import SqliteStore

    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
    store = SqliteStore(db)
    store.setup()
    yield store
    db.close()


@contextlib.contextmanager
def postgres_store(uri: str) -> Iterator[Any]:
    """LangGraph's PostgresStore."""
    from langgraph.store.postgres import PostgresStore

    with PostgresStore.from_conn_string(uri) as store:
        store.setup()
        yield store


@contextlib.contextmanager
def mount(base: Path, name: str, location: str) -> Iterator[Client]:
    """A mount with the store as its root."""
    point = base / name
    point.mkdir()
    vfsd = [sys.executable, "-m", "vfsd"]
    route = f"/=store:{location}#{'/'.join(NAMESPACE)}"
    subprocess.run(
        [*vfsd, "mount", "--name", name, "--route", route, str(point)], check=True, stdout=subprocess.DEVNULL
    )
    try:
        with Client(name=name) as client:
            yield client
    finally:
        subprocess.run([*vfsd, "umount", name], check=True, stdout=subprocess.DEVNULL)


def median(rounds: int, call: Callable[[int], Any]) -> float:
    """Microseconds of the median call."""
    times = []
    for i in range(rounds):
        began = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def compare(kind: str, location: str, store: Any, base: Path, rounds: int) -> None:
    """Print one row an operation."""
    from deepagents.backends.store import StoreBackend
    from langgraph.store.base import PutOp

    backend = StoreBackend(store=store, namespace=lambda runtime: NAMESPACE)
    stamp = "2026-01-01T00:00:00+00:00"
    value = {"content": TEXT, "encoding": "utf-8", "created_at": stamp, "modified_at": stamp}
    for start in range(0, FILES, 200):
        store.batch([PutOp(NAMESPACE, f"/d{i // 50:02}/f{i:04}.txt", dict(value)) for i in range(start, start + 200)])
    with mount(base, f"bench-{kind}", location) as client:
        rows: list[tuple[str, Callable[[int], Any], Callable[[int], Any]]] = [
            ("ls of 50", lambda i: tools.ls(client, "/d07"), lambda i: backend.ls("/d07")),
            ("read", lambda i: tools.read(client, "/d07/f0360.txt"), lambda i: backend.read("/d07/f0360.txt")),
            (
                "edit",
                lambda i: tools.edit(client, f"/d07/f{350 + i:04}.txt", "needle", "pin", False),
                lambda i: backend.edit(f"/d08/f{400 + i:04}.txt", "needle", "pin"),
            ),
            (
                "write",
                lambda i: tools.write(client, f"/d07/new{i}.txt", TEXT),
                lambda i: backend.write(f"/d08/new{i}.txt", TEXT),
            ),
            ("grep", lambda i: tools.grep(client, "needle", "/"), lambda i: backend.grep("needle", "/")),
            ("glob", lambda i: tools.glob(client, "**/f00*.txt"), lambda i: backend.glob("**/f00*.txt", "/")),
        ]
        for name, ours, theirs in rows:
            here, there = median(min(rounds, 40), ours), median(min(rounds, 40), theirs)
            print(f"{kind:9} {name:9} vfsd {here:9.0f}   StoreBackend {there:9.0f}   {there / here:7.1f} times as long")
    assert backend.read("/d07/f0350.txt").file_data["content"].endswith("the pin\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description=__doc__)
    parser.add_argument("--postgres", metavar="URI")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        with sqlite_store(base / "s.db") as store:
            compare("sqlite", f"sqlite:{base / 's.db'}", store, base, args.rounds)
        if args.postgres:
            with postgres_store(args.postgres) as store:
                compare("postgres", args.postgres, store, base, args.rounds)


if __name__ == "__main__":
    main()
