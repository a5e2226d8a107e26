"""A store on PostgreSQL that stops, comes back, is slow or is cut off: what is cached is read, writes fail clearly."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import Postgres, World, wait_until

from agenttools import tools
from agenttools.client import Client

pytestmark = pytest.mark.mount


@pytest.fixture
def m(world: World, postgres: Postgres) -> Path:
    return world.mount(f"/m/=store:{postgres.uri}") / "m"


def test_the_server_stops_and_starts(m: Path, world: World, postgres: Postgres) -> None:
    (m / "f").write_text("cached\n")
    (m / "g").write_text("before\n")
    postgres.stop()
    try:
        assert (m / "f").read_text() == "cached\n"
        with pytest.raises(OSError, match="Input/output error"), open(m / "g", "w") as file:
            file.write("lost\n")
        with pytest.raises(OSError, match="Input/output error"):
            (m / "d").mkdir()
        with Client(socket=world.socket()) as client:
            error = tools.write(client, "/m/f", "lost too").error
            assert error is not None
            assert (m / "f").read_text() == "cached\n"
        assert "write /g" in world.log()
        wait_until(lambda: "problem" in world.vfsd("status", "--json").stdout, 15)
    finally:
        postgres.start()
    # What the store did not take is not there either: the file is as it was.
    wait_until(lambda: (m / "g").read_text() == "before\n", 15)
    wait_until(lambda: (m / "f").write_text("again\n"), 15)
    assert postgres.sql("SELECT value->>'content' FROM store WHERE key = '/f'")[0] == "again\n"
    wait_until(lambda: "problem" not in world.vfsd("status", "--json").stdout, 15)


def test_stopped_before_the_mount(world: World, postgres: Postgres) -> None:
    postgres.stop()
    try:
        m = world.mount(f"/m/=store:{postgres.uri}") / "m"
        assert "route /m/" in world.said
        with pytest.raises(OSError, match="Input/output error"):
            os.listdir(m)
    finally:
        postgres.start()
    wait_until(lambda: (m / "f").write_text("x"), 15)
    assert os.listdir(m) == ["f"]


def test_writers_while_the_server_restarts(m: Path, postgres: Postgres) -> None:
    """Each close that returned has its whole content in the store, whatever happened meanwhile."""
    done = threading.Event()
    acknowledged: dict[int, int] = {}

    def write(number: int) -> None:
        round_ = 0
        while not done.is_set():
            round_ += 1
            try:
                with open(m / f"w{number}", "w") as file:
                    file.write(f"{round_} " * 2000)
                acknowledged[number] = round_
            except OSError:
                time.sleep(0.05)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    postgres.stop()
    time.sleep(0.5)
    postgres.start()
    wait_until(lambda: len(acknowledged) == 3, 15)
    time.sleep(1)
    done.set()
    for thread in threads:
        thread.join(30)
    for number, round_ in acknowledged.items():
        words = postgres.sql("SELECT value->>'content' FROM store WHERE key = %s", f"/w{number}")[0].split()
        assert len(words) == 2000
        assert len(set(words)) == 1
        assert int(words[0]) >= round_


@pytest.mark.filterwarnings("ignore")
def test_two_mounts_and_an_app_while_the_server_restarts(m: Path, world: World, postgres: Postgres) -> None:
    """Each has its own files and all write one: nothing acknowledged is lost, and the one is somebody's whole."""
    pytest.importorskip("deepagents")
    from deepagents.backends.store import StoreBackend
    from langgraph.store.postgres import PostgresStore

    other = world.mount(f"/m/=store:{postgres.uri}", name="two") / "m"
    done = threading.Event()
    acknowledged: dict[str, list[int]] = {"a": [], "b": [], "app": []}

    def by_mount(where: Path, name: str, text: str) -> None:
        with open(where / name, "w") as file:
            file.write(text)

    def by_app(name: str, text: str) -> None:
        with PostgresStore.from_conn_string(postgres.uri) as store:
            backend = StoreBackend(store=store, namespace=lambda runtime: ("filesystem",))
            assert backend.write(f"/{name}", text).error is None

    writers: dict[str, Callable[[str, str], None]] = {
        "a": lambda name, text: by_mount(m, name, text),
        "b": lambda name, text: by_mount(other, name, text),
        "app": by_app,
    }

    def work(who: str) -> None:
        number = 0
        while not done.is_set():
            number += 1
            try:
                writers[who]("shared", f"{who}-{number} " * 3000)
                writers[who](f"{who}-{number}", f"{who} {number}")
                acknowledged[who].append(number)
            except Exception:
                time.sleep(0.05)

    threads = [threading.Thread(target=work, args=(who,)) for who in writers]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(acknowledged.values()), 20)
    postgres.stop()
    postgres.start()
    before = {who: len(numbers) for who, numbers in acknowledged.items()}
    wait_until(lambda: all(len(acknowledged[who]) > before[who] for who in writers), 20)
    done.set()
    for thread in threads:
        thread.join(30)
    for place in (m, other):
        for who, numbers in acknowledged.items():
            for number in numbers:
                wait_until(lambda p=place / f"{who}-{number}", t=f"{who} {number}": p.read_text() == t)
    stored = postgres.sql("SELECT value->>'content' FROM store WHERE key = '/shared'")[0]
    assert len(set(stored.split())) == 1
    for place in (m, other):
        wait_until(lambda p=place / "shared": p.read_text() == stored)


def test_a_slow_server_holds_nothing_else_up(m: Path, world: World, postgres: Postgres) -> None:
    import psycopg

    (m / "f").write_text("x")
    with psycopg.connect(postgres.uri) as db:
        db.execute("LOCK TABLE store IN ACCESS EXCLUSIVE MODE")
        slow = threading.Thread(target=lambda: (m / "f").write_text("waited"))
        slow.start()
        time.sleep(0.3)
        began = time.monotonic()
        (m.parent / "beside").write_text("quick")
        assert (m.parent / "beside").read_text() == "quick"
        assert os.stat(m / "f").st_mode
        with Client(socket=world.socket()) as client:
            assert tools.read(client, "/beside").content == "quick"
        assert time.monotonic() - began < 2
        assert slow.is_alive()
        db.rollback()
    slow.join(20)
    assert (m / "f").read_text() == "waited"


def test_a_connection_cut_in_mid_write(m: Path, postgres: Postgres) -> None:
    done = threading.Event()
    failures: list[OSError] = []
    last = [""]

    def write() -> None:
        n = 0
        while not done.is_set():
            n += 1
            text = f"{n} " * 100_000
            try:
                (m / "big").write_text(text)
                last[0] = text
            except OSError as exc:
                failures.append(exc)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(20):
        busy = "application_name = 'vfsd' AND state = 'active'"
        postgres.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {busy}")
        time.sleep(0.05)
    done.set()
    writer.join(30)
    stored = postgres.sql("SELECT value->>'content' FROM store WHERE key = '/big'")
    if stored is not None:
        assert len(set(stored[0].split())) == 1
    wait_until(lambda: (m / "big").write_text("after"))
    assert postgres.sql("SELECT value->>'content' FROM store WHERE key = '/big'")[0] == "after"
