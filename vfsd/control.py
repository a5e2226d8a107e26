"""One question to a running daemon, asked from a command: blocking, with a bound in time.

The full client is in ``agenttools``, which nothing here may import; a command asks one thing and ends.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

from vfsd.doors.rpc import VERSION, Decoder, Encoder, WireError, error_of


def ask(path: str, op: str, seconds: float, **params: Any) -> dict[str, Any]:
    """The reply of the daemon on socket ``path`` to ``op``; OSError is its refusal, or ETIMEDOUT after ``seconds``."""
    deadline = time.monotonic() + seconds
    encoder, decoder = Encoder(), Decoder()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(seconds)
        sock.connect(path)
        hello = {"id": 1, "op": "hello", "version": VERSION, "client": "vfsd"}
        for message in (hello, {"id": 2, "op": op, **params}):
            for part in encoder.encode(message):
                sock.sendall(part)
        while True:
            try:
                reply = decoder.next()
            except WireError as exc:
                raise OSError(errno.EPROTO, str(exc), path) from None
            if reply is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(errno.ETIMEDOUT, f"no answer in {seconds:g} s", path)
                sock.settimeout(left)
                data = sock.recv(65536)
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "the daemon closed the connection", path)
                decoder.receive(data)
            elif not reply.get("ok"):
                raise error_of(reply)
            elif reply.get("id") == 2:
                return reply
