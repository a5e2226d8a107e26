"""What a route that waits knows of its remote, and where contents are on their way. Plain values; knows no loop."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vfsd.backends.remote import ERRNOS, Meta, RemoteError

log = logging.getLogger(__name__)


class Known(NamedTuple):
    """What the remote has at a path: its etag, and of a content the digest (None: not seen yet) and the size."""

    etag: Hashable
    digest: int | None
    size: int
    meta: Meta | None


class Etags(Mapping[bytes, Hashable]):
    """The etags of what was known at one moment; mostly nobody asks, so nothing is made of them beforehand."""

    def __init__(self, known: dict[bytes, Known]) -> None:
        self._known = known

    def __getitem__(self, path: bytes) -> Hashable:
        return self._known[path].etag

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def words(exc: Exception) -> str:
    """What an exception says, for a sentence: its first line, of an OSError without the number."""
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
    return str(exc).strip().partition("\n")[0] or type(exc).__name__


def answer(exc: Exception, kind: str, what: str, who: str) -> OSError:
    """A refusal as it is; all else as EIO, with the reason in the log, and the trace of what nobody expects."""
    if isinstance(exc, OSError) and exc.errno in ERRNOS:
        return exc
    reason = words(exc)
    expected = isinstance(exc, (OSError, RemoteError)) or type(exc).__module__.partition(".")[0] != "builtins"
    log.warning("%s: %s: %s", who, what, reason, exc_info=None if expected else exc)
    return OSError(errno.EIO, f"{kind}: {what}: {reason}")


def scratch_file(directory: Path | None) -> int | None:
    """A file without a name in ``directory``; None where that can't be had."""
    if directory is None:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
