"""What is read of the past in a thread: how much a checkpoint holds, and what differs between two.

Each reading has a connection of its own, on which all is of one moment; that the checkpoints stay meanwhile is
the caller's business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vfsd.backends import history
from vfsd.backends.history import Past
from vfsd.backends.sqlite import SqliteBackend
from vfsd.past.difference import Compare, without_stubs
from vfsd.past.slots import Part

PATCH_MAX = 4 << 20
"""Bytes of all the patches of one diff."""


class Span(NamedTuple):
    """One volume at two moments; ``stubs`` are no difference."""

    store: SqliteBackend
    then: int
    now: int
    stubs: list[tuple[int, bytes]]


def totals(part: Part) -> tuple[int, int, int]:
    db = part.store.connect_past()
    try:
        return Past(db, part.epoch).totals()
    finally:
        db.close()


class Told(NamedTuple):
    """Each difference as ``Difference.plain``, its names and its patch; ``whole`` unless patches had no room."""

    changes: list[dict[str, Any]]
    names: list[frozenset[bytes]]
    patches: list[bytes]
    whole: bool


def compare(span: Span, prefix: bytes, patch: bool, named: bool) -> Told:
    """Paths below ``prefix``; with patches, and with all names, if asked for. Runs in a thread."""
    db = span.store.connect_past()
    try:
        then, now = Past(db, span.then), Past(db, span.now)
        comparison = Compare(then, now, span.store.read_extents)
        found = comparison.differences(history.touched(db, min(span.then, span.now), max(span.then, span.now)))
        found = without_stubs(found, then, now, span.stubs)
        if named:
            comparison.add_names(found)
        whole = comparison.add_patches(found, PATCH_MAX) if patch else True
        names = [d.names_below(prefix) for d in found]
        return Told([d.plain(prefix) for d in found], names, [d.patch for d in found], whole)
    finally:
        db.close()
