"""What must change for a volume to be as it was at a checkpoint: the plan of a restore.

Pure but for reading the past: mutates nothing. The plan is one list of changes, so that a restore is one commit for the
journal, the kernel's caches and everyone who listens. A file that is open and would change gets a new node, so that who
has it open keeps the old content; one open for writing refuses the restore.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from vfsd.backends.base import Stored
from vfsd.backends.history import NOW, Extents, Past, Touched
from vfsd.core.changes import Change, Content, Dentry, Drop, NoDentry, Put, Target, Write, Xattr


class Rewind:
    """``then`` and ``now`` are the volume at the checkpoint and as of the last fold, which must be of this moment.

    ``is_open`` gives True for a node that is open for writing, False for one open else, or None; ``is_pinned`` tells of
    a node the kernel or a handle holds; ``next_node`` is the first free number; ``read`` gives bytes by extents, offset
    and length.
    """

    def __init__(
        self,
        then: Past,
        now: Past,
        is_open: Callable[[int], bool | None],
        is_pinned: Callable[[int], bool],
        next_node: int,
        time_ns: int,
        read: Callable[[Extents, int, int], bytes],
    ) -> None:
        assert now.epoch == NOW
        self._then = then
        self._now = now
        self._is_open = is_open
        self._is_pinned = is_pinned
        self._next = next_node
        self._time = time_ns
        self._read = read
        self._moved: dict[int, int] = {}
        self._puts: list[Change] = []
        self._gone: list[Change] = []

    def changes(self, touched: Touched) -> list[Change]:
        """The plan. Raises OSError(EBUSY, sentence, path) when a file that would change is open for writing."""
        for node in sorted(touched.nodes):
            self._node(node)
        dentries = set(touched.dentries)
        for node in self._moved:
            dentries.update(self._then.links(node))
        removed: list[Change] = []
        added: list[Change] = []
        for parent, name in sorted(dentries):
            before, after = self._now.child(parent, name), self._then.child(parent, name)
            after = self._moved.get(after, after) if after is not None else None
            if before == after:
                continue
            if before is not None:
                removed.append(NoDentry(parent, name, before))
            if after is not None:
                added.append(Dentry(parent, name, after))
        return [*self._puts, *removed, *added, *self._gone]

    def _node(self, node: int) -> None:
        then, now = self._then.node(node), self._now.node(node)
        lives = now is not None and now.nlink > 0
        if then is None or then.nlink == 0:
            if lives:
                assert now is not None
                self._remove(now)
            return
        changed = now is None or not lives or self._content_differs(then, now)
        if stat.S_ISREG(then.mode) and changed and self._is_open(node) is not None:
            if lives:
                assert now is not None
                self._refuse_writer(node)
                self._put(now, node, nlink=0)
            fresh, self._next = self._next, self._next + 1
            self._moved[node] = fresh
            self._bring_back(then, fresh, None)
        else:
            self._bring_back(then, node, now if lives or self._is_pinned(node) else None)

    def _content_differs(self, then: Stored, now: Stored) -> bool:
        return then.size != now.size or self._then.map(then.node) != self._now.map(now.node)

    def _refuse_writer(self, node: int) -> None:
        if self._is_open(node):
            path = self._now.path(node) or b"a file without a name"
            raise OSError(errno.EBUSY, "it is open for writing and the restore would change it", os.fsdecode(path))

    def _remove(self, now: Stored) -> None:
        if stat.S_ISREG(now.mode):
            self._refuse_writer(now.node)
        if self._is_pinned(now.node):
            self._put(now, now.node, nlink=0)
        else:
            self._gone.append(Drop(now.node))

    def _put(self, s: Stored, node: int, nlink: int) -> None:
        self._puts.append(Put(node, s.mode, nlink, s.uid, s.gid, s.extra, s.size, s.atime_ns, s.mtime_ns, self._time))

    def _bring_back(self, then: Stored, node: int, now: Stored | None) -> None:
        """Make ``node`` what ``then`` was; ``now`` is what it is, None when it is to be made."""
        # Its time of change apart, which no one can set, it may be as it was already: after a restore, say.
        if now is None or then._replace(ctime_ns=now.ctime_ns) != now:
            self._put(then, node, then.nlink)
        if then.target is not None and (now is None or now.target != then.target):
            self._puts.append(Target(node, then.target))
        was, has = self._then.xattrs(then.node), self._now.xattrs(node) if now is not None else {}
        for name in sorted(was.keys() | has.keys()):
            if was.get(name) != has.get(name):
                self._puts.append(Xattr(node, name, was.get(name)))
        extents = self._then.map(then.node)
        if node != then.node:
            # The file left open keeps its blocks, and a block is one file's: the new one gets its own.
            for offset, length, _, _ in extents:
                length = min(length, then.size - offset)
                if length > 0:
                    self._puts.append(Write(node, offset, self._read(extents, offset, length)))
        elif extents != (self._now.map(node) if now is not None else []):
            self._puts.append(Content(node, extents))
