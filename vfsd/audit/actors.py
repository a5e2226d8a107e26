"""Who is behind a pid: its command line, and the execute and tool call that it belongs to.

Owns the look into ``/proc``. A process belongs to the execute whose marker is in its environment; else to that of its
mount namespace, of its session, or of its nearest ancestor that has one (a container's supervisor, say), for a program
may clear its environment. Must not know doors or records.

A process is looked at when its first request is answered, for then it waits for us and is still there; and again when
what is known of it is old, since it may have started another program. The command line of a process can only be read
under a lock that another thread of it may hold until we answer a request (munmap(2) of pages that are being written
back), and the loop must never wait for that. So the loop itself looks only at a process that has one thread and memory
of its own; all other looks are a worker thread's, and are waited for PATIENCE seconds at most.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

_K = TypeVar("_K")
_T = TypeVar("_T")

PATIENCE = 0.05
"""Seconds that a request may be held up by the look at who made it."""

FRESH_NS = 2_000_000
STALE_NS = 200_000_000
"""Nanoseconds for which the first look and later ones count: twice as long each time, for a process that has just been
forked will run another program soon, and one that has run for long hardly ever does."""

KNOWN_MAX = 1024
"""Processes, sessions and ancestors remembered, each."""

COMMAND_MAX = 256
"""Characters of a command line that are kept."""

_NS_GET_MNTNS_ID = 0x8008B705
"""ioctl(2) of a mount namespace: its number, which is never given out again (Linux 6.11); the inode's is, soon."""

_PF_FORKNOEXEC = 0x40
"""Flag of a process that has not started a program since its fork: its memory may be its parent's (vfork(2))."""

_KEPT_NS = 1_000_000_000
"""What was known of a pid counts for so long after it could not be looked at again: then it may be another process."""

_ANCESTOR_NS = 1_000_000_000
_DEPTH_MAX = 64
_ENVIRON_MAX = 1 << 18
_PIECE = 4096
"""The most that one read(2) of a process's memory under /proc gives."""

MARKER = b"VFSD_EXECUTE="
CALL = b"VFSD_CALL_ID="
"""What ``agenttools`` puts into the environment of each command it runs: the ids of the executes it is in, outermost
first, joined by ``:``; and the id of the tool call."""


class Mark(NamedTuple):
    """The execute that a process belongs to, and the tool call that it was made for (empty: none was given)."""

    execute: str
    call: str


class Actor(NamedTuple):
    """``pid`` is the process's, also where the kernel told of a thread; what is empty is unknown."""

    pid: int
    command: str = ""
    mark: Mark | None = None


class _Seen:
    """What is known of one pid, until when it counts, and for how long what is learnt next will."""

    __slots__ = ("actor", "good", "until")

    def __init__(self, actor: Actor, until: int, good: int) -> None:
        self.actor = actor
        self.until = until
        self.good = good


