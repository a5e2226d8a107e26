"""The same tests through every door."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import Driver, HostDriver
from trees import EVERY, Mounts, directory


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


@pytest.fixture(params=EVERY)
def fs(request: pytest.FixtureRequest, mounts: Mounts, tmp_path: Path) -> Iterator[Driver]:
    with directory(request.param, mounts, tmp_path) as driver:
        yield driver


@pytest.fixture
def host(tmp_path: Path) -> Driver:
    """A host directory: what the kernel and its own file system answer."""
    (tmp_path / "reference").mkdir()
    return HostDriver(tmp_path / "reference")
