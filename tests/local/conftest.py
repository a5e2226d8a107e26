"""A host directory and the ``local`` volume on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_volume import BASE, FakeFeed

from vfsd.backends.local import LocalVolume


@pytest.fixture
def feed() -> FakeFeed:
    return FakeFeed()


@pytest.fixture
def host(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def vol(host: Path, feed: FakeFeed) -> Iterator[LocalVolume]:
    before = len(os.listdir("/proc/self/fd"))
    volume = LocalVolume(BASE, host, feed)
    yield volume
    volume.close()
    # Fewer is no leak: the collector may have closed what an earlier test left.
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors leaked"
