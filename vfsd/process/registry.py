"""The running mounts of this user: one JSON file, one lock and one socket each in the runtime directory.

Owns those files and the locks by which daemons exclude one another. A held lock is the only proof of life: a pid can
be reused, a lock can't outlive its process. Open file description locks (fcntl(2)), because asking who holds one
does not take it, so a look never makes a daemon's start fail. Must not know volumes, engines or trio.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vfsd.doors.rpc import make_runtime_dir, runtime_dir


class Held(Exception):
    """The lock is another process's; ``pid`` is what that process wrote into it, 0 when unknown."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid


def hold(path: Path) -> int:
    """Take the lock file ``path`` for as long as the returned descriptor is open; Held when it is another's."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
    except (BlockingIOError, PermissionError):
        pid = _pid(fd)
        os.close(fd)
        raise Held(pid) from None
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def holder(path: Path) -> int | None:
    """The pid that holds the lock file ``path`` (0: unknown), or None when nobody does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
        return None if struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK else _pid(fd)
    finally:
        os.close(fd)


STOPPED_SECONDS = 1.0
"""How long a process must be seen stopped to be called so."""

_FLOCK = "hhqqi4x"
"""struct flock: l_type, l_whence, l_start, l_len, l_pid."""


def _flock(kind: int) -> bytes:
    """The whole file, for an OFD lock (l_pid must be 0)."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def _pid(fd: int) -> int:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else 0


def lock_path(name: str) -> Path:
    return Path(runtime_dir()) / f"{name}.lock"


def socket_path(name: str) -> Path:
    return Path(runtime_dir()) / f"{name}.sock"


def entry_path(name: str) -> Path:
    return Path(runtime_dir()) / f"{name}.json"


def claim(name: str) -> int:
    """``hold`` the lock of the mount ``name``. Held, or OSError with a sentence when the runtime directory is unfit."""
    with _named():
        make_runtime_dir()
        return hold(lock_path(name))


def record(entry: dict[str, Any]) -> None:
    """Write the entry of the mount ``entry["name"]``, whole or not at all. OSError with a sentence."""
    path = entry_path(entry["name"])
    fresh = path.with_suffix(".json.new")
    with _named():
        fresh.write_text(json.dumps(entry, indent=1) + "\n")
        fresh.replace(path)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """An error says which the runtime directory is, and what chooses it."""
    try:
        yield
    except OSError as exc:
        where = f"the directory of sockets {runtime_dir()} ($XDG_RUNTIME_DIR chooses it)"
        raise OSError(exc.errno or errno.EIO, f"{where} can't be used: {exc.strerror}") from None


def erase(name: str, *, passed: bool = False) -> None:
    """Remove what the mount ``name`` left in the runtime directory, but for its lock, which others may be opening.

    ``passed``: its socket is the service manager's, which goes on to listen.
    """
    for suffix in (".json",) if passed else (".json", ".sock"):
        with contextlib.suppress(FileNotFoundError):
            (Path(runtime_dir()) / f"{name}{suffix}").unlink()


def entries() -> list[dict[str, Any]]:
    """The recorded mounts by name, each with ``alive``; a file that is no entry of ours is passed over."""
    found = []
    for path in sorted(Path(runtime_dir()).glob("*.json")):
        try:
            entry = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(entry, dict) and entry.get("name") == path.stem and isinstance(entry.get("mountpoint"), str):
            found.append(entry | {"alive": holder(lock_path(path.stem)) is not None})
    return found


def is_daemon(pid: int, name: str) -> bool:
    """Whether process ``pid``, as we count, holds the lock of mount ``name``: a daemon in a container's pid namespace
    has recorded the number it has there, which here is some other process's."""
    lock = os.stat(lock_path(name))
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), lock):
                    return True
    return False


def _state(pid: int) -> str:
    """The state of process ``pid`` in a letter (proc(5)); empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def stopped(pid: int) -> bool:
    """Whether process ``pid`` does not run, by a signal (kill -STOP, ^Z) or a debugger, and stays so for a second."""
    deadline = time.monotonic() + STOPPED_SECONDS
    while _state(pid) in ("T", "t"):
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.05)  # a tracer stops it for moments
    return False


def killed(pid: int) -> bool:
    """Whether process ``pid`` was killed and can't end, for a thread waits in the kernel: a zombie with threads."""
    if _state(pid) != "Z":
        return False
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def wait_gone(name: str, seconds: float, pid: int = 0) -> bool:
    """True when the daemon of mount ``name`` has ended within ``seconds``. False at once when ``pid``, if given, is
    stopped."""
    deadline = time.monotonic() + seconds
    while holder(lock_path(name)) is not None:
        if time.monotonic() >= deadline or (pid and stopped(pid)):
            return False
        time.sleep(0.01)
    return True
