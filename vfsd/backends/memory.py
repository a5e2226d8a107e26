"""A volume that lives as long as its daemon: contents in an anonymous memory file, the tree nowhere but in the core.

Owns a memfd (memfd_create(2), Linux 3.17). Nothing survives the daemon, by design.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from vfsd.backends.base import Stored
from vfsd.backends.extents import ExtentFile
from vfsd.core.changes import Change, Drop, Put, Reserve, Write, Xattr, Zero
from vfsd.core.types import StatFs

_HUGE = 1 << 31


class MemoryBackend:
    """Implements ``Backend`` without storing anything but contents and extended attributes."""

    kind = "memory"
    sync_waits = False

    def __init__(self, scratch: int | None = None) -> None:
        """``scratch``: the descriptor of an unnamed file to keep contents in, instead of one in memory."""
        fd = os.memfd_create("vfsd-memory") if scratch is None else scratch
        self._data = ExtentFile(fd, lambda node: [], lambda node: True)
        self._xattrs: dict[int, dict[bytes, bytes]] = {}
        self._nodes: set[int] = set()
        self.read = self._data.read
        self.seek = self._data.seek
        self.begin, self.lay, self.leave = self._data.begin, self._data.lay, self._data.leave
        self.contents = self._data.contents

    def root(self) -> Stored | None:
        return None

    def next_node(self) -> int:
        return 1

    def orphans(self) -> Sequence[Stored]:
        return ()

    def node(self, node: int) -> Stored | None:
        return None

    def entry(self, directory: int, name: bytes) -> Stored | None:
        return None

    def load(self, directory: int, after: bytes, limit: int) -> Sequence[tuple[bytes, Stored]]:
        return ()

    def keeps(self, node: int) -> bool:
        return True

    def links(self, node: int) -> Iterable[tuple[int, bytes]]:
        return ()

    def allocated(self) -> int:
        return 0

    def xattrs(self, node: int) -> dict[bytes, bytes]:
        return dict(self._xattrs.get(node, ()))

    def blocks(self, node: int) -> int:
        return self._data.map(node).used // 512

    def commit(self, changes: Sequence[Change]) -> None:
        data = self._data
        try:
            for c in changes:
                if type(c) is Write:
                    data.write(c.node, c.offset, c.data)
                elif type(c) is Zero:
                    data.zero(c.node, c.offset, c.end)
                elif type(c) is Reserve:
                    data.reserve(c.node, c.offset, c.end)
                elif type(c) is Drop:
                    data.drop(c.node)
        except OSError:
            data.end(False)
            raise
        data.end(True)
        for c in changes:
            if type(c) is Put:
                self._nodes.add(c.node)
            elif type(c) is Xattr:
                if c.value is None:
                    self._xattrs[c.node].pop(c.name, None)
                else:
                    self._xattrs.setdefault(c.node, {})[c.name] = c.value
            elif type(c) is Drop:
                self._nodes.discard(c.node)
                self._xattrs.pop(c.node, None)
        if data.quarantined() > 1 << 20:
            self._give_back()

    def _give_back(self) -> None:
        runs = self._data.drain()
        self._data.punch(runs)
        self._data.release(runs)

    async def sync(self) -> None:
        self._give_back()

    async def maintain(self) -> None:
        self._give_back()

    def statfs(self) -> StatFs:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page // 4096, os.sysconf("SC_AVPHYS_PAGES") * page // 4096
        return StatFs(4096, 4096, total, free, free, _HUGE, _HUGE - len(self._nodes), _HUGE - len(self._nodes))

    def counts(self) -> tuple[int, int]:
        return len(self._nodes), os.fstat(self._data.fd).st_blocks * 512

    def close(self) -> None:
        os.close(self._data.fd)
