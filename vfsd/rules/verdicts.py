"""Verdicts on paths and inodes, remembered: what the layers of rules say of them, all links of a file considered.

Owns the way from an inode to its paths, and the memory of verdicts. Must not know operations or callers. Invariants:
the strictest verdict of all layers and of all known links counts; nothing remembered outlives a move or other rules,
but the last name of a file that has none any more.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from vfsd.core.changes import Drop, NoDentry
from vfsd.core.policy import ALLOW, DENY, INTERRUPT, READ, WRITE, Policy, Rule
from vfsd.core.types import NODE_BITS, NODE_MASK
from vfsd.feed import Commit
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume

PAST = b"/.checkpoints/"
"""Below it, after the checkpoint's name, a path is judged as what it is in the tree, too."""

_CACHED = 1 << 16
_NAMELESS = 1024
"""Files without a name that are remembered before those that are no more are forgotten."""

READ_DENY, READ_ASK, WRITE_DENY, WRITE_ASK, HIDDEN = 2, 1, 8, 4, 16
READS, WRITES = READ_DENY | READ_ASK, WRITE_DENY | WRITE_ASK

"""Bits of a verdict."""


Mute = Callable[[bytes], bool]
"""Whether it is plain to see that no rule says anything of a name in its directory."""


class Layer(NamedTuple):
    """The rules of one ``owner`` (the configuration, a client); ``hide``: listings leave out what may not be read.

    ``waits``: what they want approved waits for it; else it is refused, and may come again with a yes.
    """

    policy: Policy
    hide: bool = False
    waits: bool = True


