"""What the tests of the ``local`` volume share: a feed that remembers, errno names, a tmpfs."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from vfsd.backends.local import LocalVolume
from vfsd.core.changes import Change
from vfsd.core.types import Caller

BASE = 3 << 48
ROOT = BASE | 1
ME = Caller(os.geteuid(), os.getegid())
TOOL = ME._replace(door="rpc")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


class FakeFeed:
    """Remembers what was published; wanted by default."""

    def __init__(self) -> None:
        self.commits: list[tuple[str, list[Change]]] = []
        self.listening = True

    def wanted(self, caller: Caller) -> bool:
        return self.listening

    def publish(self, base: int, caller: Caller, op: str, changes: Sequence[Change]) -> int:
        assert base == BASE
        self.commits.append((op, list(changes)))
        return len(self.commits)

    def last(self, kind: type[Change]) -> list[Change]:
        return [c for c in self.commits[-1][1] if type(c) is kind]


def code(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The errno's name a call fails with."""
    with pytest.raises(OSError) as caught:
        call(*args, **kwargs)
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


def names(vol: LocalVolume, ino: int) -> set[bytes]:
    return {entry.name for entry in vol.readdir(ino, 0, 0)}


def whole(vol: LocalVolume, ino: int) -> bytes:
    return vol.read(ino, 0, 0, 1 << 20)


@contextmanager
def tmpfs(where: Path, options: str = "rw") -> Iterator[None]:
    """A tmpfs mounted for the time of a test."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", where], check=True)
