"""What rules cost: the same work in a mount without any and in one with rules, in turns.

    python -m benchmarks.rules [--rounds 9] [--files 1000] [--rules 100]

Prints the least processor time that the daemon's loop takes for one in any round, in microseconds, and the ratio: on a
busy machine times by the clock differ by more than rules cost.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agenttools.client import Client
from benchmarks.columns import rules as rules_text

Work = Callable[[Path, int], None]


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
    config.write_text(f'[routes."/"]\nkind = "state"\n{rules_text(rules)}\n')
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


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rules", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rules", type=int, default=100)
    options = parser.parse_args()
    times: dict[tuple[str, bool], list[float]] = {(name, ruled): [] for name in WORK for ruled in (False, True)}
    with tempfile.TemporaryDirectory(prefix="vfsd-bench-") as scratch, ExitStack() as stack:
        base = Path(scratch)
        mounts = [stack.enter_context(mounted(base, n, count)) for n, count in (("off", 0), ("on", options.rules))]
        for number in range(options.rounds):
            for name, work in WORK.items():
                for ruled in (False, True) if number % 2 else (True, False):
                    mountpoint, pid = mounts[ruled]
                    directory = mountpoint / f"round{number}"
                    directory.mkdir(exist_ok=True)
                    began = busy_ns(pid)
                    work(directory, options.files)
                    times[name, ruled].append((busy_ns(pid) - began) / options.files / 1000)
    print(f"{'microseconds':30}{'no rules':>10}{options.rules:>5} rules{'ratio':>8}")
    for name in WORK:
        off, on = (min(times[name, ruled]) for ruled in (False, True))
        print(f"{name:30}{off:10.1f}{on:11.1f}{on / off:8.2f}")


if __name__ == "__main__":
    main()
