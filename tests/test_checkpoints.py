"""Checkpoints of a mount without a kernel: how they are named, going back, dropping, forking."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from checkpointed import ME, Mount, changes, create, refused, run, state_of

from vfsd.backends.base import VolumeError
from vfsd.backends.sqlite import SqliteBackend
from vfsd.check import check_volume
from vfsd.core.types import SetAttr
from vfsd.feed import Feed
from vfsd.statevolume import StateVolume

# -- naming


def test_a_checkpoint_is_found_by_id_beginning_and_label(mount: Mount) -> None:
    name = create(mount, "before lunch")
    assert re.fullmatch("[0-9a-f]{8}", name)
    for ref in (name, name[:5], "before lunch"):
        assert mount.checkpoints.find(ref).id == name


def test_an_unknown_name_is_named(mount: Mount) -> None:
    create(mount)
    state = mount.state()
    for ref in ("nope", ""):
        error = refused(mount.checkpoints.restore, ref, ME)
        assert (error.errno, error.strerror) == (
            errno.ENOENT,
            f"no checkpoint is called {ref!r}: see vfsd checkpoint list",
        )
    assert mount.state() == state
    assert len(mount.checkpoints.all()) == 1


def test_an_ambiguous_name_tells_what_it_may_be(mount: Mount) -> None:
    first, second = create(mount, "twice"), create(mount, "twice")
    error = refused(mount.checkpoints.drop, ["twice"], ME)
    assert error.errno == errno.EINVAL
    assert error.strerror == f"'twice' may be any of these checkpoints: {first} (twice), {second} (twice)"
    assert len(mount.checkpoints.all()) == 2


def test_ids_that_begin_alike_are_ambiguous(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["aaaa1111", "aaaa2222", "aaaa1111", "bbbb3333"])
    monkeypatch.setattr("vfsd.past.checkpoints.secrets.token_hex", lambda n: next(names))
    create(mount)
    create(mount)
    assert refused(mount.checkpoints.show, "aaaa").errno == errno.EINVAL
    assert mount.checkpoints.find("aaaa2").id == "aaaa2222"
    # A number drawn twice is not used twice.
    assert create(mount) == "bbbb3333"


@pytest.mark.parametrize("label", ["two\nlines", "x" * 201, "bell\a", "\udc80"])
def test_a_label_stays_on_its_line(mount: Mount, label: str) -> None:
    assert refused(mount.checkpoints.create, label, ME).errno == errno.EINVAL
    assert mount.checkpoints.all() == []


# -- going back


def test_restore_brings_everything_back(mount: Mount) -> None:
    mount.write("/a", b"old")
    mount.write("/d/deep/file", b"x" * 10_000)
    mount.root.setxattr(mount.find("/a").ino, b"user.k", b"v", 0, ME)
    mount.root.symlink(mount.root.root_ino, b"l", b"a", ME)
    mount.root.link(mount.find("/a").ino, mount.find("/d").ino, b"hard", ME)
    state, name = mount.state(), create(mount)
    mount.write("/a", b"new")
    mount.root.removexattr(mount.find("/a").ino, b"user.k", ME)
    mount.root.setattr(mount.find("/d").ino, SetAttr(perm=0o700), ME)
    mount.root.unlink(mount.root.root_ino, b"l", ME)
    mount.root.rename(mount.find("/d").ino, b"deep", mount.root.root_ino, b"up", 0, ME)
    mount.write("/more")
    changed = mount.state()
    done = run(mount.checkpoints.restore, name, ME)
    assert mount.state() == state
    # And that is itself undone by the checkpoint made before.
    assert mount.checkpoints.find(done["before"]).cause == "restore"
    run(mount.checkpoints.restore, done["before"], ME)
    assert mount.state() == changed


def test_restore_keeps_times_of_birth(mount: Mount) -> None:
    mount.write("/a", b"old")
    ino = mount.find("/a").ino
    born = mount.root.birth_ns(ino)
    name = create(mount)
    mount.root.setattr(ino, SetAttr(atime_ns=1), ME)
    mount.write("/a", b"new")
    run(mount.checkpoints.restore, name, ME)
    assert mount.root.birth_ns(ino) == born
    mount.root.setattr(ino, SetAttr(atime_ns=1), ME)
    mount.root.unlink(mount.root.root_ino, b"a", ME)
    run(mount.checkpoints.restore, name, ME)
    assert mount.root.birth_ns(mount.find("/a").ino) == born


def test_restore_of_what_is_there_changes_nothing(mount: Mount) -> None:
    mount.write("/a")
    name = create(mount)
    assert run(mount.checkpoints.restore, name, ME)["before"] is None
    assert len(mount.checkpoints.all()) == 1


def test_a_second_restore_has_nothing_to_do(mount: Mount) -> None:
    mount.write("/a", b"old")
    mount.write("/d/b")
    name = create(mount)
    mount.write("/a", b"new")
    mount.root.unlink(mount.find("/d").ino, b"b", ME)
    assert run(mount.checkpoints.restore, name, ME)["before"] is not None
    assert run(mount.checkpoints.restore, name, ME)["before"] is None


def test_a_file_open_for_writing_refuses_a_restore_that_would_change_it(mount: Mount) -> None:
    mount.write("/d/a", b"old")
    name = create(mount)
    mount.write("/d/a", b"new")
    mount.write("/other", b"new")
    ino = mount.find("/d/a").ino
    fh = mount.root.open(ino, os.O_RDWR, ME)
    state = mount.state()
    error = refused(mount.checkpoints.restore, name, ME)
    assert error.errno == errno.EBUSY
    assert error.strerror == "/d/a is open for writing and would change: close it first; nothing was changed"
    assert mount.state() == state
    assert [mark.id for mark in mount.checkpoints.all()] == [name]
    assert os.listdir(mount.place("/")) != []
    mount.root.release(ino, fh)
    run(mount.checkpoints.restore, name, ME)
    assert set(mount.state()) == {b"/d", b"/d/a"}


def test_a_file_open_for_reading_keeps_what_it_was(mount: Mount) -> None:
    mount.write("/a", b"old")
    name = create(mount)
    mount.write("/a", b"new content")
    ino = mount.find("/a").ino
    fh = mount.root.open(ino, os.O_RDONLY, ME)
    run(mount.checkpoints.restore, name, ME)
    assert mount.root.read(ino, fh, 0, 100) == b"new content"
    assert mount.root.read(mount.find("/a").ino, 0, 0, 100) == b"old"
    mount.root.release(ino, fh)


def meanwhile(mount: Mount, monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> list[object]:
    """Have ``what`` happen on the loop each time a restore has been worked out in its thread; what it returned."""
    plan, found = StateVolume._plan_aside, list[object]()

    def then(volume: StateVolume, *args: Any) -> Any:
        try:
            return plan(volume, *args)
        finally:
            found.append(trio.from_thread.run_sync(what))

    monkeypatch.setattr(StateVolume, "_plan_aside", then)
    return found


def test_a_restore_is_worked_out_beside_the_loop(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    mount.write("/a", b"old")
    name = create(mount)
    mount.write("/a", b"new")
    seen = meanwhile(mount, monkeypatch, lambda: mount.state()[b"/a"][5])
    monkeypatch.setattr(mount.root.store, "touched", None)
    run(mount.checkpoints.restore, name, ME)
    assert seen == [b"new"]
    assert mount.state()[b"/a"][5] == b"old"


def test_what_changes_while_a_restore_is_worked_out_is_taken_back_and_kept(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount.write("/a", b"old")
    state, name = mount.state(), create(mount)
    mount.write("/a", b"new")
    meanwhile(mount, monkeypatch, lambda: mount.write("/late", b"late"))
    done = run(mount.checkpoints.restore, name, ME)
    assert mount.state() == state
    monkeypatch.undo()
    run(mount.checkpoints.restore, done["before"], ME)
    assert (mount.state()[b"/a"][5], mount.state()[b"/late"][5]) == (b"new", b"late")


def test_a_file_opened_while_a_restore_is_worked_out_refuses_it(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    mount.write("/a", b"old")
    name = create(mount)
    mount.write("/a", b"new")
    ino, state = mount.find("/a").ino, mount.state()
    meanwhile(mount, monkeypatch, lambda: mount.root.open(ino, os.O_RDWR, ME))
    assert refused(mount.checkpoints.restore, name, ME).errno == errno.EBUSY
    assert mount.state() == state


def test_a_file_looked_up_while_a_restore_is_worked_out_stays_as_long_as_it_is_held(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = create(mount)
    mount.write("/a", b"held")
    ino = mount.find("/a").ino
    held = meanwhile(mount, monkeypatch, lambda: mount.root.remember(ino))
    run(mount.checkpoints.restore, name, ME)
    assert mount.state() == {}
    assert mount.root.read(ino, 0, 0, 10) == b"held"
    mount.root.forget(ino, len(held))
    assert refused_now(mount.root.getattr, ino).errno == errno.ESTALE


def refused_now(call: Callable[..., Any], *args: Any) -> OSError:
    with pytest.raises(OSError) as caught:
        call(*args)
    return caught.value


def test_several_routes_go_back_together_or_not_at_all(tmp_path: Path) -> None:
    mount = Mount(tmp_path, ("/", "/work/"), ("/ram/",))
    work, ram = mount.volumes["/work/"], mount.table.volumes[1]
    ram = next(r.volume for r in mount.table.routes if r.kind == "memory")
    mount.write("/a", b"old")
    inside = work.create_file(work.root_ino, b"w", 0o644, b"old", ME)
    made = run(mount.checkpoints.create, "", ME)
    assert made["routes"] == [b"/", b"/work/"]
    ram.create_file(ram.root_ino, b"r", 0o644, b"new", ME)
    mount.write("/a", b"new")
    work.replace(inside.ino, b"new", ME)
    assert changes(mount, made["id"]) == [("modified", b"/a"), ("modified", b"/work/w")]

    fh = work.open(inside.ino, os.O_WRONLY, ME)
    error = refused(mount.checkpoints.restore, made["id"], ME)
    assert error.strerror is not None and error.strerror.startswith("/work/w is open for writing")
    assert mount.state()[b"/a"][5] == b"new"
    work.release(inside.ino, fh)

    seen = state_of(mount.past)
    assert seen[b"/" + made["id"].encode() + b"/work/w"][5] == b"old"
    run(mount.checkpoints.restore, made["id"], ME)
    assert mount.state()[b"/a"][5] == state_of(work)[b"/w"][5] == b"old"
    assert state_of(ram)[b"/r"][5] == b"new"
    mount.close()


def test_a_second_route_that_fails_takes_the_first_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount(tmp_path, ("/", "/work/"))
    work = mount.volumes["/work/"]
    made = run(mount.checkpoints.create, "", ME)
    mount.write("/a")
    work.create_file(work.root_ino, b"w", 0o644, b"new", ME)
    before = (mount.state(), state_of(work))

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(work, "commit_restore", full)
    assert refused(mount.checkpoints.restore, made["id"], ME).errno == errno.ENOSPC
    assert (mount.state(), state_of(work)) == before
    assert [mark.id for mark in mount.checkpoints.all()] == [made["id"]]
    mount.close()


def test_a_second_route_that_fails_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount(tmp_path, ("/", "/work/"))

    async def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mount.volumes["/work/"].store, "checkpoint", full)
    assert refused(mount.checkpoints.create, "", ME).errno == errno.ENOSPC
    assert mount.checkpoints.all() == mount.root.store.checkpoints() == []
    mount.close()


def test_a_restore_takes_no_route_away(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    name = create(mount)
    mount.close()
    mount = Mount(tmp_path, ("/",), ("/deep/ram/",))
    mount.write("/a")
    state = mount.state()
    error = refused(mount.checkpoints.restore, name, ME)
    assert (error.errno, error.strerror) == (
        errno.EBUSY,
        "the directory in which route 'ram' stands was not there then: mount without it",
    )
    assert mount.state() == state
    mount.close()
    mount = Mount(tmp_path)
    run(mount.checkpoints.restore, name, ME)
    assert mount.state() == {}
    mount.close()


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    mount = Mount(tmp_path, ("/",), ("/ram/",))
    made = run(mount.checkpoints.create, "", ME)
    assert made["not_included"] == [
        {
            "prefix": b"/ram/",
            "kind": "memory",
            "why": "not included: it is in memory only, and a restore leaves it as it is",
        }
    ]
    mount.close()


def test_a_mount_without_state_says_so(tmp_path: Path) -> None:
    mount = Mount(tmp_path, (), ("/",))
    error = refused(mount.checkpoints.create, "", ME)
    assert error.errno == errno.EOPNOTSUPP
    assert error.strerror == "no route of this mount is of kind state, so there is nothing to checkpoint"
    mount.close()


def test_a_read_only_mount_can_be_looked_at(mount: Mount) -> None:
    mount.write("/a")
    name = create(mount)
    mount.write("/b")
    mount.root.read_only = True
    assert changes(mount, name) == [("added", b"/b")]
    for call in (mount.checkpoints.create, mount.checkpoints.restore):
        assert refused(call, name, ME).errno == errno.EROFS
    assert refused(mount.checkpoints.drop, [name], ME).errno == errno.EROFS


# -- dropping


def test_drop_is_all_or_nothing(mount: Mount) -> None:
    first, second = create(mount), create(mount)
    assert refused(mount.checkpoints.drop, [first, "nope"], ME).errno == errno.ENOENT
    assert [mark.id for mark in mount.checkpoints.all()] == [first, second]
    run(mount.checkpoints.drop, [first, second], ME)
    assert mount.checkpoints.all() == []


def test_drop_waits_for_no_reader(mount: Mount) -> None:
    name = create(mount)

    async def main() -> None:
        async with mount.checkpoints._being_read(name):
            with pytest.raises(OSError, match="is being read") as caught:
                await mount.checkpoints.drop([name], ME)
            assert caught.value.errno == errno.EBUSY
        await mount.checkpoints.drop([name], ME)

    trio.run(main)


def test_dropping_gives_space_back(mount: Mount) -> None:
    mount.write("/big", os.urandom(4 << 20))
    name = create(mount)
    mount.write("/big", b"small")
    run(mount.root.maintain)
    held = mount.root.store.disk_used()
    run(mount.checkpoints.drop, [name], ME)
    assert mount.root.store.disk_used() <= held - (4 << 20) + 65536


def test_gc_shrinks_files_and_database(mount: Mount) -> None:
    mount.write("/kept", b"kept")
    for i in range(2000):
        mount.write(f"/many/{i:0100}", b"x" * 5000)
    run(mount.root.maintain)
    for name, _ in mount.root.children(mount.find("/many").ino):
        mount.root.unlink(mount.find("/many").ino, name, ME)
    run(mount.root.maintain)
    assert mount.root.store.waste() > 0
    done = run(mount.checkpoints.collect)
    assert done["after"] < done["before"]
    assert mount.root.store.waste() == 0
    # What was not in use is cut off; the ballast and two journals are all that is left beside the files.
    assert (mount.place("/") / "data").stat().st_size < 2 << 20
    mount.write("/more", os.urandom(100_000))
    assert mount.state()[b"/kept"][5] == b"kept"
    mount.close()
    assert check_volume(mount.place("/")) == []
    mount.open()


def test_what_an_end_without_warning_left_is_dropped(mount: Mount) -> None:
    mount.write("/a")
    run(mount.root.store.checkpoint, "feedface", "", "moment", 1)
    mount.close()
    mount.open()
    assert mount.checkpoints.all() == []
    assert mount.past.children(mount.past.root_ino) == []
    run(mount.checkpoints.maintain)
    assert mount.root.store.checkpoints() == []


def test_checkpoints_outlive_the_daemon(mount: Mount) -> None:
    mount.write("/a", b"old")
    name, state = create(mount, "kept"), mount.state()
    mount.write("/a", b"new")
    mount.close()
    mount.open()
    assert [(m.id, m.label, m.cause) for m in mount.checkpoints.all()] == [(name, "kept", "user")]
    assert mount.past_state(name) == state


# -- forking


def test_a_fork_is_a_tree_of_its_own(mount: Mount) -> None:
    mount.write("/d/a", os.urandom(300_000))
    mount.write("/b", b"b")
    ino = mount.find("/b").ino
    mount.root.write(ino, 0, 1 << 20, b"far", ME)
    mount.root.setxattr(ino, b"user.k", b"v", 0, ME)
    state, name = mount.state(), create(mount)
    mount.write("/d/a", b"changed")
    made = run(mount.checkpoints.fork, name, "other")
    (place,) = (Path(p) for p in made["volumes"])
    assert place == mount.home / "threads/other/root"
    assert check_volume(place) == []
    # Packed: holes and what other checkpoints hold take no space.
    assert (place / "data").stat().st_size <= 320_000
    forked = StateVolume(0, SqliteBackend(place), Feed(), lambda: 0)
    assert state_of(forked) == state
    forked.create_file(1, b"own", 0o644, b"", ME)
    assert forked.store.checkpoints() == []
    forked.close()
    assert b"/own" not in mount.state()


def test_a_thread_that_exists_is_not_forked_into(mount: Mount) -> None:
    name = create(mount)
    taken = mount.home / "threads/taken"
    taken.mkdir(parents=True)
    (taken / "file").write_text("mine")
    error = refused(mount.checkpoints.fork, name, "taken")
    assert error.errno == errno.EEXIST
    assert error.strerror == f"thread 'taken' exists already ({taken}); nothing was changed"
    assert os.listdir(mount.home / "threads") == ["taken"]
    assert os.listdir(taken) == ["file"]


def test_a_fork_that_fails_leaves_nothing(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    mount.write("/a", b"x" * 10_000)
    name = create(mount)

    def broken(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vfsd.past.fork._copy_bytes", broken)
    assert refused(mount.checkpoints.fork, name, "other").errno == errno.ENOSPC
    assert os.listdir(mount.home / "threads") == []


# -- a newer version


def test_a_store_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    create(mount)
    mount.close()
    place = mount.place("/")
    db = sqlite3.connect(place / "tree.db")
    db.execute("PRAGMA user_version=99")
    db.close()
    before = {p.name: p.read_bytes() for p in place.iterdir() if p.name not in ("lock", "tree.db-shm", "tree.db-wal")}
    with pytest.raises(VolumeError, match="has format 99, this vfsd reads up to 1: upgrade vfsd"):
        SqliteBackend(place)
    after = {p.name: p.read_bytes() for p in place.iterdir() if p.name not in ("lock", "tree.db-shm", "tree.db-wal")}
    assert after == before
