"""For every test: helper modules are imported from this directory; what needs a mount is marked so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from trees import Mounts

MOUNT_TESTS = Path(__file__).parent / "mount"
DAEMONS = {"world"}
"""Fixtures in which the command starts daemons that mount."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MOUNT_TESTS in item.path.parents or DAEMONS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.mount)


@pytest.fixture(scope="session")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    """Real daemons, shared by all tests that need no mount of their own."""
    mounts = Mounts(tmp_path_factory)
    yield mounts
    mounts.stop()