class Verdicts:
    """What ``layers`` say of the tree ``vfs``."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs
        self._volumes = vfs.table.volumes
        self.layers: dict[str, Layer] = {}
        self._paths: dict[bytes, int] = {}
        self._inos: dict[int, int] = {}
        self._directories: dict[int, bytes] = {}
        self._mute: dict[int, Mute] = {}
        self._among: dict[bytes, list[Layer]] = {}
        self._last: dict[int, bytes] = {}
        self._last_max = _NAMELESS
        vfs.feed.subscribe(self._committed, shell=False)

    def forget(self) -> None:
        self._paths.clear()
        self._among.clear()
        self.moved()

    def moved(self, *, directories: bool = True) -> None:
        """Paths may have changed, those of directories too."""
        self._inos.clear()
        if directories:
            self._directories.clear()
            self._mute.clear()

    def _committed(self, commit: Commit) -> None:
        """What a restore or a store's news changes does not pass the funnels."""
        if all(type(change) is Drop for change in commit.changes):  # of what had no name any more
            return
        told = commit.caller.door == "daemon" or commit.op in ("restore", "rename", "link")
        if told or any(type(change) is NoDentry for change in commit.changes):
            self.moved()

    def of_path(self, path: bytes) -> int:
        """The verdicts of a path as bits."""
        bits = self._paths.get(path)
        if bits is None:
            bits = 0
            for layer in self._layers_in(path.rpartition(b"/")[0]):
                read, write = layer.policy.judge(READ, path), layer.policy.judge(WRITE, path)
                bits = _strictest(bits, read | write << 2 | (HIDDEN if layer.hide and read == DENY else 0))
            if path.startswith(PAST):
                inside = path[len(PAST) :].partition(b"/")[2]
                bits = _strictest(bits, self.of_path(b"/" + inside))
            if len(self._paths) >= _CACHED:
                self._paths.clear()
            self._paths[path] = bits
        return bits

    def _layers_in(self, directory: bytes) -> list[Layer]:
        """The layers with what of their rules can match an entry of the directory."""
        found = self._among.get(directory)
        if found is None:
            layers = [layer._replace(policy=layer.policy.among(directory)) for layer in self.layers.values()]
            found = [layer for layer in layers if layer.policy.rules]
            if len(self._among) >= _CACHED:
                self._among.clear()
            self._among[directory] = found
        return found

    def _is_mute(self, directory: int, name: bytes) -> bool:
        """Whether it is plain to see that no rule says anything of an entry."""
        mute = self._mute.get(directory)
        return (self._mute_in(directory) if mute is None else mute)(name)

    def _mute_in(self, directory: int) -> Mute:
        path = self._directory(directory)
        mute: Mute = _never
        if path is not None and not path.startswith(PAST):
            layers = [layer.policy.mute for layer in self._layers_in(path)]
            mute = layers[0] if len(layers) == 1 else lambda name: all(one(name) for one in layers)
        if self._keeps(directory):
            self._mute[directory] = mute
        return mute

    def _directory(self, ino: int) -> bytes | None:
        """The path of a directory, which has only one; None for one that was removed."""
        path = self._directories.get(ino)
        if path is None:
            path = self._vfs.path_of(ino)
            if path is not None and self._keeps(ino):
                self._directories[ino] = path
        return path

    def _keeps(self, ino: int) -> bool:
        """Whether paths in the ino's volume change only through us."""
        if len(self._inos) >= _CACHED or len(self._directories) >= _CACHED:
            self.moved()
        return isinstance(self._volumes[ino >> NODE_BITS], TreeVolume)

    def path_in(self, parent: int, name: bytes) -> bytes | None:
        """The path of an entry, there or not; None when the directory was removed."""
        above = self._directory(parent)
        return None if above is None else above + name if above == b"/" else above + b"/" + name

    def leaves(self, parent: int, name: bytes, path: bytes) -> None:
        """An entry is about to go: what may not be read by its last name may not be read without one, while open."""
        if not self.of_path(path) & READS:
            return
        attr = self._vfs.peek(parent, name)
        if attr is None or stat.S_ISDIR(attr.mode):
            return
        if len(self._last) >= self._last_max:
            self._last = {ino: at for ino, at in self._last.items() if self._is_there(ino)}
            self._last_max = max(_NAMELESS, 2 * len(self._last))
        self._last[attr.ino] = path

    def _is_there(self, ino: int) -> bool:
        try:
            self._volumes[ino >> NODE_BITS].getattr(ino)
        except OSError:
            return False
        return True

    def paths_of(self, ino: int) -> list[bytes]:
        """Every known path of an inode; the last one of what was unlinked, if it may not be read; else none."""
        if ino == self._vfs.root_ino:
            return [b"/"]
        if not hasattr(self._volumes[ino >> NODE_BITS], "links_of"):
            path = self._vfs.path_of(ino)
            return [] if path is None else [path]
        found = (self.path_in(parent, name) for parent, name in self.links_of(ino))
        paths = [path for path in found if path is not None]
        return paths or ([self._last[ino]] if ino in self._last else [])

    def links_of(self, ino: int) -> list[tuple[int, bytes]]:
        """Every known (directory, name) that leads to an inode."""
        at = self._vfs.table.mounted_at.get(ino)
        if at is not None:
            return [at]
        try:
            return list(self._volumes[ino >> NODE_BITS].links_of(ino))
        except (OSError, AttributeError):
            return []

    def is_directory(self, ino: int) -> bool:
        """False also for what is no more."""
        try:
            return stat.S_ISDIR(self._volumes[ino >> NODE_BITS].getattr(ino).mode)
        except OSError:
            return False

    def of_ino(self, ino: int) -> int:
        """The strictest verdicts of an inode's paths."""
        bits = self._inos.get(ino)
        if bits is None:
            bits = 0
            volume = self._volumes[ino >> NODE_BITS]
            node = volume.tree.nodes.get(ino & NODE_MASK) if isinstance(volume, TreeVolume) else None
            if node is not None and node.nlink == 1 and node.parent and self._is_mute(node.parent.ino, node.name):
                if self._keeps(ino):
                    self._inos[ino] = 0
                return 0
            links = self.links_of(ino)
            if not links or not all(self._is_mute(*link) for link in links):
                for path in self.paths_of(ino):
                    bits = _strictest(bits, self.of_path(path))
            if self._keeps(ino):
                self._inos[ino] = bits
        return bits

    def may_read(self, ino: int) -> bool:
        """For searches: whether the inode may be read without asking anybody."""
        return not self.of_ino(ino) & READS

    def shown(self, parent: int, entries: Iterable[Any]) -> Iterator[Any]:
        """Those of a directory's entries (their names come first) that are not hidden."""
        for entry in entries:
            path = self.path_in(parent, entry[0])
            if path is None or not self.of_path(path) & HIDDEN:
                yield entry

    def _rule(self, operation: str, path: bytes, verdict: int) -> Rule:
        """The rule that gave the verdict."""
        paths = [path]
        if path.startswith(PAST):
            paths.append(b"/" + path[len(PAST) :].partition(b"/")[2])
        for one in paths:
            for layer in self.layers.values():
                if layer.policy.judge(operation, one) == verdict:
                    rule = layer.policy.decider(operation, one)
                    assert rule is not None
                    return rule
        raise AssertionError("no rule gave this verdict")


def _never(name: bytes) -> bool:
    return False


def _strictest(a: int, b: int) -> int:
    return max(a & 3, b & 3) | max(a & 12, b & 12) | (a | b) & HIDDEN


assert (ALLOW, INTERRUPT, DENY) == (0, READ_ASK, READ_DENY)
