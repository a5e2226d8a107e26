"""What happened to names and files in a commit, as those who watch directories think of it.

Pure arithmetic on changes. Must not know watches, engines or the kernel.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from typing import NamedTuple

from vfsd.core.changes import Change, Content, Dentry, NoDentry, Put, Reserve, Target, Write, Xattr, Zero

CREATE, REMOVE, RENAME, MODIFY, ATTRIB = "create", "remove", "rename", "modify", "attrib"


class Happening(NamedTuple):
    """``kind`` of ``ino``; by name ``name`` in ``parent`` unless it is MODIFY or ATTRIB (0 and empty).

    RENAME: to ``new_name`` in ``new_parent``, over ``replaced`` (0: nothing). ``is_dir``: of a REMOVE, a directory.
    """

    kind: str
    ino: int
    parent: int = 0
    name: bytes = b""
    new_parent: int = 0
    new_name: bytes = b""
    replaced: int = 0
    is_dir: bool = False


def happenings(base: int, op: str, changes: Sequence[Change]) -> list[Happening]:
    """Of one commit, in the order of telling."""
    named = {c.node: c for c in changes if type(c) is Dentry}
    gone = {(c.parent, c.name): c.node for c in changes if type(c) is NoDentry}
    taken = {(c.parent, c.name) for c in changes if type(c) is Dentry}
    parents = {c.parent for c in changes if type(c) is Dentry or type(c) is NoDentry}
    contents = {c.node for c in changes if isinstance(c, Write | Zero | Reserve | Content | Target)}
    found = []
    for (parent, name), node in gone.items():
        to = named.pop(node, None)
        if to is not None:
            replaced = gone.get((to.parent, to.name), 0)
            found.append(
                Happening(
                    RENAME, base | node, base | parent, name, base | to.parent, to.name, replaced and base | replaced
                )
            )
        elif (parent, name) not in taken:
            found.append(Happening(REMOVE, base | node, base | parent, name, is_dir=op == "rmdir"))
    if op != "link":  # some volumes tell of a new file with its size only
        contents |= {c.node for c in changes if type(c) is Put and c.node in named and c.size and stat.S_ISREG(c.mode)}
    for node, entry in named.items():
        found.append(Happening(CREATE, base | node, base | entry.parent, entry.name))
    told = {ino for h in found if h.kind != CREATE for ino in (h.ino, h.replaced)}
    for node in dict.fromkeys(c.node for c in changes if isinstance(c, Put | Xattr | Write | Zero | Reserve | Content)):
        if node in contents:
            found.append(Happening(MODIFY, base | node))
        elif node not in parents and node not in named and base | node not in told:
            found.append(Happening(ATTRIB, base | node))
    return found
