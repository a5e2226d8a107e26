"""State volumes that no daemon serves, used by a command: where they are, and as a tree that answers like a daemon.

Must not know what is asked of the tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

import trio

from vfsd.backends.sqlite import SqliteBackend
from vfsd.config import thread_home
from vfsd.core.types import Caller
from vfsd.doors.rpcops import OPS, Session
from vfsd.feed import Feed
from vfsd.paths import Paths
from vfsd.process import registry
from vfsd.process.control import Failure
from vfsd.routes import Route, RouteTable
from vfsd.statevolume import StateVolume, stay_small
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs

if TYPE_CHECKING:
    from vfsd.past.checkpoints import Checkpoints
    from vfsd.rules.book import Rulebook

T = TypeVar("T")

FOLD_SECONDS = 5.0
"""Between two rounds of maintenance, without which a large import would fill the memory."""


class Tree(Protocol):
    """What answers operations of the wire."""

    def call(self, op: str, /, **params: Any) -> dict[str, Any]: ...


class Volume(NamedTuple):
    """A state volume: ``prefix`` with slashes at both ends, ``location`` its directory."""

    prefix: str
    location: Path


def volumes_of(name: str, thread: str) -> list[Volume]:
    """The state volumes of a mount that does not run: those it last had, else those under its thread's directory.

    Failure when there are none.
    """
    for entry in registry.entries():
        if entry["name"] == name and entry["thread"] == thread:
            return [Volume(r["prefix"], Path(r["location"])) for r in entry["routes"] if r["kind"] == "state"]
    home = thread_home(name, thread)
    found = [Volume("/", home / "root")] if (home / "root").is_dir() else []
    found += [Volume(f"/{unquote(path.name)}/", path) for path in sorted(home.glob("routes/*")) if path.is_dir()]
    if not found:
        raise Failure(f"nothing is stored for {name!r}, thread {thread!r} ({home})")
    return found


class _Host:
    """What the operations want of a door."""

    def __init__(self) -> None:
        self.uploaded = 0
        self.checkpoints: Checkpoints | None = None
        self.rules: Rulebook | None = None
        self.status: Callable[[], dict[str, Any]] = dict
        self.shutdown: Callable[[], object] = dict
        self.binds: Callable[[], list[dict[str, Any]]] = list

    def counters(self) -> dict[str, int]:
        return {}


class _AtRest:
    """Answers from another thread than the loop's."""

    def __init__(self, vfs: Vfs, owner: tuple[int, int]) -> None:
        self._session = Session(vfs, Paths(vfs), _Host())
        self._caller = Caller(*owner, door="rpc")

    def call(self, op: str, /, **params: Any) -> dict[str, Any]:
        """The reply to an operation; OSError."""
        message = {"op": op, **params}
        return trio.from_thread.run(OPS[op], self._session, message, self._caller)


def with_tree(volumes: Sequence[Volume], use: Callable[[Tree], T]) -> T:
    """``use`` called with the volumes as one tree, by root's rights; they are closed after it.

    Raises VolumeError, OSError, and what ``use`` raises.
    """
    table, feed = RouteTable(), Feed()
    try:
        for v in sorted(volumes, key=lambda v: len(v.prefix)):
            volume = StateVolume(table.next_base(), SqliteBackend(v.location), feed, time.time_ns)
            table.mount(Route(v.prefix.encode(errors="surrogateescape"), "state", str(v.location), volume))
        tree = _AtRest(Vfs(table, feed, SystemEntries(table, feed, time.time_ns)), (0, 0))

        async def fold() -> None:
            while True:
                await trio.sleep(FOLD_SECONDS)
                for volume in table.volumes:
                    await volume.maintain()

        async def main() -> T:
            failure: BaseException | None = None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stay_small, table.volumes)
                nursery.start_soon(fold)
                try:
                    result = await trio.to_thread.run_sync(use, tree)
                except BaseException as exc:  # raised outside: the nursery would make a group of it
                    failure = exc
                nursery.cancel_scope.cancel()
            if failure is not None:
                raise failure
            return result

        return trio.run(main)
    finally:
        for volume in reversed(table.volumes):
            volume.close()
