"""What the kernel may have cached: lookup counts, and per inode what was handed out since it was last told to drop it.

Owns the arithmetic that turns a commit into the fewest invalidations. Everything here is synchronous and runs on the
loop thread. Must not know engines or threads.

Invariant: whatever the kernel can hold is marked here before the reply that hands it out is written, so that a change
committed later finds the mark. Clearing a mark and queueing the invalidation happen together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vfsd.core.changes import Change, Content, Dentry, Drop, NoDentry, Put, Target, Write, Xattr, Zero

ATTR = 1
"""Attributes were handed out."""
DATA = 2
"""Page cache may be filled: file contents, or the listing of a directory."""
_FLAGS = 3
_ONE = 4
"""One lookup: a value of ``Known._known`` is ``lookups * _ONE | flags``."""

ROOT = 1
NEGATIVE_MAX = 4096
"""Negative names remembered of one directory; past it any name may be negative. The kernel drops negative entries
without telling, so the set would grow for as long as programs look for what is not there."""


class InvalInode(NamedTuple):
    """Drop ``ino``'s attributes and, unless ``attr_only``, its pages."""

    ino: int
    attr_only: bool


class InvalEntry(NamedTuple):
    """Drop what ``name`` in ``parent`` is, or that it is nothing."""

    parent: int
    name: bytes


class Grown(NamedTuple):
    """``ino`` has ``size`` bytes, the last of which are ``last``.

    The answer to a request of before it was told to drop an inode is old news to the kernel, so that a size in it does
    not count (fuse_change_attributes, attr_version, 6.18).
    """

    ino: int
    size: int
    last: bytes


Invalidation = InvalInode | InvalEntry | Grown


class Known:
    """``pin(ino)`` is called at an inode's first lookup, ``unpin(ino)`` when the last is given back."""

    def __init__(self, pin: Callable[[int], None], unpin: Callable[[int], None]) -> None:
        self._pin = pin
        self._unpin = unpin
        self._known: dict[int, int] = {ROOT: _ONE | ATTR}  # the kernel neither looks up nor forgets the root
        self._negative: dict[int, set[bytes] | None] = {}  # None: any name
        self.uncached: set[int] = set()
        """Inos whose invalidation did not come through in time; served with zero timeouts until it has."""

    def __len__(self) -> int:
        return len(self._known)

    def lookups(self, ino: int) -> int:
        return self._known.get(ino, 0) // _ONE

    def with_data(self) -> list[int]:
        """The inos whose page cache may be filled."""
        return [ino for ino, known in self._known.items() if known & DATA]

    def looked_up(self, ino: int) -> None:
        """An entry for ``ino`` goes out: one lookup more, attributes and all."""
        known = self._known.get(ino)
        if known is None:
            self._pin(ino)
            known = 0
        self._known[ino] = known + _ONE | ATTR

    def mark(self, ino: int, what: int) -> None:
        """``what`` (ATTR, DATA) of ``ino`` goes out."""
        known = self._known.get(ino, 0)
        if known and known & what != what:
            self._known[ino] = known | what

    def negative(self, parent: int, name: bytes) -> None:
        """That ``name`` in ``parent`` is nothing goes out."""
        names = self._negative.get(parent, _EMPTY)
        if names is _EMPTY:
            self._negative[parent] = {name}
        elif names is not None:
            names.add(name)
            if len(names) > NEGATIVE_MAX:
                self._negative[parent] = None

    def forget(self, ino: int, count: int) -> None:
        """The kernel gives back ``count`` lookups."""
        if ino == ROOT:
            return
        left = self._known.get(ino, 0) - count * _ONE
        if left >= _ONE:
            self._known[ino] = left
        elif self._known.pop(ino, None) is not None:
            self._negative.pop(ino, None)
            self.uncached.discard(ino)
            self._unpin(ino)

    def forget_all(self) -> None:
        """The mount is gone: every lookup is given back (the kernel sends no FORGETs then)."""
        for ino in list(self._known):
            self.forget(ino, self.lookups(ino))
        self._known = {ROOT: _ONE | ATTR}
        self._negative.clear()

    def stale(self, base: int, op: str, changes: Sequence[Change]) -> list[Invalidation]:
        """What the kernel must drop after a commit it did not make; the marks are cleared.

        Entries come before inodes, and one is named also where only the listing may be cached: to drop an entry the
        kernel takes the directory's lock, and so waits for listings under way, whose pages the inode's turn then drops
        (fs/fuse/dir.c fuse_reverse_inval_entry, 6.18).
        """
        known, entries = self._known, list[Invalidation]()
        inodes: dict[int, bool] = {}  # ino -> attributes only
        # Only a rename can put a name over another; elsewhere a new name was nothing before.
        replaces = op.startswith("rename") or any(type(change) is NoDentry for change in changes)
        for change in changes:
            kind = type(change)
            if kind is Put or kind is Xattr:
                inodes.setdefault(base | change.node, True)
            elif kind is Write or kind is Zero or kind is Content or kind is Target:
                inodes[base | change.node] = False
            elif isinstance(change, Dentry):
                parent = base | change.parent
                inodes[parent] = False
                held = known.get(parent, 0)
                if self._was_negative(parent, change.name) or (replaces and held) or held & DATA:
                    entries.append(InvalEntry(parent, change.name))
            elif isinstance(change, NoDentry):
                parent = base | change.parent
                inodes[parent] = False
                held = known.get(parent, 0)
                if (held and base | change.node in known) or held & DATA:
                    entries.append(InvalEntry(parent, change.name))
            elif isinstance(change, Drop):
                inodes.setdefault(base | change.node, True)
        for ino, attr_only in inodes.items():
            held = known.get(ino, 0) & _FLAGS
            if held and not (attr_only and held == DATA):
                known[ino] = known[ino] & ~(ATTR if attr_only else _FLAGS)
                entries.append(InvalInode(ino, attr_only or not held & DATA))
        return entries

    def _was_negative(self, parent: int, name: bytes) -> bool:
        names = self._negative.get(parent, _EMPTY)
        if names is None:
            return True
        if name in names:
            names.discard(name)
            return True
        return False


_EMPTY: set[bytes] = set()
