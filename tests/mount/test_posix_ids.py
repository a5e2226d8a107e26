"""Mounts on which ids are not the host's, and on which root is nobody: by both doors."""

from __future__ import annotations

import errno
import functools
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import Daemon
from test_posix_acl import ACCESS, acl, shown
from test_posix_owner import NOBODY, as_user
from trees import watched

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as somebody else")

ALICE, BOB = 1000, 1001


@pytest.fixture(params=["native-state", "native-local", "pyfuse3-state"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    engine, kind = request.param.split("-")
    made: list[Daemon] = []

    def start(*extra: str) -> Daemon:
        made.append(Daemon(tmp_path / str(len(made)), engine, kind, ("--allow-other", *extra)))
        made[-1].start()
        return made[-1]

    with watched(tmp_path / "0/mnt"):
        yield start
        for daemon in made:
            daemon.stop()


def owner(path: str) -> tuple[int, int]:
    st = os.lstat(path)
    return st.st_uid, st.st_gid


def make(path: str, perm: int = 0o644) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, perm))


def test_ids_are_the_hosts_outside_and_the_trees_inside(start: Callable[..., Daemon], tmp_path: Path) -> None:
    maps = ("--map-uid", f"{ALICE}:0", "--map-uid", "0:5000", "--map-uid", "100000:100:10", "--map-gid", f"{ALICE}:0")
    daemon = start(*maps, "--map-gid", "0:5000")
    at = str(daemon.point)
    os.chmod(at, 0o777)
    assert as_user(at, ALICE, ALICE, [], lambda: make("alices")) == 0
    make(f"{at}/roots")
    assert owner(f"{at}/alices") == (ALICE, ALICE)
    assert owner(f"{at}/roots") == (0, 0)
    assert {e.name: e.stat().st_uid for e in os.scandir(at)} == {"alices": ALICE, "roots": 0}
    os.chown(f"{at}/roots", 100003, ALICE)
    assert owner(f"{at}/roots") == (100003, ALICE)
    found = daemon.client.call("stat", path=b"/roots")["attr"]
    assert (found["uid"], found["gid"]) == (100003, ALICE)
    # Whoever has no id in the tree makes nothing there and is given nothing.
    assert as_user(at, BOB, BOB, [], lambda: make("bobs")) == errno.EOVERFLOW
    assert as_user(at, ALICE, BOB, [], lambda: make("bobs")) == errno.EOVERFLOW
    with pytest.raises(OSError, match="Invalid"):
        os.chown(f"{at}/alices", BOB, -1)
    assert as_user(at, BOB, BOB, [], lambda: os.open("alices", os.O_RDONLY)) == 0
    os.setxattr(f"{at}/alices", ACCESS, acl("u:6 user:100004:6 g:4 m:6 o:0"))
    assert "user:100004:6" in shown(f"{at}/alices")
    assert as_user(at, 100004, BOB, [], lambda: os.open("alices", os.O_RDWR)) == 0
    assert as_user(at, BOB, BOB, [], lambda: os.open("alices", os.O_RDONLY)) == errno.EACCES
    with pytest.raises(OSError, match="Invalid"):
        os.setxattr(f"{at}/alices", ACCESS, acl(f"u:6 user:{BOB}:6 g:4 m:6 o:0"))
    if daemon.root != "local":
        return
    inside = daemon.host
    assert owner(f"{inside}/alices") == (0, 0)
    assert owner(f"{inside}/roots") == (103, 0)
    assert "user:104:6" in shown(f"{inside}/alices")
    # A file of somebody the host has not: shown as nobody's, and nobody may more with it than others.
    (inside / "stranger").write_text("x")
    os.chown(inside / "stranger", 77, 77)
    os.chmod(inside / "stranger", 0o660)
    assert owner(f"{at}/stranger") == (NOBODY, NOBODY)
    assert as_user(at, NOBODY, NOBODY, [], lambda: os.open("stranger", os.O_RDONLY)) == errno.EACCES


