"""Fixtures for the routes that wait; what they give is in ``servers``."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Postgres, World


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    pytest.importorskip("psycopg")
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("PostgreSQL is not installed: scripts/setup.sh")
    # Not under pytest's directory: a socket's path is short, and user postgres must get there.
    home = Path(f"/tmp/vfsd-pg-{os.getpid()}")
    home.mkdir(mode=0o755)
    server = None
    try:
        server = Postgres(home)
        yield server
    finally:
        if server is not None:
            with contextlib.suppress(AssertionError):
                server.stop()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def postgres(postgres_server: Postgres) -> Postgres:
    """The server with no table of a store in it."""
    for table in ("store", "store_migrations"):
        postgres_server.sql(f"DROP TABLE IF EXISTS {table}")
    return postgres_server


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    world = World(tmp_path)
    yield world
    world.close()
