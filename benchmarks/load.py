"""The tools' door under load: how many calls a second, and the slowest, while git clones in the mount.

    python -m benchmarks.load [--clients 1,8,64] [--seconds 10] [--files 100000] [--engine native]

Each client is a process of its own and reads, writes and edits files of its own, a call after the other. Meanwhile
``git clone`` runs in the mount over and over, or nothing does. ``stall`` is the longest that the daemon worked (its
processor time) before it answered a statfs(2) of the mount. At the end a grep and a glob over many files, and the
stalls meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import trio

from agenttools import tools
from agenttools.client import Client
from benchmarks.scale import Heart, Mount, fill

TEXT = "".join(f"line {i} of a file, of no great length\n" for i in range(28))
OPS = ("read", "write", "edit")


def _client(number: int, seconds: float, ready: Barrier, told: SimpleQueue[dict[str, list[float]]]) -> None:
    """One client's process: seconds of each call, by operation."""
    taken: dict[str, list[float]] = {op: [] for op in OPS}
    with Client(name="default") as client:
        path, turn = f"/load/c{number}", 0
        tools.write(client, path, TEXT)
        ready.wait()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            turn += 1
            for op in OPS:
                began = time.perf_counter()
                if op == "read":
                    result: tools.ReadResult | tools.WriteResult | tools.EditResult = tools.read(client, path)
                elif op == "write":
                    result = tools.write(client, path, TEXT)
                else:
                    result = tools.edit(client, path, "line 7 of", f"line {turn} of")
                taken[op].append(time.perf_counter() - began)
                if result.error is not None:
                    raise SystemExit(result.error)
    told.put(taken)


@contextmanager
def _cloning(mount: Mount, source: Path, wanted: bool) -> Iterator[list[float]]:
    """Inside, ``git clone`` runs in the mount; the seconds each took."""
    stop, took = threading.Event(), list[float]()

    def clone() -> None:
        while not stop.is_set():
            began, target = time.perf_counter(), mount.point / "clone"
            subprocess.run(["git", "clone", "-q", "--no-hardlinks", source, target], check=True)
            took.append(time.perf_counter() - began)
            shutil.rmtree(target)

    thread = threading.Thread(target=clone)
    if wanted:
        thread.start()
    try:
        yield took
    finally:
        stop.set()
        if wanted:
            thread.join()


def _row(mount: Mount, source: Path, clients: int, seconds: float, cloning: bool) -> None:
    forked = multiprocessing.get_context("fork")
    told: SimpleQueue[dict[str, list[float]]] = forked.SimpleQueue()
    ready = forked.Barrier(clients + 1)
    processes = [forked.Process(target=_client, args=(i, seconds, ready, told)) for i in range(clients)]
    for process in processes:
        process.start()
    with _cloning(mount, source, cloning) as clones, Heart(mount) as heart:
        ready.wait()
        had = mount.processor()
        taken: dict[str, list[float]] = {op: [] for op in OPS}
        for _ in processes:
            for op, times in told.get().items():
                taken[op] += times
        cpu = mount.processor() - had
        for process in processes:
            process.join()
    total = sum(map(len, taken.values()))
    cells = ""
    for op in OPS:
        times = sorted(taken[op])
        cells += f"{times[len(times) // 2] * 1e3:9.2f}{times[len(times) * 99 // 100] * 1e3:9.2f}"
    clone = f"{sum(clones) / len(clones):9.2f}" if clones else " " * 9
    print(f"{clients:>8}{total / seconds:10.0f}{cells}{clone}{heart.worst * 1e3:10.1f}{cpu / seconds:8.2f}", flush=True)


def _searches(mount: Mount, files: int, volume: Path) -> None:
    mount.down()
    trio.run(fill, volume, [f"tree/d{i // 500}/f{i:07}" for i in range(files)])
    mount.up()
    with Client(name="default", timeout=None) as client:
        for name, search in (
            ("grep, no hit", lambda: tools.grep(client, "nowhere to be found", "/tree")),
            ("glob, all", lambda: tools.glob(client, "**/*", "/tree")),
        ):
            with Heart(mount) as heart:
                began, had = time.perf_counter(), mount.processor()
                search()
                wall, cpu = time.perf_counter() - began, mount.processor() - had
            print(
                f"{name} over {files} files: {wall:.2f} s, {cpu:.2f} s of the daemon; it worked before a statfs was "
                f"answered: median {heart.percentile(0.5) * 1e3:.1f} ms, p99 {heart.percentile(0.99) * 1e3:.1f} ms, "
                f"worst {heart.worst * 1e3:.1f} ms",
                flush=True,
            )


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--engine", default="native")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vfsd-bench-") as scratch:
        base = Path(scratch)
        os.environ["XDG_RUNTIME_DIR"], os.environ["XDG_STATE_HOME"] = str(base / "run"), str(base / "state")
        (base / "run").mkdir(mode=0o700)
        source = base / "repository"
        shutil.copytree(Path(__file__).parent.parent / "vfsd", source / "vfsd")
        git = ["git", "-C", str(source), "-c", "user.name=b", "-c", "user.email=b@localhost"]
        for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
            subprocess.run([*git, *arguments], check=True)
        mount = Mount(base, options.engine)
        mount.up()
        try:
            for cloning in (False, True):
                print("while git clones in the mount" if cloning else "the tools alone", "(ms: median, p99)")
                heads = "".join(f"{op:>9}{'p99':>9}" for op in OPS)
                print(f"{'clients':>8}{'calls/s':>10}{heads}{'clone s':>9}{'stall ms':>10}{'cpu':>8}")
                for clients in map(int, options.clients.split(",")):
                    _row(mount, source, clients, options.seconds, cloning)
            (volume,) = base.glob("state/vfsd/default/threads/*/root")
            _searches(mount, options.files, volume)
        finally:
            mount.down()


if __name__ == "__main__":
    main()
