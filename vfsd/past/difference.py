"""What differs between two moments of a state volume, as a person would say it, and as a patch.

Pure but for reading the past. Contents are compared byte for byte unless they are the same blocks. Times alone are no
difference. Must not know who asks, nor how it is shown.
"""

from __future__ import annotations

import difflib
import functools
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vfsd.backends.base import Stored
from vfsd.backends.history import Extents, Past, Touched

ReadExtents = Callable[[Extents, int, int], bytes]

PATCH_FILE_MAX = 1 << 20
"""Bytes of one file above which a patch only says that it differs."""

PATCH_LINES_MAX = 20_000
"""Lines of one file above which it does so too: what ``difflib`` takes grows with their square at worst."""

_PIECE = 1 << 20
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


@dataclass
class Difference:
    """One path that differs. ``kind``: added, modified, deleted, renamed, mode, owner or xattr; ``what`` names all that
    is other (content, target, mode, owner, xattr). ``old`` and ``new`` are the nodes, None where there is none.
    ``names``, when asked for: all paths these nodes had and have."""

    kind: str
    path: bytes
    old_path: bytes
    old: Stored | None
    new: Stored | None
    what: list[str] = field(default_factory=list)
    patch: bytes = b""
    names: frozenset[bytes] = frozenset()

    def plain(self, prefix: bytes = b"/") -> dict[str, Any]:
        """As an object for programs; paths below ``prefix``."""
        some = self.new or self.old
        assert some is not None
        out: dict[str, Any] = {
            "kind": self.kind,
            "path": prefix.rstrip(b"/") + self.path,
            "type": _KINDS.get(stat.S_IFMT(some.mode), "unknown"),
            "what": self.what,
        }
        if self.kind == "renamed":
            out["old_path"] = prefix.rstrip(b"/") + self.old_path
        for name, stored in (("old", self.old), ("new", self.new)):
            if stored is not None:
                out[f"{name}_mode"], out[f"{name}_size"] = stored.mode, stored.size
        return out

    def names_below(self, prefix: bytes) -> frozenset[bytes]:
        """``names`` as paths of the tree."""
        return _below(prefix.rstrip(b"/"), self.names)


