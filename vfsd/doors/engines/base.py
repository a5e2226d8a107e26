"""What every engine is given and offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from vfsd.doors.fuse import FuseDoor


class Options(NamedTuple):
    """How to mount. Every mount also has default_permissions, nosuid, nodev, fsname and subtype vfsd."""

    allow_other: bool = False
    read_only: bool = False


class Engine(Protocol):
    """One mount: ``run`` mounts and serves until it is unmounted, ``close`` unmounts (EBUSY while in use)."""

    name: str

    @property
    def requests(self) -> int: ...
    async def run(self, door: FuseDoor, mountpoint: str, options: Options, started: Callable[[], None]) -> None: ...
    async def close(self, *, force: bool = False) -> None: ...
