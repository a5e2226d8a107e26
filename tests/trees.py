"""A fresh directory of a tree for one test, through each door and kind of volume; mounts are shared by all tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon
from drivers import Driver, HostDriver, RpcDriver, VfsDriver
from makers import KINDS, close_vfs, open_vfs
from rpc_server import Server

from agenttools.client import Client
from vfsd.check import check_volume
from vfsd.doors import engines

ENGINES = ("native", "pyfuse3")
PATIENCE = 40.0
"""Seconds after which a test's mount is cut off, so that its system calls fail instead of hanging for ever."""

UNMOUNTED = [f"{door}-{kind}" for door in ("vfs", "rpc") for kind in KINDS]
MOUNTED = [f"mount-{engine}-{kind}" for engine in ENGINES for kind in KINDS]
EVERY = [*UNMOUNTED, *(pytest.param(name, marks=pytest.mark.mount) for name in MOUNTED)]


@contextlib.contextmanager
def watched(point: Path) -> Iterator[None]:
    """Cut the mount off when the block takes too long."""
    timer = threading.Timer(PATIENCE, engines.abort, [str(point)])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Mounts:
    """One daemon for each engine and kind of root, started when first wanted; ``extra`` goes to each command."""

    def __init__(self, factory: pytest.TempPathFactory, *extra: str) -> None:
        self._factory = factory
        self._extra = extra
        self._daemons: dict[str, Daemon] = {}
        self._numbers = itertools.count()

    def daemon(self, name: str) -> Daemon:
        if name not in self._daemons:
            if not os.access("/dev/fuse", os.R_OK | os.W_OK):
                pytest.skip("/dev/fuse can't be opened")
            _, engine, kind = name.split("-")
            daemon = self._daemons[name] = Daemon(self._factory.mktemp(name), engine, kind, self._extra)
            daemon.start()
        return self._daemons[name]

    @contextlib.contextmanager
    def directory(self, name: str) -> Iterator[tuple[Daemon, str]]:
        """(daemon, path of a new directory in its tree); afterwards its log must be without surprises."""
        daemon = self.daemon(name)
        path = f"/t{next(self._numbers)}"
        os.mkdir(f"{daemon.point}{path}")
        with watched(daemon.point):
            yield daemon, path
        assert daemon.unexpected() == []

    def running(self) -> list[Daemon]:
        return list(self._daemons.values())

    def stop(self) -> None:
        try:
            for daemon in self._daemons.values():
                daemon.stop()
        finally:
            for daemon in self._daemons.values():
                daemon.abort()


@contextlib.contextmanager
def directory(name: str, mounts: Mounts, tmp_path: Path) -> Iterator[Driver]:
    """A driver on a fresh directory, by one of the names above; then fsck."""
    door, kind = name.split("-")[0], name.split("-")[-1]
    if door == "mount":
        with mounts.directory(name) as (daemon, path):
            yield HostDriver(f"{daemon.point}{path}")
        return
    place = tmp_path / "volume"
    vfs = open_vfs({"/": (kind, place)})
    try:
        if door == "vfs":
            yield VfsDriver(vfs)
        else:
            with Server(tmp_path / "s.sock", vfs), Client(tmp_path / "s.sock") as client:
                yield RpcDriver(client)
        counters = vfs.counters()
        assert counters["open"] == 0, "a handle was left open"
    finally:
        close_vfs(vfs)
    if kind == "state":
        assert check_volume(place) == []
