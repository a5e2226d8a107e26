"""Plans: what each operation would change, or the errno it must fail with.

Pure: a plan reads the tree, mutates nothing and asks no clock; ``now`` is in nanoseconds. It raises OSError with the
errno POSIX gives (XSH section 3; Linux man 2 where Linux says more) or NotLoaded when it met a directory that is not in
memory. Permission bits are not judged here: the kernel (default_permissions) or the path layer has done so.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from functools import cache

from vfsd.core import acl
from vfsd.core.changes import (
    Change,
    Dentry,
    Drop,
    Laid,
    NoDentry,
    Put,
    Reserve,
    Target,
    Write,
    Xattr,
    Zero,
    is_device,
)
from vfsd.core.tree import Node, Tree
from vfsd.core.types import DAEMON, FILE_MAX, LINK_MAX, NAME_MAX, SYMLINK_MAX, Caller, SetAttr

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4
RENAMES = (0, RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT, RENAME_WHITEOUT | RENAME_NOREPLACE)
"""What renameat2(2) may be asked; of the host's a local route passes on the same."""
FALLOC_KEEP_SIZE = 0x01
FALLOC_PUNCH_HOLE = 0x02
FALLOC_ZERO_RANGE = 0x10

_SUID_SGID = stat.S_ISUID | stat.S_ISGID


_text = cache(os.strerror)


def fail(code: int, name: bytes | None = None) -> OSError:
    """The OSError for an errno, naming what it is about."""
    return OSError(code, _text(code)) if name is None else OSError(code, _text(code), os.fsdecode(name))


def put(node: Node, now: int, *, nlink: int | None = None, size: int | None = None, modified: bool = False) -> Put:
    """The node as it is but for ``nlink`` and ``size``, changed (ctime) or modified (mtime too) at ``now``."""
    return Put(
        node.id,
        node.mode,
        node.nlink if nlink is None else nlink,
        node.uid,
        node.gid,
        node.extra,
        node.size if size is None else size,
        node.atime_ns,
        now if modified else node.mtime_ns,
        now,
    )


def check_name(name: bytes) -> None:
    """Raises ENAMETOOLONG, EINVAL or EEXIST for a name nothing can be created under."""
    if len(name) > NAME_MAX:
        raise fail(errno.ENAMETOOLONG, name)
    if name in (b".", b".."):
        raise fail(errno.EEXIST, name)
    if not name or b"/" in name or b"\0" in name:
        raise fail(errno.EINVAL, name)


def check_dir(node: Node) -> None:
    """Raises ENOTDIR, or ENOENT for a directory already removed (POSIX: no entry may be made in it)."""
    if not stat.S_ISDIR(node.mode):
        raise fail(errno.ENOTDIR)
    if not node.nlink:
        raise fail(errno.ENOENT)


def make(
    tree: Tree,
    parent: Node,
    name: bytes,
    mode: int,
    caller: Caller,
    now: int,
    *,
    rdev: int = 0,
    target: bytes | None = None,
    data: bytes | Laid | None = None,
    default: bytes | None = None,
) -> list[Change]:
    """A new node under ``name``: open(O_CREAT), mkdir, mknod, symlink. It gets number ``tree.next_node``.

    Group and setgid come from a setgid directory (Linux inode_init_owner), access control lists from ``default``, the
    parent's. Raises EEXIST, EMLINK and check_*'s errnos.
    """
    if len(name) > NAME_MAX or name in (b".", b"..", b"") or b"/" in name or b"\0" in name:
        check_name(name)
    if not parent.nlink or parent.children is None:
        check_dir(parent)
    if tree.child(parent, name) is not None:
        raise fail(errno.EEXIST, name)
    if target is not None and not 0 < len(target) <= SYMLINK_MAX:
        raise fail(errno.ENAMETOOLONG if target else errno.ENOENT, name)
    is_dir = mode & 0o170000 == 0o040000
    gid = caller.gid
    if parent.mode & stat.S_ISGID:
        gid = parent.gid
        if is_dir:
            mode |= stat.S_ISGID
    node = tree.next_node
    if is_dir and parent.nlink >= LINK_MAX:
        raise fail(errno.EMLINK, name)
    lists: list[Change] = []
    if default is not None and target is None:
        mode, lists = _inherit(node, mode, default)
    size = len(target or data or b"")
    changes: list[Change] = [Put(node, mode, 2 if is_dir else 1, caller.uid, gid, rdev, size, now, now, now), *lists]
    if target is not None:
        changes.append(Target(node, target))
    if data is not None:
        changes.append(Write(node, 0, data))
    changes.append(Dentry(parent.id, name, node))
    changes.append(put(parent, now, nlink=parent.nlink + 1 if is_dir else None, modified=True))
    return changes


