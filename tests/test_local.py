"""The ``local`` volume on a host directory: every operation, identity, and that nothing leads out of the root."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import xxhash

from vfsd.backends import local_inodes, local_sys
from vfsd.backends.local import LocalVolume
from vfsd.core.changes import Change, Dentry, Drop, NoDentry, Put, Write, Xattr, Zero
from vfsd.core.types import Caller, SetAttr

BASE = 3 << 48
ROOT = BASE | 1
ME = Caller(os.geteuid(), os.getegid())
TOOL = ME._replace(door="rpc")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


class FakeFeed:
    """Remembers what was published; wanted by default."""

    def __init__(self) -> None:
        self.commits: list[tuple[str, list[Change]]] = []
        self.listening = True

    def wanted(self, caller: Caller) -> bool:
        return self.listening

    def publish(self, base: int, caller: Caller, op: str, changes: Sequence[Change]) -> int:
        assert base == BASE
        self.commits.append((op, list(changes)))
        return len(self.commits)

    def last(self, kind: type[Change]) -> list[Change]:
        return [c for c in self.commits[-1][1] if type(c) is kind]


@pytest.fixture
def feed() -> FakeFeed:
    return FakeFeed()


@pytest.fixture
def host(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def vol(host: Path, feed: FakeFeed) -> Iterator[LocalVolume]:
    before = len(os.listdir("/proc/self/fd"))
    volume = LocalVolume(BASE, host, feed)
    yield volume
    volume.close()
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors leaked"


def code(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The errno's name a call fails with."""
    with pytest.raises(OSError) as caught:
        call(*args, **kwargs)
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


def names(vol: LocalVolume, ino: int) -> set[bytes]:
    return {entry.name for entry in vol.readdir(ino, 0, 0)}


def whole(vol: LocalVolume, ino: int) -> bytes:
    return vol.read(ino, 0, 0, 1 << 20)


