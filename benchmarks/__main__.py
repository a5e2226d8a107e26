"""``make bench``: every row for every column in one interleaved run; medians, and ratios to the host directory.

    python -m benchmarks [--rounds 3] [--files 2000] [--mib 256] [--only small,large,programs,tools] [--dir DIRECTORY]
                         [--limit 300] [--awake] [COLUMN ...]

Columns are the host directory, vfsd with each engine, with the native engine also without the audit log
(``unaudited``), with ``opens = "heard"`` (``heard``) and with a hundred rules (``ruled``), for which opens are heard
too, and bindfs, juicefs, rclone, mirage and s3ql where they are installed (benchmarks/peers.py). ``--only many`` is the
small files' rows with 100,000 files. All is kept below ``--dir``: with /dev/shm the host directory is tmpfs. The tables
are Markdown; what goes on meanwhile is told on standard error.

Times vary with the machine; the ratios are what to compare. On an idle virtual machine a core that halts may take 50
to 500 us to wake, which is then most of what a request costs to any file system served by a process; with ``--awake``
none halts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from agenttools.client import Client
from benchmarks import files, programs, tools
from benchmarks.awake import awake
from benchmarks.columns import Column, Columns, columns
from benchmarks.table import Table
from benchmarks.turns import Group, take

GROUPS = ("small", "many", "large", "programs", "tools")


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("columns", nargs="*", metavar="COLUMN")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--only", default="small,large,programs,tools", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--dir", help="where to keep all that is measured; default $TMPDIR")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a row has failed")
    parser.add_argument("--awake", action="store_true", help="keep the processors from halting meanwhile")
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := set(only) - set(GROUPS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the mounts would stay
    kept = tempfile.TemporaryDirectory(prefix="vfsd-bench-", dir=options.dir)
    sockets = tempfile.TemporaryDirectory(prefix="vfsd-")  # not below --dir: a socket's path must be short
    with kept as scratch, sockets as os.environ["XDG_RUNTIME_DIR"]:
        os.environ["XDG_STATE_HOME"] = f"{scratch}/state"
        base = Path(scratch)
        with awake() if options.awake else contextlib.nullcontext(), columns(base, options.columns) as there:
            table = Table(there)
            if groups := _groups(only, options, base, table):
                _measure(there, groups, options, table)
                print(table.markdown(), flush=True)
            if "tools" in only:
                _tool_table(there, base)


def _groups(only: list[str], options: argparse.Namespace, base: Path, table: Table) -> list[Group]:
    groups: list[Group] = []
    if "small" in only:
        groups.append(partial(files.small_files, options.files))
    if "many" in only:
        groups.append(partial(files.small_files, 100_000))
    if "large" in only:
        groups.append(partial(files.large_file, options.mib))
    if "programs" in only:
        made = programs.material(base)
        for missing in made.missing:
            print(missing, file=sys.stderr, flush=True)
            table.note(missing)
        groups.append(partial(programs.programs, made))
    return groups


def _measure(there: Columns, groups: list[Group], options: argparse.Namespace, table: Table) -> None:
    gone: set[str] = set()
    for number in range(options.rounds):
        first = number % len(there.found)  # what a column leaves to be written back falls on another each round
        for group in groups:
            for column in there.found[first:] + there.found[:first]:
                if column.name in gone:
                    continue
                try:
                    for row, cell in take(column, group, options.limit):
                        table.add(column, row, cell)
                        told = cell if isinstance(cell, str) else f"{cell:.4f}"
                        print(f"round {number + 1}, {column.name}, {row}: {told}", file=sys.stderr, flush=True)
                except OSError as error:
                    gone.add(column.name)
                    table.note(f"{error}; not measured any more")
    if os.geteuid():
        table.note("not root: the kernel's caches could not be dropped, so rows that say cold are warm")


def _tool_table(there: Columns, base: Path) -> None:
    host = base / "tools-host"
    host.mkdir()
    mount: Column | None = next((column for column in there.found if column.name == "vfsd native"), None)
    if mount is None:
        sys.exit("the tools are measured on the native column")
    print("\n| tool, us | vfsd, socket | Deep Agents | ratio |\n|---|---|---|---|")
    with Client(name="bench-native") as client:
        for row, ours, theirs in tools.rows(client, mount.path, host):
            print(f"| {row} | {ours * 1e6:.0f} | {theirs * 1e6:.0f} | {ours / theirs:.2f} |", flush=True)


main()