REFUSED: dict[str, tuple[int, Callable[[], object]]] = {
    "open": (errno.EACCES, lambda: os.open("private", os.O_RDONLY)),
    "open to write": (errno.EACCES, lambda: os.open("readable", os.O_RDWR)),
    "truncate": (errno.EACCES, lambda: os.truncate("readable", 0)),
    "open with O_TRUNC": (errno.EACCES, lambda: os.open("readable", os.O_WRONLY | os.O_TRUNC)),
    "chmod": (errno.EPERM, lambda: os.chmod("readable", 0o666)),
    "chown": (errno.EPERM, lambda: os.chown("readable", 0, 0)),
    "utime": (errno.EPERM, lambda: os.utime("readable", (1, 1))),
    "list": (errno.EACCES, lambda: os.listdir("closed")),
    "walk": (errno.EACCES, lambda: os.stat("closed/f")),
    "walk, seen by others": (errno.EACCES, lambda: os.open("closed/f", os.O_RDONLY)),
    "create": (errno.EACCES, lambda: make("closed/x")),
    "create beside": (errno.EACCES, lambda: make("theirs/x")),
    "nameless": (errno.EACCES, lambda: os.open("theirs", os.O_TMPFILE | os.O_RDWR)),
    "mkdir": (errno.EACCES, lambda: os.mkdir("theirs/x")),
    "symlink": (errno.EACCES, lambda: os.symlink("x", "theirs/x")),
    "fifo": (errno.EACCES, lambda: os.mkfifo("theirs/x")),
    "device": (errno.EPERM, lambda: os.mknod("device", stat.S_IFCHR | 0o666, os.makedev(1, 3))),
    "link": (errno.EACCES, lambda: os.link("readable", "theirs/x")),
    "unlink": (errno.EACCES, lambda: os.unlink("theirs/f")),
    "rmdir": (errno.EACCES, lambda: os.rmdir("theirs/d")),
    "rename": (errno.EACCES, lambda: os.rename("theirs/f", "x")),
    "rename into": (errno.EACCES, lambda: os.rename("mine", "theirs/x")),
    "sticky": (errno.EPERM, lambda: os.unlink("sticky/f")),
    "rename over, sticky": (errno.EPERM, lambda: os.rename("mine", "sticky/f")),
    "user xattr": (errno.EACCES, lambda: os.setxattr("readable", "user.a", b"")),
    "trusted xattr": (errno.EPERM, lambda: os.setxattr("mine", "trusted.a", b"")),
    "security xattr": (errno.EPERM, lambda: os.setxattr("mine", "security.a", b"")),
    "acl": (errno.EPERM, lambda: os.setxattr("readable", ACCESS, acl("u:6 g:6 o:6"))),
    "read a private xattr": (errno.EACCES, lambda: os.getxattr("private", "user.a")),
}


def test_root_is_nobody(start: Callable[..., Daemon]) -> None:
    daemon = start()
    at = str(daemon.point)
    for name, perm in (("private", 0o600), ("readable", 0o644)):
        make(f"{at}/{name}")
        os.chmod(f"{at}/{name}", perm)
    os.setxattr(f"{at}/private", "user.a", b"v")
    for name, perm in (("closed", 0o700), ("theirs", 0o755), ("sticky", 0o1777)):
        os.mkdir(f"{at}/{name}")
        make(f"{at}/{name}/f")
        os.mkdir(f"{at}/{name}/d")
        os.chmod(f"{at}/{name}", perm)
    for directory, names, files in os.walk(at):
        for name in (*names, *files):
            os.chown(f"{directory}/{name}", ALICE, ALICE)
    os.chown(at, ALICE, ALICE)
    os.chmod(at, 0o1777)
    daemon.stop()
    daemon.command.insert(-1, "--root-squash")
    daemon.start()
    assert as_user(at, ALICE, ALICE, [], lambda: os.stat("closed/f")) == 0
    make(f"{at}/mine")
    assert owner(f"{at}/mine") == (NOBODY, NOBODY)
    for what, (code, do) in REFUSED.items():
        if what == "nameless" and "pyfuse3" in daemon.command:
            code = errno.EOPNOTSUPP
        assert (what, errno.errorcode.get(as_user(at, 0, 0, [], do))) == (what, errno.errorcode[code])
    for tool, path in (("read", b"/private"), ("write", b"/readable"), ("list", b"/closed"), ("unlink", b"/theirs/f")):
        with pytest.raises(PermissionError):
            daemon.client.call(tool, path=path, **({"data": b"x"} if tool == "write" else {}))
    daemon.client.call("write", path=b"/tools", data=b"x")
    assert owner(f"{at}/tools") == (NOBODY, NOBODY)
    # Its own files it may do all with, as anybody; and setuid goes when it writes.
    os.chmod(f"{at}/mine", 0o6755)
    with open(f"{at}/mine", "r+b", buffering=0) as file:
        file.write(b"x")
    assert stat.S_IMODE(os.stat(f"{at}/mine").st_mode) == 0o755
    os.truncate(f"{at}/mine", 0)
    os.utime(f"{at}/mine")
    os.rename(f"{at}/mine", f"{at}/moved")
    os.setxattr(f"{at}/moved", ACCESS, acl(f"u:6 user:{ALICE}:6 g:4 m:6 o:0"))
    assert as_user(at, ALICE, ALICE, [], lambda: os.open("moved", os.O_RDWR)) == 0
    os.unlink(f"{at}/moved")
    assert sorted(os.listdir(f"{at}/theirs")) == ["d", "f"]
    assert as_user(at, ALICE, ALICE, [], functools.partial(os.rename, "private", "theirs/p")) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--map-uid", "x"), "write it as HOST:TREE"),
        (("--map-gid", "1:2:0"), "at least one"),
        (("--map-uid", "1:2", "--map-uid", "1:3"), "host id 1 is mapped twice"),
        (("--map-uid", "1:2:10", "--map-uid", "20:11"), "tree id 11 is mapped twice"),
    ],
)
def test_bad_maps_are_wrong_usage(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["vfsd", "mount", *words, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") <= 2
