"""Extended attributes: which names there are, and the plans of setting and removing one (xattr(7)).

Pure, as ``plans`` are. POSIX access control lists are extended attributes that go together with the mode.
"""

from __future__ import annotations

import errno
import stat

from vfsd.core import acl
from vfsd.core.changes import Change, Xattr
from vfsd.core.plans import fail, put
from vfsd.core.tree import Node
from vfsd.core.types import NAME_MAX, XATTR_SIZE_MAX

XATTR_CREATE = 1
XATTR_REPLACE = 2
_NAMESPACES = (b"user.", b"trusted.", b"security.")
"""Those without ``system.``, in which there are access control lists and nothing else."""


def unfit(name: bytes) -> int:
    """The errno for a name no volume keeps an extended attribute under, 0 for all others."""
    if not name or b"\0" in name or name in _NAMESPACES:
        return errno.EINVAL
    return 0 if name.startswith(_NAMESPACES) or name in acl.NAMES else errno.EOPNOTSUPP


def setxattr(node: Node, present: dict[bytes, bytes], name: bytes, value: bytes, flags: int, now: int) -> list[Change]:
    """setxattr(2). Raises EEXIST, ENODATA, ERANGE, E2BIG, EINVAL.

    An access control list sets the mode too, and is not kept when that says it all (Linux posix_acl_update_mode);
    EOPNOTSUPP for a symlink's, EACCES for a default one of anything but a directory.
    """
    if not name or len(name) > NAME_MAX:
        raise fail(errno.ERANGE, name)
    if len(value) > XATTR_SIZE_MAX:
        raise fail(errno.E2BIG, name)
    if flags & ~(XATTR_CREATE | XATTR_REPLACE):
        raise fail(errno.EINVAL, name)
    if flags & XATTR_CREATE and name in present:
        raise fail(errno.EEXIST, name)
    if flags & XATTR_REPLACE and name not in present:
        raise fail(errno.ENODATA, name)
    after = put(node, now)
    if name in acl.NAMES:
        if stat.S_ISLNK(node.mode):
            raise fail(errno.EOPNOTSUPP, name)
        if name == acl.DEFAULT and not stat.S_ISDIR(node.mode):
            raise fail(errno.EACCES, name)
        entries = acl.parse(value)
        kept = bool(entries)
        if entries and name == acl.ACCESS:
            after, kept = after._replace(mode=acl.mode_of(entries, node.mode)), not acl.is_plain(entries)
        if not kept:
            return [Xattr(node.id, name, None), after] if name in present else [after]
    return [Xattr(node.id, name, value), after]


def removexattr(node: Node, present: dict[bytes, bytes], name: bytes, now: int) -> list[Change]:
    """removexattr(2). Raises ENODATA, but not for an access control list: taking away none is nothing to do."""
    if name not in present:
        if name in acl.NAMES:
            return []
        raise fail(errno.ENODATA, name)
    return [Xattr(node.id, name, None), put(node, now)]
