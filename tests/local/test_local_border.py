"""The ``local`` volume: nothing leads out of its root, and nothing blocks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from local_volume import BASE, ME, ROOT, FakeFeed, code, names, needs_root, tmpfs, whole

from vfsd.backends import local_sys
from vfsd.backends.local import LocalVolume
from vfsd.core.types import SetAttr


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
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout, done.stderr) == ("ok\n", "")


def test_a_root_that_is_not_there(host: Path, feed: FakeFeed) -> None:
    (host / "f").touch()
    assert code(LocalVolume, BASE, host / "nothing", feed) == "ENOENT"
    assert code(LocalVolume, BASE, host / "f", feed) == "ENOTDIR"
