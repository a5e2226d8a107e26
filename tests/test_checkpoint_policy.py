"""Checkpoints taken unasked, undo, and how long they stay."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from checkpointed import ME, Mount, create, refused, run

from vfsd.config import CheckpointPolicy


def policy(mount: Mount, **values: Any) -> None:
    mount.checkpoints.policy = CheckpointPolicy(**values)


def call(mount: Mount, path: str, data: bytes, call_id: str = "") -> None:
    """A tool's write."""
    run(mount.checkpoints.before_call, f"write {path}", call_id, ME)
    mount.write(path, data)


def test_undo_takes_back_the_last_execute_as_a_whole(mount: Mount) -> None:
    mount.write("/a", b"old")
    state = mount.state()
    run(mount.checkpoints.before_execute, "make all", ME)
    mount.write("/a", b"new")
    mount.write("/b", b"new")
    done = run(mount.checkpoints.undo, ME)
    assert done["undone"] == "execute: make all"
    assert mount.state() == state
    run(mount.checkpoints.restore, done["before"], ME)
    assert set(mount.state()) == {b"/a", b"/b"}


def test_undo_after_undo_goes_further_back(mount: Mount) -> None:
    policy(mount, every_calls=1)
    states = []
    for i in range(3):
        states.append(mount.state())
        call(mount, "/a", b"%d" % i)
    after = mount.state()
    first = run(mount.checkpoints.undo, ME)
    assert (first["undone"], mount.state()) == ("write /a", states[2])
    run(mount.checkpoints.undo, ME)
    assert mount.state() == states[1]
    # Taken up again from before the first undo, the last call is the last call again.
    run(mount.checkpoints.restore, first["before"], ME)
    assert mount.state() == after
    run(mount.checkpoints.undo, ME)
    assert mount.state() == states[2]
    run(mount.checkpoints.undo, ME)
    run(mount.checkpoints.undo, ME)
    assert mount.state() == states[0]
    error = refused(mount.checkpoints.undo, ME)
    assert error.errno == errno.ENOENT
    assert error.strerror is not None and error.strerror.startswith("there is nothing to undo")


def test_undo_passes_over_what_changed_nothing(mount: Mount) -> None:
    run(mount.checkpoints.before_execute, "touch a", ME)
    mount.write("/a")
    run(mount.checkpoints.before_execute, "true", ME)
    assert run(mount.checkpoints.undo, ME)["undone"] == "execute: touch a"
    assert mount.state() == {}


def test_undo_passes_over_what_left_nothing(mount: Mount) -> None:
    run(mount.checkpoints.before_execute, "touch a", ME)
    mount.write("/a")
    run(mount.checkpoints.before_execute, "sort", ME)
    mount.write("/temporary")
    mount.root.unlink(mount.root.root_ino, b"temporary", ME)
    assert run(mount.checkpoints.undo, ME)["undone"] == "execute: touch a"


def test_undo_never_goes_forward(mount: Mount) -> None:
    name = create(mount, "start")
    mount.write("/a")
    run(mount.checkpoints.before_execute, "touch b", ME)
    mount.write("/b")
    run(mount.checkpoints.restore, name, ME)
    assert refused(mount.checkpoints.undo, ME).errno == errno.ENOENT
    assert mount.state() == {}


def test_undo_tells_what_else_goes(mount: Mount) -> None:
    run(mount.checkpoints.before_execute, "make", ME)
    mount.write("/a")
    call(mount, "/b", b"b")
    done = run(mount.checkpoints.undo, ME)
    assert (done["undone"], done["after"]) == ("execute: make", ["write /b"])


def test_each_nth_call_is_preceded_by_a_checkpoint(mount: Mount) -> None:
    policy(mount, every_calls=3)
    for i in range(7):
        call(mount, f"/{i}", b"x")
    assert [mark.label for mark in mount.checkpoints.all()] == ["write /0", "write /3", "write /6"]
    # An edit that had to start over is one call.
    policy(mount, every_calls=1)
    for _ in range(3):
        call(mount, "/8", b"x", "call-1")
    assert len(mount.checkpoints.all()) == 4


def test_nothing_changed_takes_no_checkpoint(mount: Mount) -> None:
    for command in ("one", "two", "three"):
        run(mount.checkpoints.before_execute, command, ME)
    assert [mark.label for mark in mount.checkpoints.all()] == ["execute: three"]
    policy(mount, every_execute=False)
    mount.write("/a")
    assert run(mount.checkpoints.before_execute, "four", ME) == ""
    assert len(mount.checkpoints.all()) == 1


def test_retention_keeps_the_newest_and_all_that_were_asked_for(mount: Mount) -> None:
    policy(mount, every_calls=1, keep=3)
    mine = create(mount, "mine")
    for i in range(8):
        call(mount, "/a", b"%d" % i)
    run(mount.checkpoints.maintain)
    kept = mount.checkpoints.all()
    assert [mark.id for mark in kept if mark.cause == "user"] == [mine]
    assert len(kept) == 4
    assert [mount.past_state(mark.id)[b"/a"][5] for mark in kept[1:]] == [b"4", b"5", b"6"]


def test_on_a_nearly_full_disk_only_the_newest_automatic_one_stays(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(mount, every_calls=1)
    for i in range(4):
        call(mount, "/a", b"%d" % i)
    stats = mount.root.store.statfs()
    monkeypatch.setattr(mount.root.store, "statfs", lambda: stats._replace(bavail=stats.blocks // 50))
    run(mount.checkpoints.maintain)
    assert len(mount.checkpoints.all()) == 1


def test_a_checkpoint_that_fails_does_not_stop_the_call(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mount.root.store, "checkpoint", full)
    assert run(mount.checkpoints.before_execute, "make", ME) == ""


def test_a_checkpoint_that_is_used_again_keeps_its_new_label(mount: Mount) -> None:
    for command in ("one", "two", "three"):
        run(mount.checkpoints.before_execute, command, ME)
    (before,) = mount.checkpoints.all()
    mount.close()
    mount.open()
    (after,) = mount.checkpoints.all()
    assert (after.id, after.label) == (before.id, "execute: three")


def test_a_label_that_cannot_be_kept_does_not_stop_the_call(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    taken = run(mount.checkpoints.before_execute, "one", ME)
    monkeypatch.setattr(mount.root, "relabel", full)
    assert run(mount.checkpoints.before_execute, "two", ME) == taken
    assert mount.checkpoints.all()[0].label == "execute: two"


def test_nothing_to_undo_is_said_truly_after_an_undo(mount: Mount) -> None:
    """The checkpoints of what was undone do differ from the tree; they are not what came before it."""
    run(mount.checkpoints.before_execute, "touch a", ME)
    mount.write("/a")
    run(mount.checkpoints.before_execute, "touch b", ME)
    mount.write("/b")
    run(mount.checkpoints.undo, ME)
    run(mount.checkpoints.undo, ME)
    said = str(refused(mount.checkpoints.undo, ME).strerror)
    assert "no automatic checkpoint from before the present state differs from it" in said
