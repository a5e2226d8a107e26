"""A plain directory that stands in for the mount (``mount/test_execute.py`` has the real one): the directory holds what
the daemon keeps hidden, the stubs of the host's system directories.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agenttools import views
from agenttools.shell import ExecuteResult

STUBBORN = """
sleep 311 & echo $! > plain
(trap '' TERM HUP INT; sleep 312; sleep 312) & echo $! > deaf
setsid sh -c 'echo $$ > own; sleep 313; true' &
(setsid sh -c 'echo $$ > orphan; exec sleep 314' &)
(setsid env -i /bin/sh -c 'echo $$ > unmarked; exec /bin/sleep 315' &)
while [ ! -s unmarked ] || [ ! -s orphan ] || [ ! -s own ]; do sleep 0.01; done
"""
"""Leaves processes behind in each way, their pids in files of the same names; the last is found by its namespace
alone."""


class Daemon:
    """What execute needs of the daemon, over a plain directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hello: dict[str, Any] = {"mountpoint": os.fsencode(root)}
        for name in (*views.SYSTEM, "dev", "proc", "sys", "run"):
            host = Path("/", name)
            if host.is_symlink():
                (root / name).symlink_to(host.readlink())
            elif host.is_dir():
                (root / name).mkdir()

    def call(self, op: str, /, **params: Any) -> Mapping[str, Any]:
        if op == "stat":
            found = os.stat(os.fsencode(self.root) + params["path"])
            return {"attr": {"ino": found.st_ino, "mode": found.st_mode}}
        assert op == "stub"
        for path in params["paths"]:
            os.makedirs(os.fsencode(self.root) + path, exist_ok=True)
        return {}


class Attached(Daemon):
    """The same for a directory that is laid out already."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.hello = {"mountpoint": os.fsencode(root)}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids(run: Callable[..., ExecuteResult], directory: Path, *names: str) -> list[int]:
    """The pids that a command wrote to the files ``names``, as this process sees them; 0 for one that has ended.

    A confined command counts in a namespace of its own, which it is asked for.
    """
    written = [int((directory / name).read_text()) for name in names]
    theirs = run("readlink /proc/self/ns/pid").output.strip()
    if theirs == os.readlink("/proc/self/ns/pid"):
        return written
    return [_outside(theirs, pid) for pid in written]


def _outside(namespace: str, inner: int) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/pid") != namespace:
                continue
            lines = (process / "status").read_text().splitlines()
        except OSError:
            continue
        numbers = next(line.split() for line in lines if line.startswith("NSpid:"))
        if int(numbers[-1]) == inner:
            return int(process.name)
    return 0