class Compare:
    """``then`` and ``now`` are one volume at two moments; ``read`` gives bytes by extents, offset, length."""

    def __init__(self, then: Past, now: Past, read: ReadExtents) -> None:
        self._then = then
        self._now = now
        self._read = read
        self._found: list[Difference] = []

    def differences(self, touched: Touched) -> list[Difference]:
        """All of them by path; ``touched`` has at least what changed between the two."""
        gone, new = self._moved_names(touched)
        done = self._same_places(gone, new) | self._renames(gone, new)
        for path, node in gone.items():
            self._found.append(Difference("deleted", path, path, self._then.node(node), None))
        for path, node in new.items():
            self._found.append(Difference("added", path, path, None, self._now.node(node)))
        for node in touched.nodes - done:
            self._compare(node, node, None)
        self._found.sort(key=lambda d: (d.path, d.kind != "deleted"))
        return self._found

    def _moved_names(self, touched: Touched) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """The paths that lead to another node than they did, or to none: at each of the two moments."""
        gone: dict[bytes, int] = {}
        new: dict[bytes, int] = {}
        for parent, name in touched.dentries:
            before, after = self._then.child(parent, name), self._now.child(parent, name)
            if before == after:
                continue
            for past, paths, node in ((self._then, gone, before), (self._now, new, after)):
                above = past.path(parent) if node is not None else None
                if node is not None and above is not None:
                    paths[above.rstrip(b"/") + b"/" + name] = node
        return gone, new

    def _same_places(self, gone: dict[bytes, int], new: dict[bytes, int]) -> set[int]:
        """Paths that something else of the same type has taken are modified there, unless a directory moved."""
        done: set[int] = set()
        moved = set(gone.values()) & set(new.values())
        for path in sorted(gone.keys() & new.keys()):
            old, other = self._then.node(gone[path]), self._now.node(new[path])
            if old is None or other is None or stat.S_IFMT(old.mode) != stat.S_IFMT(other.mode):
                continue
            if stat.S_ISDIR(old.mode) and {old.node, other.node} & moved:
                continue
            self._compare(gone.pop(path), new.pop(path), path)
            done |= {old.node, other.node}
        return done

    def _renames(self, gone: dict[bytes, int], new: dict[bytes, int]) -> set[int]:
        done: set[int] = set()
        places: dict[int, list[bytes]] = {}
        for path in sorted(new):
            places.setdefault(new[path], []).append(path)
        for path in sorted(gone):
            node = gone[path]
            if places.get(node):
                place = places[node].pop(0)
                self._compare(node, node, place, path)
                del gone[path], new[place]
                done.add(node)
        return done

    def _compare(self, before: int, after: int, path: bytes | None, old_path: bytes | None = None) -> None:
        """Note how a file that was and is differs: at ``path``, found when not given, and renamed from ``old_path``."""
        old, new = self._then.node(before), self._now.node(after)
        if old is None or new is None or not old.nlink or not new.nlink:
            return
        what = self._what(old, new)
        if not what and old_path is None:
            return
        path = path or self._now.path(after)
        if path is None:
            return
        if old_path is not None:
            kind = "renamed"
        else:
            kind = "modified" if what[0] in ("content", "target", "device") else what[0]
        self._found.append(Difference(kind, path, old_path or path, old, new, what))

    def _what(self, old: Stored, new: Stored) -> list[str]:
        what: list[str] = []
        if stat.S_ISREG(old.mode) and self._contents_differ(old, new):
            what.append("content")
        if old.target != new.target:
            what.append("target")
        if old.rdev != new.rdev:
            what.append("device")
        if old.mode != new.mode:
            what.append("mode")
        if (old.uid, old.gid) != (new.uid, new.gid):
            what.append("owner")
        if self._then.xattrs(old.node) != self._now.xattrs(new.node):
            what.append("xattr")
        return what

    def _contents_differ(self, old: Stored, new: Stored) -> bool:
        if old.size != new.size:
            return True
        before, after = self._then.map(old.node), self._now.map(new.node)
        if [e[:3] for e in before] == [e[:3] for e in after]:
            return False
        return any(
            self._read(before, at, min(_PIECE, old.size - at)) != self._read(after, at, min(_PIECE, old.size - at))
            for at in range(0, old.size, _PIECE)
        )

    # -- names

    def add_names(self, found: Iterable[Difference]) -> None:
        """Put all paths of its nodes, at both moments, in each."""
        known: dict[tuple[int, int], frozenset[bytes]] = {}
        for one in found:
            key = (one.old.node if one.old else 0, one.new.node if one.new else 0)
            if key not in known:
                # The root has a path without a name.
                known[key] = frozenset((*self._then.paths(key[0]), *self._now.paths(key[1]))) or frozenset((b"/",))
            one.names = known[key]

    # -- patches

    def add_patches(self, found: Iterable[Difference], limit: int) -> bool:
        """Put a unified diff in each that has one, ``limit`` bytes in all; False when some had no room."""
        whole = True
        for one in found:
            patch = self._patch(one)
            if len(patch) > limit:
                whole = False
                continue
            one.patch = patch
            limit -= len(patch)
        return whole

    def _patch(self, d: Difference) -> bytes:
        """As ``git diff`` has it, so that ``git apply`` and patch(1) take it; empty for what they can't say."""
        old, new = d.old, d.new
        for stored in (old, new):
            if stored is not None and not (stat.S_ISREG(stored.mode) or stat.S_ISLNK(stored.mode)):
                return b""
        a, b = _quoted(b"a" + d.old_path), _quoted(b"b" + d.path)
        head = [b"diff --git %b %b\n" % (a, b)]
        if old is None and new is not None:
            head.append(b"new file mode %o\n" % _git_mode(new.mode))
        elif new is None and old is not None:
            head.append(b"deleted file mode %o\n" % _git_mode(old.mode))
        elif old is not None and new is not None:
            if _git_mode(old.mode) != _git_mode(new.mode):
                head.append(b"old mode %o\nnew mode %o\n" % (_git_mode(old.mode), _git_mode(new.mode)))
            if d.kind == "renamed":
                head.append(b"rename from %b\nrename to %b\n" % (_quoted(d.old_path[1:]), _quoted(d.path[1:])))
        before, after = self._content(self._then, old), self._content(self._now, new)
        if before is None or after is None or b"\0" in before or b"\0" in after:
            if "content" in d.what or old is None or new is None:
                head.append(
                    b"Binary files %b and %b differ\n" % (a if old else b"/dev/null", b if new else b"/dev/null")
                )
            return b"".join(head) if len(head) > 1 else b""
        lines = _unified(before, after, a if old else b"/dev/null", b if new else b"/dev/null")
        return b"".join(head) + lines if lines or len(head) > 1 else b""

    def _content(self, past: Past, stored: Stored | None) -> bytes | None:
        """None for what is too large to show."""
        if stored is None:
            return b""
        if stored.target is not None:
            return stored.target
        if stored.size > PATCH_FILE_MAX:
            return None
        data = self._read(past.map(stored.node), 0, stored.size)
        return None if data.count(b"\n") > PATCH_LINES_MAX else data


