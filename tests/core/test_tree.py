"""The tree and its handles: paths, residency and pins."""

from __future__ import annotations

import errno
import os

import pytest
from test_plans import at, grown

from vfsd.core import plans
from vfsd.core.changes import Dentry, Drop, NoDentry, Put
from vfsd.core.handles import Handles
from vfsd.core.tree import Tree
from vfsd.core.types import NODE_BITS, NotLoaded


def test_paths_and_ancestry() -> None:
    tree = grown()
    sub = at(tree, "/d/sub")
    assert tree.path(sub) == b"/d/sub"
    assert tree.path(at(tree, "/")) == b"/"
    assert tree.path(at(tree, "gone")) is None
    assert tree.is_within(sub, at(tree, "/d"))
    assert tree.is_within(sub, sub)
    assert not tree.is_within(at(tree, "/d"), sub)


def test_a_rename_moves_the_whole_subtree() -> None:
    tree = grown()
    tree.apply(plans.rename(tree, at(tree, "/"), b"d", at(tree, "/empty"), b"moved", 0, 50))
    assert tree.path(at(tree, "/empty/moved/sub")) == b"/empty/moved/sub"


def test_an_exchange_moves_both() -> None:
    tree = grown()
    sub, f = at(tree, "/d/sub"), at(tree, "/f")
    tree.apply(plans.rename(tree, at(tree, "/d"), b"sub", at(tree, "/"), b"f", plans.RENAME_EXCHANGE, 50))
    assert (tree.path(sub), tree.path(f)) == (b"/f", b"/d/sub")
    assert (at(tree, "/d").nlink, at(tree, "/").nlink) == (2, 2 + 5)


def test_a_directory_not_in_memory_answers_nothing() -> None:
    tree = grown()
    unloaded = at(tree, "/unloaded")
    with pytest.raises(NotLoaded):
        tree.child(unloaded, b"n")
    with pytest.raises(NotLoaded):
        tree.is_empty(unloaded)


def test_inos_carry_the_volume() -> None:
    tree = Tree(3 << NODE_BITS)
    tree.apply([Put(7, 0o100644, 1, 0, 0, 0, 0, 0, 0, 0)])
    assert tree.nodes[7].ino == 3 << NODE_BITS | 7
    assert tree.next_node == 8


def test_numbers_are_not_given_twice() -> None:
    tree = grown()
    last = tree.next_node
    tree.apply([Put(last, 0o100644, 1, 0, 0, 0, 0, 0, 0, 0), Drop(last)])
    assert tree.next_node == last + 1


def test_removing_an_entry_leaves_a_node_known_under_another_name() -> None:
    tree = grown()
    f = at(tree, "/f")
    f.parent, f.name = at(tree, "/"), b"hard"
    tree.apply([NoDentry(1, b"f", f.id)])
    assert tree.path(f) == b"/hard"
    tree.apply([Dentry(1, b"f", f.id)])
    assert tree.path(f) == b"/f"


def test_handles_pin_and_unpin() -> None:
    tree = grown()
    f = at(tree, "/f")
    handles = Handles()
    one, two = handles.add(f, os.O_RDONLY), handles.add(f, os.O_WRONLY | os.O_APPEND)
    assert f.pins == 2
    assert len({0, one, two}) == 3
    assert handles.get(two).flags == os.O_WRONLY | os.O_APPEND
    assert handles.find(0) is None
    assert handles.remove(one) is f
    assert f.pins == 1
    for call in (handles.get, handles.remove):
        with pytest.raises(OSError) as caught:
            call(one)
        assert caught.value.errno == errno.EBADF
    assert len(handles) == 1


def test_every_known_link_of_a_file_counts() -> None:
    tree = grown()
    root, d, f = at(tree, "/"), at(tree, "/d"), at(tree, "/d/file")
    assert f.id not in tree.links
    tree.apply(plans.link(tree, f, root, b"second", 50))
    tree.apply(plans.link(tree, f, root, b"third", 50))
    assert tree.links[f.id] == {(d.id, b"file"), (root.id, b"second"), (root.id, b"third")}
    tree.apply(plans.rename(tree, root, b"third", d, b"moved", 0, 50))
    tree.apply(plans.rename(tree, d, b"file", root, b"empty", plans.RENAME_EXCHANGE, 50))
    assert tree.links[f.id] == {(d.id, b"moved"), (root.id, b"second"), (root.id, b"empty")}
    tree.apply(plans.unlink(tree, root, b"empty", 50))
    tree.apply(plans.unlink(tree, d, b"moved", 50))
    assert f.id not in tree.links and tree.path(f) == b"/second"
    tree.apply(plans.unlink(tree, root, b"second", 50))
    assert tree.path(f) is None
