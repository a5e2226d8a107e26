"""Open files and directories of one volume: ``fh`` numbers and what each one means. Pure."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from vfsd.core.plans import fail
from vfsd.core.tree import Node


class Handle:
    """One open. ``flags`` are open(2)'s; ``names`` are a directory's, from when a listing starts anew.

    ``more``: those still to come.
    """

    __slots__ = ("flags", "more", "names", "node")

    def __init__(self, node: Node, flags: int) -> None:
        self.node = node
        self.flags = flags
        self.names: list[bytes] | None = None
        self.more: Iterator[list[tuple[bytes, Node]]] | None = None


class Handles:
    """The table of opens; each pins its node. ``fh`` 0 is never given out: it means "by inode"."""

    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, Handle] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, node: Node, flags: int) -> int:
        """Pin the node and number the open."""
        fh = self._next
        self._next += 1
        self._open[fh] = Handle(node, flags)
        node.pins += 1
        return fh

    def get(self, fh: int) -> Handle:
        """Raises EBADF."""
        handle = self._open.get(fh)
        if handle is None:
            raise fail(errno.EBADF)
        return handle

    def find(self, fh: int) -> Handle | None:
        """None for 0 and for a number no longer open."""
        return self._open.get(fh)

    def writers(self) -> dict[int, bool]:
        """The nodes that are open: True where a handle may write."""
        found: dict[int, bool] = {}
        for handle in self._open.values():
            writes = handle.flags & os.O_ACCMODE != os.O_RDONLY
            found[handle.node.id] = found.get(handle.node.id, False) or writes
        return found

    def writes(self, node: Node, but: int = 0) -> bool:
        """Whether a handle other than ``but`` may write to the node."""
        return any(
            handle.node is node and number != but and handle.flags & os.O_ACCMODE != os.O_RDONLY
            for number, handle in self._open.items()
        )

    def remove(self, fh: int) -> Node:
        """Unpin and forget; returns the node. Raises EBADF."""
        handle = self._open.pop(fh, None)
        if handle is None:
            raise fail(errno.EBADF)
        handle.node.pins -= 1
        return handle.node
