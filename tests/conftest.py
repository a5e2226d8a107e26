"""For every test: helper modules are imported from this directory; what is under ``mount`` needs one, and is marked."""

from __future__ import annotations

from pathlib import Path

import pytest

MOUNT_TESTS = Path(__file__).parent / "mount"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MOUNT_TESTS in item.path.parents:
            item.add_marker(pytest.mark.mount)