@contextmanager
def tmpfs(where: Path, options: str = "rw") -> Iterator[None]:
    """A tmpfs mounted for the time of a test."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", where], check=True)


# --- each operation ---------------------------------------------------------------------------------------------------


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
    assert vol.write(ino, fh, 4, b"three\n", ME) == 6
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
    assert code(vol.rename, ROOT, b"a", ROOT, b"n", 4, ME) == "EINVAL"
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


def test_setattr(vol: LocalVolume, host: Path, feed: FakeFeed) -> None:
    ino = vol.create_file(ROOT, b"f", 0o644, b"0123456789", ME).ino
    assert stat.S_IMODE(vol.setattr(ino, SetAttr(perm=0o4711), ME).mode) == 0o4711
    assert vol.setattr(ino, SetAttr(size=4), ME).size == 4
    assert feed.last(Zero)
    assert (host / "f").read_bytes() == b"0123"
    vol.setattr(ino, SetAttr(size=6), ME)
    assert (host / "f").read_bytes() == b"0123\0\0"
    fh = vol.open(ino, os.O_RDONLY, ME)
    assert vol.setattr(ino, SetAttr(size=0), ME, fh).size == 0, "open(2) with O_RDONLY|O_TRUNC truncates"
    vol.release(ino, fh)
    before, moment = -1_500_000_001, 1_600_000_000_123_456_789
    a = vol.setattr(ino, SetAttr(atime_ns=before, mtime_ns=moment), ME)
    assert (a.atime_ns, a.mtime_ns) == (before, moment)
    a = vol.setattr(ino, SetAttr(mtime_ns=-1), ME)
    assert (a.atime_ns, a.mtime_ns) == (before, -1)
    d = vol.mkdir(ROOT, b"d", 0o755, ME).ino
    assert stat.S_IMODE(vol.setattr(d, SetAttr(perm=0o1777), ME).mode) == 0o1777
    assert code(vol.setattr, d, SetAttr(size=0), ME) == "EISDIR"
    p = vol.mknod(ROOT, b"p", stat.S_IFIFO | 0o600, 0, ME).ino
    assert code(vol.setattr, p, SetAttr(size=0), ME) == "EINVAL"
    assert stat.S_IMODE(vol.setattr(p, SetAttr(perm=0o640), ME).mode) == 0o640


def test_truncate_through_a_handle_needs_no_permission(vol: LocalVolume) -> None:
    attr, fh = vol.create(ROOT, b"f", 0o000, os.O_RDWR, ME)
    vol.write(attr.ino, fh, 0, b"abc", ME)
    assert vol.setattr(attr.ino, SetAttr(size=1), ME, fh).size == 1
    vol.release(attr.ino, fh)


@needs_root
def test_owner_group_and_setgid(vol: LocalVolume, host: Path) -> None:
    you = Caller(4321, 8765)
    attr, fh = vol.create(ROOT, b"f", 0o6755, os.O_RDWR, you)
    vol.release(attr.ino, fh)
    assert (attr.uid, attr.gid, stat.S_IMODE(attr.mode)) == (4321, 8765, 0o6755)
    shared = vol.mkdir(ROOT, b"shared", 0o775, you).ino
    vol.setattr(shared, SetAttr(gid=77, perm=0o3775), you)
    d = vol.mkdir(shared, b"d", 0o1755, you)
    assert (d.uid, d.gid, stat.S_IMODE(d.mode)) == (4321, 77, 0o3755)
    f = vol.create_file(shared, b"f", 0o640, b"", you)
    assert (f.uid, f.gid, stat.S_IMODE(f.mode)) == (4321, 77, 0o640)
    for a in (
        vol.mknod(shared, b"p", stat.S_IFIFO | 0o622, 0, you),
        vol.mknod(shared, b"s", stat.S_IFREG | 0o4755, 0, you),
        vol.symlink(shared, b"l", b"/etc/passwd", you),
    ):
        assert (a.uid, a.gid) == (4321, 77)
    assert stat.S_IMODE((host / "shared/s").lstat().st_mode) == 0o4755
    assert Path("/etc/passwd").stat().st_uid == 0
    a = vol.setattr(vol.lookup(shared, b"l").ino, SetAttr(uid=5, gid=6), ME)
    assert (a.uid, a.gid) == (5, 6)
    assert Path("/etc/passwd").stat().st_uid == 0


def test_the_umask_does_not_matter(vol: LocalVolume) -> None:
    old = os.umask(0o077)
    try:
        assert stat.S_IMODE(vol.mkdir(ROOT, b"d", 0o777, ME).mode) == 0o777
        assert stat.S_IMODE(vol.create_file(ROOT, b"f", 0o666, b"", ME).mode) == 0o666
        assert stat.S_IMODE(vol.mknod(ROOT, b"p", stat.S_IFIFO | 0o666, 0, ME).mode) == 0o666
    finally:
        os.umask(old)


def test_writes_drop_setuid(vol: LocalVolume) -> None:
    ino = vol.create_file(ROOT, b"f", 0o6755, b"", ME).ino
    vol.write(ino, 0, 0, b"x", ME)
    vol.setattr(ino, SetAttr(perm=0o6755), ME)
    vol.write(ino, 0, 0, b"x", ME, clear_suid=True)
    assert stat.S_IMODE(vol.getattr(ino).mode) == 0o755
    vol.setattr(ino, SetAttr(perm=0o2644), ME)
    vol.setattr(ino, SetAttr(size=0, clear_suid=True), ME)
    assert stat.S_IMODE(vol.getattr(ino).mode) == 0o2644


def test_xattrs(vol: LocalVolume, host: Path, feed: FakeFeed) -> None:
    ino = vol.create_file(ROOT, b"f", 0o644, b"", ME).ino
    assert code(vol.getxattr, ino, b"user.a") == "ENODATA"
    vol.setxattr(ino, b"user.a", b"\0v\xff", 1, ME)
    assert feed.last(Xattr) == [Xattr(ino & (1 << 48) - 1, b"user.a", b"\0v\xff")]
    assert code(vol.setxattr, ino, b"user.a", b"", 1, ME) == "EEXIST"
    assert code(vol.setxattr, ino, b"user.b", b"", 2, ME) == "ENODATA"
    assert vol.getxattr(ino, b"user.a") == b"\0v\xff"
    assert os.getxattr(host / "f", "user.a") == b"\0v\xff"
    assert b"user.a" in vol.listxattr(ino)
    vol.removexattr(ino, b"user.a", ME)
    assert code(vol.removexattr, ino, b"user.a", ME) == "ENODATA"
    stranger = Caller(1000, 1000, door="rpc")
    assert code(vol.setxattr, ino, b"trusted.x", b"", 0, stranger) == "EPERM"
    assert code(vol.setxattr, ino, b"security.capability", b"", 0, stranger) == "EPERM"


def test_sparse_files(vol: LocalVolume) -> None:
    ino = vol.create_file(ROOT, b"f", 0o644, b"", ME).ino
    vol.write(ino, 0, 1 << 20, b"x" * 4096, ME)
    assert vol.getattr(ino).blocks * 512 < 1 << 19
    assert vol.seek(ino, 0, 0, os.SEEK_DATA) == 1 << 20
    assert vol.seek(ino, 0, 0, os.SEEK_HOLE) == 0
    assert vol.seek(ino, 0, 1 << 20, os.SEEK_HOLE) == (1 << 20) + 4096
    assert code(vol.seek, ino, 0, 1 << 22, os.SEEK_DATA) == "ENXIO"
    assert code(vol.seek, ino, 0, 0, os.SEEK_SET) == "EINVAL"
    vol.write(ino, 0, 5 << 30, b"end", ME)
    assert vol.getattr(ino).size == (5 << 30) + 3
    assert vol.read(ino, 0, (5 << 30) - 1, 9) == b"\0end"


def test_fallocate_and_copy_range(vol: LocalVolume) -> None:
    a = vol.create_file(ROOT, b"a", 0o644, b"0123456789", ME).ino
    vol.fallocate(a, 0, 0, 0, 8192, ME)
    assert (vol.getattr(a).size, vol.getattr(a).blocks) == (8192, 16)
    vol.fallocate(a, 0, 3, 0, 4096, ME)
    assert vol.read(a, 0, 0, 10) == b"\0" * 10
    assert code(vol.fallocate, a, 0, 2, 0, 4096, ME) in ("EOPNOTSUPP", "ENOTSUP")
    vol.write(a, 0, 0, b"0123456789", ME)
    b = vol.create_file(ROOT, b"b", 0o644, b"", ME).ino
    assert vol.copy_range(a, 0, 2, b, 0, 0, 5, ME) == 5
    assert whole(vol, b) == b"23456"
    assert vol.copy_range(a, 0, 1 << 20, b, 0, 0, 5, ME) == 0


def test_sync(vol: LocalVolume) -> None:
    async def main() -> None:
        attr, fh = vol.create(ROOT, b"f", 0o600, os.O_WRONLY, ME)
        await vol.fsync(attr.ino, fh, True)
        await vol.fsync(attr.ino, 0, False)
        vol.release(attr.ino, fh)
        fh = vol.opendir(ROOT, ME)
        await vol.fsyncdir(ROOT, fh, False)
        vol.releasedir(ROOT, fh)
        await vol.syncfs()

    trio.run(main)


def test_tmpfile(vol: LocalVolume, host: Path) -> None:
    attr, fh = vol.tmpfile(ROOT, 0o640, os.O_RDWR, ME)
    vol.remember(attr.ino, 1)
    assert (attr.nlink, stat.S_IMODE(attr.mode)) == (0, 0o640)
    assert not list(host.iterdir())
    vol.write(attr.ino, fh, 0, b"data", ME)
    vol.release(attr.ino, fh)
    assert whole(vol, attr.ino) == b"data"
    assert vol.link(attr.ino, ROOT, b"named", ME).nlink == 1
    assert (host / "named").read_bytes() == b"data"
    attr, fh = vol.tmpfile(ROOT, 0o640, os.O_RDWR, ME)
    vol.release(attr.ino, fh)
    assert code(vol.getattr, attr.ino) == "ESTALE"


def test_replace(vol: LocalVolume, host: Path, feed: FakeFeed) -> None:
    attr = vol.create_file(ROOT, b"f", 0o640, b"old content", TOOL)
    os.link(host / "f", host / "g")
    digest = xxhash.xxh3_64_intdigest(b"old content")
    assert code(vol.replace, attr.ino, b"new", TOOL, digest + 1) == "ESTALE"
    assert (host / "f").read_bytes() == b"old content"
    after = vol.replace(attr.ino, b"new", TOOL, digest)
    assert (after.ino, after.size, after.mode, after.nlink) == (attr.ino, 3, attr.mode, 2)
    assert (host / "g").read_bytes() == b"new"
    assert feed.last(Write)
    big = os.urandom(3_000_000)
    assert vol.replace(attr.ino, big, TOOL).size == len(big)
    assert (host / "g").read_bytes() == big
    assert code(vol.create_file, ROOT, b"f", 0o640, b"", TOOL) == "EEXIST"


def test_past_the_size_limit(vol: LocalVolume, host: Path) -> None:
    ino = vol.create_file(ROOT, b"f", 0o640, b"old", TOOL).ino
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        assert code(vol.create_file, ROOT, b"new", 0o640, b"x" * (2 << 20), TOOL) == "EFBIG"
        assert vol.write(ino, 0, (1 << 20) - 10, b"x" * 20, ME) == 10
        assert code(vol.write, ino, 0, 1 << 20, b"x", ME) == "EFBIG"
        assert code(vol.replace, ino, b"x" * (2 << 20), TOOL) == "EFBIG"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (host / "new").exists()


@needs_root
def test_a_full_disk_loses_nothing(host: Path, feed: FakeFeed) -> None:
    with tmpfs(host, "size=1m"):
        vol = LocalVolume(BASE, host, feed)
        old = os.urandom(600_000)
        ino = vol.create_file(ROOT, b"f", 0o640, old, TOOL).ino
        assert code(vol.replace, ino, b"x" * 2_000_000, TOOL) == "ENOSPC"
        assert whole(vol, ino) == old
        assert code(vol.create_file, ROOT, b"g", 0o640, b"x" * 2_000_000, TOOL) == "ENOSPC"
        assert names(vol, ROOT) == {b"f"}
        assert vol.replace(ino, b"x" * 900_000, TOOL).size == 900_000
        vol.close()


def test_read_only(host: Path, feed: FakeFeed) -> None:
    (host / "f").write_bytes(b"abc")
    vol = LocalVolume(BASE, host, feed, read_only=True)
    ino = vol.lookup(ROOT, b"f").ino
    assert whole(vol, ino) == b"abc"
    for call, *args in (
        (vol.create, ROOT, b"x", 0o600, os.O_RDWR, ME),
        (vol.create_file, ROOT, b"x", 0o600, b"", ME),
        (vol.tmpfile, ROOT, 0o600, os.O_RDWR, ME),
        (vol.mkdir, ROOT, b"x", 0o700, ME),
        (vol.mknod, ROOT, b"x", stat.S_IFIFO, 0, ME),
        (vol.symlink, ROOT, b"x", b"y", ME),
        (vol.link, ino, ROOT, b"x", ME),
        (vol.unlink, ROOT, b"f", ME),
        (vol.rmdir, ROOT, b"f", ME),
        (vol.rename, ROOT, b"f", ROOT, b"g", 0, ME),
        (vol.setattr, ino, SetAttr(perm=0), ME),
        (vol.open, ino, os.O_WRONLY, ME),
        (vol.open, ino, os.O_RDONLY | os.O_TRUNC, ME),
        (vol.write, ino, 0, 0, b"x", ME),
        (vol.replace, ino, b"x", ME),
        (vol.fallocate, ino, 0, 0, 0, 1, ME),
        (vol.copy_range, ino, 0, 0, ino, 0, 0, 1, ME),
        (vol.setxattr, ino, b"user.a", b"", 0, ME),
        (vol.removexattr, ino, b"user.a", ME),
    ):
        assert code(call, *args) == "EROFS", call  # type: ignore[arg-type]
    vol.close()
    assert not feed.commits


def test_nothing_is_built_when_nobody_listens(vol: LocalVolume, feed: FakeFeed) -> None:
    feed.listening = False
    attr, fh = vol.create(ROOT, b"f", 0o600, os.O_RDWR, ME)
    vol.write(attr.ino, fh, 0, b"x", ME)
    vol.setattr(attr.ino, SetAttr(perm=0o644), ME)
    vol.rename(ROOT, b"f", ROOT, b"g", 0, ME)
    vol.unlink(ROOT, b"g", ME)
    vol.release(attr.ino, fh)
    assert not feed.commits


# --- names and listings -----------------------------------------------------------------------------------------------


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


# --- identity and lifetime --------------------------------------------------------------------------------------------


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


# --- the border -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
def test_a_directory_moved_out_is_out(
    vol: LocalVolume, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(local_sys, "open_beneath", local_sys.open_beneath_by_steps)
    (host / "a/b").mkdir(parents=True)
    (host / "a/b/f").write_bytes(b"in")
    a = vol.lookup(ROOT, b"a").ino
    b = vol.lookup(a, b"b").ino
    f = vol.lookup(b, b"f").ino
    assert whole(vol, f) == b"in"
    (tmp_path / "out").mkdir()
    (host / "a").rename(tmp_path / "out/a")
    (tmp_path / "out/a/b/secret").write_bytes(b"secret")
    for ino in (a, b):
        assert code(vol.lookup, ino, b"secret") == "ESTALE"
        assert code(vol.create_file, ino, b"x", 0o600, b"", ME) == "ESTALE"
        assert code(vol.mkdir, ino, b"x", 0o700, ME) == "ESTALE"
        assert code(vol.unlink, ino, b"secret", ME) == "ESTALE"
        assert code(vol.rename, ino, b"secret", ROOT, b"x", 0, ME) == "ESTALE"
        assert code(lambda ino=ino: list(vol.readdir(ino, 0, 0))) == "ESTALE"
    assert code(vol.open, f, os.O_RDONLY, ME) == "ESTALE"
    assert code(vol.lookup, ROOT, b"a") == "ENOENT"
    (tmp_path / "out/a").rename(host / "a")
    assert vol.lookup(ROOT, b"a").ino == a
    assert whole(vol, vol.lookup(b, b"secret").ino) == b"secret"


def test_the_root_itself_may_move(vol: LocalVolume, host: Path, tmp_path: Path) -> None:
    d = vol.mkdir(ROOT, b"d", 0o755, ME).ino
    host.rename(tmp_path / "elsewhere")
    host.mkdir()
    (host / "d").mkdir()
    vol.create_file(d, b"f", 0o644, b"x", ME)
    assert (tmp_path / "elsewhere/d/f").exists()


def test_a_sibling_with_the_roots_name_as_prefix_is_outside(vol: LocalVolume, host: Path, tmp_path: Path) -> None:
    d = vol.mkdir(ROOT, b"d", 0o755, ME).ino
    (tmp_path / "root2").mkdir()
    (host / "d").rename(tmp_path / "root2/d")
    assert code(vol.create_file, d, b"f", 0o644, b"x", ME) == "ESTALE"


@pytest.mark.parametrize("at_once", [True, False])
def test_symlink_swap_race(
    host: Path, tmp_path: Path, feed: FakeFeed, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """A directory and a file flip to symlinks that lead out and back, while they are used."""
    if not at_once:
        monkeypatch.setattr(local_sys, "open_beneath", local_sys.open_beneath_by_steps)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"secret")
    for name in ("d", "d.real"):
        (host / name).mkdir()
        (host / name / "f").write_bytes(b"inside")
    (host / "d.link").symlink_to(outside)
    (host / "d.real/f").unlink()
    (host / "d.real/f").symlink_to(outside / "f")
    before = (outside / "f").lstat()
    stop = threading.Event()

    def flip() -> None:
        root = os.open(host, os.O_RDONLY)
        while not stop.is_set():
            for other in (b"d.link", b"d.real"):
                local_sys.rename(root, b"d", root, other, 2)
                local_sys.rename(root, b"d", root, other, 2)
        os.close(root)

    vol = LocalVolume(BASE, host, feed)
    vol._inodes.limit = 1
    flipper = threading.Thread(target=flip)
    flipper.start()
    fine = 0
    try:
        for i in range(3000):
            try:
                d = vol.lookup(ROOT, b"d").ino
                f = vol.lookup(d, b"f").ino
                assert whole(vol, f) == b"inside"
                vol.setattr(f, SetAttr(perm=0o600 + i % 64), ME)
                vol.write(f, 0, 0, b"inside", ME)
                vol.create_file(d, b"new%d" % i, 0o600, b"", ME)
                list(vol.readdir(d, 0, 0))
                fine += 1
            except OSError as exc:
                assert exc.errno in (errno.ESTALE, errno.ENOTDIR, errno.ENOENT, errno.ELOOP, errno.EOPNOTSUPP)
    finally:
        stop.set()
        flipper.join()
        vol.close()
    assert fine
    assert os.listdir(outside) == ["f"]
    assert (outside / "f").read_bytes() == b"secret"
    assert (outside / "f").lstat().st_ctime_ns == before.st_ctime_ns


def test_fifos_and_devices_never_block(vol: LocalVolume, host: Path) -> None:
    os.mkfifo(host / "p")
    p = vol.lookup(ROOT, b"p").ino
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        assert code(vol.open, p, flags, ME) == "ENXIO"
    assert code(vol.read, p, 0, 0, 1) == "ENXIO"
    assert code(vol.write, p, 0, 0, b"x", ME) == "ENXIO"
    assert code(vol.create, ROOT, b"p", 0o600, os.O_WRONLY, ME) == "ENXIO"
    assert code(vol.replace, p, b"x", ME) == "ENXIO"
    # A regular file turns into a FIFO after it was looked up.
    (host / "f").write_bytes(b"x")
    f = vol.lookup(ROOT, b"f").ino
    (host / "f").unlink()
    os.mkfifo(host / "f")
    assert code(vol.open, f, os.O_RDONLY, ME) in ("ESTALE", "ENXIO")


def test_deeper_than_path_max(vol: LocalVolume, host: Path, tmp_path: Path) -> None:
    vol._inodes.limit = 3
    ino = ROOT
    for _ in range(25):
        ino = vol.mkdir(ino, b"n" * 200, 0o755, ME).ino
    f = vol.create_file(ino, b"f", 0o644, b"deep", ME).ino
    assert whole(vol, f) == b"deep"
    assert names(vol, ino) == {b"f"}
    path = vol.path_of(f)
    assert path is not None
    assert len(path) > 5000
    (host / ("n" * 200)).rename(tmp_path / "out")
    assert code(vol.create_file, ino, b"x", 0o600, b"", ME) == "ESTALE"


@needs_root
def test_a_mount_below_the_root_is_part_of_it(host: Path, feed: FakeFeed) -> None:
    (host / "m").mkdir()
    with tmpfs(host / "m"):
        vol = LocalVolume(BASE, host, feed)
        m = vol.lookup(ROOT, b"m").ino
        f = vol.create_file(m, b"f", 0o644, b"tmpfs", ME).ino
        assert whole(vol, f) == b"tmpfs"
        assert len({ROOT, m, f}) == 3
        assert vol.path_of(f) == b"/m/f"
        assert vol.statfs(f).blocks == os.statvfs(host / "m").f_blocks
        vol.create_file(ROOT, b"g", 0o644, b"", ME)
        assert code(vol.rename, ROOT, b"g", m, b"g", 0, ME) == "EXDEV"
        assert code(vol.link, f, ROOT, b"h", ME) == "EXDEV"
        vol.close()


AS_USER = """
import os, stat, sys
from vfsd.backends.local import LocalVolume
from vfsd.core.types import Caller, SetAttr
class Feed:
    def wanted(self, caller): return False
