"""One command's life: its start, its output, its time limit and its end.

Owns the child process and the pipes to it. What the command sees is in the ``Launch`` given, finding its processes
is the business of ``processes``, keeping its output that of ``capture``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agenttools import launcher, warden
from agenttools.capture import Output
from agenttools.confinement import Gate, Profile
from agenttools.limits import Watch
from agenttools.processes import end_all, mount_namespace
from agenttools.views import MARKER, Launch, ViewName

TIMED_OUT = 124
"""The exit code of a command ended by its time limit (as timeout(1) and Deep Agents have it)."""

_GRACE = 0.1
"""Seconds given to what still holds the output when the shell has ended: ``tee`` in a process substitution, say."""

_PIPE = 1 << 16
"""A pipe's capacity in bytes (pipe(7)): one read of it takes all that was written before."""


@dataclass(frozen=True, slots=True)
class ExecuteResult:
    """What a command did.

    ``output``: stdout and stderr in the order written, UTF-8 with replacement characters for what is not, at most
    ``max_output`` bytes. ``exit_code``: 0 to 255; 128+N when signal N ended it, as a shell says it; TIMED_OUT when
    ``timed_out``. ``truncated``: there was more; all of it is in ``output_file`` (a tree path) unless that is None.
    ``notices``: sentences on what cannot be seen from the output. ``duration`` in seconds. ``size`` bytes and ``lines``
    line endings were printed in all; ``tail`` is the end of that, empty unless ``truncated``. ``complete``: nothing of
    it was lost, ``output_file`` has what ``output`` has not. ``profile`` is what the command was confined by.
    """

    output: str
    exit_code: int
    view: ViewName
    truncated: bool = False
    output_file: str | None = None
    timed_out: bool = False
    duration: float = 0.0
    notices: tuple[str, ...] = ()
    size: int = 0
    lines: int = 0
    tail: str = ""
    complete: bool = True
    profile: Profile = "open"


class Cancelled(Exception):
    """The execute was cancelled; its processes have been ended."""


class Cancellation:
    """Ends one execute from another thread: ``cancel()`` at any time, any number of times."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC)

    def cancel(self) -> None:
        """The call raises Cancelled when the command's processes have ended."""
        os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        return self._event

    def __del__(self) -> None:
        os.close(self._event)


class SetupFailed(Exception):
    """bubblewrap ended before it had started the command; the argument is what it said."""


