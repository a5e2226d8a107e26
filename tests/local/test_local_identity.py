"""The ``local`` volume: which file an ino is, and how long; few descriptors for many files."""

from __future__ import annotations

import os
import random
import resource
import stat
import threading
from pathlib import Path

import pytest
from local_volume import ME, ROOT, FakeFeed, code, names, whole

from vfsd.backends import local_inodes, local_sys
from vfsd.backends.local import LocalVolume
from vfsd.core.changes import Drop
from vfsd.core.types import SetAttr


def test_unlinked_but_open(vol: LocalVolume, host: Path, feed: FakeFeed) -> None:
    attr, fh = vol.create(ROOT, b"f", 0o600, os.O_RDWR, ME)
    vol.remember(attr.ino, 1)
    vol.unlink(ROOT, b"f", ME)
    assert not feed.last(Drop)
    assert vol.getattr(attr.ino).nlink == 0
    assert vol.path_of(attr.ino) is None
    vol.write(attr.ino, fh, 0, b"still", ME)
    vol.release(attr.ino, fh)
    assert whole(vol, attr.ino) == b"still", "looked up still, by the kernel"
    fh = vol.open(attr.ino, os.O_RDONLY, ME)
    vol.forget(attr.ino, 1)
    assert vol.read(attr.ino, fh, 0, 9) == b"still"
    vol.release(attr.ino, fh)
    assert code(vol.getattr, attr.ino) == "ESTALE"
    assert code(vol.lookup, ROOT, b"f") == "ENOENT"


def test_removed_directory_in_use(vol: LocalVolume) -> None:
    d = vol.mkdir(ROOT, b"d", 0o755, ME).ino
    vol.remember(d, 1)
    vol.rmdir(ROOT, b"d", ME)
    assert vol.getattr(d).nlink in (0, 1)
    assert names(vol, d) == set()
    assert code(vol.lookup, d, b"x") == "ENOENT"
    assert code(vol.create_file, d, b"x", 0o600, b"", ME) == "ENOENT"
    vol.forget(d, 1)
    assert code(vol.getattr, d) == "ESTALE"


def test_replaced_by_rename_but_looked_up(vol: LocalVolume) -> None:
    old = vol.create_file(ROOT, b"f", 0o600, b"old", ME).ino
    vol.remember(old, 1)
    vol.create_file(ROOT, b"g", 0o600, b"new", ME)
    vol.rename(ROOT, b"g", ROOT, b"f", 0, ME)
    assert whole(vol, old) == b"old"
    assert whole(vol, vol.lookup(ROOT, b"f").ino) == b"new"
    vol.forget(old, 1)


def test_a_failed_removal_leaves_all_as_it_was(vol: LocalVolume, host: Path) -> None:
    d = vol.mkdir(ROOT, b"d", 0o755, ME).ino
    vol.remember(d, 1)
    f = vol.create_file(d, b"f", 0o600, b"", ME).ino
    assert code(vol.rmdir, ROOT, b"d", ME) == "ENOTEMPTY"
    assert vol.path_of(f) == b"/d/f"
    vol.forget(d, 1)
    assert vol.getattr(f).size == 0


def test_the_host_removes_and_makes_anew(vol: LocalVolume, host: Path) -> None:
    """File systems hand a freed inode number to the next file; it must not be taken for the old one."""
    inos = set()
    for i in range(40):
        (host / "f").write_bytes(b"%d" % i)
        threading.Event().wait(0.005)  # past the tick of the file system's clock
        ino = vol.lookup(ROOT, b"f").ino
        vol.remember(ino, 1)
        assert ino not in inos
        assert whole(vol, ino) == b"%d" % i
        inos.add(ino)
        # Crowd the descriptor out, as ten thousand other files would.
        vol._inodes._cool(vol._inodes.by_node[ino & (1 << 48) - 1])
        (host / "f").unlink()
        assert code(vol.getattr, ino) == "ESTALE"
        assert code(vol.open, ino, os.O_RDONLY, ME) == "ESTALE"
    (host / "f").mkdir()
    assert stat.S_ISDIR(vol.lookup(ROOT, b"f").mode)
    for ino in inos:
        assert code(vol.getattr, ino) == "ESTALE"
        vol.forget(ino, 1)


def test_changes_keep_the_ino(vol: LocalVolume, host: Path) -> None:
    (host / "f").write_bytes(b"1")
    ino = vol.lookup(ROOT, b"f").ino
    for i in range(5):
        (host / "f").write_bytes(b"%d" % i)
        (host / "f").chmod(0o600 + i)
        assert vol.lookup(ROOT, b"f").ino == ino
    (host / "f").rename(host / "g")
    assert vol.lookup(ROOT, b"g").ino == ino
    assert code(vol.lookup, ROOT, b"f") == "ENOENT"


