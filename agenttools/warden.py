"""Ends the commands of a client that was killed: a small process of each client, which outlives it by a moment.

Owns that process, a shell in a session of its own. It reads from a socket that nobody but the client holds which
commands run, and when the client is gone it becomes ``processes``, which ends those as the client does at a time limit.
What a command whose call had returned left in the background is none of them. Safe from many threads at once.

A death signal (prctl(2) PR_SET_PDEATHSIG) reaches one process and none that it started; a client can't be asked to be
another's parent; and to start a Python each time would take longer than a command does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

from agenttools import processes
from agenttools.processes import Namespace

_SCRIPT = """
trap '' HUP INT TERM
while read -r line; do last=$line; done
test -z "$last" || exec "$PYTHON" -IS "$PROGRAM" $last
"""
"""Each line lists all that runs: nothing need be kept but the last one. What it starts is named in the environment, for
who ends the client by a part of its command line must not meet this process too."""

_lock = threading.Lock()
_running: dict[str, str] = {}
_process: subprocess.Popen[bytes] | None = None
_hold: socket.socket | None = None


def begin(marker: str) -> None:
    """A command is about to be started with ``marker`` in its environment. Raises OSError; then it must not be."""
    _tell(marker, f"{marker},,,,")


def started(marker: str, pid: int, namespace: Namespace | None) -> None:
    """It runs: as ``pid``, or in a mount namespace of its own, where that finds all of it."""
    device, inode = namespace or ("", "")
    root = f"{pid},{processes.start_time(pid)}" if namespace is None else ","
    _tell(marker, f"{marker},{root},{device},{inode}")


def ended(marker: str) -> None:
    """Nothing is to be ended any more. Without effect when nothing was begun."""
    if marker in _running:
        with contextlib.suppress(OSError):  # the next command's begin raises it
            _tell(marker, None)


def _tell(marker: str, entry: str | None) -> None:
    with _lock:
        if entry is None:
            del _running[marker]
        else:
            _running[marker] = entry
        line = f"{' '.join(_running.values())}\n".encode()
        if _hold is None or not _sent(_hold, line):
            _start()
            if _hold is None or not _sent(_hold, line):
                raise OSError("the process that ends commands of a killed client does not read")


def _sent(hold: socket.socket, line: bytes) -> bool:
    with contextlib.suppress(OSError):
        return hold.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(line)
    return False


def _start() -> None:
    global _hold, _process
    if _process is not None:
        # Before it is let go: what it knows is out of date, and it would act on it.
        _process.kill()
        _process.wait()
    if _hold is not None:
        _hold.close()
    _hold, theirs = socket.socketpair()
    names = {"PYTHON": sys.executable or "python3", "PROGRAM": os.path.abspath(processes.__file__)}
    # In no directory and with no output of the caller's: it must keep nothing busy.
    with theirs:
        _process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", **names},
            start_new_session=True,
        )


@atexit.register
def _let_go() -> None:
    global _hold
    if _hold is not None:
        _hold.close()
        _hold = None
    if _process is not None and _process.poll() is None:
        _process.returncode = -signal.SIGKILL  # not waited for: it may have a command to end


def _after_fork() -> None:
    """A child made by fork has commands of its own only, and must not hold what its parent's death is seen by."""
    global _hold, _lock, _process
    _lock = threading.Lock()
    if _hold is not None:
        _hold.close()
    if _process is not None:
        _process.returncode = 0  # the parent's to wait for
    _hold = _process = None
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
