"""Find and end every process that one command started, wherever it has hidden itself.

Owns the walk over ``/proc``. Must not know what the command was, which view it ran in, or any daemon.
The caller's own process is never signalled. As a program, for which it imports nothing of this package, it ends the
commands given, whose client is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

WAIT_GONE = 2.0
"""Seconds to wait for killed processes to leave; one stuck in the kernel (state D) must not hold the caller."""

Namespace = tuple[int, int]
"""Device and inode of ``/proc/PID/ns/mnt``: two processes are in one mount namespace when these are equal."""


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int


def mount_namespace(pid: int) -> Namespace | None:
    """The mount namespace of ``pid``, or None when it has ended, may not be looked at, or shares the caller's own."""
    try:
        theirs = os.stat(f"/proc/{pid}/ns/mnt")
        ours = os.stat("/proc/self/ns/mnt")
    except OSError:
        return None
    found = (theirs.st_dev, theirs.st_ino)
    return None if found == (ours.st_dev, ours.st_ino) else found


def end_all(roots: Collection[int], marker: str, namespace: Namespace | None) -> set[int]:
    """Stop, then kill, all that a command started; return the pids still there after WAIT_GONE seconds.

    ``roots`` are the pids the caller knows (and their sessions); ``marker`` a string that only this command's
    environment holds; ``namespace`` a mount namespace only its processes are in. A process belongs when it is a
    root, descends from one that belongs, is in a root's session, or carries the marker or the namespace.

    All are stopped before any is killed: a stopped process can neither fork nor, by dying, hand its children to
    init, where the line of descent would be lost.
    """
    mark = marker.encode()
    found: set[int] = set()
    while fresh := set(_belonging(found.union(roots), roots, mark, namespace)) - found:
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
        found |= fresh
    for pid in found:
        _signal(pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_GONE
    while (left := {process.pid for process in _processes() if process.pid in found}) and time.monotonic() < deadline:
        time.sleep(0.002)
    return left


def _belonging(
    known: Collection[int], sessions: Collection[int], mark: bytes, namespace: Namespace | None
) -> Iterator[int]:
    me = os.getpid()
    for pid, parent, session in _processes():
        if pid == me or pid == 1:
            continue
        if pid in known or parent in known or session in sessions or _carries(pid, mark, namespace):
            yield pid


def _carries(pid: int, mark: bytes, namespace: Namespace | None) -> bool:
    if namespace is not None and mount_namespace(pid) == namespace:
        return True
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return mark in environ.read()
    except OSError:  # ended meanwhile, or another user's
        return False


def _processes() -> Iterator[_Process]:
    """Every process that can still do something: zombies are left out, they only wait for their parent."""
    for name in os.listdir("/proc"):
        fields = _stat(name) if name.isdigit() else []
        if fields and fields[0] not in b"ZX":
            yield _Process(int(name), int(fields[1]), int(fields[3]))


def _stat(pid: int | str) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` from the third, the state, on; none when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # proc(5): the name in parentheses may hold anything, so fields are counted from the last one
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return []


def start_time(pid: int) -> int:
    """When process ``pid`` was started, in clock ticks since boot; with the pid it names one process. 0: none such."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # it has ended, or is another user's now (a setuid program)
        os.kill(pid, number)


def _main(commands: Sequence[str]) -> None:
    """End ``commands``, each MARKER,PID,START,DEVICE,INODE: its root, or its mount namespace, or neither is known."""
    for command in commands:
        marker, pid, start, device, inode = command.split(",")
        roots = [int(pid)] if pid and start_time(int(pid)) == int(start) else []
        end_all(roots, marker, (int(device), int(inode)) if inode else None)


if __name__ == "__main__":
    _main(sys.argv[1:])
