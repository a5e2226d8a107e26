"""``make bench``: every row for every column in one interleaved run; medians, and ratios to the host directory.

    python -m benchmarks [--rounds 3] [--files 2000] [--mib 256] [--only small,large,programs,tools] [--awake]
                         [COLUMN ...]

Columns are the host directory, vfsd with each engine, with the native engine also without the audit log (``unaudited``)
and with a hundred rules (``ruled``), and bindfs, juicefs and rclone where they are installed. Times vary with the
machine; the ratios are what to compare. On an idle virtual machine a core that halts may take 50 to 500 us to wake,
which is then most of what a request costs, to any file system served by a process; with ``--awake`` none halts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agenttools.client import Client
from benchmarks import files, tools
from benchmarks.awake import awake
from benchmarks.columns import Column, columns


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("columns", nargs="*", metavar="COLUMN")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--only", default="small,large,programs,tools")
    parser.add_argument("--awake", action="store_true", help="keep the processors from halting meanwhile")
    options = parser.parse_args()
    only = options.only.split(",")
    with tempfile.TemporaryDirectory(prefix="vfsd-bench-") as scratch:
        os.environ["XDG_RUNTIME_DIR"] = f"{scratch}/run"
        os.environ["XDG_STATE_HOME"] = f"{scratch}/state"
        os.mkdir(f"{scratch}/run", 0o700)
        base = Path(scratch)
        with awake() if options.awake else contextlib.nullcontext(), columns(base, options.columns) as found:
            if only != ["tools"]:
                _file_table(found, options, only, _repository(base))
            if "tools" in only:
                _tool_table(found, base)


def _repository(base: Path) -> Path:
    """A repository to clone: this one's files, committed once."""
    source, target = Path(__file__).parent.parent, base / "repository"
    target.mkdir()
    git = ["git", "-C", str(target), "-c", "user.name=b", "-c", "user.email=b@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    for copy in range(10):
        for package in ("vfsd", "agenttools", "tests", "docs"):
            subprocess.run(["cp", "-r", source / package, target / f"{package}{copy}"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return target


def _file_table(found: list[Column], options: argparse.Namespace, only: list[str], repository: Path) -> None:
    taken: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        first = number % len(found)  # what a column leaves to be written back falls on another each round
        for column in found[first:] + found[:first]:
            for row, seconds in _rows(column, options, only, repository):
                taken.setdefault(row, {}).setdefault(column.name, []).append(seconds)
    print(f"{'seconds, and times the host':44}" + "".join(f"{c.name:>24}" for c in found))
    for row, cells in taken.items():
        host = statistics.median(cells["host"])
        line = f"{row:44}{host:24.4f}"
        for column in found[1:]:
            seconds = statistics.median(cells[column.name])
            line += f"{seconds:17.4f} {seconds / host:5.1f}x"
        print(line, flush=True)
    if os.geteuid():
        print("not root: the kernel's caches could not be dropped, so rows that say cold are warm")


def _rows(
    column: Column, options: argparse.Namespace, only: list[str], repository: Path
) -> Iterator[tuple[str, float]]:
    if "small" in only:
        yield from files.small_files(column, options.files)
    if "large" in only:
        yield from files.large_file(column, options.mib)
    if "programs" in only:
        yield from files.programs(column, repository)


def _tool_table(found: list[Column], base: Path) -> None:
    host = base / "tools-host"
    host.mkdir()
    mount = next((c.path for c in found if c.name == "vfsd native"), None)
    if mount is None:
        sys.exit("the tools are measured on the native column")
    print(f"\n{'tool, microseconds':20}{'vfsd, socket':>16}{'Deep Agents':>16}{'ratio':>8}")
    with Client(name="bench-native") as client:
        for row, ours, theirs in tools.rows(client, mount, host):
            print(f"{row:20}{ours * 1e6:16.0f}{theirs * 1e6:16.0f}{ours / theirs:8.2f}", flush=True)


main()
