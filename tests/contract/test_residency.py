"""Nodes that leave memory come back as they were, and a large directory is never in it whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from makers import ME, dump, open_volume, squeeze, ticking
from workload import steps

from vfsd import residency

COUNT = 1000


@pytest.fixture
def volume(tmp_path: Path) -> Any:
    """A directory of many files, and nothing in memory."""
    volume = open_volume("state", tmp_path / "volume", clock=ticking())
    many = volume.mkdir(volume.root_ino, b"many", 0o755, ME).ino
    for i in range(COUNT):
        volume.create_file(many, b"%04d" % i, 0o644, b"content %d" % i, ME)
    squeeze(volume)
    yield volume
    volume.close()


def names(volume: Any, ino: int) -> list[bytes]:
    return [name for name, _ in volume.children(ino)]


@pytest.mark.parametrize("page", [1, 3, residency.PAGE])
def test_a_session_with_nothing_kept_in_memory(page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "PAGE", page)
    whole = open_volume("memory", tmp_path, clock=ticking())
    volume = open_volume("state", tmp_path / "volume", clock=ticking())
    for i, (name, step) in enumerate(steps()):
        step(whole)
        step(volume)
        squeeze(volume, fold=i % 2 == 1)
        assert dump(volume) == dump(whole), name
    squeeze(volume)
    assert set(volume.tree.nodes) == {1}
    assert dump(volume) == dump(whole)
    whole.close()
    volume.close()


def test_one_name_of_a_large_directory_brings_in_no_other(volume: Any) -> None:
    assert set(volume.tree.nodes) == {1}
    many = volume.lookup(volume.root_ino, b"many").ino
    found = volume.lookup(many, b"0777")
    assert bytes(volume.read(found.ino, 0, 0, 100)) == b"content 777"
    with pytest.raises(FileNotFoundError):
        volume.lookup(many, b"nothing")
    volume.unlink(many, b"0777", ME)
    assert len(volume.tree.nodes) <= residency.PAGE + 3


def test_a_node_the_kernel_knows_comes_back_by_its_number(volume: Any) -> None:
    many = volume.lookup(volume.root_ino, b"many")
    ino = volume.lookup(many.ino, b"0500").ino
    volume.remember(ino)
    squeeze(volume)
    assert ino not in volume.tree.nodes
    assert volume.getattr(ino).size == 11
    assert volume.getattr(ino).pins == 1
    assert volume.path_of(ino) == b"/many/0500"
    volume.unlink(many.ino, b"0500", ME)
    squeeze(volume)
    assert bytes(volume.read(ino, 0, 0, 100)) == b"content 500"  # unlinked, and the kernel still knows it
    volume.forget(ino, 1)
    with pytest.raises(OSError, match="Stale"):
        volume.getattr(ino)


def test_what_the_kernel_forgot_while_it_was_gone_is_not_pinned_again(volume: Any) -> None:
    many = volume.lookup(volume.root_ino, b"many").ino
    ino = volume.lookup(many, b"0500").ino
    volume.remember(ino)
    squeeze(volume)
    volume.forget(ino, 1)
    volume.unlink(many, b"0500", ME)
    with pytest.raises(OSError, match="Stale"):
        volume.getattr(ino)


def test_an_open_file_stays(volume: Any) -> None:
    many = volume.lookup(volume.root_ino, b"many").ino
    ino = volume.lookup(many, b"0001").ino
    fh = volume.open(ino, os.O_RDWR, ME)
    squeeze(volume)
    assert ino in volume.tree.nodes
    volume.unlink(many, b"0001", ME)
    squeeze(volume)
    assert volume.write(ino, fh, 0, b"still there", ME) == 11
    volume.release(ino, fh)
    assert ino not in volume.tree.nodes


def test_a_listing_while_all_else_changes(volume: Any) -> None:
    """What stays is told once, whether it leaves memory, is folded or comes back meanwhile."""
    many = volume.lookup(volume.root_ino, b"many").ino
    for i in range(0, COUNT, 7):
        volume.unlink(many, b"%04d" % i, ME)
        volume.create_file(many, b"%04d+" % i, 0o644, b"", ME)
    stays = {b"%04d" % i for i in range(COUNT) if i % 7} - {b"0400"}
    stays |= {b"%04d+" % i for i in range(0, COUNT, 7)}
    fh = volume.opendir(many, ME)
    told: list[bytes] = []
    offset = 0
    while page := [entry for entry, _ in zip(volume.readdir(many, fh, offset), range(30), strict=False)]:
        told += [entry.name for entry in page]
        offset = page[-1].offset
        if len(told) == 300:
            squeeze(volume)
            volume.rename(many, b"0400", many, b"9999", 0, ME)
        elif len(told) == 600:
            volume.create_file(many, b"0000-late", 0o644, b"", ME)
            squeeze(volume)
    assert sorted(name for name in told if name in stays) == sorted(stays)
    again = [entry.name for entry in volume.readdir(many, fh, 0)]
    assert sorted(again) == sorted(stays | {b"9999", b"0000-late"})
    volume.releasedir(many, fh)


def test_children_of_a_large_directory_come_page_by_page(volume: Any) -> None:
    many = volume.lookup(volume.root_ino, b"many").ino
    entries = iter(volume.children(many))
    next(entries)
    assert len(volume.tree.nodes) <= 2 * residency.PAGE + 2
    assert 1 + sum(1 for _ in entries) == COUNT


def test_a_large_directory_with_all_unfolded_removed_is_empty(volume: Any) -> None:
    many = volume.lookup(volume.root_ino, b"many").ino
    for name in names(volume, many):
        volume.unlink(many, name, ME)
    squeeze(volume, fold=False)
    assert names(volume, many) == []
    volume.rmdir(volume.root_ino, b"many", ME)
    squeeze(volume)
    assert names(volume, volume.root_ino) == []


def test_a_hard_link_whose_other_name_is_not_in_memory(volume: Any) -> None:
    many = volume.lookup(volume.root_ino, b"many").ino
    other = volume.mkdir(volume.root_ino, b"other", 0o755, ME).ino
    ino = volume.lookup(many, b"0003").ino
    volume.link(ino, other, b"second", ME)
    squeeze(volume)
    assert sorted(volume.links_of(ino)) == sorted([(many, b"0003"), (other, b"second")])
    squeeze(volume)
    volume.unlink(many, b"0003", ME)
    squeeze(volume)
    assert volume.links_of(ino) == [(other, b"second")]
    assert volume.path_of(ino) == b"/other/second"


def test_deep_trees_come_back_from_the_bottom(tmp_path: Path) -> None:
    volume = open_volume("state", tmp_path / "deep")
    at = volume.root_ino
    for _ in range(1200):
        at = volume.mkdir(at, b"d", 0o755, ME).ino
    squeeze(volume)
    assert set(volume.tree.nodes) == {1}
    assert volume.path_of(at) == b"/d" * 1200
    volume.close()