class Child:
    """A started command: its process, and in the root view what bubblewrap tells of it on a pipe of its own.

    Until it is closed it ends with the caller, however that ends.
    """

    def __init__(self, launch: Launch, argv: Sequence[str], options: Sequence[str], **popen: Any) -> None:
        self._status = -1
        self._told = b""
        self._marker = launch.environ[MARKER]
        gate = None if launch.confinement is None else Gate(launch.confinement)
        try:
            warden.begin(self._marker)
            self.process = self._popen(launch, argv, options, gate, popen)
            self._watch(gate)
        except BaseException:
            self.close()
            raise
        finally:
            if gate is not None:
                gate.close()

    def _popen(
        self, launch: Launch, argv: Sequence[str], options: Sequence[str], gate: Gate | None, popen: dict[str, Any]
    ) -> subprocess.Popen[bytes]:
        if not launch.prefix:
            return subprocess.Popen(argv, cwd=launch.cwd, env=launch.environ, **popen)
        self._status, status = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        more, fds = ([], []) if gate is None else (gate.options, gate.fds)
        bwrap, *view = launch.prefix
        whole = [bwrap, "--json-status-fd", str(status), "--die-with-parent", *options, *more, *view, *argv]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(whole, cwd=launch.cwd, env=launch.environ, pass_fds=(status, *fds), **popen)

        try:
            return start() if gate is None else launcher.start(start)
        finally:
            os.close(status)

    def _watch(self, gate: Gate | None) -> None:
        """Say what runs to who ends it with the caller; then let it through ``gate``, limited, if it waits there."""
        pid = self.process.pid if self._status < 0 else self._inner()
        if pid is None:
            return  # bubblewrap has failed, which is told when it is waited for
        try:
            warden.started(self._marker, self.process.pid, mount_namespace(pid))
            if gate is not None and gate.waits:
                gate.open(pid)
        except BaseException:
            for ended in (pid, self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ended, signal.SIGKILL)
            self.process.wait()
            raise

    def _inner(self) -> int | None:
        """The process that will be the command, which bubblewrap tells when it has made the namespace; None: it has
        failed."""
        poller = select.poll()
        poller.register(self._status, select.POLLIN)
        while (pid := self._tell("child-pid")) is None:
            if any(event & select.POLLHUP for _, event in poller.poll()):
                return self._tell("child-pid")
        return pid

    def _tell(self, key: str) -> int | None:
        """The number bubblewrap wrote for ``key`` (one JSON object a line), if it has."""
        if self._status >= 0:
            with contextlib.suppress(BlockingIOError):
                self._told += os.read(self._status, 4096)
        for line in self._told.splitlines():
            with contextlib.suppress(ValueError):  # half a line
                value = json.loads(line).get(key)
                if value is not None:
                    return int(value)
        return None

    def end(self, marker: str) -> set[int]:
        """End all processes of the running command; return the pids of those that could not be."""
        inner = self._tell("child-pid")
        roots = [self.process.pid] if inner is None else [self.process.pid, inner]
        left = end_all(roots, marker, None if inner is None else mount_namespace(inner))
        if self.process.pid not in left:
            self.process.wait()
        return left

    @contextlib.contextmanager
    def passing_on(self, *numbers: int) -> Iterator[None]:
        """Signals that reach the caller meanwhile go to the command instead. For the main thread."""

        def pass_on(number: int, frame: object) -> None:
            inner = self._tell("child-pid")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid if inner is None else inner, number)

        held = {number: signal.signal(number, pass_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in held.items():
                signal.signal(number, handler)

    def exit_code(self) -> int:
        """Wait, and give the shell's idea of the exit code. Raises SetupFailed when the command was never started."""
        code = self.process.wait()
        if code >= 0 and self._status >= 0 and self._tell("exit-code") is None:
            raise SetupFailed
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        warden.ended(self._marker)
        if self._status >= 0:
            os.close(self._status)
            self._status = -1


def _start(launch: Launch, command: str) -> tuple[Child, int]:
    """The started shell, and the end of the pipe to read its output from."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        child = Child(
            launch,
            ("/bin/sh", "-c", command),
            ("--new-session",),  # `kill 0` in the command must not reach bubblewrap
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return child, read


def run(
    launch: Launch,
    command: str,
    call: str,
    limit: float,
    output: Output,
    output_file: str,
    cancellation: Cancellation | None,
) -> ExecuteResult:
    started = time.monotonic()
    confined = launch.confinement
    watch = Watch(confined.limits, confined.group) if confined is not None and confined.limits else None
    child, read = _start(launch, command)
    ended, left = False, set[int]()
    try:
        try:
            ended = _pump(read, child.process.pid, output, started + limit if limit else None, cancellation)
        finally:
            if not ended:
                left = child.end(call)
        if not _drain(read, output):
            read = _discard(read)
        code = child.exit_code() if ended else TIMED_OUT
    except SetupFailed:
        raise SetupFailed(output.finish()[0].strip()) from None
    finally:
        if read >= 0:
            os.close(read)
        child.close()
    notices = [] if ended else [f"Command timed out after {limit:g} seconds"]
    if watch is not None:
        notices += watch.notices(code)
    if left:
        notices.append(f"These processes of it could not be ended: {', '.join(map(str, sorted(left)))}")
    if launch.notice:
        notices.append(launch.notice)
    text, truncated = output.finish()
    if truncated:
        where = f"all of it is in {output_file}" if output.kept else "the rest was lost"
        notices.append(f"Output truncated at {len(text.encode())} bytes; {output.problem or where}")
    return ExecuteResult(
        output=text,
        exit_code=code,
        view=launch.view,
        truncated=truncated,
        output_file=output_file if output.kept else None,
        timed_out=not ended,
        duration=time.monotonic() - started,
        notices=tuple(notices),
        size=output.size,
        lines=output.lines,
        tail=output.tail if truncated else "",
        complete=not truncated or (output.kept and not output.problem),
        profile="open" if confined is None else confined.profile,
    )


def _pump(read: int, pid: int, output: Output, deadline: float | None, stop: Cancellation | None) -> bool:
    """Take output until process ``pid`` ends (True) or ``deadline`` (of time.monotonic) passes. Raises Cancelled."""
    poller = select.poll()
    process = os.pidfd_open(pid)
    try:
        for fd in (read, process) if stop is None else (read, process, stop.fileno()):
            poller.register(fd, select.POLLIN)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            ready = {fd for fd, _ in poller.poll(None if left is None else min(math.ceil(left * 1000), 1 << 30))}
            if read in ready:
                data = os.read(read, _PIPE)
                output.feed(data)
                if not data:
                    poller.unregister(read)
            if stop is not None and stop.fileno() in ready:
                raise Cancelled
            if process in ready:
                return True
    finally:
        os.close(process)


def _drain(read: int, output: Output) -> bool:
    """Take what is left of the output, for _GRACE seconds at most; False if someone still holds the other end."""
    poller = select.poll()
    poller.register(read, select.POLLIN)
    deadline = time.monotonic() + _GRACE
    while (left := deadline - time.monotonic()) > 0:
        if poller.poll(math.ceil(left * 1000)):
            data = os.read(read, _PIPE)
            if not data:
                return True
            output.feed(data)
    return False


def _discard(read: int) -> int:
    """Go on reading, in a thread, what a background child prints: a server must not die of SIGPIPE at its next line."""

    def discard() -> None:
        while os.read(read, _PIPE):
            pass
        os.close(read)

    threading.Thread(target=discard, name="execute-discard", daemon=True).start()
    return -1
