"""What a tree volume asks of the place its tree is kept in.

A backend stores and gives back; it judges nothing. It must not know POSIX rules, doors or the feed. ``commit`` is all
or nothing: it raises OSError (ENOSPC, EIO, EROFS) and then nothing happened, or the changes are there and survive the
death of the daemon (of the machine after ``sync``) as far as the kind of route promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from vfsd.core.changes import Change, Laid, rdev
from vfsd.core.types import StatFs


class Stored(NamedTuple):
    """One node as the backend has it: ``blocks`` of 512 bytes, times in nanoseconds, ``extra`` as in ``Put``."""

    node: int
    mode: int
    nlink: int
    uid: int
    gid: int
    extra: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes | None
    blocks: int

    @property
    def rdev(self) -> int:
        """The device number."""
        return rdev(self.mode, self.extra)


class VolumeError(Exception):
    """A volume that can't be opened; the message says which, why and what to do."""


class DiskFull(VolumeError):
    """There is no room on the disk for what opening the volume writes."""


class Backend(Protocol):
    """The seam below a tree volume; but for ``sync`` and ``maintain`` each method is synchronous
    and quick (local disk or memory)."""

    kind: str
    sync_waits: bool
    """Whether the next ``sync`` suspends."""

    def root(self) -> Stored | None:
        """The root directory, None in a volume just made."""

    def next_node(self) -> int:
        """A number above every node ever stored."""

    def orphans(self) -> Sequence[Stored]:
        """Nodes without a link, left by a daemon that ended while they were open."""

    def node(self, node: int) -> Stored | None:
        """A node that is not in memory; None when there is none."""

    def entry(self, directory: int, name: bytes) -> Stored | None:
        """What an entry leads to that is not in memory; None when there is none."""

    def load(self, directory: int, after: bytes, limit: int) -> Sequence[tuple[bytes, Stored]]:
        """Up to ``limit`` entries of a directory whose names come after one, in byte order; fewer only at the end."""

    def keeps(self, node: int) -> bool:
        """True while the methods above do not give what was committed last of a node or its entries."""

    def links(self, node: int) -> Iterable[tuple[int, bytes]]:
        """The (directory, name) of each link of a node that is stored; none where all is in memory anyway."""

    def allocated(self) -> int:
        """Units of 512 bytes that all contents take, asked for when the volume is opened."""

    def xattrs(self, node: int) -> dict[bytes, bytes]:
        """The extended attributes of a node."""

    def read(self, node: int, offset: int, length: int) -> bytes:
        """``length`` bytes, zeros in holes; the caller clips to the size."""

    def seek(self, node: int, size: int, offset: int, hole: bool) -> int | None:
        """SEEK_HOLE or SEEK_DATA below ``size``; None for no data."""

    def blocks(self, node: int) -> int:
        """Units of 512 bytes allocated to a node's content."""

    def begin(self, pieces: Sequence[bytes]) -> Laid:
        """Room for content that ``lay`` is to put there before a commit; ``leave`` must follow."""

    def lay(self, laid: Laid) -> None:
        """Put it there; for any thread. Raises OSError."""

    def leave(self, laid: Laid) -> None:
        """What no commit took is given up."""

    def contents(self, node: int) -> Callable[[int, int], bytes]:
        """What reads, by offset and length and in any thread, the content that the node has at this call, for as long
        as nothing changes it."""

    def commit(self, changes: Sequence[Change]) -> None:
        """Make all changes so, or raise OSError and none."""

    async def sync(self) -> None:
        """Make all that was committed survive power loss. Raises OSError."""

    async def maintain(self) -> None:
        """Housekeeping: bound the logs, give freed space back."""

    def statfs(self) -> StatFs:
        """Space and node counts."""

    def counts(self) -> tuple[int, int]:
        """(nodes, bytes allocated)."""

    def close(self) -> None:
        """Sync and let go."""
