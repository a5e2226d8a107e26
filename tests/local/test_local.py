"""The ``local`` volume on a host directory: making, naming and removing files, and listings."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest
from local_volume import BASE, ME, ROOT, FakeFeed, code, names, needs_root, whole

from vfsd.backends.local import LocalVolume
from vfsd.core.changes import Dentry, Drop, NoDentry, Put, Write, Zero
from vfsd.core.types import Caller, SetAttr


def test_attributes_are_the_hosts(vol: LocalVolume, host: Path) -> None:
    (host / "f").write_bytes(b"x" * 5000)
    st = (host / "f").lstat()
    a = vol.lookup(ROOT, b"f")
    assert (a.mode, a.nlink, a.uid, a.gid, a.size, a.blocks) == (
        st.st_mode,
        st.st_nlink,
        st.st_uid,
        st.st_gid,
        st.st_size,
        st.st_blocks,
    )
    assert (a.atime_ns, a.mtime_ns, a.ctime_ns) == (st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns)
    assert a.ino == BASE | st.st_ino, "the host's inode number, so that tools that keep it agree on both sides"
    assert vol.getattr(a.ino).size == 5000
    assert vol.getattr(ROOT).ino == ROOT
    assert vol.statfs(ROOT).blocks == os.statvfs(host).f_blocks


def test_create_write_read(vol: LocalVolume, host: Path, feed: FakeFeed) -> None:
    attr, fh = vol.create(ROOT, b"f", 0o640, os.O_RDWR, ME)
    vol.remember(attr.ino, 1)
    assert stat.S_IMODE(attr.mode) == 0o640
    assert feed.commits[-1][0] == "create"
    assert feed.last(Dentry) == [Dentry(1, b"f", attr.ino & (1 << 48) - 1)]
    assert vol.write(attr.ino, fh, 3, b"abc", ME) == 3
    written = feed.last(Write)[0]
    assert isinstance(written, Write)
    assert (written.offset, bytes(written.data)) == (3, b"abc")
    assert (host / "f").read_bytes() == b"\0\0\0abc"
    assert vol.read(attr.ino, fh, 4, 10) == b"bc"
    assert whole(vol, attr.ino) == b"\0\0\0abc"
    assert vol.write(attr.ino, 0, 0, b"XY", ME) == 2
    assert vol.write(attr.ino, fh, 0, memoryview(b"end"), ME, append=True) == 3
    assert (host / "f").read_bytes() == b"XY\0abcend"
    vol.flush(attr.ino, fh, ME)
    vol.release(attr.ino, fh)
    assert code(vol.release, attr.ino, fh) == "EBADF"
    assert code(vol.create, ROOT, b"f", 0o600, os.O_RDWR | os.O_EXCL, ME) == "EEXIST"
    again, fh = vol.create(ROOT, b"f", 0o600, os.O_RDWR | os.O_TRUNC, ME)
    assert (again.ino, again.size, stat.S_IMODE(again.mode)) == (attr.ino, 0, 0o640)
    vol.release(attr.ino, fh)


def test_append_handle_follows_the_hosts_end(vol: LocalVolume, host: Path) -> None:
    (host / "log").write_bytes(b"one\n")
    ino = vol.lookup(ROOT, b"log").ino
    fh = vol.open(ino, os.O_WRONLY | os.O_APPEND, ME)
    with (host / "log").open("ab") as f:
        f.write(b"two\n")
    assert vol.write(ino, fh, 4, b"three\n", ME, append=True) == 6
    assert (host / "log").read_bytes() == b"one\ntwo\nthree\n"
    vol.release(ino, fh)


def test_open_truncates(vol: LocalVolume, host: Path, feed: FakeFeed) -> None:
    (host / "f").write_bytes(b"abc")
    ino = vol.lookup(ROOT, b"f").ino
    fh = vol.open(ino, os.O_WRONLY | os.O_TRUNC, ME)
    assert vol.getattr(ino, fh).size == 0
    assert feed.last(Zero)
    vol.release(ino, fh)


@pytest.mark.parametrize("fmt", [stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK])
def test_mknod(vol: LocalVolume, host: Path, fmt: int) -> None:
    a = vol.mknod(ROOT, b"n", fmt | 0o620, 0, ME)
    assert a.mode == fmt | 0o620
    assert (host / "n").lstat().st_mode == fmt | 0o620
    assert code(vol.mknod, ROOT, b"n", fmt | 0o620, 0, ME) == "EEXIST"


@needs_root
def test_device_nodes_only_for_root(vol: LocalVolume) -> None:
    assert vol.mknod(ROOT, b"null", stat.S_IFCHR | 0o666, os.makedev(1, 3), ME).rdev == os.makedev(1, 3)
    assert code(vol.mknod, ROOT, b"mem", stat.S_IFCHR | 0o666, os.makedev(1, 1), Caller(1000, 1000)) == "EPERM"


def test_directories(vol: LocalVolume, host: Path, feed: FakeFeed) -> None:
    d = vol.mkdir(ROOT, b"d", 0o750, ME)
    assert stat.S_IMODE(d.mode) == 0o750
    assert d.nlink == (host / "d").lstat().st_nlink
    assert code(vol.mkdir, ROOT, b"d", 0o755, ME) == "EEXIST"
    e = vol.mkdir(d.ino, b"e", 0o700, ME)
    assert vol.parent_of(e.ino) == d.ino
    assert vol.parent_of(d.ino) == ROOT
    assert vol.parent_of(ROOT) == ROOT
    assert vol.path_of(e.ino) == b"/d/e"
    assert vol.path_of(ROOT) == b"/"
    assert vol.lookup(e.ino, b"..").ino == d.ino
    assert vol.lookup(ROOT, b"..").ino == ROOT
    assert vol.lookup(d.ino, b".").ino == d.ino
    assert code(vol.rmdir, ROOT, b"d", ME) == "ENOTEMPTY"
    assert code(vol.unlink, ROOT, b"d", ME) == "EISDIR"
    vol.rmdir(d.ino, b"e", ME)
    assert feed.last(Drop)
    assert code(vol.rmdir, d.ino, b"e", ME) == "ENOENT"
    (host / "f").touch()
    assert code(vol.rmdir, ROOT, b"f", ME) == "ENOTDIR"
    assert code(vol.lookup, vol.lookup(ROOT, b"f").ino, b"x") == "ENOTDIR"


def test_symlinks_are_given_not_followed(vol: LocalVolume, host: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "outside").mkdir()
    a = vol.symlink(ROOT, b"up", b"../secret", ME)
    assert stat.S_ISLNK(a.mode)
    assert vol.readlink(a.ino) == b"../secret"
    assert a.size == len(b"../secret")
    (host / "abs").symlink_to(tmp_path / "secret")
    (host / "dir").symlink_to(tmp_path / "outside")
    for name in (b"up", b"abs", b"dir"):
        ino = vol.lookup(ROOT, name).ino
        assert code(vol.open, ino, os.O_RDONLY, ME) == "ELOOP"
        assert code(vol.read, ino, 0, 0, 10) == "ELOOP"
        assert code(vol.lookup, ino, b"x") == "ENOTDIR"
        assert code(vol.create, ROOT, name, 0o600, os.O_RDWR, ME) == "ELOOP"
        assert code(vol.create_file, ino, b"x", 0o600, b"", ME) == "ENOTDIR"
        assert code(vol.setattr, ino, SetAttr(size=0), ME) in ("ELOOP", "EINVAL")
    with pytest.raises(OSError):
        vol.setattr(vol.lookup(ROOT, b"abs").ino, SetAttr(perm=0o777), ME)
    vol.setattr(vol.lookup(ROOT, b"abs").ino, SetAttr(mtime_ns=5), ME)
    assert (host / "abs").lstat().st_mtime_ns == 5
    secret = (tmp_path / "secret").stat()
    assert secret.st_mtime_ns != 5
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert not list((tmp_path / "outside").iterdir())
    assert code(vol.readlink, ROOT) == "EINVAL"


def test_hard_links_are_one_ino(vol: LocalVolume, host: Path, feed: FakeFeed) -> None:
    a = vol.create_file(ROOT, b"a", 0o644, b"one", ME)
    d = vol.mkdir(ROOT, b"d", 0o755, ME)
    b = vol.link(a.ino, d.ino, b"b", ME)
    assert (b.ino, b.nlink) == (a.ino, 2)
    os.link(host / "a", host / "c")
    assert vol.lookup(ROOT, b"c").ino == a.ino
    vol.unlink(ROOT, b"a", ME)
    assert not feed.last(Drop)
    vol.unlink(ROOT, b"c", ME)
    assert vol.lookup(d.ino, b"b").ino == a.ino
    assert whole(vol, a.ino) == b"one"
    assert vol.path_of(a.ino) == b"/d/b"
    assert code(vol.link, d.ino, ROOT, b"x", ME) == "EPERM"
    assert code(vol.link, a.ino, d.ino, b"b", ME) == "EEXIST"
    vol.rename(d.ino, b"b", ROOT, b"z", 0, ME)
    again = vol.link(a.ino, ROOT, b"y", ME)
    commits = len(feed.commits)
    vol.rename(ROOT, b"z", ROOT, b"y", 0, ME)
    assert (again.nlink, len(feed.commits)) == (2, commits), "two names of one file: nothing happens"
    s = vol.symlink(ROOT, b"s", b"nowhere", ME)
    assert vol.link(s.ino, ROOT, b"s2", ME).nlink == 2


def test_rename(vol: LocalVolume, host: Path, feed: FakeFeed) -> None:
    a = vol.create_file(ROOT, b"a", 0o644, b"a", ME)
    b = vol.create_file(ROOT, b"b", 0o644, b"b", ME)
    d = vol.mkdir(ROOT, b"d", 0o755, ME)
    assert code(vol.rename, ROOT, b"a", ROOT, b"b", 1, ME) == "EEXIST"
    assert code(vol.rename, ROOT, b"a", ROOT, b"n", 2, ME) == "ENOENT"
    assert code(vol.rename, ROOT, b"a", ROOT, b"n", 6, ME) == "EINVAL"
    assert code(vol.rename, ROOT, b"x", ROOT, b"n", 0, ME) == "ENOENT"
    assert code(vol.rename, ROOT, b"d", ROOT, b"a", 0, ME) == "ENOTDIR"
    assert code(vol.rename, ROOT, b"a", ROOT, b"d", 0, ME) == "EISDIR"
    e = vol.mkdir(d.ino, b"e", 0o755, ME)
    assert code(vol.rename, ROOT, b"d", e.ino, b"x", 0, ME) == "EINVAL"
    vol.rename(ROOT, b"a", ROOT, b"b", 2, ME)
    assert (vol.lookup(ROOT, b"a").ino, vol.lookup(ROOT, b"b").ino) == (b.ino, a.ino)
    assert (whole(vol, a.ino), whole(vol, b.ino)) == (b"a", b"b")
    vol.rename(ROOT, b"b", d.ino, b"n", 1, ME)
    assert {type(c) for c in feed.commits[-1][1]} == {NoDentry, Dentry, Put}
    assert vol.path_of(a.ino) == b"/d/n"
    vol.rename(ROOT, b"d", ROOT, b"moved", 0, ME)
    assert whole(vol, a.ino) == b"a"
    assert vol.path_of(a.ino) == b"/moved/n"
    vol.rename(ROOT, b"a", d.ino, b"n", 0, ME)
    assert feed.last(Drop)
    assert (host / "moved/n").read_bytes() == b"b"
    assert code(vol.getattr, a.ino) == "ESTALE"


def test_names_are_bytes(vol: LocalVolume, host: Path) -> None:
    odd = [b"\xff\xfe", b"a\nb", b" ", b"-", b"\x01", "ü".encode(), b"n" * 255, b"...", b" (deleted)"]
    for name in odd:
        vol.create_file(ROOT, name, 0o644, name, ME)
    assert sorted(os.listdir(os.fsencode(host))) == sorted(odd)
    assert names(vol, ROOT) == set(odd)
    for name in odd:
        assert whole(vol, vol.lookup(ROOT, name).ino) == name
    d = vol.mkdir(ROOT, b"\xff d (deleted)\n", 0o755, ME).ino
    assert whole(vol, vol.create_file(d, b"x", 0o644, b"x", ME).ino) == b"x"
    assert code(vol.lookup, ROOT, b"n" * 256) == "ENAMETOOLONG"
    assert code(vol.mkdir, ROOT, b"n" * 256, 0o755, ME) == "ENAMETOOLONG"


@pytest.mark.parametrize("name", [b"..", b".", b"", b"a/b", b"/etc", b"../x", b"a\0b"])
def test_only_single_names_are_taken(vol: LocalVolume, host: Path, name: bytes) -> None:
    (host / "a").mkdir()
    (host / "a/b").touch()
    a = vol.lookup(ROOT, b"a").ino
    if name not in (b".", b".."):
        assert code(vol.lookup, a, name) == "EINVAL"
    for call, *args in (
        (vol.create, a, name, 0o600, os.O_RDWR, ME),
        (vol.create_file, a, name, 0o600, b"", ME),
        (vol.mkdir, a, name, 0o700, ME),
        (vol.mknod, a, name, stat.S_IFREG, 0, ME),
        (vol.symlink, a, name, b"x", ME),
        (vol.link, vol.lookup(a, b"b").ino, a, name, ME),
        (vol.unlink, a, name, ME),
        (vol.rmdir, a, name, ME),
        (vol.rename, a, name, ROOT, b"z", 0, ME),
        (vol.rename, a, b"b", a, name, 0, ME),
    ):
        with pytest.raises(OSError):
            call(*args)  # type: ignore[operator]
    assert sorted(os.listdir(host)) == ["a"]
    assert os.listdir(host / "a") == ["b"]


def test_listing_resumes_by_offset(vol: LocalVolume, host: Path) -> None:
    for i in range(50):
        (host / f"f{i}").touch()
    fh = vol.opendir(ROOT, ME)
    first = list(vol.readdir(ROOT, fh, 0))
    assert [e.offset for e in first] == list(range(3, 53))
    assert [e.name for e in vol.readdir(ROOT, fh, 20)] == [e.name for e in first[18:]]
    assert first[0].attr.ino == vol.lookup(ROOT, first[0].name).ino
    (host / "new").touch()
    assert b"new" not in {e.name for e in vol.readdir(ROOT, fh, 3)}
    assert b"new" in {e.name for e in vol.readdir(ROOT, fh, 0)}, "rewinddir reads anew"
    vol.releasedir(ROOT, fh)
    assert code(vol.readdir, ROOT, fh, 0) == "EBADF"
    assert code(vol.opendir, vol.lookup(ROOT, b"new").ino, ME) == "ENOTDIR"
    assert dict(vol.children(ROOT)).keys() == names(vol, ROOT)


@pytest.mark.parametrize("with_handle", [True, False])
@pytest.mark.slow
def test_listing_while_churning(vol: LocalVolume, host: Path, with_handle: bool) -> None:
    rng = random.Random(7)
    stay = {b"stay%d" % i for i in range(10_000)}
    for name in stay:
        os.close(os.open(os.fsencode(host) + b"/" + name, os.O_CREAT | os.O_WRONLY))
    churn = [f"churn{i}" for i in range(300)]
    for name in churn:
        (host / name).touch()
    fh = vol.opendir(ROOT, ME) if with_handle else 0
    seen: list[bytes] = []
    offset = 0
    while True:
        page = []
        for entry in vol.readdir(ROOT, fh, offset):
            page.append(entry)
            if len(page) == 100:
                break
        if not page:
            break
        seen += [e.name for e in page]
        offset = page[-1].offset
        for name in rng.sample(churn, 10):
            if (host / name).exists():
                (host / name).unlink()
            else:
                (host / name).touch()
        if not with_handle:
            next(vol.readdir(ROOT, 0, 0))  # somebody else begins to read the same directory
    assert len(seen) == len(set(seen))
    assert stay <= set(seen)
    if fh:
        vol.releasedir(ROOT, fh)
