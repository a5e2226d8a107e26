"""What the feed tells is the whole truth: replayed from empty it gives the live tree, and so does the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from makers import dump, open_volume, ticking
from workload import steps

from vfsd.core.tree import Node, Tree
from vfsd.feed import Commit, Feed


def shape(tree: Tree) -> dict[int, tuple[Any, ...]]:
    """All there is but what only the backend knows (blocks) and what only this process needs (pins)."""

    def of(node: Node) -> tuple[Any, ...]:
        children = None if node.children is None else {name: child.id for name, child in node.children.items()}
        attributes = (node.mode, node.nlink, node.uid, node.gid, node.rdev, node.size)
        return (*attributes, node.atime_ns, node.mtime_ns, node.ctime_ns, node.target, children)

    return {number: of(node) for number, node in tree.nodes.items()}


@pytest.mark.parametrize("kind", ["state", "memory"])
def test_the_feed_replayed_is_the_tree(kind: str, tmp_path: Path) -> None:
    feed, told = Feed(), list[Commit]()
    feed.subscribe(told.append)
    volume = open_volume(kind, tmp_path / "volume", feed, clock=ticking())
    copy = Tree(0)
    seen = 0
    for name, step in steps():
        step(volume)
        for commit in told[seen:]:
            copy.apply(commit.changes)
        seen = len(told)
        assert shape(copy) == shape(volume.tree), name
    assert [commit.seq for commit in told] == list(range(1, len(told) + 1))
    assert {commit.base for commit in told} == {0}
    whole = Tree(0)
    for commit in told:
        whole.apply(commit.changes)
        whole.apply(commit.changes)  # absolute: twice is once
    assert shape(whole) == shape(volume.tree)
    before = dump(volume)
    volume.close()
    if kind == "state":
        again = open_volume(kind, tmp_path / "volume")
        assert dump(again) == before
        loaded = shape(again.tree)
        assert {n: t[:-1] for n, t in loaded.items()} == {n: t[:-1] for n, t in shape(whole).items()}
        again.close()


def test_what_is_refused_is_not_told(tmp_path: Path) -> None:
    feed, told = Feed(), list[Commit]()
    feed.subscribe(told.append)
    volume = open_volume("memory", tmp_path, feed)
    for _, step in steps():
        step(volume)
    count, seq = len(told), feed.seq
    for call in (volume.unlink, volume.rmdir):
        with pytest.raises(OSError):
            call(volume.root_ino, b"nothing", told[0].caller)
    with pytest.raises(OSError):
        volume.replace(volume.root_ino, b"", told[0].caller)
    assert (len(told), feed.seq) == (count, seq)
    volume.close()
