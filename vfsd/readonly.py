"""What volumes that only show something have in common: attributes made as they are asked for, and every refusal.

Must not know what is shown.
"""

from __future__ import annotations

import errno
from typing import Any, NamedTuple, NoReturn

from vfsd.core.plans import fail
from vfsd.core.types import Caller


class ShownAttr(NamedTuple):
    """Satisfies ``core.types.Attr``."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


class ReadOnlyVolume:
    """The part of the volume API that changes something or makes it durable: EROFS, and nothing to do."""

    inline = True
    sync_waits = False
    read_only = True

    def _refuse(self, *args: Any) -> NoReturn:
        raise fail(errno.EROFS)

    mknod = mkdir = symlink = link = unlink = rmdir = rename = setattr = setxattr = removexattr = _refuse
    write = replace = create_file = fallocate = copy_range = tmpfile = _refuse

    def birth_ns(self, ino: int) -> int | None:
        """Not known."""
        return None

    def flush(self, ino: int, fh: int, caller: Caller) -> None:
        """Nothing is held back."""

    async def fsync(self, ino: int, fh: int, datasync: bool) -> None:
        """What is shown is made durable by who owns it."""

    async def syncfs(self) -> None:
        """As ``fsync``."""

    async def maintain(self) -> None:
        """Nothing of its own to bound."""

    def close(self) -> None:
        """What is shown is somebody else's."""
