"""What checkpoints cost on trees of different sizes, beside git on a host directory with the same files.

    python -m benchmarks.checkpoints [--files 1000,10000,100000] [--changed 100] [--rounds 7] [--engine native]

Each round changes files through the socket and takes a checkpoint, compares it with the one before, goes back to that,
and drops it. Milliseconds, as the client waits for the reply: the median and, of create, the worst. git: ``commit -a``
for create and ``reset --hard`` for restore, of the same changes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agenttools import checkpoints
from agenttools.checkpoints import CheckpointResult
from agenttools.client import Client

T = TypeVar("T")
PAGE = b"x" * 1000


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--files", default="1000,10000,100000")
    parser.add_argument("--changed", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engine", default="native")
    options = parser.parse_args()
    print(f"{options.changed} files changed, median ms of {options.rounds} rounds")
    heads = ("files", "create", "worst", "git commit", "restore", "git reset", "diff", "drop", "fork")
    print("".join(f"{head:>12}" for head in heads))
    for count in map(int, options.files.split(",")):
        with tempfile.TemporaryDirectory(prefix="vfsd-bench-") as scratch:
            row = _measure(Path(scratch), count, options.changed, options.rounds, options.engine)
        print(f"{count:>12}" + "".join(f"{value:>12.1f}" for value in row), flush=True)


def _path(i: int) -> str:
    return f"d{i // 500}/f{i}"


def _measure(base: Path, count: int, changed: int, rounds: int, engine: str) -> list[float]:
    os.environ["XDG_RUNTIME_DIR"], os.environ["XDG_STATE_HOME"] = str(base / "run"), str(base / "state")
    (base / "run").mkdir(mode=0o700)
    point = base / "mnt"
    point.mkdir()
    vfsd = [sys.executable, "-m", "vfsd"]
    subprocess.run([*vfsd, "mount", "--engine", engine, point], check=True, stdout=subprocess.DEVNULL)
    times: dict[str, list[float]] = {}
    try:
        with Client(name="default", timeout=None) as client:
            for i in range(count):
                client.call("write", path=b"/" + _path(i).encode(), data=PAGE)
            _timed(times, "first", lambda: _done(checkpoints.create(client)))
            for turn in range(rounds):
                for i in range(changed):
                    client.call("write", path=b"/" + _path(i * (count // changed)).encode(), data=b"%d" % turn + PAGE)
                last = checkpoints.all_of(client).data["checkpoints"][-1]["id"]
                made = _timed(times, "create", lambda: _done(checkpoints.create(client)))
                _timed(times, "diff", lambda: _done(checkpoints.diff(client, last, made)))  # noqa: B023
                back = _timed(times, "restore", lambda: _done(checkpoints.restore(client, last)))  # noqa: B023
                _done(checkpoints.restore(client, made))
                _timed(times, "drop", lambda: _done(checkpoints.drop(client, [back])))  # noqa: B023
            _timed(times, "fork", lambda: _done(checkpoints.fork(client, made, "forked")))
    finally:
        subprocess.run([*vfsd, "umount", "default"], check=True, stdout=subprocess.DEVNULL)
    git = _git(base / "host", count, changed, rounds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return [
        middle["create"], max(times["create"]), git["commit"], middle["restore"], git["reset"],
        middle["diff"], middle["drop"], middle["fork"],
    ]  # fmt: skip


def _git(host: Path, count: int, changed: int, rounds: int) -> dict[str, float]:
    for i in range(count):
        path = host / _path(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PAGE)
    git = ["git", "-C", str(host), "-c", "user.name=b", "-c", "user.email=b@localhost", "-c", "gc.auto=0"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    times: dict[str, list[float]] = {}
    for turn in range(rounds):
        for i in range(changed):
            (host / _path(i * (count // changed))).write_bytes(b"%d" % turn + PAGE)
        _timed(times, "commit", lambda: subprocess.run([*git, "commit", "-qam", "more"], check=True))
        _timed(times, "reset", lambda: subprocess.run([*git, "reset", "-q", "--hard", "HEAD~"], check=True))
    return {name: statistics.median(values) for name, values in times.items()}


def _done(result: CheckpointResult) -> str:
    """The checkpoint that a result names first; an error ends the run."""
    if result.error is not None:
        raise SystemExit(result.error)
    return str(result.data.get("before") or result.data.get("id"))


def _timed(times: dict[str, list[float]], name: str, what: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = what()
    times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
    return result


if __name__ == "__main__":
    main()
