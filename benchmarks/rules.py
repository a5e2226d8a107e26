"""What rules cost: the same work in a mount without any, which hears of opens too, and in one with rules, in turns.

    python -m benchmarks.rules [--pairs 6] [--rounds 12] [--files 200] [--rules 100]

Prints the processor time that the daemon's loop takes for one, in microseconds, the median of all rounds, and the
median of the rounds' ratios, of that and of the time by the clock: on a busy machine the latter differs by more than
rules cost. Each pair of mounts is new, for two daemons alike in all differ by some percent, by where their memory lies.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agenttools.client import Client
from benchmarks.columns import rules as rules_text

Work = Callable[[Path, int], None]
Round = tuple[tuple[float, float], tuple[float, float]]
"""(without rules, with them): nanoseconds of the daemon's loop, and by the clock."""


def create(directory: Path, files: int) -> None:
    for i in range(files):
        with open(directory / f"f{i}", "wb", buffering=0) as file:
            file.write(b"x" * 4096)


def read(directory: Path, files: int) -> None:
    for i in range(files):
        with open(directory / f"f{i}", "rb", buffering=0) as file:
            file.read(4096)


def overwrite(directory: Path, files: int) -> None:
    with open(directory / "f0", "r+b", buffering=0) as file:
        for _ in range(files):
            os.pwrite(file.fileno(), b"y" * 4096, 0)


def rename(directory: Path, files: int) -> None:
    for i in range(files):
        os.rename(directory / f"f{i}", directory / f"g{i}")


def unlink(directory: Path, files: int) -> None:
    for i in range(files):
        os.unlink(directory / f"g{i}")


WORK: dict[str, Work] = {
    "create, write 4 KiB, close": create, "open, read, close": read, "pwrite 4 KiB": overwrite,
    "rename": rename, "unlink": unlink,
}  # fmt: skip


def busy_ns(pid: int) -> int:
    """Nanoseconds that the process's first thread has run so far (proc(5), schedstat)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


@contextmanager
def mounted(base: Path, name: str, rules: int) -> Iterator[tuple[Path, int]]:
    """(mountpoint, pid) of an empty state route with so many rules, half of them for reading; none of them matches."""
    for made in ("mnt", "run", "state"):
        (base / name / made).mkdir(parents=True, mode=0o700)
    config = base / name / "vfsd.toml"
    config.write_text(f'opens = "heard"\n[routes."/"]\nkind = "state"\n{rules_text(rules)}\n')
    environ = os.environ | {"XDG_RUNTIME_DIR": str(base / name / "run"), "XDG_STATE_HOME": str(base / name / "state")}
    vfsd = [sys.executable, "-m", "vfsd"]
    subprocess.run([*vfsd, "mount", "--config", config, base / name / "mnt"], env=environ, check=True, stdout=2)
    try:
        with Client(socket=base / name / "run/vfsd/default.sock") as client:
            assert len(client.call("rules")["layers"][0]["rules"]) == rules
            pid: int = client.hello["pid"]
        yield base / name / "mnt", pid
    finally:
        subprocess.run([*vfsd, "umount", "default"], env=environ, check=True, stdout=2)


def measure(rounds: int, files: int, rules: int) -> dict[str, list[Round]]:
    """Of a new pair of mounts: for each kind of work, each round."""
    times: dict[str, list[Round]] = {name: [] for name in WORK}
    with tempfile.TemporaryDirectory(prefix="vfsd-bench-") as scratch, ExitStack() as stack:
        mounts = [stack.enter_context(mounted(Path(scratch), n, c)) for n, c in (("off", 0), ("on", rules))]
        for number in range(rounds):
            for name, work in WORK.items():
                took: dict[bool, tuple[float, float]] = {}
                for ruled in (False, True) if number % 2 else (True, False):
                    mountpoint, pid = mounts[ruled]
                    directory = mountpoint / f"round{number}"
                    directory.mkdir(exist_ok=True)
                    began, began_at = busy_ns(pid), time.perf_counter_ns()
                    work(directory, files)
                    took[ruled] = busy_ns(pid) - began, time.perf_counter_ns() - began_at
                times[name].append((took[False], took[True]))
    return times


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rules", description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--rules", type=int, default=100)
    options = parser.parse_args()
    times: dict[str, list[Round]] = {name: [] for name in WORK}
    for _ in range(options.pairs):
        for name, pairs in measure(options.rounds, options.files, options.rules).items():
            times[name] += pairs
    print(
        f"{'microseconds of processor time':32}{'no rules':>10}{options.rules:>5} rules{'ratio':>8}{'by the clock':>14}"
    )
    for name, rounds in times.items():
        off, on = (statistics.median(one[ruled][0] for one in rounds) / options.files / 1000 for ruled in (0, 1))
        busy, clock = (statistics.median(one[1][of] / one[0][of] for one in rounds) for of in (0, 1))
        print(f"{name:32}{off:10.1f}{on:11.1f}{busy:8.2f}{clock:14.2f}")


if __name__ == "__main__":
    main()
