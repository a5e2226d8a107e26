"""A disk whose power can be cut: a mounted tree in memory that records what is done to it, and images of its past.

Run as a program, ``disk.py MOUNTPOINT LOG`` serves the tree with our own engine until it is unmounted, and appends to
LOG, in order, each write, truncation, name made or removed, and sync. SQLite's files are among what is recorded, as
whatever it does passes through the kernel. A directory made at its root is a mark of the test, no more.

The rules of the disk, as strict as POSIX: what a file had when its fsync began is kept. Each other write and truncation
is kept, lost or garbled (random bytes where it wrote), each for itself, in no order. A name is kept once its directory
is synced; of the later changes of names those up to some moment are kept. This is SQLite's own idea of a crash test
(sqlite.org/testing.html, 3.2), with its assumption that a write spoils no bytes beside it (powersafe overwrite).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgpack
import trio

from vfsd.backends.memory import MemoryBackend
from vfsd.core.changes import Dentry, NoDentry, Put, Write, Zero
from vfsd.doors import engines
from vfsd.doors.engines import Options
from vfsd.doors.fuse import FuseDoor
from vfsd.feed import Commit, Feed
from vfsd.routes import Route, RouteTable
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume

ROOT_NODE = 1
SECONDS = 20.0

Op = list[Any]
"""["write", node, offset, bytes], ["size", node, size], ["zero", node, offset, end], ["name", parent, name, node or
None], ["directory", node], ["sync", node] or ["mark", name]."""


class Disk:
    """The recording, from the outside: ``point`` is where it is mounted, for as long as the block."""

    def __init__(self, base: Path) -> None:
        self.point = base / "disk"
        self._log = base / "disk.log"
        self._marks = 0

    def __enter__(self) -> Disk:
        self.point.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.point, self._log], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "started\n"
        return self

    def __exit__(self, *exc: object) -> None:
        subprocess.run(["umount", self.point], timeout=SECONDS, check=False)
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            engines.abort(str(self.point))
            self._process.kill()
            self._process.wait(SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if engines.mounted(str(self.point)) is not None:
            engines.unmount(str(self.point), lazy=True)

    def mark(self) -> None:
        """Note this moment."""
        os.mkdir(self.point / f"mark.{self._marks}")
        self._marks += 1

    def ops(self) -> list[Op]:
        """All that was recorded, once the disk is unmounted."""
        with open(self._log, "rb") as file:
            return list(msgpack.Unpacker(file, max_buffer_size=1 << 30))


class Image:
    """What may be left of the disk when power is lost after ``ops``.

    ``fate(op)`` says "kept", "lost" or "garbled" for each change that no sync had made safe.
    """

    def __init__(self, ops: list[Op], fate: Callable[[Op], str], rng: random.Random) -> None:
        self._rng = rng
        self.files: dict[int, bytearray] = {}
        self.names: dict[tuple[int, str], int] = {}
        self.directories = {ROOT_NODE}
        synced = self._last_syncs(ops)
        names_lost = False
        for at, op in enumerate(ops):
            kind = op[0]
            if kind == "name":
                # As a file system's own log has it: what comes after a change of names that was lost is lost too.
                if at > synced.get(op[1], -1):
                    names_lost = names_lost or fate(op) != "kept"
                    if names_lost:
                        continue
                self._name(*op[1:])
            elif kind == "directory":
                self.directories.add(op[1])
            elif kind in ("write", "size", "zero"):
                self._content(op, "kept" if at < synced.get(op[1], -1) else fate(op))

    @staticmethod
    def _last_syncs(ops: list[Op]) -> dict[int, int]:
        return {op[1]: at for at, op in enumerate(ops) if op[0] == "sync"}

    def _name(self, parent: int, name: str, node: int | None) -> None:
        if node is None:
            self.names.pop((parent, name), None)
        else:
            self.names[parent, name] = node

    def _content(self, op: Op, fate: str) -> None:
        if fate == "lost":
            return
        kind, node, offset, *rest = op
        file = self.files.setdefault(node, bytearray())
        if kind == "size":
            if offset < len(file):
                del file[offset:]
            else:
                file.extend(bytes(offset - len(file)))
            return
        if kind == "zero":
            end = min(len(file), rest[0])
            data = bytes(max(0, end - offset))
        else:
            data = rest[0]
        if fate == "garbled":
            data = self._rng.randbytes(len(data))
        if offset > len(file):
            file.extend(bytes(offset - len(file)))
        file[offset : offset + len(data)] = data

    def write_to(self, place: Path) -> None:
        """Make the image's files under ``place``, but for SQLite's shared memory, which no start relies on."""
        place.mkdir()
        places = {ROOT_NODE: place}
        for (parent, name), node in sorted(self.names.items()):
            if parent not in places or name.endswith("-shm"):
                continue
            if node in self.directories:
                places[node] = places[parent] / name
                places[node].mkdir()
            else:
                (places[parent] / name).write_bytes(self.files.get(node, b""))


def fates(rng: random.Random, kept: float, lost: float) -> Callable[[Op], str]:
    """Each change kept or lost with these probabilities, else garbled."""

    def fate(op: Op) -> str:
        x = rng.random()
        return "kept" if x < kept else "lost" if x < kept + lost else "garbled"

    return fate


# -- the program


class _Recorder:
    def __init__(self, log: Path) -> None:
        self._fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._sizes: dict[int, int] = {}
        self._directories: set[int] = set()

    def note(self, *op: object) -> None:
        os.write(self._fd, msgpack.packb(op))

    def commit(self, commit: Commit) -> None:
        for op in self._ops(commit):
            self.note(*op)

    def _ops(self, commit: Commit) -> Iterator[tuple[object, ...]]:
        changes = commit.changes
        written = {c.node for c in changes if type(c) is Write}
        for c in changes:
            if type(c) is Write:
                yield "write", c.node, c.offset, bytes(c.data)
            elif type(c) is Zero and c.end is not None and c.node not in written:
                yield "zero", c.node, c.offset, c.end
            elif type(c) is Put:
                if c.mode >> 12 == 4:
                    if c.node not in self._directories:
                        self._directories.add(c.node)
                        yield "directory", c.node
                elif self._sizes.get(c.node, 0) != c.size and c.node not in written:
                    yield "size", c.node, c.size
                self._sizes[c.node] = c.size
            elif isinstance(c, (Dentry, NoDentry)):
                if c.parent == ROOT_NODE and c.name.startswith(b"mark."):
                    yield "mark", c.name.decode()
                else:
                    yield "name", c.parent, c.name.decode(), c.node if type(c) is Dentry else None


class _Volume(TreeVolume):
    recorder: _Recorder

    async def fsync(self, ino: int, fh: int, datasync: bool) -> None:
        self.recorder.note("sync", self._node(ino).id)


def main(mountpoint: str, log: str) -> None:
    feed, table = Feed(), RouteTable()
    recorder = _Recorder(Path(log))
    volume = _Volume(0, MemoryBackend(), feed, lambda: 0, owner=(os.getuid(), os.getgid()))
    volume.recorder = recorder
    feed.subscribe(recorder.commit)
    table.mount(Route(b"/", volume.kind, "", volume))
    door = FuseDoor(Vfs(table, feed, SystemEntries(table, feed, lambda: 0)))
    engine, _ = engines.choose("native")
    trio.run(engine.run, door, mountpoint, Options(), lambda: print("started", flush=True))
    volume.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
