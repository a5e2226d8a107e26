"""One volume of each kind, opened again at will."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from build import KINDS, open_volume
from waiting import open_remote, store_at

from vfsd.check import check_volume
from vfsd.feed import Feed


class Place:
    """Where one volume lives; ``open`` it, ``reopen`` what was closed. A memory volume can't be opened again."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.feed = Feed()
        self.volume: Any = None
        self.lasts = kind != "memory"
        self.ours = kind not in ("local", "store")
        """Nobody but the volume changes its files, and its numbers outlive it."""

    def open(self) -> Any:
        if self.kind == "store":
            self.volume = open_remote(store_at(self.path), self.feed)
        else:
            self.volume = open_volume(self.kind, self.path, self.feed)
        return self.volume

    def reopen(self) -> Any:
        self.close()
        return self.open()

    def close(self) -> None:
        if self.volume is not None:
            self.volume.close()
            self.volume = None


@pytest.fixture(params=(*KINDS, "store"))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, tmp_path / "volume")
    yield place
    place.close()
    if place.kind == "state" and (place.path / "tree.db").exists():
        assert check_volume(place.path) == []


@pytest.fixture
def volume(place: Place) -> Any:
    return place.open()
