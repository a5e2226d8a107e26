"""Volumes that wait, as tests of inline volumes use them: each coroutine is run to its end at once."""

from __future__ import annotations

import os
from pathlib import Path
from types import CoroutineType
from typing import Any

import trio

from vfsd.backends.remote import Remote
from vfsd.backends.storesql import open_store
from vfsd.feed import Feed
from vfsd.remote.volume import RemoteVolume

NAMESPACE = ("tester", "filesystem")


class Waiting:
    """A RemoteVolume whose methods return results."""

    def __init__(self, volume: RemoteVolume) -> None:
        self.__dict__["volume"] = volume

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.volume, name)
        if not callable(value):
            return value

        def call(*args: Any) -> Any:
            result = value(*args)
            if type(result) is CoroutineType:
                coroutine = result

                async def wait() -> Any:
                    return await coroutine

                return trio.run(wait)
            return result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.volume, name, value)


def open_remote(remote: Remote, feed: Feed | None = None, *, base: int = 0, read_only: bool = False) -> Waiting:
    """A started volume of a remote."""
    owner = (os.geteuid(), os.getegid())
    volume = RemoteVolume(base, remote, feed or Feed(), owner=owner, read_only=read_only)
    volume.start(60.0)
    return Waiting(volume)


def store_at(place: Path, namespace: tuple[str, ...] = NAMESPACE) -> Any:
    """A store on SQLite in a directory."""
    place.mkdir(exist_ok=True)
    return open_store(f"sqlite:{place / 'store.db'}", namespace, (os.geteuid(), os.getegid()))
