"""What a service manager and a daemon tell each other: state and signs of life out, a listening socket in.

Owns systemd's three small protocols (sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3)), which other managers
speak too. Must not know trio or what is served.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from typing import NamedTuple

_FIRST = 3
"""SD_LISTEN_FDS_START."""


class Supervisor(NamedTuple):
    """``notify``: where to tell (empty: nobody listens). ``watchdog``: seconds within which a sign of life is wanted,
    0 for never. ``listener``: the socket to serve on, None to make one."""

    notify: str = ""
    watchdog: float = 0.0
    listener: socket.socket | None = None

    def tell(self, *fields: str) -> None:
        """Send ``NAME=value`` fields. A manager that does not take them is no reason to stop."""
        if not self.notify:
            return
        address = "\0" + self.notify[1:] if self.notify.startswith("@") else self.notify
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            # When the manager's queue is full: a lost sign of life is followed by another, a lost READY is not.
            sock.settimeout(0.0 if fields[0] == "WATCHDOG=1" else 1.0)
            sock.sendto("\n".join(fields).encode(errors="replace"), address)

    @property
    def address(self) -> str | None:
        """The path of the socket that was passed."""
        return None if self.listener is None else os.fspath(self.listener.getsockname())


def take(environ: MutableMapping[str, str]) -> Supervisor:
    """What the manager that started this process asks for; taken out of ``environ``, for it concerns no child.

    Raises ValueError with a sentence for sockets that can't be served on.
    """
    me = str(os.getpid())
    got = {
        name: environ.pop(name, "")
        for name in (
            "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES",
        )
    }  # fmt: skip
    usec = int(got["WATCHDOG_USEC"]) if got["WATCHDOG_USEC"].isdigit() and got["WATCHDOG_PID"] in ("", me) else 0
    count = int(got["LISTEN_FDS"]) if got["LISTEN_FDS"].isdigit() and got["LISTEN_PID"] == me else 0
    return Supervisor(got["NOTIFY_SOCKET"], usec / 1e6, _listener(count) if count else None)


def _listener(count: int) -> socket.socket:
    if count != 1:
        raise ValueError(
            f"{count} sockets were passed to this daemon: its .socket unit needs exactly one ListenStream="
        )
    try:
        sock = socket.socket(fileno=_FIRST)
    except OSError as exc:
        raise ValueError(
            f"descriptor {_FIRST}, which LISTEN_FDS promises to be a socket, is none ({exc.strerror})"
        ) from None
    kind = (sock.family, sock.type, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    path = sock.getsockname()
    if kind != (socket.AF_UNIX, socket.SOCK_STREAM, 1) or not (isinstance(path, str) and path):
        raise ValueError(
            "the socket passed to this daemon is no Unix stream socket with a path that listens: use ListenStream=/PATH"
        )
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock
