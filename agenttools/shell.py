"""execute: run one shell command in the tree, where the caller is, and give back what it printed.

Owns a command's life: its start, its output, its time limit and its end. What it sees is the business of ``views``,
finding its processes that of ``processes``. Must not know how a model is told (``tools`` words it).

Invariants: a call returns when the shell ends, whatever its background children do, and they live on. A call that
times out, is cancelled or raises leaves none of the command's processes. A command is started at most once. Output is
read in bounded memory. Safe from many threads at once. Needs Linux 5.3 (pidfd_open).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from errno import EACCES, ENOENT, ENOTDIR, EOPNOTSUPP
from typing import Any, TypeVar

from agenttools.capture import Output
from agenttools.processes import end_all, mount_namespace
from agenttools.views import (
    Launch,
    TreeClient,
    View,
    ViewName,
    ViewUnavailable,
    mount_view,
    mountpoint_of,
    root_view,
    user_shell,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "MAX_OUTPUT",
    "TIMED_OUT",
    "Cancellation",
    "Cancelled",
    "ExecuteResult",
    "View",
    "ViewUnavailable",
    "aexecute",
    "execute",
    "run_interactive",
]

DEFAULT_TIMEOUT = 120.0
"""Seconds (as Deep Agents' LocalShellBackend)."""

MAX_OUTPUT = 100_000
"""Bytes of output in a result (as Deep Agents' LocalShellBackend)."""

MAX_COMMAND = 131_071
"""Bytes of a command: Linux's MAX_ARG_STRLEN less the NUL."""

TIMED_OUT = 124
"""The exit code of a command ended by its time limit (as timeout(1) and Deep Agents have it)."""

RESULTS = "/large_tool_results"

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
    ``notices``: sentences on what cannot be seen from the output. ``duration`` in seconds.
    """

    output: str
    exit_code: int
    view: ViewName
    truncated: bool = False
    output_file: str | None = None
    timed_out: bool = False
    duration: float = 0.0
    notices: tuple[str, ...] = ()


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


_Result = TypeVar("_Result")


class _SetupFailed(Exception):
    """bubblewrap ended before it had started the command; the argument is what it said."""


_root_view_works: bool = False
_root_view_fails: str = ""
"""Why the root view cannot be had: found out once in a process, so that ``auto`` does not change views midway."""


def execute(
    client: TreeClient,
    command: str,
    *,
    timeout: float | None = None,
    view: View = "auto",
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    call_id: str | None = None,
    max_output: int = MAX_OUTPUT,
    mountpoint: str | None = None,
    cancellation: Cancellation | None = None,
) -> ExecuteResult:
    """Run ``/bin/sh -c command`` in the tree with nothing on stdin, and wait for the shell to end.

    ``timeout`` in seconds, None for DEFAULT_TIMEOUT, 0 for none. ``view`` auto: root where it can be had, else mount.
    ``cwd``: a tree path. ``env`` is added to the few variables that pass (``views.PASSED``). ``call_id`` names the file
    that keeps an output of more than ``max_output`` bytes. ``mountpoint``: where the tree is mounted as the caller sees
    it, if not where the daemon says.

    Raises ValueError for a timeout below 0, an unknown view, a command that holds NUL or is longer than MAX_COMMAND;
    ViewUnavailable (an OSError) when the view cannot be had or the tree is not mounted here; FileNotFoundError,
    NotADirectoryError or PermissionError for ``cwd``; ConnectionError without a daemon; Cancelled. Whatever the
    command itself does is a result.
    """
    limit = DEFAULT_TIMEOUT if timeout is None else timeout
    if not 0 <= limit < math.inf:
        raise ValueError(f"timeout must be a number of seconds, or 0 for none, not {timeout}")
    if "\0" in command:
        raise ValueError("a command cannot hold a NUL character")
    if len(os.fsencode(command)) > MAX_COMMAND:
        raise ValueError(f"the command is longer than {MAX_COMMAND} bytes; write it to a file and run that")
    call = secrets.token_hex(8)

    def run(launch: Launch) -> ExecuteResult:
        name = f"{RESULTS}/{_file_name(call_id or f'execute_{call}')}"
        return _run(launch, command, call, limit, Output(max_output, launch.mountpoint + name), name, cancellation)

    return _in_view(client, view, cwd, env or {}, call, mountpoint, run)


async def aexecute(client: TreeClient, command: str, **options: Any) -> ExecuteResult:
    """``execute`` for asyncio and trio, in a thread of its own. Cancelling it ends the command's processes first."""
    cancellation = Cancellation()
    outcome: list[ExecuteResult | BaseException] = []
    done, post, shield = _event()

    def work() -> None:
        try:
            outcome.append(execute(client, command, cancellation=cancellation, **options))
        except BaseException as error:  # raised again in the caller's task
            outcome.append(error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed under us
            post(done.set)

    threading.Thread(target=work, name="execute", daemon=True).start()
    try:
        await done.wait()
    except GeneratorExit:
        cancellation.cancel()
        raise
    except BaseException:
        cancellation.cancel()
        with shield:
            await done.wait()
        raise
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _event() -> tuple[Any, Callable[[Callable[[], object]], object], contextlib.AbstractContextManager[Any]]:
    """An event of the running loop, how to call something on that loop, and what shields a wait from cancellation."""
    trio = sys.modules.get("trio")
    if trio is not None:
        with contextlib.suppress(RuntimeError):  # trio is loaded, but this is not one of its tasks
            token = trio.lowlevel.current_trio_token()
            return trio.Event(), token.run_sync_soon, trio.CancelScope(shield=True)
    import asyncio  # here, since it takes longer to import than all of agenttools

    return asyncio.Event(), asyncio.get_running_loop().call_soon_threadsafe, contextlib.nullcontext()


def run_interactive(
    client: TreeClient,
    argv: Sequence[str] = (),
    *,
    view: View = "auto",
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    mountpoint: str | None = None,
) -> int:
    """Run a program, or the user's shell, in the tree on the caller's own terminal; return its exit code.

    There is no time limit, and ^C goes to the program. Raises what ``execute`` raises for the view and ``cwd``.
    """

    def run(launch: Launch) -> int:
        return _run_interactive(launch, tuple(argv) or (user_shell(),))

    return _in_view(client, view, cwd, env or {}, secrets.token_hex(8), mountpoint, run)


# ---------------------------------------------------------------------- the view


def _in_view(
    client: TreeClient,
    view: View,
    cwd: str,
    env: Mapping[str, str],
    call: str,
    mountpoint: str | None,
    run: Callable[[Launch], _Result],
) -> _Result:
    """``run`` in the view asked for. That bubblewrap can do its work here is learnt from the first command itself: when
    it fails, the command has not been started, and can be started in the mount view."""
    global _root_view_fails, _root_view_works
    if view not in ("auto", "root", "mount"):
        raise ValueError(f"view must be auto, root or mount, not {view}")
    place = mountpoint_of(client, mountpoint)
    if view == "root" or (view == "auto" and not _root_view_fails):
        try:
            result = run(root_view(client, place, cwd, env, call))
            _root_view_works = True
            return result
        except ViewUnavailable as error:  # no bubblewrap
            if view == "root":
                raise
            _root_view_fails = str(error.strerror)
        except _SetupFailed as error:
            said = str(error)
            if "Can't chdir" in said:
                raise _no_directory(said, cwd) from None
            if view == "root" or _root_view_works:
                raise ViewUnavailable(EOPNOTSUPP, f"the root view cannot be made here: {said}") from None
            _root_view_fails = said
    return run(mount_view(place, cwd, env, call))


def _no_directory(said: str, cwd: str) -> OSError:
    code = next((code for code in (ENOTDIR, EACCES) if os.strerror(code) in said), ENOENT)
    return OSError(code, os.strerror(code), cwd)


# ---------------------------------------------------------------------- one command


class _Child:
    """A started command: its process, and in the root view what bubblewrap tells of it on a pipe of its own."""

    def __init__(self, launch: Launch, argv: Sequence[str], options: Sequence[str], **popen: Any) -> None:
        self._status = -1
        self._told = b""
        prefix, status = launch.prefix, -1
        if prefix:
            self._status, status = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            prefix = (prefix[0], "--json-status-fd", str(status), "--die-with-parent", *options, *prefix[1:])
        try:
            self.process = subprocess.Popen(
                [*prefix, *argv],
                cwd=launch.cwd,
                env=launch.environ,
                pass_fds=(status,) if prefix else (),
                **popen,
            )
        except BaseException:
            self.close()
            raise
        finally:
            if prefix:
                os.close(status)

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
        self.process.wait()
        return left

    def exit_code(self) -> int:
        """Wait, and give the shell's idea of the exit code. Raises _SetupFailed when the command was never started."""
        code = self.process.wait()
        if code >= 0 and self._status >= 0 and self._tell("exit-code") is None:
            raise _SetupFailed
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        if self._status >= 0:
            os.close(self._status)
            self._status = -1


def _start(launch: Launch, command: str) -> tuple[_Child, int]:
    """The started shell, and the end of the pipe to read its output from."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        child = _Child(
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


def _run(
    launch: Launch,
    command: str,
    call: str,
    limit: float,
    output: Output,
    output_file: str,
    cancellation: Cancellation | None,
) -> ExecuteResult:
    started = time.monotonic()
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
    except _SetupFailed:
        raise _SetupFailed(output.finish()[0].strip()) from None
    finally:
        if read >= 0:
            os.close(read)
        child.close()
    notices = [] if ended else [f"Command timed out after {limit:g} seconds"]
    if left:
        notices.append(f"These processes of it could not be ended: {', '.join(map(str, sorted(left)))}")
    if launch.view == "mount" and _root_view_fails:
        notices.append(f"Ran in the mount view, in the directory {launch.cwd}: {_root_view_fails}")
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


def _run_interactive(launch: Launch, argv: Sequence[str]) -> int:
    main = threading.current_thread() is threading.main_thread()
    # A handler, not SIG_IGN: that one the program would inherit.
    held = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGQUIT) if main}
    child = _Child(launch, argv, ())
    try:
        return child.exit_code()
    except _SetupFailed:
        raise _SetupFailed("bubblewrap failed; what it said is above") from None
    finally:
        child.close()
        for number, handler in held.items():
            signal.signal(number, handler)


def _file_name(call_id: str) -> str:
    """The name Deep Agents gives to the file of a tool call's large result, so that one call has one file."""
    name = re.sub(r"[./\\\0]", "_", call_id)
    if len(os.fsencode(name)) <= 128:
        return name
    import hashlib  # here, since few calls need it

    return f"call-{hashlib.sha256(os.fsencode(call_id)).hexdigest()}"