def _inherit(node: int, mode: int, default: bytes) -> tuple[int, list[Change]]:
    """(mode, the lists) of a new node below a directory with a default list."""
    mode, access = acl.inherited(default, mode)
    lists: list[Change] = [] if access is None else [Xattr(node, acl.ACCESS, access)]
    if stat.S_ISDIR(mode):
        lists.append(Xattr(node, acl.DEFAULT, default))
    return mode, lists


def make_unlinked(
    tree: Tree, parent: Node, mode: int, caller: Caller, now: int, *, default: bytes | None = None
) -> list[Change]:
    """A regular file without a name (open(2) O_TMPFILE)."""
    check_dir(parent)
    gid = parent.gid if parent.mode & stat.S_ISGID else caller.gid
    mode, lists = (mode, []) if default is None else _inherit(tree.next_node, mode, default)
    return [Put(tree.next_node, mode, 0, caller.uid, gid, 0, 0, now, now, now), *lists]


def link(tree: Tree, node: Node, parent: Node, name: bytes, now: int) -> list[Change]:
    """A further link. Raises EPERM for a directory, EMLINK, EEXIST."""
    check_name(name)
    check_dir(parent)
    if stat.S_ISDIR(node.mode):
        raise fail(errno.EPERM, name)
    if tree.child(parent, name) is not None:
        raise fail(errno.EEXIST, name)
    if node.nlink >= LINK_MAX:
        raise fail(errno.EMLINK, name)
    return [
        Dentry(parent.id, name, node.id),
        put(node, now, nlink=node.nlink + 1),
        put(parent, now, modified=True),
    ]


def _unlinked(node: Node, now: int) -> list[Change]:
    """What becomes of a node that loses a link (a directory: its last)."""
    left = 0 if stat.S_ISDIR(node.mode) else node.nlink - 1
    if left or node.pins:
        return [put(node, now, nlink=left)]
    return [Drop(node.id)]


def unlink(tree: Tree, parent: Node, name: bytes, now: int) -> list[Change]:
    """unlink(2). Raises ENOENT, EISDIR (Linux; POSIX EPERM)."""
    check_dir(parent)
    node = tree.child(parent, name)
    if node is None:
        raise fail(errno.ENOENT, name)
    if stat.S_ISDIR(node.mode):
        raise fail(errno.EISDIR, name)
    return [NoDentry(parent.id, name, node.id), *_unlinked(node, now), put(parent, now, modified=True)]


def rmdir(tree: Tree, parent: Node, name: bytes, now: int) -> list[Change]:
    """rmdir(2). Raises ENOENT, ENOTDIR, ENOTEMPTY, EINVAL for ``.``."""
    check_dir(parent)
    if name in (b".", b".."):
        raise fail(errno.EINVAL if name == b"." else errno.ENOTEMPTY, name)
    node = tree.child(parent, name)
    if node is None:
        raise fail(errno.ENOENT, name)
    if not stat.S_ISDIR(node.mode):
        raise fail(errno.ENOTDIR, name)
    if not tree.is_empty(node):
        raise fail(errno.ENOTEMPTY, name)
    return [
        NoDentry(parent.id, name, node.id),
        *_unlinked(node, now),
        put(parent, now, nlink=parent.nlink - 1, modified=True),
    ]


def rename(
    tree: Tree,
    parent: Node,
    name: bytes,
    new_parent: Node,
    new_name: bytes,
    flags: int,
    now: int,
    caller: Caller = DAEMON,
) -> list[Change]:
    """rename(2) and renameat2(2), flags as in RENAMES; an empty list when both names are one file already.

    A whiteout left behind (the device 0:0 of no mode, Linux vfs_whiteout) is ``caller``'s. Raises ENOENT, EEXIST,
    EISDIR, ENOTDIR, ENOTEMPTY, EMLINK, EINVAL (into itself, unknown flags).
    """
    if flags not in RENAMES:
        raise fail(errno.EINVAL, name)
    check_dir(parent)
    check_dir(new_parent)
    for n in (name, new_name):
        if n in (b".", b".."):
            raise fail(errno.EBUSY, n)
        check_name(n)
    node = tree.child(parent, name)
    if node is None:
        raise fail(errno.ENOENT, name)
    other = tree.child(new_parent, new_name)
    if other is None and flags == RENAME_EXCHANGE:
        raise fail(errno.ENOENT, new_name)
    if other is not None and flags & RENAME_NOREPLACE:
        raise fail(errno.EEXIST, new_name)
    if stat.S_ISDIR(node.mode) and tree.is_within(new_parent, node):
        raise fail(errno.EINVAL, name)
    if other is node:
        return []
    if flags == RENAME_EXCHANGE:
        assert other is not None
        return _exchange(tree, parent, name, node, new_parent, new_name, other, now)
    changes = _move(tree, parent, name, node, new_parent, new_name, other, now)
    if flags & RENAME_WHITEOUT:
        left, gid = tree.next_node, parent.gid if parent.mode & stat.S_ISGID else caller.gid
        changes.append(Put(left, stat.S_IFCHR, 1, caller.uid, gid, 0, 0, now, now, now))
        changes.append(Dentry(parent.id, name, left))
    return changes