def test_names_swapped_by_the_host(vol: LocalVolume, host: Path) -> None:
    """An ino never stands for what now has the name its file was last seen by."""
    inos = {}
    for name in (b"a", b"b"):
        (host / name.decode()).write_bytes(name)
        inos[name] = vol.lookup(ROOT, name).ino
    root = os.open(host, os.O_RDONLY)
    local_sys.rename(root, b"a", root, b"b", 2)
    os.close(root)
    assert code(vol.open, inos[b"a"], os.O_RDONLY, ME) == "ESTALE"
    assert code(vol.getattr, inos[b"b"]) == "ESTALE"
    assert vol.lookup(ROOT, b"b").ino == inos[b"a"]
    assert whole(vol, inos[b"a"]) == b"a"


def test_the_host_turns_directories_inside_out(vol: LocalVolume, host: Path) -> None:
    (host / "a/b").mkdir(parents=True)
    (host / "a/b/f").write_bytes(b"x")
    a = vol.lookup(ROOT, b"a").ino
    b = vol.lookup(a, b"b").ino
    vol.lookup(b, b"f")
    (host / "a/b").rename(host / "b")
    (host / "a").rename(host / "b/a")
    assert vol.lookup(b, b"a").ino == a
    assert vol.path_of(a) is None or vol.path_of(a) == b"/b/a"
    assert vol.lookup(ROOT, b"b").ino == b
    assert vol.path_of(a) == b"/b/a"
    assert whole(vol, vol.lookup(b, b"f").ino) == b"x"


def test_few_descriptors_many_files(vol: LocalVolume, host: Path) -> None:
    vol._inodes.limit = 8
    deep = ROOT
    inos = []
    for i in range(60):
        deep = vol.mkdir(deep, b"d%d" % i, 0o755, ME).ino
        inos.append(vol.create_file(deep, b"f", 0o644, b"%d" % i, ME).ino)
        vol.remember(deep, 1)
    order = list(range(60)) * 3
    random.Random(1).shuffle(order)
    for i in order:
        assert whole(vol, inos[i]) == b"%d" % i
        vol.setattr(inos[i], SetAttr(perm=0o600), ME)
    assert vol.counters()["path_fds"] <= 8
    for ino in inos:
        vol.remember(ino, 1)
        vol.unlink(vol.parent_of(ino), b"f", ME)
    for i, ino in enumerate(inos):
        assert whole(vol, ino) == b"%d" % i
        vol.forget(ino, 1)


@pytest.mark.slow
def test_ten_thousand_open_files(vol: LocalVolume) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 10_200:
        pytest.skip("the machine's hard limit of open files is lower")
    opened = []
    for i in range(10_000):
        attr, fh = vol.create(ROOT, b"f%d" % i, 0o600, os.O_RDWR, ME)
        vol.write(attr.ino, fh, 0, b"%d" % i, ME)
        opened.append((attr.ino, fh))
    for i, (ino, fh) in enumerate(opened):
        assert vol.read(ino, fh, 0, 9) == b"%d" % i
        vol.release(ino, fh)


def test_out_of_descriptors_the_kept_ones_are_given_up(vol: LocalVolume, host: Path) -> None:
    for i in range(200):
        (host / f"f{i}").write_bytes(b"x")
    inos = [vol.lookup(ROOT, b"f%d" % i).ino for i in range(200)]
    used = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, limits[1]))
    try:
        for ino in inos:
            assert whole(vol, ino) == b"x"
        handles = [(ino, vol.open(ino, os.O_RDONLY, ME)) for ino in inos[:40]]
        assert code(lambda: [vol.open(ino, os.O_RDONLY, ME) for ino in inos]) == "EMFILE"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for ino, fh in handles:
        vol.release(ino, fh)


def test_idle_inodes_are_forgotten(vol: LocalVolume, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_inodes, "IDLE_MAX", 100)
    vol._inodes._idle_max = 100
    (host / "d").mkdir()
    d = vol.lookup(ROOT, b"d").ino
    (host / "d/kept").touch()
    kept = vol.lookup(d, b"kept").ino
    vol.remember(kept, 2)
    for i in range(1000):
        (host / f"f{i}").touch()
    first = vol.lookup(ROOT, b"f0").ino
    assert len(names(vol, ROOT)) == 1001
    assert vol.counters()["inodes"] <= 101
    assert code(vol.getattr, first) == "ESTALE"
    assert vol.lookup(ROOT, b"f0").ino == first
    assert vol.path_of(kept) == b"/d/kept"
    assert vol.parent_of(kept) == d
    vol.forget(kept, 2)