def without_stubs(
    found: list[Difference], then: Past, now: Past, stubs: Iterable[tuple[int, bytes]]
) -> list[Difference]:
    """``found`` less the directories in ``stubs`` (parent, name) that came or went with nothing else in them."""
    paths: set[bytes] = set()
    for parent, name in stubs:
        for past in (then, now):
            above = past.path(parent) if past.node(parent) is not None else None
            if above is not None:
                paths.add(above.rstrip(b"/") + b"/" + name)
    kept: list[Difference] = []
    # From the end, so that what is in a directory is judged before it.
    for d in reversed(found):
        some = d.new or d.old
        bare = d.kind in ("added", "deleted") and some is not None and stat.S_ISDIR(some.mode)
        if not (bare and d.path in paths and not any(k.path.startswith(d.path + b"/") for k in kept)):
            kept.append(d)
    return kept[::-1]


@functools.lru_cache(maxsize=16)
def _below(prefix: bytes, names: frozenset[bytes]) -> frozenset[bytes]:
    # All names of a file with many come with each of them: one set, made once.
    return frozenset(prefix + name for name in names) if prefix else names


def _git_mode(mode: int) -> int:
    """What git keeps of a mode."""
    return 0o120000 if stat.S_ISLNK(mode) else 0o100755 if mode & 0o100 else 0o100644


def _quoted(path: bytes) -> bytes:
    """A path as git writes it: in C quotes when it holds anything a line could not."""
    if all(0x20 <= c < 0x7F and c not in b'"\\' for c in path):
        return path
    return b'"' + b"".join(bytes([c]) if 0x20 <= c < 0x7F and c not in b'"\\' else b"\\%03o" % c for c in path) + b'"'


def _unified(before: bytes, after: bytes, a: bytes, b: bytes) -> bytes:
    # Latin-1 says every byte, and difflib wants text; lines end at a newline only, as in diff(1).
    old, new = ([s.decode("latin-1") for s in text.split(b"\n")] for text in (before, after))
    ends = [lines.pop() for lines in (old, new)]
    for lines, end in ((old, ends[0]), (new, ends[1])):
        lines[:] = [line + "\n" for line in lines] + ([end + "\n\\ No newline at end of file\n"] if end else [])
    out = list(difflib.unified_diff(old, new, lineterm="\n"))
    if not out:
        return b""
    return b"--- %b\n+++ %b\n" % (a, b) + "".join(out[2:]).encode("latin-1")
