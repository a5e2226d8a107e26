"""Limits of a confined command: cgroup v2 where the caller may make groups, rlimits for the rest.

Owns what is limited by what, and the groups. Must not know namespaces or bubblewrap: it is given the pid of a process
that has not begun its program yet.

A group counts all commands of one tree and profile together; without one, ``memory`` is each process's address space,
and ``processes`` counts those of the caller's uid in the commands' own user namespace. The kernel counts neither for
root, so there ``processes`` takes a group.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from errno import EOPNOTSUPP
from typing import Any

CGROUPS = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit. ``memory`` in bytes, ``cpu_seconds`` and ``open_files`` of each process."""

    memory: int | None = None
    processes: int | None = None
    cpu_seconds: int | None = None
    open_files: int | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Limits:
        """The limits that ``given`` names. ValueError for an unknown one, or one that is not a number above 0."""
        known = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"there is no limit {name!r} (there are {', '.join(sorted(known))})")
            if type(value) is not int or value < 1:
                raise ValueError(f"the limit {name} must be a number of at least 1, not {value!r}")
        return cls(**given)


class LimitsUnavailable(OSError):
    """A limit asked for cannot be kept here; ``strerror`` says which and why."""


def group(limits: Limits, key: str, root: str = CGROUPS) -> str | None:
    """The cgroup for ``limits`` called ``key``, made if it is not there; None when no limit is one of groups, or the
    caller may not make groups. ``root``: where cgroup v2 is mounted."""
    if limits.memory is None and limits.processes is None:
        return None
    parent = parent_group(root)
    if parent is None:
        return None
    path = os.path.join(parent, f"vfsd-execute-{os.geteuid()}-{key}")
    try:
        _lay(path, limits)
    except OSError:
        return None
    return path


def _lay(path: str, limits: Limits) -> None:
    os.makedirs(path, exist_ok=True)
    _set(path, "memory.max", limits.memory)
    _set(path, "pids.max", limits.processes)
    if limits.memory is not None:
        with contextlib.suppress(OSError):  # no swap in this kernel
            _set(path, "memory.swap.max", 0)


def _set(path: str, name: str, value: int | None) -> None:
    with open(os.path.join(path, name), "w") as file:
        file.write("max" if value is None else str(value))


def parent_group(root: str = CGROUPS, own: str = "/proc/self/cgroup") -> str | None:
    """The nearest group above this process in which it may make groups for memory and processes, and move to them."""
    try:
        with open(own) as lines:
            path = next((line[3:].strip() for line in lines if line.startswith("0::")), None)
    except OSError:
        return None
    while path is not None:
        place = os.path.normpath(f"{root}/{path.lstrip('/')}")
        if os.access(place, os.W_OK) and os.access(f"{place}/cgroup.procs", os.W_OK) and _has_controllers(place):
            return place
        path = None if path in ("", "/") else os.path.dirname(path)
    return None


def _has_controllers(place: str) -> bool:
    """Whether groups below ``place`` have both controllers; switches them on where that is allowed."""
    try:
        with open(f"{place}/cgroup.subtree_control") as file:
            missing = {"memory", "pids"} - set(file.read().split())
        if missing:
            with open(f"{place}/cgroup.subtree_control", "w") as file:
                file.write(" ".join(f"+{name}" for name in sorted(missing)))
    except OSError:  # it is not there, or holds processes itself (cgroups(7): no internal processes)
        return False
    return True


def check(limits: Limits, path: str | None) -> None:
    """LimitsUnavailable when ``limits`` cannot all be kept with the group ``path``, or with none."""
    if limits.processes is not None and path is None and os.getuid() == 0:
        raise LimitsUnavailable(
            EOPNOTSUPP,
            "a limit of processes for root takes a cgroup (v2, delegated), which cannot be made here: "
            "run as an ordinary user, or leave that limit out",
        )


def apply(limits: Limits, pid: int, path: str | None) -> None:
    """Put process ``pid``, and so all it will start, under ``limits``. Raises OSError."""
    if path is not None:
        try:
            _set(path, "cgroup.procs", pid)
        except FileNotFoundError:  # the last of those who were in it has ended since
            _lay(path, limits)
            _set(path, "cgroup.procs", pid)
    wanted = {resource.RLIMIT_CPU: limits.cpu_seconds, resource.RLIMIT_NOFILE: limits.open_files}
    if path is None:
        wanted |= {resource.RLIMIT_AS: limits.memory, resource.RLIMIT_NPROC: limits.processes}
    for number, value in wanted.items():
        if value is not None:
            # SIGXCPU, which says why, comes before SIGKILL, which doesn't.
            last = value + (number == resource.RLIMIT_CPU)
            hard = resource.prlimit(pid, number)[1]
            most = last if hard == resource.RLIM_INFINITY else min(last, hard)
            resource.prlimit(pid, number, (min(value, most), most))


class Watch:
    """What ``limits``, with the group ``path`` or with none, do to commands from now on."""

    def __init__(self, limits: Limits, path: str | None) -> None:
        self._limits, self._path = limits, path
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        """(processes killed for want of memory, processes that were refused) ever."""
        if self._path is None:
            return 0, 0
        return _count(self._path, "memory.events", "oom_kill"), _count(self._path, "pids.events", "max")

    def notices(self, exit_code: int) -> list[str]:
        """A sentence for each limit that was reached, as far as it can be told; ``exit_code`` is the command's."""
        limits, said = self._limits, []
        killed, refused = (now - before for now, before in zip(self._counts(), self._before, strict=True))
        if limits.memory is not None and killed > 0:
            said.append(f"The limit of {limits.memory} bytes of memory was reached (processes killed: {killed})")
        if limits.processes is not None and refused > 0:
            said.append(f"The limit of {limits.processes} processes was reached (more were refused: {refused})")
        if limits.cpu_seconds is not None and exit_code == 128 + signal.SIGXCPU:
            said.append(f"Ended by the limit of {limits.cpu_seconds} seconds of processor time")
        return said


def _count(path: str, name: str, key: str) -> int:
    """One number of a group's file of "KEY NUMBER" lines; 0 when it is not there."""
    try:
        with open(os.path.join(path, name)) as file:
            return int(dict(line.split() for line in file).get(key, 0))
    except OSError:
        return 0