uid = int(sys.argv[2])
if os.geteuid() != uid:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
me = Caller(uid, uid)
vol = LocalVolume(0, sys.argv[1], Feed())
a, fh = vol.create(1, b"f", 0o400, os.O_RDWR, me)
vol.remember(a.ino, 1)
assert vol.write(a.ino, fh, 0, b"abc", me) == 3
assert (a.uid, a.gid, stat.S_IMODE(a.mode)) == (uid, uid, 0o400)
for call, want in ((lambda: vol.write(a.ino, 0, 0, b"x", me), 13), (lambda: vol.setattr(a.ino, SetAttr(uid=0), me), 1)):
    try:
        call()
    except OSError as exc:
        assert exc.errno == want, exc
    else:
        raise SystemExit("should have failed")
other = vol.mkdir(1, b"d", 0o755, Caller(uid + 1, uid + 1))
assert other.uid == uid
vol.setattr(other.ino, SetAttr(perm=0), me)
assert vol.getattr(other.ino).mode & 0o777 == 0
vol.rmdir(1, b"d", me)
vol.unlink(1, b"f", me)
assert vol.read(a.ino, fh, 0, 9) == b"abc"
vol.close()
print("ok")
"""


def test_as_an_ordinary_user(host: Path) -> None:
    uid = os.geteuid() or 54321
    host.chmod(0o777)
    for parent in host.parents[:2]:
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", AS_USER, ".", str(uid)],
        cwd=host,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout, done.stderr) == ("ok\n", "")


def test_a_root_that_is_not_there(host: Path, feed: FakeFeed) -> None:
    (host / "f").touch()
    assert code(LocalVolume, BASE, host / "nothing", feed) == "ENOENT"
    assert code(LocalVolume, BASE, host / "f", feed) == "ENOTDIR"
