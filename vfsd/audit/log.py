"""Lines of JSON kept in a directory, in segments that are dropped from the front: what the audit writes and all read.

Owns where a line is and how much is kept. A segment's file name is the position of its first byte among all bytes ever
written, so that positions stay true while old segments go. Must not know what a line says. Invariants: a line that was
appended is in the kernel's hands when ``append`` returns, so that a killed process loses none; nothing but whole lines
is read; at most ``max_bytes`` and one line stay.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SEGMENTS = 8
"""Segments that ``max_bytes`` is divided into: what goes at once when room is needed."""

_BLOCK = 1 << 16


class Segment(NamedTuple):
    """``start``: the position of its first byte; ``began``: when it was made, in seconds since the epoch."""

    start: int
    began: int
    path: Path


def segments(directory: Path, name: str) -> list[Segment]:
    """The segments of log ``name``, oldest first; none when there is no such directory."""
    found = []
    try:
        entries = os.listdir(directory)
    except FileNotFoundError:
        return []
    for entry in entries:
        match = re.fullmatch(r"(\w+)\.(\d+)-(\d+)\.ndjson", entry)
        if match is not None and match[1] == name:
            found.append(Segment(int(match[2]), int(match[3]), directory / entry))
    return sorted(found)


def lines(directory: Path, name: str, end: int) -> Iterator[bytes]:
    """All whole lines before position ``end``, oldest first, without their line ends."""
    position, rest = 0, b""
    while position < end:
        data, position = read_from(directory, name, position, end)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def read_from(directory: Path, name: str, position: int, end: int | None = None) -> tuple[bytes, int]:
    """Some bytes from ``position`` on, or from the oldest kept, and the position after them; none at the end."""
    for segment in segments(directory, name):
        try:
            with open(segment.path, "rb") as file:
                first = max(position, segment.start)
                file.seek(first - segment.start)
                data = file.read(_BLOCK if end is None else min(_BLOCK, max(0, end - first)))
        except FileNotFoundError:  # dropped since
            continue
        if data:
            return data, first + len(data)
    return b"", position


def lines_back(directory: Path, name: str) -> Iterator[bytes]:
    """The same, newest first."""
    for segment in reversed(segments(directory, name)):
        try:
            with open(segment.path, "rb") as file:
                yield from _back(file.fileno())
        except FileNotFoundError:
            continue


def _back(fd: int) -> Iterator[bytes]:
    end = os.fstat(fd).st_size
    rest: bytes | None = None
    while end > 0:
        start = max(0, end - _BLOCK)
        parts = os.pread(fd, end - start, start).split(b"\n")
        end = start
        if rest is not None:
            parts[-1] += rest
        else:
            parts.pop()  # nothing, or half a line
        if parts:
            rest = parts[0]
            yield from reversed(parts[1:])
    if rest is not None:
        yield rest


class SegmentLog:
    """The one writer of log ``name`` in ``directory``, which is made (0700) when missing.

    ``max_bytes`` and ``max_age`` (seconds) bound what is kept. Raises OSError.
    """

    def __init__(self, directory: Path, name: str, max_bytes: int, max_age: float) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._name = name
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._room = max(4096, max_bytes // SEGMENTS)
        self._segments = segments(directory, name)
        self._fd = -1
        self._synced = 0
        if self._segments:
            self._resume(self._segments[-1])
            self._limit = self._segments[-1].start + self._room
        else:
            self._begin(0)
        self.maintain()

    @property
    def origin(self) -> int:
        """The position of the oldest byte kept."""
        return self._segments[0].start

    @property
    def dirty(self) -> bool:
        """Whether there are lines that power loss would take."""
        return self.end != self._synced

    @property
    def mtime_ns(self) -> int:
        """When the last line was written, in nanoseconds since the epoch."""
        return os.fstat(self._fd).st_mtime_ns

    def _resume(self, last: Segment) -> None:
        """Go on behind the last whole line; half a line is what a lost machine left of one."""
        self._fd = os.open(last.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        had = os.fstat(self._fd)
        self.end = last.start + had.st_size
        kept = had.st_size
        while kept:
            start = max(0, kept - _BLOCK)
            found = os.pread(self._fd, kept - start, start).rfind(b"\n")
            kept = start + found + 1
            if found >= 0:
                break
        if kept != had.st_size:
            os.ftruncate(self._fd, kept)
            self.end = last.start + kept

    def _begin(self, start: int) -> None:
        began = int(time.time())
        path = self._directory / f"{self._name}.{start:020d}-{began}.ndjson"
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._segments.append(Segment(start, began, path))
        self.end = start
        self._limit = start + self._room

    def append(self, line: bytes) -> None:
        """Add a line, which ends with a line end; OSError (ENOSPC, EIO): it is not there."""
        end = self.end + len(line)
        if end > self._limit:
            self._rotate()
            end = self.end + len(line)
        if os.write(self._fd, line) != len(line):
            os.ftruncate(self._fd, self.end - self._segments[-1].start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.end = end

    def _rotate(self) -> None:
        if self.end > self._segments[-1].start:
            self._begin(self.end)
        self._drop()

    def _drop(self) -> None:
        oldest_kept = time.time() - self._max_age
        while len(self._segments) > 1:
            first, last = self._segments[0], self._segments[-1]
            # The last one counts as full, so that the bound holds until the next time.
            if last.start + self._room - first.start <= self._max_bytes:
                with contextlib.suppress(FileNotFoundError):
                    if first.path.stat().st_mtime >= oldest_kept:
                        return
            first.path.unlink(missing_ok=True)
            del self._segments[0]

    def maintain(self) -> None:
        """Drop what is too old; for now and then, also while nothing is appended."""
        if self._segments[-1].began < time.time() - self._max_age / SEGMENTS:
            self._rotate()
        else:
            self._drop()

    def sync(self) -> None:
        """All that was appended survives power loss. For any thread."""
        end, fd = self.end, os.dup(self._fd)
        try:
            os.fdatasync(fd)
            self._synced = end
        finally:
            os.close(fd)

    def read(self, position: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``position``, at most one segment's; of what was dropped, empty lines."""
        if position >= self.end or length <= 0:
            return b""
        if position < self.origin:
            return b"\n" * min(length, self.origin - position)
        for start, _, path in reversed(self._segments):
            if start <= position:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    return os.pread(fd, min(length, self.end - position), position - start)
                finally:
                    os.close(fd)
        return b""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
