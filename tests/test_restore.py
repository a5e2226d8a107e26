"""Restores beside a tree that goes on changing, and of volumes of which nothing is in memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
from checkpointed import ME, Mount, create, run

from vfsd.backends.sqlite import SqliteBackend


@pytest.mark.parametrize("times", [1, 2, 100])
def test_what_changes_while_the_checkpoint_before_is_taken_is_in_it(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    mount.write("/a", b"old")
    state, name = mount.state(), create(mount)
    mount.write("/a", b"new")
    taken: list[object] = []

    async def checkpoint(store: SqliteBackend, *args: Any) -> Any:
        made = await real(store, *args)
        taken.append(made)
        if len(taken) <= times:
            mount.write("/late", b"late %d" % len(taken))
        return made

    real = SqliteBackend.checkpoint
    monkeypatch.setattr(SqliteBackend, "checkpoint", checkpoint)
    done = run(mount.checkpoints.restore, name, ME)
    assert mount.state() == state
    assert [mark.id for mark in mount.checkpoints.all()] == [name, done["before"]]
    assert len(mount.root.store.checkpoints()) == 2
    monkeypatch.undo()
    run(mount.checkpoints.restore, done["before"], ME)
    assert mount.state()[b"/a"][5] == b"new"
    assert mount.state()[b"/late"][5] == b"late %d" % min(times, 2)


def test_a_restore_of_a_mount_just_started(mount: Mount) -> None:
    for i in range(30):
        mount.write(f"/d{i % 3}/f{i}", b"%d" % i * 5000)
    mount.write("/gone/deep/f", b"gone")
    root = mount.root
    root.link(mount.find("/d0/f0").ino, root.root_ino, b"link", ME)
    root.symlink(root.root_ino, b"sym", b"d0/f0", ME)
    first, one, used = mount.state(), create(mount), root.used()
    for i in range(0, 30, 2):
        mount.write(f"/d{i % 3}/f{i}", b"other")
    root.unlink(root.root_ino, b"link", ME)
    root.unlink(mount.find("/d1").ino, b"f1", ME)
    root.unlink(mount.find("/gone/deep").ino, b"f", ME)
    root.rmdir(mount.find("/gone").ino, b"deep", ME)
    root.rmdir(root.root_ino, b"gone", ME)
    root.rename(root.root_ino, b"d2", mount.find("/d1").ino, b"moved", 0, ME)
    for i in range(20):
        mount.write(f"/new/n{i}", b"n" * 9000)
    second = mount.state()
    two, used_then = create(mount), root.used()
    for ref, state, count in ((one, first, used), (two, second, used_then), (one, first, used)):
        for reopened in (True, False):
            if reopened:
                mount.close()
                mount.open()
            run(mount.checkpoints.restore, ref, ME)
            # As it is in memory, and as it is read again.
            assert mount.root.used() == count
            assert mount.state() == state
            mount.close()
            mount.open()
            assert mount.state() == state
            assert mount.root.used() == count
            fh = mount.root.open(mount.find("/d0/f3").ino, os.O_RDONLY, ME)
            mount.root.release(0, fh)