def _exchange(
    tree: Tree, parent: Node, name: bytes, node: Node, new_parent: Node, new_name: bytes, other: Node, now: int
) -> list[Change]:
    if stat.S_ISDIR(other.mode) and tree.is_within(parent, other):
        raise fail(errno.EINVAL, new_name)
    shift = int(stat.S_ISDIR(node.mode)) - int(stat.S_ISDIR(other.mode))
    changes: list[Change] = [
        Dentry(parent.id, name, other.id),
        Dentry(new_parent.id, new_name, node.id),
        put(node, now),
        put(other, now),
    ]
    if parent is new_parent:
        changes.append(put(parent, now, modified=True))
    else:
        changes.append(put(parent, now, nlink=parent.nlink - shift, modified=True))
        changes.append(put(new_parent, now, nlink=new_parent.nlink + shift, modified=True))
    return changes


def _move(
    tree: Tree, parent: Node, name: bytes, node: Node, new_parent: Node, new_name: bytes, other: Node | None, now: int
) -> list[Change]:
    is_dir = stat.S_ISDIR(node.mode)
    changes: list[Change] = [NoDentry(parent.id, name, node.id)]
    if other is not None:
        if stat.S_ISDIR(other.mode):
            if not is_dir:
                raise fail(errno.EISDIR, new_name)
            if not tree.is_empty(other):
                raise fail(errno.ENOTEMPTY, new_name)
        elif is_dir:
            raise fail(errno.ENOTDIR, new_name)
        changes.append(NoDentry(new_parent.id, new_name, other.id))
        changes += _unlinked(other, now)
    changes.append(Dentry(new_parent.id, new_name, node.id))
    changes.append(put(node, now))
    lost = 1 if is_dir else 0
    gained = lost - (1 if other is not None and stat.S_ISDIR(other.mode) else 0)
    if parent is new_parent:
        changes.append(put(parent, now, nlink=parent.nlink - lost + gained, modified=True))
    else:
        if gained > 0 and new_parent.nlink >= LINK_MAX:
            raise fail(errno.EMLINK, new_name)
        changes.append(put(parent, now, nlink=parent.nlink - lost, modified=True))
        changes.append(put(new_parent, now, nlink=new_parent.nlink + gained, modified=True))
    return changes


def setattr(node: Node, to: SetAttr, now: int, *, member: bool = True, access: bytes | None = None) -> list[Change]:
    """chmod, chown, truncate and utimensat in one. Raises EISDIR, EINVAL, EFBIG.

    ``access``: the node's access control list, which a chmod changes too.

    A chown of anything but a directory drops setuid, and setgid where the group may execute or the caller is no
    ``member`` of it (Linux chown_common); without FUSE_HANDLE_KILLPRIV the kernel asks for that itself with ``perm``.
    """
    mode, size = node.mode, node.size
    changes: list[Change] = []
    if to.perm is not None:
        mode = stat.S_IFMT(mode) | (to.perm & 0o7777)
        if access is not None:
            changes.append(Xattr(node.id, acl.ACCESS, acl.changed(access, mode)))
    elif to.clear_suid or ((to.uid is not None or to.gid is not None) and not stat.S_ISDIR(mode)):
        mode = without_suid(mode, member)
    mtime = node.mtime_ns
    if to.size is not None:
        changes += resize(node, to.size)
        size, mtime = to.size, now
    changes.append(
        Put(
            node.id,
            mode,
            node.nlink,
            node.uid if to.uid is None else to.uid,
            node.gid if to.gid is None else to.gid,
            node.extra if to.atime_ns is None or is_device(mode) else node.extra or node.atime_ns,
            size,
            node.atime_ns if to.atime_ns is None else _clamp(to.atime_ns),
            mtime if to.mtime_ns is None else _clamp(to.mtime_ns),
            now if to.ctime_ns is None else to.ctime_ns,
        )
    )
    return changes


