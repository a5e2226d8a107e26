"""What a confined command is kept from: the profiles, as options of bubblewrap.

Owns the profiles ``tree`` and ``offline`` and what each leaves out; ``docs/security.md`` says what that is worth. The
namespaces are the business of ``keeper``, system calls of ``seccomp``, sockets of ``launcher``, numbers of ``limits``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from agenttools import keeper, limits, seccomp
from agenttools.limits import Limits

Profile = Literal["open", "tree", "offline"]
"""``open`` confines nothing. ``tree``: only the tree can be changed, and of the caller's machine it is as good as all
there is. ``offline``: the same, with no network."""

PROFILES: tuple[str, ...] = get_args(Profile)
DEFAULT: Profile = "tree"

ROOT_KEEPS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""Capabilities root's commands keep: to own, change and give away files of the tree, and to be another user in it.
Not MKNOD, SYS_ADMIN, SYS_PTRACE, NET_*, DAC_READ_SEARCH, nor any other that means the machine."""

SHARED_MEMORY = 256 << 20
"""Bytes of /dev/shm."""

RUN = 16 << 20
"""Bytes of /run."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """How one tree's commands are confined. ``spaces``: the namespaces they share. ``group``: their cgroup."""

    profile: Profile
    limits: Limits
    spaces: keeper.Spaces
    group: str | None


def choose(profile: str | None, settings: Mapping[str, Any]) -> Profile:
    """The profile asked for, else the daemon's, else the default. ValueError for one there is not."""
    chosen = profile if profile is not None else settings.get("profile", DEFAULT)
    for known in get_args(Profile):
        if chosen == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"profile must be {', '.join(PROFILES[:-1])} or {PROFILES[-1]}, not {chosen}")


def prepare(bwrap: str, profile: Profile, wanted: Limits, tree: str) -> Confinement:
    """The confinement of the commands of ``tree``, a string that names it.

    Raises OSError with a sentence when it cannot be had: keeper.KeeperFailed, limits.LimitsUnavailable.
    """
    if not seccomp.supported():
        raise keeper.KeeperFailed(95, "there is no filter of system calls for this kind of machine")
    # Commands with other rights must not share a process tree, where one could be made to act for the other.
    # Nor may another container's, which may have the same directory to find it in: a pid there is another process here.
    here = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "mnt", "user")]
    key = hashlib.sha256(f"{bwrap}\0{tree}\0{wanted!r}\0{here}".encode(errors="surrogateescape")).hexdigest()[:16]
    key = f"{profile}-{key}"
    group = limits.group(wanted, key)
    limits.check(wanted, group)
    options = ["--unshare-ipc", *(("--unshare-net",) if profile == "offline" else ())]
    terms = keeper.Terms(bwrap, options, seccomp.program(), lambda pid: limits.apply(wanted, pid, group), group)
    return Confinement(profile, wanted, keeper.join(key, terms), group)


def namespaces(confinement: Confinement) -> list[str]:
    """Options that come before any mount."""
    argv = [*confinement.spaces.options, "--unshare-ipc"]
    if confinement.profile == "offline":
        argv.append("--unshare-net")
    if keeper.privileged():
        argv += ["--cap-drop", "ALL"]
        argv += [word for name in ROOT_KEEPS for word in ("--cap-add", f"CAP_{name}")]
    return argv


def kernel_files(present: Sequence[str]) -> list[str]:
    """/dev, /proc, /sys and /run, those of them that are ``present`` in the tree, each of the command's own."""
    argv: list[str] = []
    if "/dev" in present:
        argv += ["--dev", "/dev", "--size", str(SHARED_MEMORY), "--perms", "1777", "--tmpfs", "/dev/shm"]
        argv += ["--remount-ro", "/dev"]
    if "/proc" in present:
        argv += ["--proc", "/proc"]
        if os.geteuid() == 0:  # root needs no capability to write to most of /proc/sys, nor to /proc/sysrq-trigger
            argv += ["--remount-ro", "/proc"]
    if "/sys" in present:
        argv += ["--size", "65536", "--tmpfs", "/sys"]
        if os.path.isdir("/sys/devices/system"):  # processors and memory, which many programs count
            argv += ["--ro-bind", "/sys/devices/system", "/sys/devices/system"]
        argv += ["--remount-ro", "/sys"]
    if "/run" in present:
        argv += ["--size", str(RUN), "--tmpfs", "/run"]
    return argv


