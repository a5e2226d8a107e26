"""POSIX access control lists (POSIX 1003.1e draft 17, acl(5)): what they grant, what becomes of them, and of the mode.

Pure. A list is the value of an extended attribute as Linux lays it out (uapi/linux/posix_acl_xattr.h): version 2 and
entries of tag, permissions and id. The three entries a mode has too (owner, group or mask, others) are always the
mode's; a list that says no more than the mode is not kept at all.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Final

ACCESS: Final = b"system.posix_acl_access"
"""The list of the file itself."""
DEFAULT: Final = b"system.posix_acl_default"
"""Of a directory: the list that what is made in it begins with."""
NAMES: Final = (ACCESS, DEFAULT)

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_ORDER = (USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER)
_NO_ID = 0xFFFFFFFF
_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")

Entry = tuple[int, int, int]
"""(tag, permissions 0 to 7, uid or gid)"""


def parse(value: bytes) -> list[Entry]:
    """The entries of a valid list, none for an empty one. Raises EINVAL (Linux posix_acl_valid), EOPNOTSUPP."""
    if len(value) < 4:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if value[:4] != _VERSION:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    if len(value) % _ENTRY.size != 4:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    entries = [(tag, perm, who if tag in (USER, GROUP) else _NO_ID) for tag, perm, who in _ENTRY.iter_unpack(value[4:])]
    if entries and not _is_valid(entries):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return entries


def _is_valid(entries: list[Entry]) -> bool:
    tags = [tag for tag, _, _ in entries]
    if not set(tags).issubset(_ORDER) or any(perm > 7 for _, perm, _ in entries):
        return False
    named = USER in tags or GROUP in tags
    once = all(tags.count(tag) == 1 for tag in (USER_OBJ, GROUP_OBJ, OTHER)) and tags.count(MASK) <= 1
    known = all(who != _NO_ID for tag, _, who in entries if tag in (USER, GROUP))
    return once and known and (MASK in tags or not named) and tags == sorted(tags, key=_ORDER.index)


def pack(entries: list[Entry]) -> bytes:
    """The reverse of ``parse``."""
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in entries)


def mode_of(entries: list[Entry], mode: int) -> int:
    """``mode`` with the permissions the list has for owner, mask (group where there is none) and others."""
    perms = {tag: perm for tag, perm, _ in entries}
    group = perms.get(MASK, perms[GROUP_OBJ])
    return mode & ~0o777 | perms[USER_OBJ] << 6 | group << 3 | perms[OTHER]


def is_plain(entries: list[Entry]) -> bool:
    """Whether a mode says as much (Linux posix_acl_equiv_mode)."""
    return len(entries) == 3


def changed(value: bytes, mode: int) -> bytes:
    """The list after a chmod to ``mode`` (Linux posix_acl_chmod)."""
    entries = parse(value)
    group = MASK if any(tag == MASK for tag, _, _ in entries) else GROUP_OBJ
    perms = {USER_OBJ: mode >> 6 & 7, group: mode >> 3 & 7, OTHER: mode & 7}
    return pack([(tag, perms.get(tag, perm), who) for tag, perm, who in entries])


def inherited(default: bytes, mode: int) -> tuple[int, bytes | None]:
    """(mode, list or None where the mode says it all) of what is made with ``mode`` below a directory's ``default``.

    Whatever ``mode`` does not grant is taken from the list, and the umask has no part in it (Linux posix_acl_create).
    """
    entries = parse(default)
    group = MASK if any(tag == MASK for tag, _, _ in entries) else GROUP_OBJ
    limits = {USER_OBJ: mode >> 6 & 7, group: mode >> 3 & 7, OTHER: mode & 7}
    entries = [(tag, perm & limits.get(tag, 7), who) for tag, perm, who in entries]
    return mode_of(entries, mode), None if is_plain(entries) else pack(entries)


def grants(value: bytes, uid: int, gid: int, owner: int, group: int, bits: int) -> bool:
    """Whether the list of a file of ``owner`` and ``group`` gives a caller ``bits`` (Linux posix_acl_permission)."""
    entries = parse(value)
    mask = next((perm for tag, perm, _ in entries if tag == MASK), 7)
    in_a_group = False
    for tag, perm, who in entries:
        if tag == USER_OBJ and uid == owner:
            return perm & bits == bits
        if tag == USER and uid == who:
            return perm & mask & bits == bits
        if (tag == GROUP_OBJ and gid == group) or (tag == GROUP and gid == who):
            in_a_group = True
            if perm & mask & bits == bits:
                return True
        if tag == OTHER:
            return not in_a_group and perm & bits == bits
    return False
