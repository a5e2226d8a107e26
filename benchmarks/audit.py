"""What the audit log costs: two mounts in one run, with it and without, in turns; microseconds an operation.

    python -m benchmarks.audit [--rounds 30] [--count 300] [--engine native]

``wall`` is what the program waits, ``daemon`` the processor time of the daemon; of all rounds the lowest twentieth,
since other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agenttools import tools
from agenttools.client import Client

PAGE = b"x" * 4096


class Mount:
    """One mount with a configuration of its own."""

    def __init__(self, base: Path, name: str, engine: str, audit: bool) -> None:
        self.name = name
        self.path = base / name
        self.path.mkdir()
        config = base / f"{name}.toml"
        config.write_text(f"[audit]\nenabled = {'true' if audit else 'false'}\n")
        self._vfsd = [sys.executable, "-m", "vfsd"]
        command = [*self._vfsd, "mount", "--config", config, "--name", name, "--engine", engine, self.path]
        subprocess.run([str(c) for c in command], check=True, stdout=subprocess.DEVNULL)
        status = subprocess.run([*self._vfsd, "status", name, "--json"], check=True, capture_output=True)
        self.pid = int(json.loads(status.stdout)[0]["pid"])
        self.client = Client(name=name)

    def processor(self) -> float:
        """Seconds of processor time that the daemon has used."""
        return sum(
            int(Path(f"/proc/{self.pid}/task/{task}/schedstat").read_text().split()[0])
            for task in os.listdir(f"/proc/{self.pid}/task")
        ) / 1e9  # fmt: skip

    def close(self) -> None:
        self.client.close()
        subprocess.run([*self._vfsd, "umount", self.name], check=True, stdout=subprocess.DEVNULL)


def _work(mount: Mount, turn: int, count: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, number of operations, and the work, in the order in which it must be done."""
    top = mount.path / f"t{turn}"
    names = [f"{top}/f{i}" for i in range(count)]
    top.mkdir()

    def create() -> None:
        for name in names:
            fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            os.write(fd, PAGE)
            os.close(fd)

    def write() -> None:
        fd = os.open(names[0], os.O_WRONLY)
        for i in range(count):
            os.pwrite(fd, PAGE, i % 64 * 4096)
        os.close(fd)

    def read() -> None:
        for name in names:
            fd = os.open(name, os.O_RDONLY)
            os.read(fd, 8192)
            os.close(fd)

    def tool() -> None:
        for i in range(count):
            tools.write(mount.client, f"/t{turn}/w{i}", "a few words\n")

    def rename() -> None:
        for name in names:
            os.rename(name, f"{name}~")

    def unlink() -> None:
        for name in names:
            os.unlink(f"{name}~")

    few = max(1, count // 20)

    def programs() -> None:
        for i in range(few):
            subprocess.run(["/bin/sh", "-c", f"echo a > {top}/p{i}"], check=True)

    yield "create + write 4 KiB + close", count, create
    yield "pwrite 4 KiB", count, write
    yield "open + read + close, warm", count, read
    yield "rename", count, rename
    yield "unlink", count, unlink
    yield "tool write", count, tool
    yield "a program that writes one file", few, programs


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--engine", default="native")
    options = parser.parse_args()
    taken: dict[str, list[list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="vfsd-bench-") as scratch, contextlib.ExitStack() as stack:
        os.environ["XDG_RUNTIME_DIR"] = f"{scratch}/run"
        os.environ["XDG_STATE_HOME"] = f"{scratch}/state"
        os.mkdir(f"{scratch}/run", 0o700)
        mounts = [Mount(Path(scratch), name, options.engine, name == "on") for name in ("off", "on")]
        for mount in mounts:
            stack.callback(mount.close)
        for turn in range(options.rounds):
            for both in zip(*(_work(mount, turn, options.count) for mount in mounts), strict=True):
                for side in (0, 1) if turn % 2 else (1, 0):
                    row, count, work = both[side]
                    began, had = time.perf_counter(), mounts[side].processor()
                    work()
                    wall = time.perf_counter() - began
                    used = mounts[side].processor() - had
                    taken.setdefault(row, [[], []])[side].append((wall / count * 1e6, used / count * 1e6))
    print(f"{'microseconds an operation':32}{'wall off':>10}{'on':>10}{'ratio':>8}", end="")
    print(f"{'daemon off':>12}{'on':>10}{'ratio':>8}")
    for row, sides in taken.items():
        cells = [[sorted(times)[len(times) // 20] for times in zip(*side, strict=True)] for side in sides]
        (wall_off, used_off), (wall_on, used_on) = cells
        print(
            f"{row:32}{wall_off:10.1f}{wall_on:10.1f}{wall_on / wall_off:8.2f}"
            f"{used_off:12.1f}{used_on:10.1f}{used_on / max(used_off, 0.01):8.2f}"
        )


if __name__ == "__main__":
    main()
