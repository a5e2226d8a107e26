"""One volume of each kind, opened again at will."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dict_backend import DictBackend
from makers import KINDS, open_volume
from servers import Postgres, postgres_server
from waiting import NAMESPACE, open_remote, store_at

from vfsd.backends.foreign import ForeignRemote
from vfsd.backends.remote import Remote
from vfsd.backends.store import StoreRemote
from vfsd.backends.storesql import open_store
from vfsd.check import check_volume
from vfsd.feed import Feed

__all__ = ["postgres_server"]

WAITING = ("store", "anystore", "backend", "postgres")
"""Kinds that a RemoteVolume serves. A blob route holds nothing that the suite makes: its own is routes/test_blobs."""

NOT_HELD = {
    "test_every_byte_may_be_in_a_name": "names are UTF-8",
    "test_hard_links_are_one_file": "no links",
    "test_attributes_are_kept": "no links",
    "test_new_files_belong_to_their_maker_and_setgid_directories": "no links",
    "test_special_files": "no special files",
    "test_extended_attributes": "no extended attributes",
    "test_opened_again_the_tree_is_the_same": "no links, nor attributes that last",
    "test_opened_again_it_goes_on_where_it_was": "no links, nor attributes that last",
    "test_a_read_only_volume_refuses_every_change": "no links",
}
"""Tests of things that a backend can't hold; that it refuses them is in routes/test_route_deviations."""


class Place:
    """Where one volume lives; ``open`` it, ``reopen`` what was closed. A memory volume can't be opened again."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.feed = Feed()
        self.volume: Any = None
        self.server: Postgres | None = None
        self._store: Any = None
        self.lasts = kind != "memory"
        self.ours = kind not in ("local", *WAITING)
        """Nobody but the volume changes its files, and its numbers outlive it."""

    def open(self) -> Any:
        if self.kind in WAITING:
            self.volume = open_remote(self.remote(), self.feed)
        else:
            self.volume = open_volume(self.kind, self.path, self.feed)
        return self.volume

    def remote(self) -> Remote:
        """The store of a kind that waits: on SQLite, on PostgreSQL, or any by LangGraph's interface alone."""
        if self.kind == "postgres":
            assert self.server is not None
            return open_store(self.server.uri, NAMESPACE, (os.geteuid(), os.getegid()))
        if self.kind == "store":
            return store_at(self.path)
        if self.kind == "backend":
            foreign = ForeignRemote("factory:dict_backend:DictBackend", (os.geteuid(), os.getegid()))
            foreign._backend = self._store = self._store or DictBackend()
            return foreign
        remote = StoreRemote("memory:", NAMESPACE, (os.geteuid(), os.getegid()))
        self._store = remote._store = self._store or remote._connect()
        return remote

    def reopen(self) -> Any:
        self.close()
        return self.open()

    def close(self) -> None:
        if self.volume is not None:
            self.volume.close()
            self.volume = None


@pytest.fixture(params=(*KINDS, *WAITING[:-1], pytest.param("postgres", marks=pytest.mark.slow)))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, tmp_path / "volume")
    if place.kind == "backend" and request.node.originalname in NOT_HELD:
        pytest.skip(NOT_HELD[request.node.originalname])
    if place.kind == "anystore":
        pytest.importorskip("langgraph.store.memory")
    if place.kind == "postgres":
        place.server = request.getfixturevalue("postgres_server")
        assert place.server is not None
        if place.server.sql("SELECT to_regclass('store')") != (None,):
            place.server.sql("DELETE FROM store")
    yield place
    place.close()
    if place.kind == "state" and (place.path / "tree.db").exists():
        assert check_volume(place.path) == []


@pytest.fixture
def volume(place: Place) -> Any:
    return place.open()


@pytest.fixture
def privileged(place: Place) -> None:
    """What a test does, only root may do to files of the host."""
    if place.kind == "local" and os.geteuid():
        pytest.skip("only root may give files away and make devices")
