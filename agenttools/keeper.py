"""The namespaces that confined commands of one tree share: one process tree, so that ``kill $(cat pid)`` in one call
reaches what an earlier one left in the background, and nothing outside it can be named at all.

Owns the keeper: a shell that is pid 1 of the namespace, shows nothing but the system's programs in its own ``/``, and
reaps what commands leave behind. A command may trace it, as they are one user's: so it is confined as commands are, by
the same filter, limits and network. Every client that uses the namespaces holds a FIFO open; the keeper ends when none
does and no other process is left. Clients find one another's keeper by the FIFO in the user's runtime directory,
under a lock; where there is no such directory each process has a keeper of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from errno import EOPNOTSUPP
from typing import NamedTuple

from agenttools import launcher, wire

_KEEP = """
echo; exec >/dev/null 2>&1
while :; do
    cat || { sleep 1; continue; }
    set -- /proc/[0-9]*
    test $# -gt 1 || exit
    timeout 5 head -c 1 /proc/self/fd/0
done
"""
"""cat ends well when no client holds the FIFO, and ill when a command has killed it; head waits for the next client,
since it opens the FIFO anew. A shell that waits for a program reaps every other child it has, too."""

_REMOVE_GROUP = '"$@"; exec rmdir -- "$0"'
"""With the end of the keeper, pid 1 of the namespace, all in its group has ended; who began it may be long gone."""

_JOIN_SECONDS = 2.0
"""How long a keeper may take to read what a new client wrote."""

_GET_USER_NAMESPACE = 0xB701
"""linux/nsfs.h NS_GET_USERNS: the user namespace that owns another namespace."""

_PIDS_FROM = 1 << 20
"""Where the namespace's pids begin at the earliest; a host counts from 1 and, at the kernel's default, to 32768."""

_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")


class KeeperFailed(OSError):
    """The namespaces cannot be made here; ``strerror`` is what bubblewrap said."""


class Spaces:
    """The shared namespaces, held for as long as this object is. ``fds`` are for bubblewrap, with ``options``."""

    def __init__(self, hold: int, pid: int, process: subprocess.Popen[bytes] | None) -> None:
        self._hold, self._pid, self._process = hold, pid, process
        self.fds: list[int] = []
        self.options: list[str] = []
        try:
            pids = self._open(f"/proc/{pid}/ns/pid")
            if not privileged():
                outer = fcntl.ioctl(pids, _GET_USER_NAMESPACE)
                self.fds.append(outer)
                self.options += ["--userns", str(outer)]
                inner = self._open(f"/proc/{pid}/ns/user")
                if os.stat(inner).st_ino != os.stat(outer).st_ino:
                    # bubblewrap needs uid 0 for what it mounts, and the command is to have the caller's
                    self.options += ["--userns2", str(inner)]
            self.options += ["--pidns", str(pids)]
        except BaseException:
            self.close()
            raise

    def _open(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.fds.append(fd)
        return fd

    def alive(self) -> bool:
        """Whether the keeper still reads."""
        poller = select.poll()
        poller.register(self._hold, 0)
        return not poller.poll(0)  # POLLERR, which is not asked for, when nobody does

    def close(self) -> None:
        """Let go; the keeper ends when others do not hold it either."""
        if self.alive():
            go_on(self._pid)
        for fd in (self._hold, *self.fds):
            os.close(fd)
        self._hold, self.fds = -1, []
        # It is not waited for: commands in the background may need it for long.
        if self._process is not None and self._process.poll() is None:
            self._process.returncode = 0


_lock = threading.Lock()
_held: dict[str, Spaces] = {}


def privileged() -> bool:
    """Whether namespaces need no user namespace here: root, with CAP_SYS_ADMIN (21), as bubblewrap takes root to be."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/status") as status:
        return any(line.startswith("CapEff:") and int(line.split()[1], 16) >> 21 & 1 for line in status)


class Terms(NamedTuple):
    """What a keeper is confined by: more ``options`` of bubblewrap, a filter, and what ``limit`` does to its pid;
    ``group`` is the cgroup that this puts it into, to be removed when it has ended."""

    bwrap: str
    options: Sequence[str]
    seccomp: bytes
    limit: Callable[[int], None]
    group: str | None


def join(key: str, terms: Terms) -> Spaces:
    """The namespaces called ``key``, made if there are none. Raises KeeperFailed."""
    with _lock:
        held = _held.get(key)
        if held is not None and held.alive():
            return held
        if held is not None:
            del _held[key]
            held.close()
        _held[key] = _join(key, terms)
        return _held[key]


