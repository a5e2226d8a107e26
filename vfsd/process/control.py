"""A command's conversation with a running daemon: blocking, with a bound in time where one is wanted.

The full client is in ``agenttools``, which nothing here may import; a command asks a few things, one after the other,
and ends.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Any, Self

from vfsd.doors.rpc import VERSION, Decoder, Encoder, WireError, error_of
from vfsd.process import mountpoint, registry

STATUS_SECONDS = 2.0
"""How long one daemon's status is waited for."""


class Failure(Exception):
    """A command can't do what was asked; the message is the sentence to print."""


class Control:
    """A connection to the daemon on socket ``path``; ``seconds`` bounds each answer, None: for as long as it takes."""

    def __init__(self, path: str, seconds: float | None = None) -> None:
        self._path = path
        self._seconds = seconds
        self._encoder, self._decoder = Encoder(), Decoder()
        self._number = 0
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(seconds)
            self._sock.connect(path)
            self.call("hello", version=VERSION, client="vfsd")
        except BaseException:
            self._sock.close()
            raise

    def call(self, op: str, /, **params: Any) -> dict[str, Any]:
        """The reply to ``op``; OSError is the daemon's refusal, or ETIMEDOUT."""
        deadline = None if self._seconds is None else time.monotonic() + self._seconds
        self._number += 1
        for part in self._encoder.encode({"id": self._number, "op": op, **params}):
            self._sock.sendall(part)
        while True:
            try:
                reply = self._decoder.next()
            except WireError as exc:
                raise OSError(errno.EPROTO, str(exc), self._path) from None
            if reply is None:
                self._receive(deadline)
            elif not reply.get("ok"):
                raise error_of(reply)
            elif reply.get("id") == self._number:
                return reply

    def _receive(self, deadline: float | None) -> None:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(errno.ETIMEDOUT, f"no answer in {self._seconds:g} s", self._path)
            self._sock.settimeout(left)
        data = self._sock.recv(1 << 18)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the daemon closed the connection", self._path)
        self._decoder.receive(data)

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def ask(path: str, op: str, seconds: float, **params: Any) -> dict[str, Any]:
    """The reply of the daemon on socket ``path`` to one ``op``; raises as ``Control``."""
    with Control(path, seconds) as control:
        return control.call(op, **params)


def find(target: str) -> dict[str, Any] | None:
    """The entry of the mount with this name, or else on this directory; of a daemon that died too."""
    found = registry.entries()
    if "/" not in target:
        for entry in found:
            if entry["name"] == target:
                return entry
    path = mountpoint.resolve(target)
    return next((entry for entry in found if entry["mountpoint"] == path), None)


def running(name: str, thread: str | None = None) -> dict[str, Any] | None:
    """The entry of the mount of this name, and thread if one is given; None when no daemon runs."""
    found = next((entry for entry in registry.entries() if entry["name"] == name and entry["alive"]), None)
    return found if found is not None and thread in (None, found["thread"]) else None


def thread_of(name: str, thread: str | None) -> str:
    """The thread asked for, else that of the mount of this name, running or dead, else ``default``."""
    if thread is not None:
        return thread
    return next((str(entry["thread"]) for entry in registry.entries() if entry["name"] == name), "default")


def connect(name: str) -> Control:
    """A connection to the mount of this name. Failure when it does not run."""
    entry = running(name)
    if entry is None:
        raise Failure(f"no mount is called {name!r}: start it with vfsd mount --name {name} MOUNTPOINT")
    return Control(entry["socket"])


def log_of(entry: dict[str, Any]) -> str:
    """Where a daemon's log is, for a sentence."""
    return entry["log"] or "its standard error (of a service: its journal)"


def go_on(entry: dict[str, Any]) -> str:
    """What to do with a daemon that was stopped."""
    return f"let it go on with kill -CONT {entry['pid']}, or end it with vfsd umount --force {entry['name']}"


def state_of(entry: dict[str, Any]) -> dict[str, Any]:
    """What ``status`` shows of one entry: the daemon's own words where it answers in time."""
    row = {key: value for key, value in entry.items() if key != "alive"} | {"uptime": 0.0, "counters": {}}
    if not entry["alive"] or registry.killed(entry["pid"]):
        return row | {"state": "dead", "fix": f"vfsd umount {entry['name']}"}
    row["uptime"] = max(0.0, time.time() - entry["started"])
    if registry.stopped(entry["pid"]):
        return row | {"state": "stopped", "fix": go_on(entry)}
    try:
        reply = ask(entry["socket"], "status", STATUS_SECONDS)
    except OSError as exc:
        return row | {"state": f"does not answer ({exc.strerror or exc})", "fix": f"see {log_of(entry)}"}
    return row | {key: value for key, value in reply.items() if key not in ("id", "ok")} | {"state": "running"}
