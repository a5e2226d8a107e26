"""Mountpoints as the kernel sees them: is one fit to mount on, and who keeps one busy.

Owns the reading of ``/proc`` mount tables. Must not know volumes, doors or trio. A dead or
hung mount must not hang us: nothing here touches a path on a vfsd mount but through ``answers``, which is bounded.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from vfsd.config import state_home
from vfsd.doors.engines import unmount

FSTYPE = "vfsd"
"""How our mounts are told apart in the mount table: its file system type or source contains this word."""

PROBE_SECONDS = 5.0


class MountpointError(Exception):
    """One sentence that says why this place can't be mounted on or unmounted."""


class Mount(NamedTuple):
    """One line of /proc/PID/mountinfo (proc_pid_mountinfo(5)); ``dev`` is "major:minor".

    ``id`` is no other mount's in any namespace.
    """

    dev: str
    path: str
    fstype: str
    source: str
    id: str

    @property
    def ours(self) -> bool:
        return self.fstype.startswith("fuse") and FSTYPE in f"{self.fstype} {self.source}"


class Holder(NamedTuple):
    """A process that keeps a mount busy, and by what: cwd, root, an open file, a mapping or a mount namespace."""

    pid: int
    comm: str
    what: str


def mounts(pid: str = "self") -> list[Mount]:
    """The mount table of process ``pid``, lowest mount first; empty when that process is gone or not ours to see."""
    try:
        text = Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return []
    table = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, (fstype, source) = left.split(" "), right.split(" ")[:2]
        table.append(Mount(fields[2], _unescape(fields[4]), fstype, _unescape(source), fields[0]))
    return table


def _unescape(text: str) -> str:
    """The kernel writes blank, tab, newline and backslash as three octal digits (seq_path in fs/seq_file.c)."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def resolve(path: str | Path) -> str:
    """The absolute real path of ``path``, without a look at its last component when something is mounted there."""
    full = os.path.abspath(path)
    plain = os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full))
    return plain if mount_at(plain) else os.path.realpath(full)


def mount_at(path: str) -> Mount | None:
    """The topmost mount whose mountpoint is exactly ``path``, or None."""
    found = [mount for mount in mounts() if mount.path == path]
    return found[-1] if found else None


def mount_holding(path: str) -> Mount | None:
    """The mount that real path ``path`` lies in, or None in an empty mount table."""
    best: Mount | None = None
    for mount in mounts():
        inside = path == mount.path or path.startswith(mount.path.rstrip("/") + "/")
        if inside and (best is None or len(mount.path) >= len(best.path)):
            best = mount
    return best


def answers(path: str, seconds: float = PROBE_SECONDS) -> OSError | None:
    """None when the file system at ``path`` answers within ``seconds``, else its error (ETIMEDOUT when it hangs)."""
    result: list[OSError | None] = []

    def probe() -> None:
        try:
            # Not stat(2): the kernel answers that from its cache for a mount that is long dead.
            os.statvfs(path)
            result.append(None)
        except OSError as exc:
            result.append(exc)

    # A thread, because a call on a mount whose daemon hangs can't be interrupted from within.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else OSError(errno.ETIMEDOUT, f"no answer in {seconds:.0f} s", path)


def prepare(path: str) -> list[str]:
    """Make sure that real path ``path`` can be mounted on; returns what is to be said of it, raises MountpointError.

    A mount of ours left dead by a crash stays until ``clear``: a program that goes on meanwhile must get an error
    (ENOTCONN), and not write into the bare directory, where the new mount would hide it.
    """
    if _is_dead(path):
        return [f"{path} was left dead by a crash (Transport endpoint is not connected): replaced it"]
    _check(path)
    return []


def clear(path: str) -> None:
    """Right before the mount: detach what a crash left dead on ``path``. Raises MountpointError when it isn't fit."""
    dead = False
    while _is_dead(path):
        unmount(path, lazy=True)
        dead = True
    if dead:
        _check(path)


def _is_dead(path: str) -> bool:
    """True for a mount whose daemon is gone, False for a bare path. Raises MountpointError for a mount that lives."""
    mount = mount_at(path)
    if mount is None or not mount.fstype.startswith("fuse"):
        return False
    problem = answers(path)
    if problem is None or problem.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
        what = "another vfsd" if mount.ours else f"{mount.source} ({mount.fstype})"
        state = "" if problem is None else f", which does not answer ({problem.strerror})"
        raise MountpointError(f"{path} is already mounted by {what}{state}: unmount it with fusermount3 -u {path}")
    return True


def _check(path: str) -> None:
    try:
        info = os.stat(path)
        if not stat.S_ISDIR(info.st_mode):
            raise MountpointError(f"mountpoint {path} is not a directory")
        with os.scandir(path) as entries:
            if next(entries, None) is not None:
                raise MountpointError(f"mountpoint {path} is not empty: choose an empty directory")
    except FileNotFoundError:
        raise MountpointError(f"mountpoint {path} does not exist: mkdir -p {path}") from None
    except OSError as exc:
        raise MountpointError(f"mountpoint {path}: {exc.strerror}") from None
    if not os.access(path, os.W_OK):
        # fusermount3 refuses a mountpoint that its caller can't write to.
        raise MountpointError(f"mountpoint {path} is not writable for you: choose another directory")


class Placed(Protocol):
    """A route as far as it concerns the host: ``location`` is the directory its files are in, None without one, and
    ``uri`` another place of theirs."""

    @property
    def prefix(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def location(self) -> Path | None: ...
    @property
    def uri(self) -> str: ...


def check_places(routes: Iterable[Placed], point: str) -> None:
    """Refuse locations that are missing, or on a vfsd mount: the daemon of ``point`` would wait for itself."""
    for spec in routes:
        if spec.uri.startswith("sqlite:"):
            home = Path(spec.uri.removeprefix("sqlite:")).parent
            _check_parent(spec, spec.uri, home, made=home == state_home())
        if spec.location is None:
            continue
        real, what = os.path.realpath(spec.location), f"route {spec.prefix}: location {spec.location}"
        if real == point or real.startswith(point + "/"):
            raise MountpointError(f"{what} is inside the mountpoint {point}")
        mount = mount_holding(real)
        if mount is not None and mount.ours:
            raise MountpointError(f"{what} is inside another vfsd mount, {mount.path}")
        if spec.kind == "local":
            if not os.path.lexists(real):
                raise MountpointError(f"{what} does not exist: mkdir -p {spec.location}")
            if not os.path.isdir(real):
                raise MountpointError(f"{what} is not a directory")
            if not os.access(real, os.R_OK | os.X_OK):
                raise MountpointError(f"{what} is not readable for you: choose another directory")
            if point.startswith(real.rstrip("/") + "/"):
                where = f"is inside its location {spec.location}"
                raise MountpointError(f"route {spec.prefix}: the mountpoint {point} {where}")
        else:
            _check_parent(spec, spec.location, spec.location.parent, made=spec.location.is_relative_to(state_home()))


def _check_parent(spec: Placed, location: str | Path, parent: Path, *, made: bool) -> None:
    """vfsd's own directories are made; any other that is missing is misspelt, or not mounted."""
    if not made and not parent.is_dir():
        raise MountpointError(
            f"route {spec.prefix}: location {location}: there is no directory {parent}: mkdir -p {parent}"
        )


def holders(path: str, dev: str | None = None) -> list[Holder]:
    """The other processes that use the mount at ``path``, with device ``dev`` also from mount namespaces of their own.

    Only those that /proc lets us see: as an ordinary user, one's own.
    """
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
    return [holder for pid in others if (holder := _holder(pid, path, dev))]


def _holder(pid: str, path: str, dev: str | None) -> Holder | None:
    what = next((what for what, target in _uses(pid) if target == path or target.startswith(path + "/")), None)
    if what is None and dev is not None and namespace(pid) not in (namespace("self"), None):
        what = next(("mount namespace" for mount in mounts(pid) if mount.dev == dev), None)
    if what is None:
        return None
    try:
        comm = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return None
    return Holder(int(pid), comm, what)


def namespace(pid: str) -> str | None:
    """What tells the mount namespace of a process from others, None where that can't be seen."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return None


def _uses(pid: str) -> Iterator[tuple[str, str]]:
    """(what, path) for everything process ``pid`` holds; the links are read, never followed."""
    base = f"/proc/{pid}"
    for what in ("cwd", "root"):
        try:
            yield what, os.readlink(f"{base}/{what}")
        except OSError:
            continue
    try:
        fds = os.listdir(f"{base}/fd")
    except OSError:
        fds = []
    for fd in fds:
        try:
            yield "open file", os.readlink(f"{base}/fd/{fd}")
        except OSError:
            continue
    try:
        with open(f"{base}/maps", errors="surrogateescape") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6:
                    yield "mapping", fields[5]
    except OSError:
        return
