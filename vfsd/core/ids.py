"""User and group ids on both sides of a mount: the host's that programs have, the tree's that files are kept with.

Pure. As idmapped mounts have it (mount_setattr(2)): ranges of equal length, and an id in none of them is nobody's.
"""

from __future__ import annotations

import errno
import itertools
import os
from typing import NamedTuple

from vfsd.core import acl
from vfsd.core.types import Caller, SetAttr

NO_ID = 0xFFFFFFFF
"""What the kernel takes for no id (INVALID_UID): shown as 65534, and no program ever has it."""
NOBODY = 65534


class Range(NamedTuple):
    """``length`` ids: from ``host`` on the host's side, from ``tree`` on the tree's."""

    host: int
    tree: int
    length: int


def parse(text: str) -> Range:
    """``HOST:TREE[:COUNT]``; ValueError for anything else."""
    parts = text.split(":")
    if not 2 <= len(parts) <= 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{text!r}: write it as HOST:TREE[:COUNT], such as 1000:0 or 100000:0:65536")
    host, tree, count = map(int, (*parts, "1") if len(parts) == 2 else parts)
    if not count or max(host, tree) + count > NO_ID:
        raise ValueError(f"{text!r}: ids go from 0 to {NO_ID - 1}, and a range has at least one")
    return Range(host, tree, count)


def check(ranges: tuple[Range, ...]) -> None:
    """ValueError when an id would have two."""
    for side in ("host", "tree"):
        spans = sorted((getattr(r, side), getattr(r, side) + r.length) for r in ranges)
        for (_, end), (begin, _) in itertools.pairwise(spans):
            if begin < end:
                raise ValueError(f"{side} id {begin} is mapped twice")


class Ids:
    """Both maps; without ranges every id is itself."""

    def __init__(self, uids: tuple[Range, ...] = (), gids: tuple[Range, ...] = ()) -> None:
        self._uids, self._gids = uids, gids

    def uid_in(self, uid: int) -> int:
        """The tree's for the host's, NO_ID where there is none."""
        return _mapped(self._uids, uid, True)

    def gid_in(self, gid: int) -> int:
        return _mapped(self._gids, gid, True)

    def uid_out(self, uid: int) -> int:
        """The host's for the tree's, NO_ID where there is none."""
        return _mapped(self._uids, uid, False)

    def gid_out(self, gid: int) -> int:
        return _mapped(self._gids, gid, False)

    def caller_in(self, caller: Caller) -> Caller:
        return caller._replace(uid=self.uid_in(caller.uid), gid=self.gid_in(caller.gid))

    def setattr_in(self, to: SetAttr) -> SetAttr:
        """EINVAL for an owner the tree can't have (chown(2) on an idmapped mount)."""
        uid = None if to.uid is None else self.uid_in(to.uid)
        gid = None if to.gid is None else self.gid_in(to.gid)
        if NO_ID in (uid, gid):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return to._replace(uid=uid, gid=gid)

    def acl_in(self, value: bytes) -> bytes:
        """An access control list as the tree keeps it; EINVAL for an id the tree can't have."""
        entries = [(t, perm, self._acl_id(t, who, True)) for t, perm, who in acl.parse(value)]
        if any(t in (acl.USER, acl.GROUP) and who == NO_ID for t, _, who in entries):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return acl.pack(entries)

    def acl_out(self, value: bytes) -> bytes:
        """The same as the host sees it; entries of ids that it has not are left out, the mask stays."""
        entries = [(t, perm, self._acl_id(t, who, False)) for t, perm, who in acl.parse(value)]
        return acl.pack([e for e in entries if e[0] not in (acl.USER, acl.GROUP) or e[2] != NO_ID])

    def _acl_id(self, tag: int, who: int, inward: bool) -> int:
        ranges = self._uids if tag == acl.USER else self._gids if tag == acl.GROUP else ()
        return _mapped(ranges, who, inward)


def _mapped(ranges: tuple[Range, ...], one: int, inward: bool) -> int:
    if not ranges:
        return one
    for host, tree, count in ranges:
        begin, other = (host, tree) if inward else (tree, host)
        if begin <= one < begin + count:
            return one - begin + other
    return NO_ID


def squashed(caller: Caller) -> Caller:
    """The caller, nobody in root's place (exports(5), root_squash)."""
    return caller if caller.uid else caller._replace(uid=NOBODY, gid=NOBODY)