def masks(system: Sequence[str], bound: Sequence[str], private: Sequence[str], mountpoint: str) -> list[str]:
    """Options that hide the ``private`` paths and what only root may read, in the host's top-level directories
    ``system`` and in the toolchain's, ``bound``; also where the tree shows the former again, below ``mountpoint`` (""
    when the command does not see it)."""
    hidden = [(path, is_directory) for path, is_directory in _secrets() if os.geteuid() == 0]
    for path in sorted({path for name in private if name for path in (name, os.path.realpath(name))}):
        if path != "/" and _top(path, (*system, *bound)) and os.path.exists(path):
            hidden.append((path, os.path.isdir(path)))
    argv = [word for path, is_directory in hidden for word in _mask(path, is_directory)]
    for top in sorted({top for path, _ in hidden if mountpoint and (top := _top(path, system))}):
        argv += _mask(mountpoint + top, True)
    return argv


def _top(path: str, directories: Sequence[str]) -> str | None:
    return next((top for top in directories if path == top or path.startswith(f"{top}/")), None)


def _mask(path: str, is_directory: bool) -> list[str]:
    # A device on a mount without devices: opening it is refused.
    return ["--tmpfs", path, "--remount-ro", path] if is_directory else ["--ro-bind", "/dev/null", path]


@functools.lru_cache(maxsize=1)
def _secrets() -> tuple[tuple[str, bool], ...]:
    """What in /etc not everybody may read, and whether it is a directory: password hashes, keys of the host."""
    return tuple(_unreadable("/etc"))


def _unreadable(directory: str) -> Iterator[tuple[str, bool]]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_symlink():
                continue
            info = entry.stat(follow_symlinks=False)
            needed = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(info.st_mode) else stat.S_IROTH
            if info.st_mode & needed != needed:
                if stat.S_ISDIR(info.st_mode):
                    yield entry.path, True
                elif stat.S_ISREG(info.st_mode) and info.st_size:
                    yield entry.path, False
            elif stat.S_ISDIR(info.st_mode):
                yield from _unreadable(entry.path)


class Gate:
    """What one start of bubblewrap needs besides its view: the filter, and a stop until the limits are in force.

    ``options`` and ``fds`` are for bubblewrap. ``open`` lets the command begin; ``close`` gives everything back.
    """

    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement
        self._write = -1
        self._own: list[int] = []
        try:
            self._own.append(keeper.memory_file(seccomp.program()))
            self.options = ["--seccomp", str(self._own[0])]
            if confinement.limits:
                read, self._write = os.pipe2(os.O_CLOEXEC)
                self._own.append(read)
                self.options += ["--block-fd", str(read)]
        except BaseException:
            self.close()
            raise
        self.fds = [*confinement.spaces.fds, *self._own]

    @property
    def waits(self) -> bool:
        """Whether the command waits for ``open``."""
        return self._write >= 0

    def open(self, pid: int) -> None:
        """Put the limits on ``pid`` and let it go on. Raises OSError; it then never begins."""
        limits.apply(self._confinement.limits, pid, self._confinement.group)
        os.write(self._write, b"\n")

    def close(self) -> None:
        """Give the descriptors back; a command that still waits must have been ended before, for it would begin."""
        for fd in (*self._own, *([self._write] if self._write >= 0 else [])):
            os.close(fd)
        self._own, self._write = [], -1
