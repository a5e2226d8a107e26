"""The vocabulary of change: what a plan yields, a backend commits, a tree applies and a feed tells.

Every change is absolute (it says what is so afterwards, never "add one"), so that replaying it twice is harmless.
Numbers are nodes of one volume, never inos.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Put(NamedTuple):
    """Node ``node`` exists with exactly these attributes (POSIX struct stat; times in nanoseconds)."""

    node: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
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


class Write(NamedTuple):
    """The bytes of ``node`` from ``offset`` are ``data``."""

    node: int
    offset: int
    data: bytes | bytearray | memoryview


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
