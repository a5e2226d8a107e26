"""Keep what a command prints: the head in memory, all of it in a file of the tree when it is more than that.

Owns the cap, the decoding and the file. Must not know processes or views. What goes wrong with the file is told in
``problem`` and never raised: the command is not to blame for it.
"""

from __future__ import annotations

import codecs
import os
from typing import BinaryIO

MAX_KEPT = 1 << 30
"""Bytes kept in a file: what a runaway command prints must not fill the disk that the tree is on."""

_BUFFER = 1 << 18
"""Bytes gathered for one write to the tree."""


class Output:
    """One command's output: at most ``limit`` bytes of it in the text, and all in the file ``path`` if that is less.

    ``kept``: the file was made. ``problem``: why it does not hold everything, or "".
    """

    def __init__(self, limit: int, path: str) -> None:
        self.kept = False
        self.problem = ""
        self._limit, self._path = limit, path
        self._head = bytearray()
        self._total = 0
        self._file: BinaryIO | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes printed."""
        if self._total <= self._limit < self._total + len(data):
            self._begin()
        self._total += len(data)
        self._write(data)
        self._head += data[: self._limit - len(self._head)]

    def finish(self) -> tuple[str, bool]:
        """The text, cut between characters, and whether it is less than was printed. Closes the file."""
        whole = self._total <= self._limit
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
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._file = open(self._path, "wb", buffering=_BUFFER)  # noqa: SIM115 - close() closes it
        except OSError as error:
            self._failed(error)
        else:
            self.kept = True
            self._write(bytes(self._head))

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._failed(error)
            self.close()
        if self._total > MAX_KEPT:
            self.problem = f"only its first {MAX_KEPT >> 20} MiB were kept"
            self.close()

    def _failed(self, error: OSError) -> None:
        self.problem = self.problem or error.strerror or str(error)
