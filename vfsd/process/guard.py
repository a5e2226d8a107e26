"""Cuts the connection of a daemon that was killed and can't end.

A daemon that is killed while the kernel has a notification of its wait stays, with all who wait for its answers: the
notification waits for a directory that a program holds, and that program for an answer of the daemon. Nobody who waits
for the process, such as a service manager, learns that it is dead.

Owns a small process beside the daemon, which the kernel tells when the daemon's main thread is gone
(prctl(2), PR_SET_PDEATHSIG), and which ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess

from vfsd.doors.engines import abort_file

NAME = "vfsd-guard"
"""What its command line ends with."""

_SCRIPT = """
trap '' HUP INT TERM
trap : USR1
read -r abort || exit
exec 3<&0
cat <&3 >/dev/null &
wait $! && exit
sleep 0.5
kill -0 $! && echo 1 >"$abort"
kill -9 $!
"""
"""cat ends when nobody holds the other end of the pipe any more: the whole daemon has ended. A shell that waits for it
is woken by the signal, and gives the threads time to end, which nothing keeps as a rule. It is a tenth of a Python."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Guard:
    """To be made by the main thread. ``arm`` it when the mount is there, ``end`` it before an end in order."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, NAME],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=True,
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1),
            text=True,
        )

    def arm(self, mountpoint: str) -> None:
        """From now on the connection of what is mounted on ``mountpoint`` is cut if we are killed and stay."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # no such files here, or somebody has killed it
            self._process.stdin.write(f"{abort_file(mountpoint)}\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """A service manager would find it left over for a moment."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
