"""What all tests share: everything under tests/mount needs a mount, and is marked so."""

from __future__ import annotations

from pathlib import Path

import pytest

MOUNT_TESTS = Path(__file__).parent / "mount"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MOUNT_TESTS in item.path.parents:
            item.add_marker(pytest.mark.mount)
