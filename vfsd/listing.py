"""Directories listed in pages, in byte order of the names, for callers who have no kernel.

A large one is sorted once, and each page then looks up what it tells of. Must not know sockets or messages.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Iterable
from heapq import merge
from itertools import chain, islice
from typing import NamedTuple

import trio

from vfsd.core.types import Attr, Caller
from vfsd.paths import READ, SEARCH, Paths, again_if_stale, fail, need
from vfsd.vfs import Vfs

LIST_MAX = 50_000
LIST_BYTES = 4 << 20
"""Entries, and bytes of names, in one page of a listing."""

_SLICE_S = 0.003
_CHUNK = 1000
"""Entries of a directory taken at a stretch."""


class Entry(NamedTuple):
    """One line of a listing."""

    name: bytes
    mode: int
    size: int
    mtime_ns: int


class Rest(NamedTuple):
    """What is left of a listing: the names of directory ``ino``, told of up to ``after``, which is before ``at``."""

    ino: int
    after: bytes
    at: int
    names: list[bytes]


@again_if_stale
async def list_page(
    paths: Paths, path: bytes, caller: Caller, after: bytes = b"", rest: Rest | None = None
) -> tuple[list[Entry], Rest | None]:
    """Entries of directory ``path`` after a name, in byte order of the names, and what is left for the next page.

    ``rest`` is from the page before, without which all names are sorted anew. ENOTDIR, EACCES.
    """
    attr = await paths.resolve(path, caller)
    if not stat.S_ISDIR(attr.mode):
        fail(errno.ENOTDIR)
    need(paths.vfs, caller, attr, READ | SEARCH)
    if rest is None or (rest.ino, rest.after) != (attr.ino, after):
        children = iter(await paths.vfs.children(attr.ino, caller))
        first = list(islice(children, _CHUNK))
        if len(first) < _CHUNK:
            found = [Entry(name, a.mode, a.size, a.mtime_ns) for name, a in first if name > after]
            return sorted(found), None
        rest = Rest(attr.ino, after, 0, await _sorted_names(chain(first, children), after))
    return await _page(paths.vfs, rest, caller)


async def _page(vfs: Vfs, rest: Rest, caller: Caller) -> tuple[list[Entry], Rest | None]:
    entries: list[Entry] = []
    room, began = LIST_BYTES, time.perf_counter()
    for at in range(rest.at, len(rest.names)):
        name = rest.names[at]
        room -= len(name)
        if room < 0 or len(entries) == LIST_MAX:
            return entries, rest._replace(at=at, after=entries[-1].name)
        try:
            a = await vfs.lookup(rest.ino, name, caller)
        except (FileNotFoundError, PermissionError):
            continue  # gone or not to be seen by now
        entries.append(Entry(name, a.mode, a.size, a.mtime_ns))
        if time.perf_counter() - began > _SLICE_S:
            await trio.lowlevel.checkpoint()
            began = time.perf_counter()
    return entries, None


async def _sorted_names(entries: Iterable[tuple[bytes, Attr]], after: bytes) -> list[bytes]:
    """Those after a name, sorted a few at a time."""
    runs: list[list[bytes]] = []
    entries = iter(entries)
    while chunk := list(islice(entries, _CHUNK)):
        runs.append(sorted([name for name, _ in chunk if name > after]))
        await trio.lowlevel.checkpoint()
    names: list[bytes] = []
    merged = merge(*runs)
    while some := list(islice(merged, _CHUNK)):
        names += some
        await trio.lowlevel.checkpoint()
    return names