def _clamp(time_ns: int) -> int:
    """The nearest time that fits 64 bits (years 1678 to 2262), as a file system with its own limits does."""
    return max(-(1 << 63), min(time_ns, (1 << 63) - 1))


def in_group(gid: int, caller: Caller) -> bool:
    """Whether setgid without group execution may stay (Linux in_group_or_capable, 6.2).

    A request names one group of the caller, so that a member by another group is taken for a stranger.
    """
    return caller.uid == 0 or caller.gid == gid


def without_suid(mode: int, member: bool) -> int:
    """The mode less setuid and setgid (Linux setattr_should_drop_suidgid); ``member`` as ``in_group`` says.

    A directory keeps both; there they mean something else.
    """
    if stat.S_ISDIR(mode):
        return mode
    drop = stat.S_ISUID if member and not mode & stat.S_IXGRP else _SUID_SGID
    return mode & ~drop


def resize(node: Node, size: int) -> list[Change]:
    """What truncating a regular file to ``size`` does to its bytes. Raises EISDIR, EINVAL, EFBIG."""
    if stat.S_ISDIR(node.mode):
        raise fail(errno.EISDIR)
    if not stat.S_ISREG(node.mode) or size < 0:
        raise fail(errno.EINVAL)
    if size > FILE_MAX:
        raise fail(errno.EFBIG)
    if size < node.size:
        return [Zero(node.id, size, None)]
    return [Zero(node.id, node.size, size)] if size > node.size else []


def write(
    node: Node,
    offset: int,
    data: bytes | bytearray | memoryview,
    now: int,
    *,
    clear_suid: bool,
    member: bool = True,
) -> list[Change]:
    """pwrite(2); the data must not reach past FILE_MAX (EFBIG)."""
    end = offset + len(data)
    if end > FILE_MAX:
        raise fail(errno.EFBIG)
    size = node.size
    changes: list[Change] = [Write(node.id, offset, data)]
    if offset > size:
        changes.insert(0, Zero(node.id, size, offset))
    mode = without_suid(node.mode, member) if clear_suid else node.mode
    changes.append(
        Put(
            node.id,
            mode,
            node.nlink,
            node.uid,
            node.gid,
            node.extra,
            end if end > size else size,
            node.atime_ns,
            now,
            now,
        )
    )
    return changes


def replace(node: Node, data: bytes | bytearray | memoryview | Laid, now: int) -> list[Change]:
    """The whole content anew, in other blocks than the old, so that a crash shows one or the other."""
    if stat.S_ISDIR(node.mode):
        raise fail(errno.EISDIR)
    if not stat.S_ISREG(node.mode):
        raise fail(errno.EINVAL)
    if len(data) > FILE_MAX:
        raise fail(errno.EFBIG)
    changes: list[Change] = [Zero(node.id, 0, None)] if node.size else []
    changes.append(Write(node.id, 0, data))
    changes.append(put(node, now, size=len(data), modified=True))
    return changes


def fallocate(node: Node, mode: int, offset: int, length: int, now: int) -> list[Change]:
    """fallocate(2): reserve, KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE; EOPNOTSUPP for other modes, EINVAL, EFBIG, ENODEV."""
    if not stat.S_ISREG(node.mode):
        raise fail(errno.ENODEV)
    if offset < 0 or length <= 0:
        raise fail(errno.EINVAL)
    end = offset + length
    if end > FILE_MAX:
        raise fail(errno.EFBIG)
    punch, zero = mode & FALLOC_PUNCH_HOLE, mode & FALLOC_ZERO_RANGE
    if mode & ~(FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE) or (punch and zero):
        raise fail(errno.EOPNOTSUPP)
    if punch and not mode & FALLOC_KEEP_SIZE:
        raise fail(errno.EOPNOTSUPP)
    size = node.size
    grown = end if end > size and not mode & FALLOC_KEEP_SIZE else size
    changes: list[Change] = []
    if (punch or zero) and offset < size:
        changes.append(Zero(node.id, offset, min(end, size)))
    if grown > size:
        changes.append(Zero(node.id, size, grown))
    if not punch:
        changes.append(Reserve(node.id, offset, end))
    # Any mode is a modification, as file_modified() has it (Linux 5.17 on).
    changes.append(put(node, now, size=grown, modified=True))
    return changes


def forget(nodes: Sequence[Node]) -> list[Change]:
    """Unlinked nodes whose last pin has gone."""
    return [Drop(node.id) for node in nodes if not node.nlink]
