"""The tree of one volume in memory: nodes, their entries, and ``apply``, the only thing that changes them.

Pure: no trio, no os, no clock. Invariants:
- ``apply`` cannot fail for changes a plan of this tree yielded.
- A directory's ``children`` is None (nothing of it is loaded), or what is known of its entries: all of them only when
  it is ``complete``.
- A node that is not in memory, and whatever is not known of a directory, is as the backend has it.
- A node without a link is in ``nodes`` while it has a pin; pins are kernel lookups and handles.
- ``parent`` and ``name`` are one place a node is linked at, the only one for a directory; where more are known,
  ``links`` has all that are.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable

from vfsd.core.changes import Change, Dentry, Drop, NoDentry, Put, Target, is_device, rdev
from vfsd.core.types import ROOT_NODE, NotLoaded

ABSENT_MAX = 4096
"""Names remembered that are nothing in one directory not known whole."""


class Children(dict[bytes, "Node"]):
    """What is known of a directory's entries. ``complete``: these are all; ``absent``: names known to be nothing."""

    __slots__ = ("absent", "complete")

    def __init__(self, *, complete: bool) -> None:
        super().__init__()
        self.complete = complete
        self.absent: set[bytes] | None = None

    def note_absent(self, name: bytes) -> None:
        """The backend has no such entry either."""
        if self.absent is None or len(self.absent) >= ABSENT_MAX:
            self.absent = set()
        self.absent.add(name)


class Node:
    """One file or directory; satisfies ``core.types.Attr``. ``id`` is the node number, ``ino`` has the volume too."""

    __slots__ = (
        "atime_ns",
        "blocks",
        "children",
        "ctime_ns",
        "extra",
        "gid",
        "id",
        "ino",
        "mode",
        "mtime_ns",
        "name",
        "nlink",
        "parent",
        "pins",
        "size",
        "target",
        "uid",
    )

    def __init__(self, base: int, node: int) -> None:
        self.id = node
        self.ino = base | node if base else node
        self.mode = self.nlink = self.uid = self.gid = self.extra = self.size = self.blocks = 0
        self.atime_ns = self.mtime_ns = self.ctime_ns = 0
        self.target: bytes | None = None
        self.children: Children | None = None
        self.parent: Node | None = None
        self.name = b""
        self.pins = 0

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def rdev(self) -> int:
        return rdev(self.mode, self.extra)

    @property
    def birth_ns(self) -> int | None:
        """When it was made; None for a device node, which keeps no time besides those that are set."""
        return None if is_device(self.mode) else self.extra or self.atime_ns


class Tree:
    """All nodes of one volume that are in memory; ``base`` is ``volume << NODE_BITS``."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.nodes: dict[int, Node] = {}
        self.links: dict[int, set[tuple[int, bytes]]] = {}
        """Node -> (directory, name) of each of its links, for files with several known ones."""
        self.next_node = ROOT_NODE
        self.dropped_blocks = 0
        """Units of 512 bytes that dropped nodes had, all told."""

    def child(self, directory: Node, name: bytes) -> Node | None:
        """The entry ``name``, None when there is none. Raises NotLoaded."""
        children = directory.children
        if children is None:
            raise NotLoaded(directory.id)
        node = children.get(name)
        if node is None and not children.complete and (children.absent is None or name not in children.absent):
            raise NotLoaded(directory.id, name)
        return node

    def is_empty(self, directory: Node) -> bool:
        """Raises NotLoaded."""
        children = directory.children
        if children:
            return False
        if children is None or not children.complete:
            raise NotLoaded(directory.id)
        return True

    def is_within(self, node: Node, directory: Node) -> bool:
        """True when ``node`` is ``directory`` or below it."""
        at: Node | None = node
        while at is not None:
            if at is directory:
                return True
            at = at.parent
        return False

    def path(self, node: Node) -> bytes | None:
        """A path of the node from the volume's root; None when it has no link left."""
        parts: list[bytes] = []
        at = node
        while at.parent is not None:
            parts.append(at.name)
            at = at.parent
        return b"/" + b"/".join(reversed(parts)) if at.id == ROOT_NODE else None

    def apply(self, changes: Iterable[Change]) -> None:
        """Make the changes so. Contents and extended attributes are the backend's; they leave no trace here."""
        nodes = self.nodes
        for c in changes:
            if type(c) is Put:
                self._put(c)
            elif type(c) is Dentry:
                parent, node = nodes[c.parent], nodes[c.node]
                assert parent.children is not None
                replaced = parent.children.get(c.name)
                if replaced is not None and replaced is not node:
                    self._unlink(replaced, parent, c.name)
                parent.children[c.name] = node
                self.link(node, parent, c.name)
            elif type(c) is NoDentry:
                parent, gone = nodes[c.parent], nodes.get(c.node)
                assert parent.children is not None
                parent.children.pop(c.name, None)
                if gone is not None:
                    self._unlink(gone, parent, c.name)
            elif type(c) is Target:
                nodes[c.node].target = c.target
            elif type(c) is Drop:
                dropped = nodes.pop(c.node, None)
                if dropped is not None:
                    self.dropped_blocks += dropped.blocks
                    self.links.pop(c.node, None)

    def link(self, node: Node, parent: Node, name: bytes) -> None:
        """Note that ``node`` is ``name`` in ``parent``, perhaps besides elsewhere."""
        before = node.parent
        if before is not None and (before is not parent or node.name != name) and not node.is_dir:
            self.links.setdefault(node.id, {(before.id, node.name)}).add((parent.id, name))
        node.parent, node.name = parent, name

    def evict(self, node: Node) -> None:
        """Let a node go that the backend has as it is: it has a link, and no entry of it is in memory."""
        places = self.links.pop(node.id, None)
        if places is None:
            places = set() if node.parent is None else {(node.parent.id, node.name)}
        for at, name in places:
            children = self.nodes[at].children
            assert children is not None
            children.complete = False
            del children[name]
            if children.absent is not None:
                children.absent.discard(name)
        node.parent = None
        del self.nodes[node.id]

    def _unlink(self, node: Node, parent: Node, name: bytes) -> None:
        links = self.links.get(node.id)
        if links is not None:
            links.discard((parent.id, name))
        if node.parent is parent and node.name == name:
            node.parent = None
            if links:
                at, node.name = min(links)
                node.parent = self.nodes[at]
        if links is not None and len(links) == 1:
            del self.links[node.id]

    def _put(self, c: Put) -> None:
        node = self.nodes.get(c.node)
        if node is None:
            node = self.nodes[c.node] = Node(self.base, c.node)
            if c.node >= self.next_node:
                self.next_node = c.node + 1
            if stat.S_ISDIR(c.mode):
                node.children = Children(complete=True)
        (
            _,
            node.mode,
            node.nlink,
            node.uid,
            node.gid,
            node.extra,
            node.size,
            node.atime_ns,
            node.mtime_ns,
            node.ctime_ns,
        ) = c
