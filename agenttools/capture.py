"""Keep what a command prints: the head in memory, all of it in a file of the tree when it is more than that.

Owns the cap, the decoding and the file. Must not know processes or views. What goes wrong with the file is told in
``problem`` and never raised: the command is not to blame for it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import BinaryIO

from agenttools import inside

MAX_KEPT = 1 << 30
"""Bytes kept in a file: what a runaway command prints must not fill the disk that the tree is on."""

_BUFFER = 1 << 18
"""Bytes gathered for one write to the tree."""

TAIL = 2000
"""Bytes of the end kept in memory (as many as Deep Agents' capture previews)."""


class Output:
    """One command's output: at most ``limit`` bytes of it in the text, and all in the tree's file ``path`` if that is
    less.

    ``kept``: the file was made. ``problem``: why it does not hold everything, or "". ``size`` bytes and ``lines`` line
    endings came in all. The file gets ``cap`` bytes at most. ``watch`` is called with everything that is fed.
    """

    def __init__(
        self,
        limit: int,
        mountpoint: str,
        path: str,
        cap: int | None = None,
        watch: Callable[[bytes], object] | None = None,
    ) -> None:
        self._watch = watch
        self.kept = False
        self.problem = ""
        self.size = self.lines = 0
        self._limit, self._mountpoint, self._path = limit, mountpoint, path
        self._cap = MAX_KEPT if cap is None else cap
        self._head = bytearray()
        self._tail = b""
        self._file: BinaryIO | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes printed."""
        if self._watch is not None:
            self._watch(data)
        if self.size <= self._limit < self.size + len(data):
            self._begin()
        self._write(data)
        self.size += len(data)
        self.lines += data.count(b"\n")
        self._head += data[: self._limit - len(self._head)]
        self._tail = data[-TAIL:] if len(data) >= TAIL else (self._tail + data)[-TAIL:]

    @property
    def tail(self) -> str:
        """The last TAIL bytes, without what is left of a character that they begin in."""
        start = 0
        while start < min(3, len(self._tail)) and self._tail[start] & 0xC0 == 0x80:  # RFC 3629: at most 3 such bytes
            start += 1
        return self._tail[start:].decode(errors="replace")

    def finish(self) -> tuple[str, bool]:
        """The text, cut between characters, and whether it is less than was printed. Closes the file."""
        whole = self.size <= self._limit
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self._head), whole)
        encoded = text.encode()
        if len(encoded) > self._limit:  # a replacement character is longer than the byte it stands for
            text = encoded[: self._limit].decode("utf-8", "ignore")
            if whole:
                self._begin()
                whole = False
        self.close()
        return text, not whole

    def close(self) -> None:
        """Give up the file; without effect when there is none."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._failed(error)

    def _begin(self) -> None:
        try:
            fd = inside.create(self._mountpoint, self._path)
            self._file = open(fd, "wb", buffering=_BUFFER)  # noqa: SIM115 - close() closes it
        except OSError as error:
            self._failed(error)
        else:
            self.kept = True
            size, self.size = self.size, 0
            self._write(bytes(self._head))
            self.size = size

    def _write(self, data: bytes) -> None:
        """Put ``data``, which follows ``size`` bytes, into the file if there is one."""
        if self._file is None:
            return
        room = self._cap - self.size
        try:
            self._file.write(data[:room])
        except OSError as error:
            self._failed(error)
            self.close()
        if len(data) > room:
            self.problem = f"only its first {self._cap >> 20} MiB were kept"
            self.close()

    def _failed(self, error: OSError) -> None:
        self.problem = self.problem or error.strerror or str(error)
