"""What the past is shown by: one state volume at one checkpoint.

Must not know how it is numbered or asked for.
"""

from __future__ import annotations

from typing import NamedTuple

from vfsd.backends.history import Past
from vfsd.backends.sqlite import SqliteBackend


class Part(NamedTuple):
    """One state route of a checkpoint: where it stands (slashes at both ends), its store, the epoch there.

    ``base`` is that of the route's volume.
    """

    prefix: bytes
    store: SqliteBackend
    epoch: int
    base: int = 0


class Slot:
    """One state volume at one checkpoint. ``parent`` and ``name``: where its root stands."""

    __slots__ = ("alive", "base", "epoch", "name", "parent", "pins", "store")

    def __init__(self, part: Part, parent: int, name: bytes) -> None:
        self.store = part.store
        self.base = part.base
        self.epoch = part.epoch
        self.parent = parent
        self.name = name
        self.pins = 0
        self.alive = True

    @property
    def past(self) -> Past:
        """Asked for each time: the store's connection may be another one by then."""
        return self.store.past(self.epoch)
