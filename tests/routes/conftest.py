"""Fixtures for the routes that wait; what they give is in ``servers``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Postgres, World, postgres_server

__all__ = ["postgres_server"]


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
