"""What we tell the kernel unasked, as bytes (include/uapi/linux/fuse.h, enum fuse_notify_code). Pure."""

from __future__ import annotations

import struct

NOTIFY_INVAL_INODE, NOTIFY_INVAL_ENTRY, NOTIFY_STORE = 2, 3, 4

_INVAL_INODE = struct.Struct("<IiQQqq")
_INVAL_ENTRY = struct.Struct("<IiQQII")
_STORE = struct.Struct("<IiQQQII")


def inval_inode(ino: int, offset: int, length: int) -> bytes:
    """Tells to drop ``ino``'s attributes and ``length`` bytes (0: all) of pages from ``offset`` (negative: none)."""
    return _INVAL_INODE.pack(_INVAL_INODE.size, NOTIFY_INVAL_INODE, 0, ino, offset, length)


def inval_entry(parent: int, name: bytes) -> bytes:
    """The notification that drops ``name`` in ``parent``, positive or negative."""
    size = _INVAL_ENTRY.size + len(name) + 1
    return _INVAL_ENTRY.pack(size, NOTIFY_INVAL_ENTRY, 0, parent, len(name), 0) + name + b"\0"


def store(ino: int, offset: int, data: bytes) -> bytes:
    """Puts bytes into the page cache; a file that ended before them ends with them."""
    return _STORE.pack(_STORE.size + len(data), NOTIFY_STORE, 0, ino, offset, len(data), 0) + data
