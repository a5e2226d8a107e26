"""How long each large operation makes every program in the mount wait: the daemon is one loop, and what works long in
it holds them all.

    python -m benchmarks.holds [--files 100000] [--rounds 3] [--engine native] [--only write,read,...] [--dir DIR]

A process of its own asks the mount for a statfs(2) over and over. ``wait`` is the longest that one took, by the clock;
``work`` the most processor time that the daemon's loop spent before it answered one. Of several rounds the one with the
least, for what other programs take of the machine is not the daemon's doing. Milliseconds; ``took`` is seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import trio

from agenttools import checkpoints
from agenttools.client import Client
from benchmarks.scale import Mount, fill

MIB = 1 << 20
PER = 500
Work = Callable[[], object]


class Watch:
    """``longest``: seconds by the clock and of the loop's processor time, while it is entered."""

    def __init__(self, mount: Mount) -> None:
        fork = multiprocessing.get_context("fork")
        self._ours, theirs = fork.Pipe()
        self._process = fork.Process(target=_watch, args=(mount, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.longest = (0.0, 0.0)

    def __enter__(self) -> Watch:
        self._ours.send(True)
        self._ours.recv()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ours.send(False)
        self.longest = self._ours.recv()

    def end(self) -> None:
        """Nothing is watched any more."""
        self._process.kill()
        self._process.join()


def _watch(mount: Mount, orders: Connection) -> None:
    point = str(mount.point)
    while True:
        try:
            orders.recv()
        except EOFError:
            return
        os.statvfs(point)
        orders.send(None)
        waits = works = 0.0
        while not orders.poll(0.0005):
            had, began = mount.loop_processor(), time.perf_counter()
            os.statvfs(point)
            waits = max(waits, time.perf_counter() - began)
            works = max(works, mount.loop_processor() - had)
        orders.recv()
        orders.send((waits, works))


class Bench:
    """One mount with ``files`` files in ``/tree``."""

    def __init__(self, mount: Mount, client: Client, files: int) -> None:
        self.mount = mount
        self.client = client
        self.files = files
        self.base = mount.base

    # Each yields (row, work) and prepares between; one round.

    def write(self) -> Iterator[tuple[str, Work]]:
        data = os.urandom(16 * MIB)
        yield "write of 16 MiB, new", lambda: self.client.call("write", path=b"/large", data=data)
        yield "write of 16 MiB, over another", lambda: self.client.call("write", path=b"/large", data=data)
        checkpoints.create(self.client)
        yield "... that a checkpoint holds", lambda: self.client.call("write", path=b"/large", data=data)
        large = os.urandom(200 * MIB)
        yield "write of 200 MiB", lambda: self.client.call("write", path=b"/larger", data=large)
        self.client.call("delete", path=b"/larger")
        yield "pwrite of 8 MiB", lambda: self._pwrite(data[: 8 * MIB])
        self.client.call("delete", path=b"/large")

    def _pwrite(self, data: bytes) -> None:
        fh = self.client.call("open", path=b"/large", flags=os.O_WRONLY)["fh"]
        self.client.call("pwrite", fh=fh, offset=0, data=data)
        self.client.call("close", fh=fh)

    def read(self) -> Iterator[tuple[str, Work]]:
        self.client.call("write", path=b"/large", data=os.urandom(16 * MIB))
        for piece in (1, 8):
            yield (
                f"read of 16 MiB, in pieces of {piece}",
                lambda: [
                    self.client.call("read", path=b"/large", offset=at * MIB, length=piece * MIB)  # noqa: B023
                    for at in range(0, 16, piece)  # noqa: B023
                ],
            )
        self.client.call("delete", path=b"/large")

    def restore(self) -> Iterator[tuple[str, Work]]:
        paths = [b"/some/d%d/f%d" % (i // PER, i) for i in range(10_000)]
        empty = _id(checkpoints.create(self.client))
        for path in paths:
            self.client.call("write", path=path, data=b"one " * 30)
        full = _id(checkpoints.create(self.client))
        for path in paths:
            self.client.call("write", path=path, data=b"other " * 30)
        os.listdir(self.mount.point / "some/d0")
        yield "restore, 10,000 files changed", lambda: checkpoints.restore(self.client, full)
        yield "restore, 10,000 files removed", lambda: checkpoints.restore(self.client, empty)
        yield "restore, 10,000 files brought back", lambda: checkpoints.restore(self.client, full)
        yield "diff of 10,000 files", lambda: checkpoints.diff(self.client, empty, full)
        self.client.call("delete", path=b"/some")

    def list(self) -> Iterator[tuple[str, Work]]:
        def all_of() -> None:
            reply = self.client.call("list", path=b"/flat")
            while reply["more"]:
                reply = self.client.call("list", path=b"/flat", **{"continue": reply["continue"]})

        yield f"list of {self.files:,} files in one directory, first", all_of
        yield "... again", all_of

    def diff(self) -> Iterator[tuple[str, Work]]:
        first = _id(checkpoints.create(self.client))
        made = _id(checkpoints.create(self.client))
        self.client.call("rename", old=b"/tree", new=b"/tree2")
        self.client.call("rename", old=b"/tree2", new=b"/tree")
        for number in range(0, self.files, max(1, self.files // 20_000)):
            self.client.call("chmod", path=b"/tree/d%d/f%07d" % (number // PER, number), perm=0o600)
        yield "diff of 20,000 files", lambda: checkpoints.diff(self.client, first)
        checkpoints.restore(self.client, made)

    def rename(self) -> Iterator[tuple[str, Work]]:
        subprocess.run(["ls", "-lR", self.mount.point / "tree"], check=True, stdout=subprocess.DEVNULL)
        yield "rename of a directory of all", lambda: self.client.call("rename", old=b"/tree", new=b"/tree2")
        subprocess.run(["ls", "-lR", self.mount.point / "tree2"], check=True, stdout=subprocess.DEVNULL)
        yield "... and back", lambda: self.client.call("rename", old=b"/tree2", new=b"/tree")

    def fork(self) -> Iterator[tuple[str, Work]]:
        made = _id(checkpoints.create(self.client))
        yield "fork", lambda: checkpoints.fork(self.client, made, f"fork{time.monotonic_ns()}")
        yield "gc", lambda: self.client.call("gc")

    def archive(self) -> Iterator[tuple[str, Work]]:
        tar = self.base / "tree.tar"
        vfsd = [sys.executable, "-m", "vfsd"]
        yield "export", lambda: subprocess.run([*vfsd, "export", tar], check=True)
        yield "import", lambda: subprocess.run([*vfsd, "import", "--into", "/in", tar], check=True)
        yield "delete of what was imported", lambda: self.client.call("delete", path=b"/in")

    def delete(self) -> Iterator[tuple[str, Work]]:
        yield "delete of all, one directory", lambda: self.client.call("delete", path=b"/flat")
        yield "delete of all, many directories", lambda: self.client.call("delete", path=b"/tree")


GROUPS = ("write", "read", "restore", "list", "diff", "rename", "fork", "archive", "delete")
ONCE = ("archive", "delete")


def _id(result: checkpoints.CheckpointResult) -> str:
    if result.error is not None:
        raise RuntimeError(result.error)
    return str(result.data["id"])


def _measure(base: Path, files: int, rounds: int, engine: str, only: list[str]) -> None:
    os.environ["XDG_RUNTIME_DIR"], os.environ["XDG_STATE_HOME"] = str(base / "run"), str(base / "state")
    (base / "run").mkdir(mode=0o700)
    mount = Mount(base, engine)
    mount.up()
    mount.down()
    (volume,) = base.glob("state/vfsd/default/threads/*/root")
    if not {"write", "read", "restore"}.issuperset(only):
        trio.run(fill, volume, [f"tree/d{i // PER}/f{i:07}" for i in range(files)])
        trio.run(fill, volume, [f"flat/f{i:07}" for i in range(files)])
    mount.up()
    watch = Watch(mount)
    try:
        with Client(name="default", timeout=None) as client:
            print(f"{'':50}{'took s':>9}{'wait ms':>9}{'work ms':>9}", flush=True)
            for group in only:
                found: dict[str, list[tuple[float, float, float]]] = {}
                for _ in range(1 if group in ONCE else rounds):
                    for row, work in getattr(Bench(mount, client, files), group)():
                        with watch:
                            began = time.perf_counter()
                            work()
                            took = time.perf_counter() - began
                        found.setdefault(row, []).append((took, *watch.longest))
                for row, values in found.items():
                    took, wait, load = (min(column) for column in zip(*values, strict=True))
                    print(f"{row:50}{took:9.2f}{wait * 1e3:9.1f}{load * 1e3:9.1f}", flush=True)
    finally:
        watch.end()
        mount.down()


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.holds", description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="native")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--dir", help="where to make the volume")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vfsd-bench-", dir=options.dir) as scratch:
        _measure(Path(scratch), options.files, options.rounds, options.engine, options.only.split(","))


if __name__ == "__main__":
    main()
