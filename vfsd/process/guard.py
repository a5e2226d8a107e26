"""Cuts the connection of a daemon that was killed and can't end.

A daemon that is killed while the kernel has a notification of its wait stays, with all who wait for its answers: the
notification waits for a directory that a program holds, and that program for an answer of the daemon. Nobody who waits
for the process, such as a service manager, learns that it is dead.

Owns a small process beside the daemon, which the kernel tells when the daemon's main thread is gone
(prctl(2), PR_SET_PDEATHSIG). It holds none of the daemon's descriptors, and ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from typing import NoReturn

from vfsd.doors.engines import abort_device, mounted

GRACE_SECONDS = 0.5
"""Between the end of the main thread and that of all others, which nothing keeps as a rule."""

NAME = b"vfsd-guard"
"""What ps(1) shows (at most 15 bytes)."""

_ORPHANED = signal.SIGUSR1
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class _Orphaned(Exception):
    pass


class Guard:
    """To be made by the main thread before there are others. ``arm`` it when the mount is there."""

    def __init__(self) -> None:
        parent = os.getpid()
        read, self._write = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            _guard(parent, read)
        os.close(read)

    def arm(self, mountpoint: str) -> None:
        """From now on the connection of what is mounted on ``mountpoint`` is cut if we are killed and stay."""
        device = mounted(mountpoint)
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            os.write(self._write, b"%d" % (device or 0))

    def end(self) -> None:
        """Before an end in order, after which a service manager would find it left over for a moment."""
        os.close(self._write)
        os.waitpid(self._pid, 0)


def _guard(parent: int, read: int) -> NoReturn:
    """The process's whole life."""
    try:
        os.setsid()
        signal.signal(_ORPHANED, _orphaned)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.dup2(read, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.chdir("/")
        _wait(parent, 3)
    finally:
        os._exit(0)


def _orphaned(*_: object) -> NoReturn:
    raise _Orphaned


def _wait(parent: int, read: int) -> None:
    device = b""
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, NAME)
        libc.prctl(_PR_SET_PDEATHSIG, _ORPHANED)
        if os.getppid() == parent:
            device = os.read(read, 32)
            while os.read(read, 32):
                pass
            return
    except _Orphaned:
        pass
    ended = select.select([read], [], [], GRACE_SECONDS)[0]
    if device and not ended:
        abort_device(int(device))