class Actors:
    """``clock`` gives nanoseconds; ``proc`` is where the process file system is."""

    def __init__(self, clock: Callable[[], int], proc: str = "/proc") -> None:
        self._clock = clock
        self._proc = proc
        self._seen: dict[int, _Seen] = {}
        self._sessions: dict[int, Mark] = {}
        self._namespaces: dict[int, Mark] = {}
        self._placed: dict[tuple[str, int], bool] = {}  # execute and session of it whose sign it is known to be or not
        self._ancestors: dict[int, tuple[Mark | None, int]] = {}
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._told: SimpleQueue[Actor | None] = SimpleQueue()
        self._late = 0
        self._thread = threading.Thread(target=self._work, name="vfsd-actors", daemon=True)
        self._thread.start()

    def of(self, pid: int, now: int) -> tuple[Actor, int]:
        """Who ``pid`` is, and until when (by the clock, which says ``now``) that need not be asked again."""
        seen = self._seen.get(pid)
        if seen is not None and now < seen.until:
            return seen.actor, seen.until
        if pid <= 0:  # the kernel itself, or a process of a pid namespace that we are not above of
            return Actor(pid), now + STALE_NS
        found = self._look(pid)
        now = self._clock()
        if seen is None or (found is None and now - seen.until > _KEPT_NS):
            seen = _Seen(found or Actor(pid), now + FRESH_NS, FRESH_NS)
            _put(self._seen, pid, seen)
        else:
            # Nothing found: it has ended, and this is the last that it did.
            seen.actor = found or seen.actor
            seen.good = min(seen.good * 2, STALE_NS)
            seen.until = now + seen.good
        return seen.actor, seen.until

    def _look(self, pid: int) -> Actor | None:
        try:
            fields = self._stat(pid)
            if fields[17] == b"1" and not int(fields[6]) & _PF_FORKNOEXEC:
                found = self._alone(pid, fields)
                if found is not None:
                    return found
        except (OSError, ValueError, IndexError):  # it has ended, or it is hidden from us
            return None
        return self._ask(pid)

    def _alone(self, pid: int, fields: list[bytes]) -> Actor | None:
        """Who a process with one thread is; None when others have to be looked at to tell."""
        parent, session = int(fields[1]), int(fields[3])
        mark = self._mark(pid)
        if mark is not None:
            if (mark.execute, session) not in self._placed:
                return None
        else:
            if self._namespaces:
                mark = self._namespaces.get(self._namespace(pid))
            mark = mark or self._sessions.get(session)
            if mark is None and parent > 1:
                known = self._ancestors.get(parent)
                if known is None or self._clock() >= known[1]:
                    return None
                mark = known[0]
        return Actor(pid, self._command(pid), mark)

    def _ask(self, pid: int) -> Actor | None:
        """Have the worker thread look."""
        while self._late:
            # The thread is, or was, held up by a look that nobody waits for any more.
            try:
                self._told.get_nowait()
            except Empty:
                return None
            self._late -= 1
        self._asked.put(pid)
        try:
            return self._told.get(timeout=PATIENCE)
        except Empty:
            self._late += 1
            return None

    def close(self) -> None:
        """End the thread, when it next can."""
        self._asked.put(None)

    # -- on the worker thread

    def _work(self) -> None:
        while (pid := self._asked.get()) is not None:
            try:
                actor = self._actor(pid)
            except (OSError, ValueError, IndexError):  # it has ended, or it is hidden from us
                self._told.put(None)
                continue
            self._told.put(actor)

    def _read(self, pid: int, name: str, size: int) -> bytes:
        fd = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, size)
        finally:
            os.close(fd)

    def _stat(self, pid: int) -> list[bytes]:
        """The fields of proc(5) ``stat`` from the third on; the second may hold anything, a parenthesis too."""
        return self._read(pid, "stat", 1024).rpartition(b")")[2].split()

    def _actor(self, pid: int) -> Actor:
        fields = self._stat(pid)
        parent, session, threads = int(fields[1]), int(fields[3]), int(fields[17])
        process = pid
        if threads > 1:
            for line in self._read(pid, "status", 4096).splitlines():
                if line.startswith(b"Tgid:"):
                    process = int(line[5:])
        mark = self._mark(pid)
        if mark is None:
            if self._namespaces:
                mark = self._namespaces.get(self._namespace(pid))
            mark = mark or self._sessions.get(session) or self._ancestor(parent, 0)
        else:
            if session not in self._sessions and self._leads(session, mark):
                _put(self._sessions, session, mark)
            namespace = self._namespace(pid)
            if namespace and namespace not in self._namespaces and self._made_for(parent, mark, namespace):
                _put(self._namespaces, namespace, mark)
            _put(self._placed, (mark.execute, session), True)
        return Actor(process, self._command(pid), mark)

    def _command(self, pid: int) -> str:
        """As typed, but on one line; what has no command line is in brackets, as ps(1) shows it."""
        words = self._read(pid, "cmdline", 4 * COMMAND_MAX).split(b"\0")
        command = " ".join(b" ".join(words).decode(errors="replace").split())
        if not command:
            command = f"[{self._read(pid, 'comm', 64).decode(errors='replace').strip()}]"
        return command if len(command) <= COMMAND_MAX else command[: COMMAND_MAX - 1] + "…"

    def _namespace(self, pid: int) -> int:
        """The number of its mount namespace, 0 when that can't be told."""
        try:
            fd = os.open(f"{self._proc}/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            return int(struct.unpack("=Q", fcntl.ioctl(fd, _NS_GET_MNTNS_ID, bytes(8)))[0])
        except OSError:
            return 0
        finally:
            os.close(fd)

    def _made_for(self, parent: int, mark: Mark, namespace: int) -> bool:
        """Whether a mount namespace is the execute's alone: that from which it was started is another."""
        for _ in range(_DEPTH_MAX):
            above = self._mark(parent)
            if above is None or above.execute != mark.execute:
                return self._namespace(parent) not in (0, namespace)
            parent = int(self._stat(parent)[1])
        return False

    def _leads(self, session: int, mark: Mark) -> bool:
        """Whether the whole session is of that execute; one run on a terminal is in the session of the terminal."""
        leader = self._mark(session) if session > 0 else None
        return leader is not None and leader.execute == mark.execute

    def _mark(self, pid: int) -> Mark | None:
        try:
            environ = self._read_all(pid)
        except OSError:  # another user's
            return None
        execute = call = ""
        for variable in environ.split(b"\0"):
            if variable.startswith(MARKER):
                execute = variable[len(MARKER) :].decode(errors="replace").rpartition(":")[2]
            elif variable.startswith(CALL):
                call = variable[len(CALL) :].decode(errors="replace")
        return Mark(execute, call) if execute else None

    def _read_all(self, pid: int) -> bytes:
        fd = os.open(f"{self._proc}/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = piece = os.read(fd, _PIECE)
            while len(piece) == _PIECE and len(found) < _ENVIRON_MAX:
                piece = os.read(fd, _PIECE)
                found += piece
            return found
        finally:
            os.close(fd)

    def _ancestor(self, pid: int, depth: int) -> Mark | None:
        """The mark of ``pid`` or of the nearest of its ancestors that has one."""
        if pid <= 1 or depth > _DEPTH_MAX:
            return None
        now = self._clock()
        known = self._ancestors.get(pid)
        if known is not None and now < known[1]:
            return known[0]
        try:
            fields = self._stat(pid)
            mark = self._mark(pid) or self._sessions.get(int(fields[3])) or self._ancestor(int(fields[1]), depth + 1)
        except (OSError, ValueError, IndexError):
            return None
        _put(self._ancestors, pid, (mark, now + _ANCESTOR_NS))
        return mark


def _put(known: dict[_K, _T], key: _K, value: _T) -> None:
    if len(known) >= KNOWN_MAX:
        known.clear()
    known[key] = value
