"""A small session of every kind of change, one commit a step, the same in every run."""

from __future__ import annotations

import stat
from collections.abc import Callable
from typing import Any

from makers import ME

from vfsd.core.types import SetAttr

Step = tuple[str, Callable[[Any], Any]]


def _at(volume: Any, path: str) -> int:
    ino = volume.root_ino
    for name in path.split("/"):
        if name:
            ino = volume.lookup(ino, name.encode()).ino
    return int(ino)


def steps() -> list[Step]:
    """(name, what it does to a volume)."""
    return [
        ("mkdir", lambda v: v.mkdir(v.root_ino, b"d", 0o755, ME)),
        ("create with content", lambda v: v.create_file(v.root_ino, b"f", 0o644, b"first " * 1000, ME)),
        ("create another", lambda v: v.create_file(_at(v, "d"), b"g", 0o600, b"g" * 20_000, ME)),
        ("write in place", lambda v: v.write(_at(v, "f"), 0, 100, b"in place", ME)),
        ("append", lambda v: v.write(_at(v, "f"), 0, 0, b"a" * 5000, ME, True)),
        ("write far", lambda v: v.write(_at(v, "f"), 0, 100_000, b"far", ME)),
        ("replace", lambda v: v.replace(_at(v, "d/g"), b"anew " * 2000, ME)),
        ("truncate", lambda v: v.setattr(_at(v, "f"), SetAttr(size=6001), ME)),
        ("grow", lambda v: v.setattr(_at(v, "f"), SetAttr(size=9000), ME)),
        ("symlink", lambda v: v.symlink(_at(v, "d"), b"l", b"../f", ME)),
        ("link", lambda v: v.link(_at(v, "f"), _at(v, "d"), b"hard", ME)),
        ("mkdir below", lambda v: v.mkdir(_at(v, "d"), b"e", 0o755, ME)),
        ("rename", lambda v: v.rename(v.root_ino, b"f", _at(v, "d/e"), b"moved", 0, ME)),
        ("rename over", lambda v: v.rename(_at(v, "d"), b"g", _at(v, "d"), b"hard", 0, ME)),
        ("exchange", lambda v: v.rename(_at(v, "d"), b"l", _at(v, "d/e"), b"moved", 2, ME)),
        ("setxattr", lambda v: v.setxattr(_at(v, "d"), b"user.a", b"1" * 100, 0, ME)),
        ("setxattr again", lambda v: v.setxattr(_at(v, "d"), b"user.b", b"2", 0, ME)),
        ("removexattr", lambda v: v.removexattr(_at(v, "d"), b"user.a", ME)),
        ("reserve", lambda v: v.fallocate(_at(v, "d/hard"), 0, 0, 0, 50_000, ME)),
        ("punch", lambda v: v.fallocate(_at(v, "d/hard"), 0, 3, 4096, 8192, ME)),
        ("chmod", lambda v: v.setattr(_at(v, "d/hard"), SetAttr(perm=0o4755, mtime_ns=-5), ME)),
        ("fifo", lambda v: v.mknod(v.root_ino, b"p", stat.S_IFIFO | 0o600, 0, ME)),
        ("unlink", lambda v: v.unlink(_at(v, "d"), b"l", ME)),
        ("unlink the fifo", lambda v: v.unlink(v.root_ino, b"p", ME)),
        ("use freed space", lambda v: v.create_file(v.root_ino, b"h", 0o644, b"h" * 30_000, ME)),
        ("unlink large", lambda v: v.unlink(v.root_ino, b"h", ME)),
        ("rename back", lambda v: v.rename(_at(v, "d/e"), b"moved", v.root_ino, b"back", 0, ME)),
        ("rmdir", lambda v: v.rmdir(_at(v, "d"), b"e", ME)),
    ]  # fmt: skip
