"""What of a tree volume is in memory: nodes and entries come in when they are asked for.

Owns how a node, an entry or a page of a directory gets from the backend into the tree. Must not know doors, paths or
what operations do. A directory of up to PAGE entries comes in whole when it is listed; of a larger one only what was
asked for, and it is listed page by page, in byte order of the names. Invariants: what is not in memory is in the
backend as it is; what is in memory counts, whatever the backend has of it. Methods that take inos raise ESTALE for one
that is no more, and EIO when the backend can't be read.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TypeVar

from vfsd.backends.base import Backend, Stored
from vfsd.core.plans import fail
from vfsd.core.tree import Children, Node, Tree
from vfsd.core.types import NODE_MASK, ROOT_NODE, NotLoaded

_T = TypeVar("_T")

RESIDENT = 100_000
"""Nodes of a state volume that are kept in memory, about 500 bytes each; those not folded or in use come on top."""

PAGE = 256
"""Entries loaded at once: about two milliseconds."""

ENTRIES = 8
"""Entries loaded of a directory one by one; whoever asks for as many is likely to ask for more, so a page comes in."""

Entries = Iterable[tuple[bytes, Node]]


class Residency:
    """The tree of ``backend``; ``base`` is ``volume << NODE_BITS``."""

    def __init__(self, base: int, backend: Backend) -> None:
        self.base = base
        self.backend = backend
        self.tree = Tree(base)
        self.root_ino = base | ROOT_NODE
        self._evicted_pins: dict[int, int] = {}
        """Of nodes that the kernel knows and that are not in memory."""

    # -- nodes

    def _insert(self, s: Stored) -> Node:
        node = self.tree.nodes.get(s.node)
        if node is None:
            node = self.tree.nodes[s.node] = Node(self.base, s.node)
            node.mode, node.nlink, node.uid, node.gid = s.mode, s.nlink, s.uid, s.gid
            node.extra, node.size, node.blocks, node.target = s.extra, s.size, s.blocks, s.target
            node.atime_ns, node.mtime_ns, node.ctime_ns = s.atime_ns, s.mtime_ns, s.ctime_ns
            if self._evicted_pins:
                node.pins = self._evicted_pins.pop(s.node, 0)
        return node

    def _bring(self, number: int) -> Node | None:
        """The node, from the backend with the directories above it if need be; None when there is none."""
        nodes, backend = self.tree.nodes, self.backend
        found = child = nodes.get(number)
        name = b""
        while child is None or name:
            node = nodes.get(number)
            known = node is not None
            if node is None:
                stored = backend.node(number)
                if stored is None:
                    return found
                node = self._insert(stored)
            if name:
                assert child is not None
                self._hold(node, name, child)
            else:
                found = node
            if known or number == ROOT_NODE:
                break
            # A node that was not in memory has not changed since the backend has it, nor has what it is called.
            link = next(iter(backend.links(number)), None)
            if link is None:
                break
            child, (number, name) = node, link
        return found

    def _node(self, ino: int) -> Node:
        node = self.tree.nodes.get(ino & NODE_MASK)
        if node is None:
            node = self._bring(ino & NODE_MASK)
            if node is None:
                raise fail(errno.ESTALE)
        return node

    def _dir(self, ino: int) -> Node:
        """A directory, of which something may be known: its ``children`` are not None. ENOTDIR."""
        node = self._node(ino)
        if node.children is None:
            if not stat.S_ISDIR(node.mode):
                raise fail(errno.ENOTDIR)
            node.children = Children(complete=False)
        return node

    def _to_list(self, ino: int) -> Children:
        """What is known of a directory that is about to be listed: all of it, if it is not large. ENOTDIR."""
        node = self._dir(ino)
        children = node.children
        assert children is not None
        if not children.complete and len(children) < PAGE:
            self._load(node)
        return children

    # -- entries

    def _hold(self, directory: Node, name: bytes, node: Node) -> Node:
        """The entry ``name``: what is known of it, else ``node``, as the backend has it."""
        children = directory.children
        if children is None:
            children = directory.children = Children(complete=False)
        found = children.get(name)
        if found is None:
            found = children[name] = node
            self.tree.link(node, directory, name)
        return found

    def _load(self, directory: Node) -> None:
        """The first entries of a directory, which mostly are all."""
        rows = self.backend.load(directory.id, b"", PAGE)
        if directory.children is None:
            directory.children = Children(complete=False)
        for name, stored in rows:
            if name not in directory.children:
                self._hold(directory, name, self._insert(stored))
        directory.children.complete = len(rows) < PAGE

    def _entry(self, directory: Node, name: bytes) -> Node | None:
        """The entry, None when there is none, of a directory got by ``_dir``."""
        children = directory.children
        assert children is not None
        node = children.get(name)
        if node is None and not children.complete and (children.absent is None or name not in children.absent):
            stored = self.backend.entry(directory.id, name)
            if stored is None:
                children.note_absent(name)
            else:
                node = self._hold(directory, name, self._insert(stored))
            if len(children) == ENTRIES:
                self._load(directory)
        return node

    def _plan(self, plan: Callable[..., _T], *args: object, **kwargs: object) -> _T:
        while True:
            try:
                return plan(*args, **kwargs)
            except NotLoaded as missing:
                directory = self.tree.nodes[missing.node]
                if missing.name is None or directory.children is None:
                    self._load(directory)
                else:
                    self._entry(directory, missing.name)

    def _pages(self, ino: int) -> Iterator[list[tuple[bytes, Node]]]:
        """The entries of a directory not known whole, a page at a time; others may change it in between.

        An entry that stays is given once, one that comes or goes meanwhile perhaps.
        """
        children = self._dir(ino).children
        assert children is not None
        # What the backend can't list yet; later on it may be able to.
        keeps = self.backend.keeps
        own = sorted((name for name, node in children.items() if keeps(node.id)), reverse=True)
        after, ended = b"", False
        while not ended:
            rows = self.backend.load(ino & NODE_MASK, after, PAGE)
            ended = len(rows) < PAGE
            if rows:
                after = rows[-1][0]
            directory = self._node(ino)
            page: dict[bytes, Node] = {}
            for name, stored in rows:
                node = None if directory.children is None else directory.children.get(name)
                page[name] = node or self._hold(directory, name, self._insert(stored))
            while own and (ended or own[-1] <= after):
                name = own.pop()
                node = None if directory.children is None else directory.children.get(name)
                if node is not None:
                    page[name] = node
            yield sorted(page.items(), key=lambda item: item[0])

    def _held(self, ino: int, names: list[bytes]) -> Entries:
        """The entries ``names`` of a directory as they are taken; others may change it in between."""
        for name in names:
            directory = self._dir(ino)
            assert directory.children is not None
            node = directory.children.get(name) or self._entry(directory, name)
            if node is not None:
                yield name, node

    def children(self, ino: int) -> Entries:
        """All entries, unordered, for searches and listings; those of a large directory as they are taken. ENOTDIR."""
        children = self._to_list(ino)
        if children.complete:
            return list(children.items()) if len(children) <= PAGE else self._held(ino, list(children))
        return chain.from_iterable(self._pages(ino))

    # -- paths

    def parent_of(self, ino: int) -> int:
        """The ino of ``..``."""
        node = self._node(ino)
        return node.parent.ino if node.parent is not None else self.root_ino

    def path_of(self, ino: int) -> bytes | None:
        """A path from the volume's root; None for a file without a link."""
        node = self.tree.nodes.get(ino & NODE_MASK) or self._bring(ino & NODE_MASK)
        return None if node is None else self.tree.path(node)

    def links_of(self, ino: int) -> list[tuple[int, bytes]]:
        """Every (ino of a directory, name) that leads to the ino; none for the root and for what was unlinked."""
        node = self._node(ino)
        if node.nlink > 1 and not node.is_dir and len(self.tree.links.get(node.id, (b"",))) < node.nlink:
            # Those never asked for, and so unchanged since the backend has them.
            for at, name in self.backend.links(node.id):
                directory = self._bring(at)
                if directory is not None:
                    self._dir(directory.ino)
                    self._entry(directory, name)
        links = self.tree.links.get(node.id)
        if links is not None:
            return [(self.base | at, name) for at, name in links]
        return [] if node.parent is None else [(node.parent.ino, node.name)]
