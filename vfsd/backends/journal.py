"""The log in front of a volume's database: whole records, each acknowledged once one write(2) has taken it.

Owns the files ``journal.0`` and ``journal.1``: one takes records while the other is being folded into the database.
Must not know what a record means. A record is a 16-byte head (payload length, a reserved word, xxh3_64 of the payload)
and a msgpack payload ``[seq, rows]``. A reader stops at the first record that is short or fails its checksum: what was
synced lies before it, what comes after was never promised.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from vfsd.backends.durable import Durable
from vfsd.backends.fallocate import host_fallocate

_HEAD = struct.Struct("<IIQ")
_MAX_PAYLOAD = 1 << 30
_KEEP_SIZE = 0x01
"""FALLOC_FL_KEEP_SIZE."""
_RESERVE = 256 << 10
_ROOM = 16 << 10
"""Bytes that a record of anything but a large extended attribute or a restore stays under."""

Rows = list[tuple[Any, ...]]


class Journal:
    """Append-only records over two files of ``directory``, both made at once so that no rename needs a sync."""

    def __init__(self, directory: Path) -> None:
        self._fds = [
            os.open(directory / f"journal.{i}", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            for i in (0, 1)
        ]
        self._files = [Durable(fd) for fd in self._fds]
        self._active = 0
        self._fd = self._fds[0]
        self._pack = msgpack.Packer(autoreset=True).pack
        self._head = _HEAD.pack
        self._digest = xxhash.xxh3_64_intdigest
        self.size = 0
        """Bytes in the active file."""
        self.seq = 0
        """Number of the last record."""
        self._torn = False
        """The active file may have bytes past ``size``; no record may follow them."""
        self._reserved = 0
        """Bytes of the active file that have space on the disk."""
        self._can_reserve = True

    def ensure_room(self) -> None:
        """Have space for a record of usual size, so that ``append`` won't meet a full disk. Raises ENOSPC."""
        if self.size + _ROOM <= self._reserved or not self._can_reserve:
            return
        try:
            host_fallocate(self._fd, _KEEP_SIZE, self.size, _RESERVE)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            self._can_reserve = False
        else:
            self._reserved = self.size + _RESERVE

    def append(self, rows: Rows) -> None:
        """One record, whole or not at all. Raises OSError (ENOSPC, EIO)."""
        if self._torn:
            self._cut()
        payload = self._pack((self.seq + 1, rows))
        record = self._head(len(payload), 0, self._digest(payload)) + payload
        self._torn = True
        try:
            written = os.write(self._fd, record)
        except OSError:
            self._cut()
            raise
        if written != len(record):
            self._cut()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False
        self._files[self._active].written += 1
        self.size += written
        self.seq += 1

    def _cut(self) -> None:
        """Drop what lies past the last whole record: replay would stop there, and lose all that came after it."""
        os.ftruncate(self._fd, self.size)
        self._torn = False
        self._reserved = self.size

    def rotate(self) -> None:
        """Send new records to the other file, which must have been cleared. Raises OSError."""
        if self._torn:
            self._cut()
        self._active ^= 1
        self._fd = self._fds[self._active]
        self.size = self._reserved = 0

    def clear_folded(self) -> None:
        """Empty the file that is not active: the database has its records for good."""
        os.ftruncate(self._fds[self._active ^ 1], 0)

    def sync(self) -> None:
        """All records survive power loss; may be called in a thread."""
        for file in self._files:
            file.sync()

    def doubt(self) -> None:
        """What is there was written by another process, which may not have made it durable: the next sync does."""
        for file in self._files:
            file.written += 1

    def replay(self, after: int) -> Iterator[Rows]:
        """The rows of each whole record after number ``after``, in order and without a gap; ``seq`` follows.

        A gap is a torn end of the older file: what the newer one has was written later and not synced either.
        """
        self.seq = after
        files = sorted(
            (list(self._records(fd)) for fd in self._fds), key=lambda records: records[0][0] if records else 0
        )
        for seq, rows in (record for records in files for record in records):
            if seq == self.seq + 1:
                self.seq = seq
                yield rows

    @staticmethod
    def _records(fd: int) -> Iterator[tuple[int, Rows]]:
        at, end = 0, os.fstat(fd).st_size
        while at + _HEAD.size <= end:
            length, _, digest = _HEAD.unpack(os.pread(fd, _HEAD.size, at))
            at += _HEAD.size
            if length > _MAX_PAYLOAD or at + length > end:
                return
            payload = os.pread(fd, length, at)
            if xxhash.xxh3_64_intdigest(payload) != digest:
                return
            seq, rows = msgpack.unpackb(payload, use_list=False)
            yield seq, list(rows)
            at += length

    def reset(self) -> None:
        """Empty both files for good: everything is folded, and no record left behind may ever follow a new one."""
        for fd in self._fds:
            os.ftruncate(fd, 0)
            os.fsync(fd)
        self.size = self._reserved = 0

    def close(self) -> None:
        """Let go of both files."""
        for fd in self._fds:
            os.close(fd)
