"""Path walk, whole files and the permissions a kernel would have checked, on every kind of volume."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash
from makers import KINDS, close_vfs, done, open_vfs

from vfsd.core.types import Caller, SetAttr
from vfsd.listing import list_page
from vfsd.paths import Paths
from vfsd.vfs import Vfs

ROOT = Caller(0, 0, 0, "rpc")
ALICE = Caller(1001, 1001, 0, "rpc")
BOB = Caller(1002, 1002, 0, "rpc")


@pytest.fixture(params=KINDS)
def vfs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Vfs]:
    vfs = open_vfs({"/": (request.param, tmp_path / "volume"), "/mem/": ("memory", tmp_path)})
    yield vfs
    close_vfs(vfs)


@pytest.fixture
def paths(vfs: Vfs) -> Paths:
    return Paths(vfs)


def errno_of(operation: Any) -> str:
    with pytest.raises(OSError) as caught:
        done(operation)
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


def write(paths: Paths, path: bytes, data: bytes = b"", **options: Any) -> Any:
    return done(paths.write_file(path, data, ROOT, **options))


def content(paths: Paths, path: bytes, caller: Caller = ROOT) -> bytes:
    return bytes(done(paths.read_file(path, 0, 1 << 20, caller))[1])


def symlink(paths: Paths, target: bytes, path: bytes) -> None:
    parent, name = done(paths.resolve_parent(path, ROOT))
    done(paths.vfs.symlink(parent, name, target, ROOT))


def chmod(paths: Paths, path: bytes, perm: int, owner: Caller = ROOT) -> None:
    attr = done(paths.resolve(path, ROOT))
    done(paths.vfs.setattr(attr.ino, SetAttr(uid=owner.uid, gid=owner.gid), ROOT))
    done(paths.vfs.setattr(attr.ino, SetAttr(perm=perm), ROOT))


def names(paths: Paths, path: bytes) -> list[bytes]:
    return [entry.name for entry in done(list_page(paths, path, ROOT))[0]]


# ---------------------------------------------------------------------- walking


@pytest.fixture
def tree(paths: Paths) -> Paths:
    write(paths, b"/a/b/file", b"content")
    write(paths, b"/mem/m/file", b"memory")
    symlink(paths, b"b", b"/a/rel")
    symlink(paths, b"/a/b/file", b"/a/abs")
    symlink(paths, b"../a/rel/file", b"/a/chain")
    symlink(paths, b"../../../../../etc/../a/b", b"/a/up")
    symlink(paths, b"/mem/m", b"/a/over")
    symlink(paths, b"nowhere", b"/a/dangling")
    symlink(paths, b"loop2", b"/loop1")
    symlink(paths, b"loop1", b"/loop2")
    return paths


@pytest.mark.parametrize(
    "path",
    [
        b"/a/b/file", b"a/b/file", b"//a///b/./file", b"/a/../a/b/file", b"/../../a/b/file", b"/a/rel/file", b"/a/abs",
        b"/a/chain", b"/mem/../a/b/file", b"/a/over/../../a/b/file", b"/mem/m/../../a/rel/../rel/file",
    ],
)  # fmt: skip
def test_these_all_name_the_same_file(tree: Paths, path: bytes) -> None:
    assert done(tree.resolve(path, ROOT)).ino == done(tree.resolve(b"/a/b/file", ROOT)).ino
    assert content(tree, path) == b"content"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (b"", "ENOENT"),
        (b"/none", "ENOENT"),
        (b"/none/x", "ENOENT"),
        (b"/a/none/", "ENOENT"),
        (b"/a/b/file/", "ENOTDIR"),
        (b"/a/b/file/.", "ENOTDIR"),
        (b"/a/b/file/x", "ENOTDIR"),
        (b"/a/b/file/..", "ENOTDIR"),
        (b"/a/abs/", "ENOTDIR"),
        (b"/a/dangling", "ENOENT"),
        (b"/a/up", "ENOENT"),
        (b"/loop1", "ELOOP"),
        (b"/loop1/x", "ELOOP"),
        (b"/" + b"n" * 256, "ENAMETOOLONG"),
        (b"/" + b"n/" * 2048, "ENAMETOOLONG"),
        (b"/a\0b", "EINVAL"),
    ],
)
def test_these_name_nothing(tree: Paths, path: bytes, code: str) -> None:
    assert errno_of(tree.resolve(path, ROOT)) == code


def test_a_path_may_have_4096_bytes(paths: Paths) -> None:
    assert stat.S_ISDIR(done(paths.resolve(b"/" * 4096, ROOT)).mode)


def test_without_follow_a_link_is_itself_unless_a_slash_follows(tree: Paths) -> None:
    assert stat.S_ISLNK(done(tree.resolve(b"/a/rel", ROOT, follow=False)).mode)
    assert stat.S_ISDIR(done(tree.resolve(b"/a/rel/", ROOT, follow=False)).mode)
    assert stat.S_ISLNK(done(tree.resolve(b"/loop1", ROOT, follow=False)).mode)


def test_forty_links_are_followed_and_no_more(paths: Paths) -> None:
    write(paths, b"/l0", b"end")
    for i in range(1, 42):
        symlink(paths, b"l%d" % (i - 1), b"/l%d" % i)
    assert content(paths, b"/l40") == b"end"
    assert errno_of(paths.resolve(b"/l41", ROOT)) == "ELOOP"


def test_a_link_to_the_root_and_up_from_a_route(tree: Paths) -> None:
    symlink(tree, b"/", b"/a/top")
    symlink(tree, b"..", b"/mem/out")
    root = tree.vfs.root_ino
    assert done(tree.resolve(b"/a/top", ROOT)).ino == root
    assert done(tree.resolve(b"/a/top/", ROOT)).ino == root
    assert done(tree.resolve(b"/mem/out", ROOT)).ino == root
    assert done(tree.resolve(b"/mem/..", ROOT)).ino == root
    assert content(tree, b"/mem/out/a/top/a/b/file") == b"content"


def test_resolve_parent(tree: Paths) -> None:
    directory = done(tree.resolve(b"/a/b", ROOT)).ino
    assert done(tree.resolve_parent(b"/a/rel/new/", ROOT)) == (directory, b"new")
    for path in (b"/", b"/a/..", b"/a/."):
        assert errno_of(tree.resolve_parent(path, ROOT)) == "EINVAL"


# ---------------------------------------------------------------------- whole files


def test_write_makes_then_overwrites_in_place(paths: Paths, request: pytest.FixtureRequest) -> None:
    if os.geteuid() and "local" in request.node.name:
        pytest.skip("only root may give files away")
    created, attr = write(paths, b"/d/e/f", b"one", perm=0o640)
    first = (attr.ino, stat.S_IMODE(attr.mode))
    assert created
    assert first[1] == 0o640
    parent, _ = done(paths.resolve_parent(b"/d/e/f", ROOT))
    done(paths.vfs.link(attr.ino, parent, b"other", ROOT))
    chmod(paths, b"/d/e/f", 0o400)
    created, attr = write(paths, b"/d/e/f", b"the second")
    assert not created
    assert (attr.ino, stat.S_IMODE(attr.mode), attr.size, attr.nlink) == (first[0], 0o400, 10, 2)
    write(paths, b"/d/e/f", b"3")
    assert content(paths, b"/d/e/other") == b"3"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 300_000])
def test_contents_of_any_size_over_contents_of_any_size(paths: Paths, size: int) -> None:
    data = os.urandom(size)
    write(paths, b"/f", os.urandom(10_000))
    write(paths, b"/f", data)
    assert content(paths, b"/f") == data
    attr, piece = done(paths.read_file(b"/f", 10, 20, ROOT))
    assert (attr.size, bytes(piece)) == (size, data[10:30])
    assert bytes(done(paths.read_file(b"/f", size, 20, ROOT))[1]) == b""


def test_a_write_through_a_link_reaches_its_target_or_makes_it(tree: Paths) -> None:
    write(tree, b"/a/abs", b"new")
    assert content(tree, b"/a/b/file") == b"new"
    assert stat.S_ISLNK(done(tree.resolve(b"/a/abs", ROOT, follow=False)).mode)
    assert write(tree, b"/a/dangling", b"made")[0]
    assert content(tree, b"/a/nowhere") == b"made"


def test_expect_is_compare_and_swap(paths: Paths) -> None:
    write(paths, b"/f", b"old")
    old = xxhash.xxh3_64_intdigest(b"old")
    write(paths, b"/f", b"new", expect=old)
    assert errno_of(paths.write_file(b"/f", b"lost", ROOT, expect=old)) == "ESTALE"
    assert content(paths, b"/f") == b"new"
    assert errno_of(paths.write_file(b"/none/f", b"", ROOT, expect=old)) == "ENOENT"
    assert b"none" not in names(paths, b"/")
    write(paths, b"/f", b"", expect=xxhash.xxh3_64_intdigest(b"new"))
    write(paths, b"/f", b"x", expect=xxhash.xxh3_64_intdigest(b""))


def test_a_write_by_another_between_read_and_write_is_noticed(paths: Paths) -> None:
    write(paths, b"/f", b"old")
    ino = done(paths.resolve(b"/f", ROOT)).ino
    seen = xxhash.xxh3_64_intdigest(content(paths, b"/f"))
    done(paths.vfs.write(ino, 0, 0, b"O", ROOT))
    assert errno_of(paths.write_file(b"/f", b"edit", ROOT, expect=seen)) == "ESTALE"
    assert content(paths, b"/f") == b"Old"


def test_exclusive(paths: Paths) -> None:
    assert write(paths, b"/f", b"1", exclusive=True)[0]
    assert errno_of(paths.write_file(b"/f", b"2", ROOT, exclusive=True)) == "EEXIST"
    assert content(paths, b"/f") == b"1"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (b"/", "EISDIR"),
        (b"/a", "EISDIR"),
        (b"/a/rel", "EISDIR"),
        (b"/new/", "EISDIR"),
        (b"/a/b/file/x", "ENOTDIR"),
        (b"/a/b/file/x/y", "ENOTDIR"),
        (b"/loop1", "ELOOP"),
        (b"/" + b"n" * 256, "ENAMETOOLONG"),
    ],
)
def test_where_no_file_can_be_written(tree: Paths, path: bytes, code: str) -> None:
    before = names(tree, b"/")
    assert errno_of(tree.write_file(path, b"", ROOT)) == code
    assert names(tree, b"/") == before


def test_without_parents_missing_directories_are_an_error(paths: Paths) -> None:
    assert errno_of(paths.write_file(b"/x/f", b"", ROOT, parents=False)) == "ENOENT"


def test_a_fifo_is_neither_read_nor_written(paths: Paths) -> None:
    done(paths.vfs.mknod(paths.vfs.root_ino, b"fifo", stat.S_IFIFO | 0o600, 0, ROOT))
    assert errno_of(paths.read_file(b"/fifo", 0, 1, ROOT)) == "EINVAL"
    assert errno_of(paths.write_file(b"/fifo", b"", ROOT)) == "EINVAL"
    assert errno_of(paths.open(b"/fifo", os.O_RDONLY, 0, ROOT)) == "ENXIO"


def test_list_is_sorted_by_bytes(paths: Paths) -> None:
    for name in (b"b", b"\xff", b"a", "é".encode()):
        write(paths, b"/d/" + name, name)
    entries = done(list_page(paths, b"/d", ROOT))[0]
    assert [(entry.name, entry.size) for entry in entries] == [(b"a", 1), (b"b", 1), ("é".encode(), 2), (b"\xff", 1)]
    assert errno_of(list_page(paths, b"/d/a", ROOT)) == "ENOTDIR"
    assert b"mem" in names(paths, b"/")


def test_makedirs(paths: Paths) -> None:
    attr = done(paths.makedirs(b"/x/y/z/", ROOT, 0o700))
    assert stat.S_IMODE(attr.mode) == 0o700
    assert done(paths.makedirs(b"/x/y/z", ROOT)).ino == attr.ino
    write(paths, b"/x/f")
    assert errno_of(paths.makedirs(b"/x/f", ROOT)) == "EEXIST"
    assert errno_of(paths.makedirs(b"/x/f/g", ROOT)) == "ENOTDIR"


def test_a_thousand_levels(paths: Paths) -> None:
    deep = b"/d" * 1000
    write(paths, deep + b"/f", b"deep")
    assert content(paths, deep + b"/f") == b"deep"
    trio.run(lambda: paths.delete(b"/d", ROOT))
    assert b"d" not in names(paths, b"/")


# ---------------------------------------------------------------------- removing


def test_delete_removes_links_never_their_targets(tree: Paths) -> None:
    done(tree.delete(b"/a/abs", ROOT))
    done(tree.delete(b"/a/rel/", ROOT))
    done(tree.delete(b"/loop1", ROOT))
    assert content(tree, b"/a/b/file") == b"content"
    trio.run(tree.delete, b"/a", ROOT)
    assert content(tree, b"/mem/m/file") == b"memory"
    assert b"a" not in names(tree, b"/")


@pytest.mark.parametrize(
    ("path", "recursive", "code"),
    [
        (b"/none", True, "ENOENT"),
        (b"/", True, "EBUSY"),
        (b"/mem", True, "EBUSY"),
        (b"/mem", False, "EBUSY"),
        (b"/a", False, "ENOTEMPTY"),
        (b"/a/..", True, "EBUSY"),
        (b"/a/b/.", True, "EINVAL"),
        (b"/a/b/file/x", True, "ENOTDIR"),
    ],
)
def test_what_cannot_be_deleted_loses_nothing(tree: Paths, path: bytes, recursive: bool, code: str) -> None:
    assert errno_of(tree.delete(path, ROOT, recursive=recursive)) == code
    assert content(tree, b"/a/b/file") == b"content"
    assert content(tree, b"/mem/m/file") == b"memory"


def test_a_directory_above_a_route_is_busy_before_anything_is_removed(tmp_path: Path) -> None:
    vfs = open_vfs({"/": ("memory", tmp_path), "/x/y/": ("memory", tmp_path)})
    paths = Paths(vfs)
    write(paths, b"/x/a/keep")
    write(paths, b"/x/y/keep")
    assert errno_of(paths.delete(b"/x", ROOT)) == "EBUSY"
    assert names(paths, b"/x") == [b"a", b"y"]
    assert names(paths, b"/x/a") == [b"keep"]
    close_vfs(vfs)


def test_delete_gives_way_to_others_and_takes_what_they_add(tmp_path: Path) -> None:
    vfs = open_vfs({"/": ("memory", tmp_path)})
    paths = Paths(vfs)
    for i in range(3000):
        write(paths, b"/d/s%d/f%d" % (i % 30, i))
    turns = [0]

    async def other() -> None:
        while b"d" in [entry.name for entry in (await list_page(paths, b"/", ROOT))[0]]:
            turns[0] += 1
            with contextlib.suppress(FileNotFoundError):
                await paths.write_file(b"/d/s1/late%d" % turns[0], b"", ROOT, parents=False)
            await trio.sleep(0.001)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await paths.delete(b"/d", ROOT)

    trio.run(main)
    assert turns[0] > 1
    close_vfs(vfs)


# ---------------------------------------------------------------------- permissions


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Paths]:
    vfs = open_vfs({"/": ("memory", tmp_path)})
    paths = Paths(vfs)
    write(paths, b"/home/alice/file", b"hers")
    for path, perm, owner in (
        (b"/home/alice/file", 0o640, ALICE),
        (b"/home/alice", 0o755, ALICE),
        (b"/home", 0o755, ROOT),
        (b"/", 0o755, ROOT),
    ):
        chmod(paths, path, perm, owner)
    yield paths
    close_vfs(vfs)


def test_the_owner_may_and_others_may_not(owned: Paths) -> None:
    path = b"/home/alice/file"
    assert content(owned, path, ALICE) == b"hers"
    assert content(owned, path, Caller(5, ALICE.gid)) == b"hers"
    assert errno_of(owned.read_file(path, 0, 9, BOB)) == "EACCES"
    assert errno_of(owned.write_file(path, b"", BOB)) == "EACCES"
    assert errno_of(owned.write_file(path, b"", Caller(5, ALICE.gid))) == "EACCES"
    assert errno_of(owned.write_file(b"/home/alice/new", b"", BOB)) == "EACCES"
    assert errno_of(owned.write_file(b"/home/bob/new", b"", BOB)) == "EACCES"
    assert errno_of(owned.makedirs(b"/home/bob", BOB)) == "EACCES"
    assert errno_of(owned.delete(path, BOB)) == "EACCES"
    assert errno_of(owned.delete(b"/home/alice", ALICE)) == "EACCES"
    assert done(owned.write_file(b"/home/alice/new/deep", b"", ALICE))[1].uid == ALICE.uid
    done(owned.delete(b"/home/alice/new", ALICE))


def test_the_owners_bits_count_for_the_owner_even_when_others_have_more(owned: Paths) -> None:
    chmod(owned, b"/home/alice/file", 0o077, ALICE)
    assert errno_of(owned.read_file(b"/home/alice/file", 0, 9, ALICE)) == "EACCES"
    assert content(owned, b"/home/alice/file", BOB) == b"hers"


def test_a_directory_needs_search_to_pass_and_read_to_list(owned: Paths) -> None:
    chmod(owned, b"/home/alice/file", 0o644, ALICE)
    chmod(owned, b"/home/alice", 0o711, ALICE)
    assert content(owned, b"/home/alice/file", BOB) == b"hers"
    assert errno_of(list_page(owned, b"/home/alice", BOB)) == "EACCES"
    chmod(owned, b"/home/alice", 0o744, ALICE)
    assert errno_of(owned.resolve(b"/home/alice/file", BOB)) == "EACCES"
    assert errno_of(owned.resolve(b"/home/alice/..", BOB)) == "EACCES"
    assert content(owned, b"/home/alice/file", ROOT) == b"hers"


def test_the_sticky_bit_keeps_files_from_others(owned: Paths) -> None:
    done(owned.makedirs(b"/tmp", ROOT))
    chmod(owned, b"/tmp", 0o1777)
    done(owned.write_file(b"/tmp/a", b"", ALICE))
    done(owned.write_file(b"/tmp/d/x", b"", ALICE))
    assert errno_of(owned.delete(b"/tmp/a", BOB)) == "EPERM"
    assert errno_of(owned.delete(b"/tmp/d", BOB)) == "EPERM"
    done(owned.delete(b"/tmp/a", ALICE))
    chmod(owned, b"/tmp", 0o1777, BOB)
    assert errno_of(owned.delete(b"/tmp/d", BOB)) == "EACCES"
    trio.run(owned.delete, b"/tmp/d", ALICE)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (os.O_RDONLY, None),
        (os.O_WRONLY, "EACCES"),
        (os.O_RDWR, "EACCES"),
        (os.O_RDONLY | os.O_TRUNC, "EACCES"),
        (os.O_RDONLY | os.O_CREAT, None),
        (os.O_RDONLY | os.O_CREAT | os.O_EXCL, "EEXIST"),
    ],
)
def test_open_checks_what_it_is_asked_for(owned: Paths, flags: int, code: str | None) -> None:
    group = Caller(5, ALICE.gid)
    if code is None:
        attr, fh = done(owned.open(b"/home/alice/file", flags, 0, group))
        done(owned.vfs.release(attr.ino, fh))
    else:
        assert errno_of(owned.open(b"/home/alice/file", flags, 0, group)) == code
    assert content(owned, b"/home/alice/file") == b"hers"


# ---------------------------------------------------------------------- a host that renames meanwhile


def swap_after_lookup(vfs: Vfs, host: Path, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Each of the first ``times`` that ``d`` is looked up, the host puts another directory in its place right after."""
    lookup, left = vfs.lookup, times

    async def swapped(parent: int, name: bytes, caller: Caller) -> Any:
        nonlocal left
        found = await lookup(parent, name, caller)
        if name == b"d" and left:
            left -= 1
            (host / "d").rename(host / f"old{left}")
            (host / "d").mkdir()
            (host / "d/f").write_bytes(b"new")
        return found

    monkeypatch.setattr(vfs, "lookup", swapped)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "volume/d").mkdir(parents=True)
    (tmp_path / "volume/d/f").write_bytes(b"old")
    return tmp_path / "volume"


