"""The vocabulary of change: what a plan yields, a backend commits, a tree applies and a feed tells.

Every change is absolute (it says what is so afterwards, never "add one"), so that replaying it twice is harmless.
Numbers are nodes of one volume, never inos.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from typing import NamedTuple


def is_device(mode: int) -> bool:
    """Whether a node of this mode has a device number."""
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def rdev(mode: int, extra: int) -> int:
    """The device number that ``extra`` is (see ``Put``), 0 for a node that is no device."""
    return extra if extra and is_device(mode) else 0


class Put(NamedTuple):
    """Node ``node`` exists with exactly these attributes (POSIX struct stat; times in nanoseconds).

    ``extra`` is the device number of a device node. Of any other it is the time of birth once another access time was
    set; until then 0, for a node comes into being with all its times the same, and reading changes none.
    """

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


class Target(NamedTuple):
    """Node ``node`` is a symlink to ``target``."""

    node: int
    target: bytes


class Drop(NamedTuple):
    """Node ``node`` is gone with its contents and extended attributes: no link and no pin is left."""

    node: int


class Dentry(NamedTuple):
    """``name`` in directory ``parent`` is ``node``."""

    parent: int
    name: bytes
    node: int


class NoDentry(NamedTuple):
    """``name`` in directory ``parent`` is nothing; it was ``node``."""

    parent: int
    name: bytes
    node: int


class Xattr(NamedTuple):
    """Extended attribute ``name`` of ``node`` has ``value``, or is absent when None."""

    node: int
    name: bytes
    value: bytes | None


class Laid:
    """A file's whole content that the backend has in blocks of no file yet, to be all that a Write gives it."""

    __slots__ = ("pieces", "runs", "size")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.size = sum(map(len, pieces))
        self.runs: list[tuple[int, int]] = []
        """(start, length) in the backend's place; none once a file has them."""

    def __len__(self) -> int:
        return self.size

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


class Write(NamedTuple):
    """The bytes of ``node`` from ``offset`` are ``data``."""

    node: int
    offset: int
    data: bytes | bytearray | memoryview | Laid


class Zero(NamedTuple):
    """The bytes of ``node`` from ``offset`` to ``end`` (None: without end) read as zeros and take no space."""

    node: int
    offset: int
    end: int | None


class Reserve(NamedTuple):
    """The bytes of ``node`` from ``offset`` to ``end`` have space of their own; holes there read as zeros."""

    node: int
    offset: int
    end: int


class Content(NamedTuple):
    """The bytes of ``node`` are those that the backend's ``extents`` hold; from a checkpoint, never made by a plan."""

    node: int
    extents: Sequence[tuple[int, int, int, int]]


Change = Put | Target | Drop | Dentry | NoDentry | Xattr | Write | Zero | Reserve | Content