def _join(key: str, terms: Terms) -> Spaces:
    try:
        directory = os.path.join(wire.make_runtime_dir(), "execute")
        os.makedirs(directory, 0o700, exist_ok=True)
    except OSError:
        read, write = os.pipe2(os.O_CLOEXEC)
        return _start(terms, read, write)[0]
    place = os.path.join(directory, key)
    with _locked(f"{place}.lock"):
        with contextlib.suppress(OSError, ValueError):  # ENXIO: no keeper reads
            write = os.open(f"{place}.fifo", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(f"{place}.pid") as file:
                pid = int(file.read())
            if _stays(write, pid):
                return Spaces(write, pid, None)
            os.close(write)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(f"{place}.fifo", 0o600)
        read = os.open(f"{place}.fifo", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        write = os.open(f"{place}.fifo", os.O_WRONLY | os.O_CLOEXEC)
        os.set_blocking(read, True)
        spaces, pid = _start(terms, read, write)
        with open(f"{place}.pid", "w") as file:
            file.write(str(pid))
        return spaces


def _count_high(pid: int) -> None:
    """Have the namespace number its processes from where the host's do not come.

    A pid that a command leaves in a file then never names one of the host's processes. pid_max is a namespace's own
    since Linux 6.14; where it can't be set the numbers stay small.
    """
    start = _PIDS_FROM + secrets.randbelow(_PIDS_FROM)
    script = f"echo {1 << 22} >/proc/sys/kernel/pid_max; echo {start} >/proc/sys/kernel/ns_last_pid"
    enter = ["nsenter", f"--pid=/proc/{pid}/ns/pid"]
    if not privileged():
        enter += [f"--user=/proc/{pid}/ns/user", "--preserve-credentials"]
    with contextlib.suppress(OSError):
        subprocess.run([*enter, "sh", "-c", script], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def go_on(pid: int) -> None:
    """Start the keeper again, which a command that traced it may have stopped."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGCONT)


def _stays(write: int, pid: int) -> bool:
    """Whether the keeper reads what is written to it now: then it knows of us. One about to end reads no more."""
    poller = select.poll()
    poller.register(write, 0)
    if poller.poll(0):
        return False
    go_on(pid)
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(write, b"\n")
    deadline = time.monotonic() + _JOIN_SECONDS
    while not poller.poll(0) and time.monotonic() < deadline:
        if not int.from_bytes(fcntl.ioctl(write, termios.FIONREAD, bytes(4)), sys.byteorder):
            return True
        time.sleep(0.0005)
    return False


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _start(terms: Terms, read: int, write: int) -> tuple[Spaces, int]:
    """A new keeper, which reads ``read``; takes both descriptors over."""
    status, told = os.pipe2(os.O_CLOEXEC)
    rules = memory_file(terms.seccomp)
    argv = [terms.bwrap, "--json-status-fd", str(told), "--seccomp", str(rules), "--unshare-pid", "--as-pid-1"]
    argv += [*terms.options, *_view(), "/bin/sh", "-c", _KEEP]
    if terms.group is not None:
        argv = ["/bin/sh", "-c", _REMOVE_GROUP, terms.group, *argv]
    try:
        process = launcher.start(lambda: _popen(argv, read, told, rules))
    except BaseException:
        os.close(write)
        os.close(status)
        raise
    finally:
        os.close(read)
        os.close(told)
        os.close(rules)
    assert process.stdout is not None
    with process.stdout as stdout, open(status) as lines:
        said = stdout.readline()
        pid = next((json.loads(line).get("child-pid") for line in lines if "child-pid" in line), None)
    if said != b"\n" or pid is None:
        os.close(write)
        process.wait()
        raise KeeperFailed(EOPNOTSUPP, said.decode(errors="replace").strip() or "bubblewrap failed")
    spaces = Spaces(write, pid, process)
    try:
        terms.limit(pid)
    except BaseException:
        spaces.close()
        raise
    _count_high(pid)
    return spaces, pid


def memory_file(content: bytes) -> int:
    """A descriptor to read ``content`` from."""
    fd = os.memfd_create("vfsd")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _popen(argv: Sequence[str], read: int, *fds: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        stdin=read,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PATH": "/usr/bin:/bin"},
        cwd="/",
        pass_fds=fds,
        start_new_session=True,
    )


def _view() -> list[str]:
    """What the keeper sees, which its commands can see too by /proc/1/root: programs, and all of it read-only."""
    argv = ["--cap-drop", "ALL"] if privileged() else ["--unshare-user"]
    for name in _PROGRAMS:
        if os.path.islink(f"/{name}"):
            argv += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            argv += ["--ro-bind", f"/{name}", f"/{name}"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    return [*argv, *(word for path in ("/proc", "/dev", "/") for word in ("--remount-ro", path))]


@atexit.register
def _let_go() -> None:
    for held in _held.values():
        held.close()
    _held.clear()


def _after_fork() -> None:
    """A child made by fork shares its parent's hold, which counts for as long as either has it; it makes its own."""
    global _lock
    _lock = threading.Lock()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
