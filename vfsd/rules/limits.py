"""What a change brings: how much a volume would grow by it, and what a hook is shown. Must not know rules."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vfsd.core.plans import RENAME_WHITEOUT
from vfsd.core.types import NODE_BITS, Caller
from vfsd.rules.hooks import DATA_MAX, Mutation

if TYPE_CHECKING:
    from vfsd.vfs import Vfs

_BLOCK = 4096
_MAKES = frozenset(("mknod", "mkdir", "symlink", "create_file", "create", "tmpfile"))
_PUNCH_HOLE = 2


def growth(vfs: Vfs, op: str, ino: int, args: tuple[Any, ...]) -> tuple[int, int]:
    """(files, bytes of contents) more than now, at most. A hole that is filled counts as if all of it were."""
    if op in _MAKES:
        new = op == "tmpfile" or vfs.peek(ino, args[0]) is None
        return int(new), _whole(len(args[2])) if op == "create_file" else 0
    if op == "rename":
        return int(bool(args[3] & RENAME_WHITEOUT)), 0
    if op == "write":
        return 0, _written(vfs, ino, args[1], len(args[2]), bool(args[4]))
    if op == "copy_range":
        return 0, _written(vfs, args[2], args[4], args[5], False)
    if op == "replace":
        return 0, _whole(len(args[0])) - _held(vfs, ino)
    if op == "fallocate" and not args[1] & _PUNCH_HOLE:
        return 0, _written(vfs, ino, args[2], args[3], False)
    return 0, 0


def _whole(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _attr(vfs: Vfs, ino: int) -> Any:
    return vfs.table.volumes[ino >> NODE_BITS].getattr(ino)


def _held(vfs: Vfs, ino: int) -> int:
    return int(_attr(vfs, ino).blocks) * 512


def _written(vfs: Vfs, ino: int, offset: int, length: int, append: bool) -> int:
    attr = _attr(vfs, ino)
    held, size = attr.blocks * 512, int(attr.size)
    end = (size if append else offset) + length
    if held >= _whole(size):
        return max(0, _whole(end) - int(held))
    return _whole(length)


def mutation_of(op: str, caller: Caller, args: tuple[Any, ...], paths: list[bytes]) -> Mutation:
    """What a hook is called with."""
    data = args[2] if op in ("write", "create_file") else args[0] if op == "replace" else None
    size = None if data is None else len(data)
    shown = bytes(data) if data is not None and len(data) <= DATA_MAX else None
    offset = args[1] if op == "write" else 0
    return Mutation(op, tuple(os.fsdecode(path) for path in paths), caller, size, offset, shown)
