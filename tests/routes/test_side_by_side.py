"""Contents of different files go to a store at the same time; of one file, and before a rename, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Postgres, World, wait_until

from agenttools import tools
from agenttools.client import Client

pytestmark = pytest.mark.mount

FILES = 8
GATE = """
CREATE OR REPLACE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NEW; END $$;
CREATE TRIGGER gate BEFORE INSERT OR UPDATE ON store FOR EACH ROW WHEN (NEW.prefix = 'filesystem')
EXECUTE FUNCTION gate();
"""


@pytest.fixture
def m(world: World, postgres: Postgres) -> Path:
    return world.mount(f"/m/=store:{postgres.uri}") / "m"


@pytest.fixture
def gate(m: Path, postgres: Postgres) -> Iterator[Any]:
    """A connection that holds the gate: what is put waits at the server until it is committed."""
    import psycopg

    postgres.sql(GATE)
    with psycopg.connect(postgres.uri) as db:
        db.execute("SELECT pg_advisory_xact_lock(7)")
        yield db


def waiting(postgres: Postgres) -> int:
    row = postgres.sql("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'")
    return int(row[0])


def start(*calls: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def end(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_closes_of_different_files(m: Path, postgres: Postgres, gate: Any) -> None:
    threads = start(*((lambda n=n: (m / f"f{n}").write_text(f"content {n}")) for n in range(FILES)))
    wait_until(lambda: waiting(postgres) == FILES)
    gate.commit()
    end(threads)
    for n in range(FILES):
        row = postgres.sql("SELECT value->>'content' FROM store WHERE key = %s", f"/f{n}")
        assert row[0] == f"content {n}"


def test_writes_of_tools(m: Path, world: World, postgres: Postgres, gate: Any) -> None:
    def write(n: int) -> None:
        with Client(socket=world.socket()) as client:
            assert tools.write(client, f"/m/t{n}", f"text {n}").error is None

    threads = start(*((lambda n=n: write(n)) for n in range(FILES)))
    wait_until(lambda: waiting(postgres) == FILES)
    gate.commit()
    end(threads)
    assert sorted(p.name for p in m.iterdir()) == [f"t{n}" for n in range(FILES)]


def test_closes_of_one_file_come_one_after_the_other(m: Path, postgres: Postgres, gate: Any) -> None:
    first = start(lambda: (m / "f").write_text("first"))
    wait_until(lambda: waiting(postgres) == 1)
    second = start(lambda: (m / "f").write_text("the second, which is longer"))
    # A third file's shows that the second has had its time.
    third = start(lambda: (m / "g").write_text("g"))
    wait_until(lambda: waiting(postgres) == 2)
    assert second[0].is_alive()
    gate.commit()
    end(first + second + third)
    row = postgres.sql("SELECT value->>'content' FROM store WHERE key = '/f'")
    assert row[0] == (m / "f").read_text() == "the second, which is longer"


def test_a_rename_comes_after_what_is_being_written(m: Path, postgres: Postgres, gate: Any) -> None:
    def write() -> None:
        with open(m / "old", "w") as file:
            file.write("whole")

    writer = start(write)
    wait_until(lambda: waiting(postgres) == 1)
    mover = start(lambda: (m / "old").rename(m / "new"))
    assert mover[0].is_alive()
    gate.commit()
    end(writer + mover)
    assert (m / "new").read_text() == "whole"
    assert postgres.sql("SELECT value->>'content' FROM store WHERE key = '/new'")[0] == "whole"
    assert postgres.sql("SELECT count(*) FROM store WHERE key = '/old'")[0] == 0
