"""The ``local`` volume: attributes, owners, contents, extended attributes, sync, and the feed."""

from __future__ import annotations

import os
import resource
import signal
import stat
from pathlib import Path

import trio
import xxhash
from local_volume import BASE, ME, ROOT, TOOL, FakeFeed, code, names, needs_root, tmpfs, whole

from vfsd.backends.local import LocalVolume
from vfsd.core.changes import Write, Xattr, Zero
from vfsd.core.types import Caller, SetAttr


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
