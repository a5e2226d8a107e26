"""A small session of every kind of change, one commit a step, the same in every run."""

from __future__ import annotations

import stat
from collections.abc import Callable
from typing import Any

from makers import ROOT

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
        ("mkdir", lambda v: v.mkdir(v.root_ino, b"d", 0o755, ROOT)),
        ("create with content", lambda v: v.create_file(v.root_ino, b"f", 0o644, b"first " * 1000, ROOT)),
        ("create another", lambda v: v.create_file(_at(v, "d"), b"g", 0o600, b"g" * 20_000, ROOT)),
        ("write in place", lambda v: v.write(_at(v, "f"), 0, 100, b"in place", ROOT)),
        ("append", lambda v: v.write(_at(v, "f"), 0, 0, b"a" * 5000, ROOT, True)),
        ("write far", lambda v: v.write(_at(v, "f"), 0, 100_000, b"far", ROOT)),
        ("replace", lambda v: v.replace(_at(v, "d/g"), b"anew " * 2000, ROOT)),
        ("truncate", lambda v: v.setattr(_at(v, "f"), SetAttr(size=6001), ROOT)),
        ("grow", lambda v: v.setattr(_at(v, "f"), SetAttr(size=9000), ROOT)),
        ("symlink", lambda v: v.symlink(_at(v, "d"), b"l", b"../f", ROOT)),
        ("link", lambda v: v.link(_at(v, "f"), _at(v, "d"), b"hard", ROOT)),
        ("mkdir below", lambda v: v.mkdir(_at(v, "d"), b"e", 0o755, ROOT)),
        ("rename", lambda v: v.rename(v.root_ino, b"f", _at(v, "d/e"), b"moved", 0, ROOT)),
        ("rename over", lambda v: v.rename(_at(v, "d"), b"g", _at(v, "d"), b"hard", 0, ROOT)),
        ("exchange", lambda v: v.rename(_at(v, "d"), b"l", _at(v, "d/e"), b"moved", 2, ROOT)),
        ("setxattr", lambda v: v.setxattr(_at(v, "d"), b"user.a", b"1" * 100, 0, ROOT)),
        ("setxattr again", lambda v: v.setxattr(_at(v, "d"), b"user.b", b"2", 0, ROOT)),
        ("removexattr", lambda v: v.removexattr(_at(v, "d"), b"user.a", ROOT)),
        ("reserve", lambda v: v.fallocate(_at(v, "d/hard"), 0, 0, 0, 50_000, ROOT)),
        ("punch", lambda v: v.fallocate(_at(v, "d/hard"), 0, 3, 4096, 8192, ROOT)),
        ("chmod", lambda v: v.setattr(_at(v, "d/hard"), SetAttr(perm=0o4755, mtime_ns=-5), ROOT)),
        ("fifo", lambda v: v.mknod(v.root_ino, b"p", stat.S_IFIFO | 0o600, 0, ROOT)),
        ("unlink", lambda v: v.unlink(_at(v, "d"), b"l", ROOT)),
        ("unlink the fifo", lambda v: v.unlink(v.root_ino, b"p", ROOT)),
        ("use freed space", lambda v: v.create_file(v.root_ino, b"h", 0o644, b"h" * 30_000, ROOT)),
        ("unlink large", lambda v: v.unlink(v.root_ino, b"h", ROOT)),
        ("rename back", lambda v: v.rename(_at(v, "d/e"), b"moved", v.root_ino, b"back", 0, ROOT)),
        ("rmdir", lambda v: v.rmdir(_at(v, "d"), b"e", ROOT)),
    ]  # fmt: skip
