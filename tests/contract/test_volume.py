"""What every kind of volume does alike: one suite for state, memory and local."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import AbstractContextManager
from typing import Any

import pytest
from makers import ME, dump

from vfsd.core.types import FILE_MAX, Caller, SetAttr

RW = os.O_RDWR


def fails(code: int) -> AbstractContextManager[Any]:
    """The block raises OSError with this errno."""
    return pytest.raises(OSError, match=rf"^\[Errno {code}\]")


def make(volume: Any, name: bytes, data: bytes = b"", parent: int | None = None) -> int:
    """A regular file with content; its ino."""
    attr = volume.create_file(volume.root_ino if parent is None else parent, name, 0o644, data, ME)
    return int(attr.ino)


def content(volume: Any, ino: int) -> bytes:
    return bytes(volume.read(ino, 0, 0, volume.getattr(ino).size + 1))


def names(volume: Any, ino: int) -> list[bytes]:
    fh = volume.opendir(ino, ME)
    try:
        return sorted(entry.name for entry in volume.readdir(ino, fh, 0))
    finally:
        volume.releasedir(ino, fh)


def filled(volume: Any) -> None:
    """Some of everything."""
    root = volume.root_ino
    sub = volume.mkdir(root, b"sub", 0o2750, ME).ino
    volume.setattr(sub, SetAttr(perm=0o2750), ME)
    ino = make(volume, b"file", b"x" * 10_000)
    volume.link(ino, sub, b"hard", ME)
    volume.symlink(sub, b"link", b"../file", ME)
    volume.mknod(sub, b"fifo", stat.S_IFIFO | 0o600, 0, ME)
    volume.mknod(sub, b"sock", stat.S_IFSOCK | 0o600, 0, ME)
    volume.setxattr(ino, b"user.a", b"value\0", 0, ME)
    volume.setattr(ino, SetAttr(perm=0o600, uid=12, gid=34, atime_ns=-1, mtime_ns=-1_500_000_000), ME)
    sparse = make(volume, b"sparse\xff")
    volume.write(sparse, 0, (3 << 20) + 7, b"end", ME)
    volume.mkdir(sub, b"empty", 0o755, ME)
    deep = volume.mkdir(sub, b"deep", 0o755, ME).ino
    make(volume, b"n" * 255, b"long", deep)
    gone = make(volume, b"gone", b"gone")
    volume.unlink(root, b"gone", ME)
    with fails(errno.ESTALE):
        volume.getattr(gone)
    volume.rename(root, b"file", sub, b"moved", 0, ME)


def test_names_lead_to_what_was_made(volume: Any) -> None:
    root = volume.root_ino
    attr = volume.mkdir(root, b"d", 0o755, ME)
    assert stat.S_ISDIR(attr.mode)
    assert attr.nlink == 2
    assert volume.lookup(root, b"d").ino == attr.ino
    assert volume.getattr(root).nlink == 3
    assert volume.parent_of(attr.ino) == root
    assert volume.path_of(attr.ino) == b"/d"
    for name, code in ((b"no", errno.ENOENT), (b"x" * 256, errno.ENAMETOOLONG)):
        with fails(code):
            volume.lookup(root, name)
    ino = make(volume, b"f")
    with fails(errno.ENOTDIR):
        volume.lookup(ino, b"x")
    for one in (ino, attr.ino, root):  # as the kernel asks for what is opened by handle
        assert volume.lookup(one, b".").ino == one
    with fails(errno.EEXIST):
        volume.mkdir(root, b"f", 0o755, ME)
    with fails(errno.EEXIST):
        make(volume, b"d")
    assert names(volume, root) == [b"d", b"f"]
    assert sorted(name for name, _ in volume.children(root)) == [b"d", b"f"]


def test_every_byte_may_be_in_a_name(volume: Any) -> None:
    root = volume.root_ino
    every = [bytes([b]) for b in range(1, 256) if bytes([b]) not in (b"/", b".")]
    for name in every:
        make(volume, name)
    assert names(volume, root) == sorted(every)


def test_a_removed_name_is_gone(volume: Any) -> None:
    root = volume.root_ino
    make(volume, b"f")
    d = volume.mkdir(root, b"d", 0o755, ME).ino
    make(volume, b"in", b"", d)
    with fails(errno.EISDIR):
        volume.unlink(root, b"d", ME)
    with fails(errno.ENOTDIR):
        volume.rmdir(root, b"f", ME)
    with fails(errno.ENOTEMPTY):
        volume.rmdir(root, b"d", ME)
    volume.unlink(d, b"in", ME)
    volume.rmdir(root, b"d", ME)
    volume.unlink(root, b"f", ME)
    assert names(volume, root) == []
    assert volume.getattr(root).nlink == 2
    for call in (volume.unlink, volume.rmdir):
        with fails(errno.ENOENT):
            call(root, b"f", ME)


def test_rename_replaces_refuses_and_exchanges(volume: Any) -> None:
    root = volume.root_ino
    a, b = make(volume, b"a", b"A"), make(volume, b"b", b"B")
    d = volume.mkdir(root, b"d", 0o755, ME).ino
    with fails(errno.EEXIST):
        volume.rename(root, b"a", root, b"b", 1, ME)
    volume.rename(root, b"a", root, b"b", 2, ME)
    assert (volume.lookup(root, b"a").ino, volume.lookup(root, b"b").ino) == (b, a)
    volume.rename(root, b"a", root, b"b", 0, ME)
    assert names(volume, root) == [b"b", b"d"]
    assert volume.lookup(root, b"b").ino == b
    with fails(errno.EISDIR):
        volume.rename(root, b"b", root, b"d", 0, ME)
    with fails(errno.ENOTDIR):
        volume.rename(root, b"d", root, b"b", 0, ME)
    with fails(errno.EINVAL):
        volume.rename(root, b"d", d, b"in", 0, ME)
    e = volume.mkdir(root, b"e", 0o755, ME).ino
    volume.rename(root, b"e", d, b"sub", 0, ME)
    assert volume.parent_of(e) == d
    assert (volume.getattr(root).nlink, volume.getattr(d).nlink) == (3, 3)
    full = volume.mkdir(root, b"full", 0o755, ME).ino
    make(volume, b"in", b"", full)
    with fails(errno.ENOTEMPTY):
        volume.rename(root, b"d", root, b"full", 0, ME)
    volume.rename(root, b"full", d, b"sub", 0, ME)
    assert volume.lookup(d, b"sub").ino == full
    assert (volume.getattr(root).nlink, volume.getattr(d).nlink) == (3, 3)


def test_hard_links_are_one_file(volume: Any) -> None:
    root = volume.root_ino
    ino = make(volume, b"a", b"one")
    d = volume.mkdir(root, b"d", 0o755, ME).ino
    assert volume.link(ino, d, b"b", ME).ino == ino
    assert volume.getattr(ino).nlink == 2
    volume.write(volume.lookup(d, b"b").ino, 0, 0, b"two", ME)
    assert content(volume, ino) == b"two"
    with fails(errno.EPERM):
        volume.link(d, root, b"dir", ME)
    volume.rename(root, b"a", d, b"b", 0, ME)  # both names are one file: nothing happens (POSIX rename)
    assert volume.getattr(ino).nlink == 2
    volume.unlink(root, b"a", ME)
    assert volume.getattr(ino).nlink == 1
    assert content(volume, ino) == b"two"


def test_an_unlinked_file_lives_while_it_is_open(volume: Any) -> None:
    root = volume.root_ino
    ino = make(volume, b"f", b"still here")
    volume.remember(ino)
    fh = volume.open(ino, RW, ME)
    volume.unlink(root, b"f", ME)
    assert volume.getattr(ino, fh).nlink == 0
    assert bytes(volume.read(ino, fh, 0, 100)) == b"still here"
    volume.write(ino, fh, 0, b"S", ME)
    volume.setattr(ino, SetAttr(perm=0o600, size=5), ME, fh)
    assert bytes(volume.read(ino, fh, 0, 100)) == b"Still"
    assert stat.S_IMODE(volume.getattr(ino, fh).mode) == 0o600
    volume.release(ino, fh)
    volume.forget(ino, 1)
    with fails(errno.ESTALE):
        volume.getattr(ino)


def test_a_removed_directory_takes_nothing_new(volume: Any) -> None:
    root = volume.root_ino
    d = volume.mkdir(root, b"d", 0o755, ME).ino
    volume.remember(d)
    fh = volume.opendir(d, ME)
    volume.rmdir(root, b"d", ME)
    with fails(errno.ENOENT):
        volume.mkdir(d, b"x", 0o755, ME)
    assert [e.name for e in volume.readdir(d, fh, 0)] == []
    volume.releasedir(d, fh)
    volume.forget(d, 1)


def test_a_file_without_a_name(volume: Any) -> None:
    attr, fh = volume.tmpfile(volume.root_ino, 0o600, RW, ME)
    volume.write(attr.ino, fh, 0, b"t", ME)
    assert bytes(volume.read(attr.ino, fh, 0, 5)) == b"t"
    assert names(volume, volume.root_ino) == []
    volume.release(attr.ino, fh)
    assert names(volume, volume.root_ino) == []


def test_bytes_and_holes(volume: Any) -> None:
    ino = make(volume, b"f")
    assert volume.write(ino, 0, 10_000, b"data", ME) == 4
    assert content(volume, ino) == bytes(10_000) + b"data"
    assert volume.seek(ino, 0, 0, os.SEEK_DATA) <= 10_000
    assert volume.seek(ino, 0, 0, os.SEEK_HOLE) == 0
    assert volume.getattr(ino).blocks <= 16
    volume.setattr(ino, SetAttr(size=10_002), ME)
    volume.setattr(ino, SetAttr(size=20_000), ME)
    assert content(volume, ino) == bytes(10_000) + b"da" + bytes(9_998)
    assert volume.read(ino, 0, 20_000, 10) == b""
    with fails(errno.ENXIO):
        volume.seek(ino, 0, 20_000, os.SEEK_DATA)
    with fails(errno.EFBIG):
        volume.setattr(ino, SetAttr(size=FILE_MAX + 1), ME)
    volume.setattr(ino, SetAttr(size=0), ME)
    volume.write(ino, 0, 5000, b"x", ME)
    assert content(volume, ino) == bytes(5000) + b"x"


def test_appends_go_to_the_end_whatever_the_offset_says(volume: Any) -> None:
    ino = make(volume, b"f", b"12345")
    fh = volume.open(ino, os.O_WRONLY | os.O_APPEND, ME)
    volume.write(ino, fh, 0, b"6", ME, True)
    volume.release(ino, fh)
    volume.write(ino, 0, 0, b"7", ME, True)
    assert content(volume, ino) == b"1234567"


def test_opening_with_truncate_and_create(volume: Any) -> None:
    root = volume.root_ino
    ino = make(volume, b"f", b"12345")
    volume.release(ino, volume.open(ino, RW | os.O_TRUNC, ME))
    assert volume.getattr(ino).size == 0
    with fails(errno.EEXIST):
        volume.create(root, b"f", 0o644, RW | os.O_EXCL, ME)
    attr, fh = volume.create(root, b"f", 0o644, RW, ME)
    assert attr.ino == ino
    volume.release(ino, fh)
    attr, fh = volume.create(root, b"new", 0o640, RW, ME)
    assert stat.S_IMODE(attr.mode) == 0o640
    volume.release(attr.ino, fh)
    with fails(errno.EISDIR):
        volume.open(root, RW, ME)


def test_allocation(volume: Any) -> None:
    ino = make(volume, b"f", b"x" * 20_000)
    volume.fallocate(ino, 0, 0x03, 4096, 8192, ME)
    assert content(volume, ino) == b"x" * 4096 + bytes(8192) + b"x" * (20_000 - 12_288)
    assert volume.seek(ino, 0, 0, os.SEEK_HOLE) == 4096
    volume.fallocate(ino, 0, 0, 0, 100_000, ME)
    attr = volume.getattr(ino)
    assert attr.size == 100_000
    assert attr.blocks * 512 >= 100_000
    volume.fallocate(ino, 0, 0x01, 0, 200_000, ME)
    assert volume.getattr(ino).size == 100_000
    assert content(volume, ino)[:12_288] == b"x" * 4096 + bytes(8192)
    with fails(errno.EOPNOTSUPP):
        volume.fallocate(ino, 0, 0x40, 0, 4096, ME)


def test_past_four_gigabytes(place: Any, volume: Any) -> None:
    if hasattr(volume, "remote"):
        with fails(errno.EFBIG):
            volume.write(make(volume, b"f"), 0, 5 << 30, b"end", ME)
        pytest.skip("an item of a store is one JSON text, and holds up to 64 MiB")
    ino, far = make(volume, b"f"), (5 << 30) + 7
    volume.write(ino, 0, far, b"end", ME)
    assert bytes(volume.read(ino, 0, far - 3, 10)) == bytes(3) + b"end"
    assert volume.getattr(ino).size == far + 3
    assert volume.seek(ino, 0, 0, os.SEEK_DATA) >= far - 4096
    volume.setattr(ino, SetAttr(size=far + 1), ME)
    assert bytes(volume.read(ino, 0, far, 10)) == b"e"


def test_replace_compares_and_swaps(volume: Any) -> None:
    import xxhash

    ino = make(volume, b"f", b"old")
    with fails(errno.ESTALE):
        volume.replace(ino, b"new", ME, 1)
    assert content(volume, ino) == b"old"
    attr = volume.replace(ino, b"newer", ME, xxhash.xxh3_64_intdigest(b"old"))
    assert (attr.ino, content(volume, ino)) == (ino, b"newer")
    volume.replace(ino, b"", ME)
    assert content(volume, ino) == b""


@pytest.mark.usefixtures("privileged")
def test_attributes_are_kept(volume: Any) -> None:
    ino = make(volume, b"f", b"x")
    to = SetAttr(perm=0o641, uid=5, gid=6, atime_ns=-1_000_000_001, mtime_ns=1_700_000_000_123_456_789)
    attr = volume.setattr(ino, to, ME)
    assert (stat.S_IMODE(attr.mode), attr.uid, attr.gid) == (0o641, 5, 6)
    assert (attr.atime_ns, attr.mtime_ns) == (-1_000_000_001, 1_700_000_000_123_456_789)
    before = volume.getattr(ino).ctime_ns
    volume.link(ino, volume.root_ino, b"g", ME)
    assert volume.getattr(ino).mtime_ns == 1_700_000_000_123_456_789
    assert volume.getattr(ino).ctime_ns >= before


@pytest.mark.usefixtures("privileged")
def test_new_files_belong_to_their_maker_and_setgid_directories(volume: Any) -> None:
    someone = Caller(1234, 2345, 0, "rpc")
    root = volume.root_ino
    volume.setattr(root, SetAttr(perm=0o777), ME)
    attr = volume.mkdir(root, b"d", 0o755, someone)
    assert (attr.uid, attr.gid) == (1234, 2345)
    volume.setattr(attr.ino, SetAttr(perm=0o2777, gid=77), ME)
    made = volume.create_file(attr.ino, b"f", 0o644, b"", someone)
    below = volume.mkdir(attr.ino, b"below", 0o755, someone)
    assert (made.uid, made.gid, below.gid, below.mode & stat.S_ISGID) == (1234, 77, 77, stat.S_ISGID)
    link = volume.symlink(root, b"l", b"x", someone)
    assert (link.uid, link.gid, link.size) == (1234, 2345, 1)


@pytest.mark.usefixtures("privileged")
def test_special_files(volume: Any) -> None:
    root = volume.root_ino
    assert volume.readlink(volume.symlink(root, b"l", b"x" * 4095, ME).ino) == b"x" * 4095
    with fails(errno.EINVAL):
        volume.readlink(root)
    for name, mode, rdev in ((b"p", stat.S_IFIFO, 0), (b"s", stat.S_IFSOCK, 0), (b"c", stat.S_IFCHR, os.makedev(1, 3))):
        attr = volume.mknod(root, name, mode | 0o600, rdev, ME)
        assert (stat.S_IFMT(attr.mode), attr.rdev) == (mode, rdev)


def test_extended_attributes(volume: Any) -> None:
    ino = make(volume, b"f")
    volume.setxattr(ino, b"user.a", b"1", 0, ME)
    volume.setxattr(ino, b"user.b", b"", os.XATTR_CREATE, ME)
    assert volume.getxattr(ino, b"user.a") == b"1"
    assert sorted(volume.listxattr(ino)) == [b"user.a", b"user.b"]
    with fails(errno.EEXIST):
        volume.setxattr(ino, b"user.a", b"2", os.XATTR_CREATE, ME)
    with fails(errno.ENODATA):
        volume.setxattr(ino, b"user.c", b"2", os.XATTR_REPLACE, ME)
    volume.removexattr(ino, b"user.a", ME)
    for call in (volume.getxattr, lambda i, n: volume.removexattr(i, n, ME)):
        with fails(errno.ENODATA):
            call(ino, b"user.a")


def test_a_listing_gives_each_entry_that_stays_once(volume: Any) -> None:
    root = volume.root_ino
    for i in range(200):
        make(volume, b"%03d" % i)
    fh = volume.opendir(root, ME)
    seen, offset = [], 0
    while True:
        piece = []
        for entry in volume.readdir(root, fh, offset):
            piece.append(entry)
            if len(piece) == 7:
                break
        if not piece:
            break
        assert all(entry.offset >= 3 for entry in piece)
        for entry in piece:
            seen.append(entry.name)
            volume.unlink(root, entry.name, ME)
        make(volume, b"late%d" % len(seen))
        offset = piece[-1].offset
    volume.releasedir(root, fh)
    old = [name for name in seen if not name.startswith(b"late")]
    assert sorted(old) == [b"%03d" % i for i in range(200)]


def test_copying_inside_the_volume(volume: Any) -> None:
    a, b = make(volume, b"a", b"0123456789"), make(volume, b"b", b"xxxx")
    fa, fb = volume.open(a, os.O_RDONLY, ME), volume.open(b, RW, ME)
    assert volume.copy_range(a, fa, 2, b, fb, 4, 100, ME) == 8
    assert volume.copy_range(a, fa, 10, b, fb, 0, 100, ME) == 0
    assert content(volume, b) == b"xxxx23456789"
    volume.release(a, fa)
    volume.release(b, fb)


def test_statfs_has_real_numbers(volume: Any) -> None:
    found = volume.statfs(volume.root_ino)
    assert 0 < found.bavail <= found.bfree <= found.blocks
    assert found.namemax == 255
    assert found.ffree > 0


def test_the_time_of_birth_is_kept(place: Any) -> None:
    volume = place.open()
    ino = make(volume, b"f")
    born = volume.birth_ns(ino)
    if born is None:
        assert not place.ours
        return
    for time_ns in (10**9, born + 5, 10**9):
        volume.setattr(ino, SetAttr(atime_ns=time_ns), ME)
        assert (volume.birth_ns(ino), volume.getattr(ino).rdev) == (born, 0)
    volume.write(ino, 0, 0, b"more", ME)
    if place.lasts:
        volume = place.reopen()
    found = volume.lookup(volume.root_ino, b"f")
    assert (volume.birth_ns(found.ino), found.rdev) == (born, 0)


@pytest.mark.usefixtures("privileged")
def test_opened_again_the_tree_is_the_same(place: Any) -> None:
    volume = place.open()
    filled(volume)
    before = dump(volume, inos=place.ours)
    if not place.lasts:
        return
    after = dump(place.reopen(), inos=place.ours)
    assert after == before


@pytest.mark.usefixtures("privileged")
def test_opened_again_it_goes_on_where_it_was(place: Any) -> None:
    if not place.lasts:
        pytest.skip("a memory volume ends with its daemon")
    filled(place.open())
    for round_ in range(3):
        volume = place.reopen()
        ino = make(volume, b"round%d" % round_, b"r" * 9000)
        volume.write(ino, 0, 8999, b"!!", ME)
        volume.unlink(volume.root_ino, b"sparse\xff", ME) if round_ == 0 else None
    volume = place.reopen()
    for round_ in range(3):
        assert content(volume, volume.lookup(volume.root_ino, b"round%d" % round_).ino) == b"r" * 8999 + b"!!"


@pytest.mark.usefixtures("privileged")
def test_a_read_only_volume_refuses_every_change(place: Any) -> None:
    volume = place.open()
    filled(volume)
    root = volume.root_ino
    volume.read_only = True
    before = dump(volume)
    sub = volume.lookup(root, b"sub").ino
    ino = volume.lookup(sub, b"moved").ino
    for call in (
        lambda: volume.mkdir(root, b"n", 0o755, ME),
        lambda: volume.mknod(root, b"n", stat.S_IFREG | 0o644, 0, ME),
        lambda: volume.symlink(root, b"n", b"t", ME),
        lambda: volume.link(ino, root, b"n", ME),
        lambda: volume.unlink(sub, b"moved", ME),
        lambda: volume.rmdir(sub, b"empty", ME),
        lambda: volume.rename(sub, b"moved", root, b"n", 0, ME),
        lambda: volume.create(root, b"n", 0o644, RW, ME),
        lambda: volume.create_file(root, b"n", 0o644, b"", ME),
        lambda: volume.tmpfile(root, 0o600, RW, ME),
        lambda: volume.setattr(ino, SetAttr(perm=0o700), ME),
        lambda: volume.write(ino, 0, 0, b"x", ME),
        lambda: volume.replace(ino, b"x", ME),
        lambda: volume.fallocate(ino, 0, 0, 0, 4096, ME),
        lambda: volume.setxattr(ino, b"user.n", b"", 0, ME),
        lambda: volume.removexattr(ino, b"user.a", ME),
        lambda: volume.open(ino, RW, ME),
    ):
        with fails(errno.EROFS):
            call()
    assert dump(volume) == before
    volume.read_only = False