OPERATIONS = {
    "read": lambda paths: paths.read_file(b"/d/f", 0, 9, ROOT),
    "stat": lambda paths: paths.resolve(b"/d/f", ROOT),
    "list": lambda paths: list_page(paths, b"/d", ROOT),
    "write": lambda paths: paths.write_file(b"/d/f", b"written", ROOT),
    "write new": lambda paths: paths.write_file(b"/d/g", b"written", ROOT),
    "open": lambda paths: paths.open(b"/d/f", os.O_RDONLY, 0, ROOT),
    "delete": lambda paths: paths.delete(b"/d/f", ROOT),
    "makedirs": lambda paths: paths.makedirs(b"/d/x/y", ROOT),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_directory_that_the_host_replaces_meanwhile(name: str, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is walked again, once, as the kernel does for programs."""
    vfs = open_vfs({"/": ("local", host)})
    try:
        swap_after_lookup(vfs, host, monkeypatch)
        done(OPERATIONS[name](Paths(vfs)))
        assert (host / "old0/f").read_bytes() == b"old"
        assert sorted(os.listdir(host / "old0")) == ["f"]
        expected = {"write": b"written", "delete": None}.get(name, b"new")
        there = host / "d/f"
        assert (there.read_bytes() if there.exists() else None) == expected
    finally:
        close_vfs(vfs)


def test_a_directory_that_the_host_replaces_all_the_time(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vfs = open_vfs({"/": ("local", host)})
    try:
        swap_after_lookup(vfs, host, monkeypatch, times=99)
        assert errno_of(Paths(vfs).read_file(b"/d/f", 0, 9, ROOT)) == "ESTALE"
        with pytest.raises(OSError, match="Stale"):
            done(Paths(vfs).write_file(b"/d/f", b"x", ROOT, expect=xxhash.xxh3_64_intdigest(b"old")))
        assert (host / "d/f").read_bytes() == b"new"
    finally:
        close_vfs(vfs)
