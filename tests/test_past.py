"""The past as read-only directories."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpointed import ME, Mount, changes, create, run, state_of

from vfsd.core.types import SetAttr
from vfsd.past.volume import PastVolume


def test_the_past_can_be_read(mount: Mount) -> None:
    mount.write("/d/a", b"old")
    mount.root.setxattr(mount.find("/d/a").ino, b"user.k", b"v", 0, ME)
    name, state = create(mount), mount.state()
    mount.write("/d/a", b"new")
    assert mount.past_state(name) == state
    past = mount.past
    top = past.lookup(past.root_ino, name.encode())
    a = past.lookup(past.lookup(top.ino, b"d").ino, b"a")
    assert past.path_of(a.ino) == f"/{name}/d/a".encode()
    assert past.parent_of(top.ino) == past.root_ino
    assert past.lookup(past.lookup(top.ino, b"d").ino, b"..").ino == top.ino
    assert past.read(a.ino, 0, 1, 10) == b"ld"
    for missing in ((top.ino, b"nope"), (past.root_ino, b"nope")):
        with pytest.raises(FileNotFoundError):
            past.lookup(*missing)
    with pytest.raises(NotADirectoryError):
        past.lookup(a.ino, b"x")
    fh = past.opendir(top.ino, ME)
    assert [(e.name, e.attr.ino) for e in past.readdir(top.ino, fh, 0)] == [
        (n, x.ino) for n, x in past.children(top.ino)
    ]
    past.releasedir(top.ino, fh)
    # The same number each time.
    assert past.lookup(past.lookup(top.ino, b"d").ino, b"a").ino == a.ino


def test_the_past_can_not_be_changed(mount: Mount) -> None:
    mount.write("/a", b"old")
    name, past = create(mount), mount.past
    top = past.lookup(past.root_ino, name.encode())
    a = past.lookup(top.ino, b"a")
    attempts: list[Callable[[], Any]] = [
        lambda: past.open(a.ino, os.O_WRONLY, ME),
        lambda: past.open(a.ino, os.O_RDONLY | os.O_TRUNC, ME),
        lambda: past.create(top.ino, b"new", 0o644, os.O_CREAT, ME),
        lambda: past.unlink(top.ino, b"a", ME),
        lambda: past.write(a.ino, 0, 0, b"x", ME),
        lambda: past.rename(past.root_ino, name.encode(), past.root_ino, b"y", 0, ME),
        lambda: past.rmdir(past.root_ino, name.encode(), ME),
        lambda: past.setattr(a.ino, SetAttr(perm=0), ME),
    ]
    for attempt in attempts:
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno == errno.EROFS
    assert past.create(top.ino, b"a", 0o644, os.O_CREAT, ME)[0].ino == a.ino


def test_a_dropped_past_is_gone_and_its_numbers_wait(mount: Mount) -> None:
    mount.write("/a", b"old")
    name, past = create(mount), mount.past
    top = past.lookup(past.root_ino, name.encode())
    a = past.lookup(top.ino, b"a")
    fh = past.open(a.ino, os.O_RDONLY, ME)
    run(mount.checkpoints.drop, [name], ME)
    with pytest.raises(FileNotFoundError):
        past.lookup(past.root_ino, name.encode())
    for use in (lambda: past.read(a.ino, fh, 0, 10), lambda: past.getattr(a.ino), lambda: past.children(top.ino)):
        with pytest.raises(OSError) as caught:
            use()
        assert caught.value.errno == errno.ESTALE
    past._last_slot -= 1
    again = create(mount)
    assert past.lookup(past.root_ino, again.encode()).ino != top.ino
    past.release(a.ino, fh)
    past._last_slot -= 2
    third = create(mount)
    assert past.lookup(past.root_ino, third.encode()).ino == top.ino


def test_reading_the_past_while_a_fold_is_under_way(mount: Mount) -> None:
    """A fold commits between two statements of one reading: the first had seen no kept row, the second the new one."""
    mount.write("/a", b"old")
    name, past, store = create(mount), mount.past, mount.root.store
    top = past.lookup(past.root_ino, name.encode())
    a = past.lookup(top.ino, b"a")
    mount.write("/a", b"new")
    with store.reading():
        assert store.past(mount.checkpoints.find(name).parts[0].epoch).node(a.ino & 0xFF) is not None
        run(mount.root.maintain)
        assert store.past(mount.checkpoints.find(name).parts[0].epoch).map(a.ino & 0xFF) != []
    assert past.read(a.ino, 0, 0, 10) == b"old"


def test_directories_that_only_list_stand_above_routes(tmp_path: Path) -> None:
    mount = Mount(tmp_path, ("/deep/work/",), ("/",))
    work = mount.volumes["/deep/work/"]
    work.create_file(work.root_ino, b"w", 0o644, b"old", ME)
    name = create(mount)
    past: PastVolume = mount.past
    assert set(state_of(past)) == {
        f"/{name}".encode(),
        f"/{name}/deep".encode(),
        f"/{name}/deep/work".encode(),
        f"/{name}/deep/work/w".encode(),
    }
    deep = past.lookup(past.lookup(past.root_ino, name.encode()).ino, b"deep")
    assert past.parent_of(past.lookup(deep.ino, b"work").ino) == deep.ino
    run(mount.checkpoints.drop, [name], ME)
    with pytest.raises(OSError) as caught:
        past.getattr(deep.ino)
    assert caught.value.errno == errno.ESTALE
    mount.close()


def test_stubs_are_no_difference_and_not_listed(mount: Mount) -> None:
    name = create(mount)
    mount.vfs.add_stub(b"/opt/tools/bin")
    assert changes(mount, name) == []
    other = create(mount)
    assert mount.past_state(other) == {}
    assert mount.past.lookup(mount.past.lookup(mount.past.root_ino, other.encode()).ino, b"opt").mode
    mount.write("/opt/tools/mine")
    assert changes(mount, name) == [("added", b"/opt"), ("added", b"/opt/tools"), ("added", b"/opt/tools/mine")]
