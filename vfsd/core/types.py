"""The plain types every layer speaks: attributes, callers, and what an operation takes and gives.

Owns no behaviour beyond construction. Must not know trio, the operating system, a clock or any backend.
Times are nanoseconds since the epoch (may be negative), sizes and offsets are bytes, names are bytes without
``/`` and NUL, ``mode`` has the type bits and ``perm`` is ``mode & 0o7777`` (POSIX <sys/stat.h>).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

NODE_BITS = 48
"""An ino is ``volume << NODE_BITS | node``: the kernel's number, unique in the mount."""

NODE_MASK = (1 << NODE_BITS) - 1
ROOT_NODE = 1
"""The node of a volume's root directory; with volume 0 also the kernel's FUSE_ROOT_ID."""

NAME_MAX = 255
"""Bytes in one name (POSIX NAME_MAX; what ext4 allows)."""

PATH_MAX = 4096
SYMLINK_MAX = 4095
"""Bytes in a symlink's target (Linux PATH_MAX less the NUL)."""

FILE_MAX = (1 << 44) - 4096
"""Largest file in bytes: ext4's limit with 4 KiB blocks (EFBIG above it)."""

XATTR_SIZE_MAX = 65536
"""Linux XATTR_SIZE_MAX: bytes in one extended attribute's value."""

LINK_MAX = 65000
"""Hard links to one node (ext4's EXT4_LINK_MAX)."""


class Attr(Protocol):
    """What stat(2) needs of one file; read it at once, it may be the live node.

    ``blocks`` counts 512-byte units actually allocated.
    """

    @property
    def ino(self) -> int: ...
    @property
    def mode(self) -> int: ...
    @property
    def nlink(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def rdev(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def atime_ns(self) -> int: ...
    @property
    def mtime_ns(self) -> int: ...
    @property
    def ctime_ns(self) -> int: ...


class Caller(NamedTuple):
    """Who asks: credentials, the door used, and for tools the tool's name and call id.

    ``approved``: what a rule wants a person to approve goes on at once (True), is refused at once (False), or waits.
    """

    uid: int
    gid: int
    pid: int = 0
    door: str = "fuse"
    tool: str = ""
    call_id: str = ""
    approved: bool | None = None


DAEMON = Caller(0, 0, 0, "daemon")
"""The daemon acting for itself."""


class SetAttr(NamedTuple):
    """The attributes a setattr changes; None leaves one as it is.

    ``clear_suid``: FATTR_KILL_SUIDGID, the kernel asks us to drop setuid and setgid with this change.
    """

    perm: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    clear_suid: bool = False


class StatFs(NamedTuple):
    """What statvfs(3) reports; ``blocks``, ``bfree``, ``bavail`` in units of ``frsize`` bytes."""

    bsize: int
    frsize: int
    blocks: int
    bfree: int
    bavail: int
    files: int
    ffree: int
    favail: int
    namemax: int = NAME_MAX


class DirEntry(NamedTuple):
    """One entry of a listing; ``offset`` is where readdir resumes after it."""

    name: bytes
    attr: Attr
    offset: int


class NotLoaded(Exception):
    """A plan met directory ``node`` (of its own volume) and its entry ``name``, or all its entries (None), are not in
    memory; load them and plan again."""

    def __init__(self, node: int, name: bytes | None = None) -> None:
        super().__init__(node, name)
        self.node = node
        self.name = name
