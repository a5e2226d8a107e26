"""Ownership and permission as POSIX and Linux have them, judged by the kernel and by us together."""

from __future__ import annotations

import errno
import functools
import os
import stat
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mounted import Mounted

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as somebody else")


def as_user(where: str, uid: int, gid: int, groups: list[int], do: Callable[[], object]) -> int:
    """The errno that ``do`` fails with in directory ``where`` as that user, in a process of its own; 0: it does not."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            os.chdir(where)  # as root: the directories above are closed to others
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            do()
            code = 0
        except OSError as e:
            code = e.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def perm(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("uid", [0, NOBODY])
@pytest.mark.parametrize("gid", [-1, NOBODY - 1])
def test_chown_of_a_file_drops_setuid_and_setgid_also_when_it_changes_nothing(
    tree: Mounted, uid: int, gid: int
) -> None:
    path = tree / "f"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.chown(path, NOBODY, NOBODY)
    os.chmod(path, 0o6555)
    assert as_user(tree.path, uid, uid, [NOBODY, NOBODY - 1], lambda: os.chown("f", -1, gid)) == 0
    assert perm(path) == 0o555


@pytest.mark.parametrize("to", [NOBODY, -1])
def test_chown_of_a_directory_keeps_setgid(where: str, to: int) -> None:
    path = f"{where}/d"
    os.mkdir(path)
    os.chmod(path, 0o6755)
    os.chown(path, to, to)
    assert perm(path) == 0o6755


@pytest.mark.parametrize("mode", [0o6755, 0o2755, 0o755])
def test_a_stranger_drops_no_setuid_by_a_chown_that_changes_nothing(where: str, mode: int) -> None:
    """Where ext4 says EPERM the native engine says that it is done: the kernel asks the same before a write."""
    path = f"{where}/f"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.chmod(path, mode)
    refused = errno.EPERM if mode != 0o755 and "pyfuse3" in where else 0
    assert as_user(where, NOBODY, NOBODY, [], lambda: os.chown("f", -1, -1)) == refused
    assert perm(path) == mode


def test_roots_write_keeps_setuid_but_of_a_file_with_capabilities(where: str) -> None:
    """There the native engine drops both: the request before the write is that of chown(-1, -1)."""
    path = f"{where}/f"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.fchmod(fd, 0o4755)
    os.write(fd, b"x")
    assert perm(path) == 0o4755
    os.setxattr(path, "security.capability", struct.pack("<IIIII", 0x02000001, 0x400, 0, 0, 0))
    os.write(fd, b"x")
    os.close(fd)
    assert os.listxattr(path) == []
    assert perm(path) == (0o4755 if "pyfuse3" in where else 0o755)


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR])
def test_chown_of_a_special_file_drops_setuid_and_setgid(tree: Mounted, kind: int) -> None:
    path = tree / "f"
    os.mknod(path, kind | 0o600, os.makedev(1, 3) if kind == stat.S_IFCHR else 0)
    os.chown(path, NOBODY, NOBODY)
    os.chmod(path, 0o6555)
    assert as_user(tree.path, NOBODY, NOBODY, [NOBODY, 500], lambda: os.chown("f", -1, 500)) == 0
    assert (os.stat(path).st_gid, perm(path)) == (500, 0o555)


def write(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, b"y")
    os.close(fd)


def open_trunc(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


def fallocate(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.posix_fallocate(fd, 0, 100)
    os.close(fd)


CHANGES = (write, open_trunc, fallocate, lambda path: os.truncate(path, 0), lambda path: os.chown(path, -1, -1))


@pytest.mark.parametrize("perm_before", [0o2644, 0o6644, 0o2745])
@pytest.mark.parametrize("group", [NOBODY, 500])
def test_setgid_without_group_execution_stays_only_for_members(
    tree: Mounted, engine: str, perm_before: int, group: int
) -> None:
    if engine == "pyfuse3" and group == 500:
        pytest.skip("without HANDLE_KILLPRIV_V2 the kernel works out the new mode itself, and forgets this rule")
    path = tree / "f"
    expected = perm_before & ~0o4000 if group == NOBODY else perm_before & ~0o6000
    for change in CHANGES:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.chown(path, NOBODY, group)
        os.chmod(path, perm_before)
        assert as_user(tree.path, NOBODY, NOBODY, [], functools.partial(change, "f")) == 0
        assert perm(path) == expected, change
        os.chmod(path, perm_before)
        write(path)
        assert perm(path) == perm_before


def test_sticky_directory(tree: Mounted) -> None:
    os.mkdir(tree / "d")
    os.chmod(tree / "d", 0o1777)
    for name, owner in (("d/mine", 1001), ("d/theirs", 1002)):
        os.close(os.open(tree / name, os.O_CREAT | os.O_WRONLY))
        os.chown(tree / name, owner, owner)

    def at(do: Callable[[], object]) -> int:
        return as_user(tree.path, 1001, 1001, [], do)

    assert at(lambda: os.unlink("d/theirs")) == errno.EPERM
    assert at(lambda: os.rename("d/theirs", "d/x")) == errno.EPERM
    assert at(lambda: os.rename("d/mine", "d/theirs")) == errno.EPERM
    assert at(lambda: os.rename("d/mine", "d/still mine")) == 0
    assert at(lambda: os.unlink("d/still mine")) == 0


def test_setgid_directory_gives_its_group(tree: Mounted) -> None:
    os.mkdir(tree / "d")
    os.chown(tree / "d", 0, 500)
    os.chmod(tree / "d", 0o2777)

    def make() -> None:
        os.umask(0)
        os.mkdir("d/d")
        os.close(os.open("d/f", os.O_CREAT | os.O_WRONLY, 0o2775))
        os.mkfifo("d/p")

    assert as_user(tree.path, 1001, 1001, [], make) == 0
    found = {n: os.stat(tree / f"d/{n}") for n in ("d", "f", "p")}
    assert {(s.st_uid, s.st_gid) for s in found.values()} == {(1001, 500)}
    assert stat.S_IMODE(found["d"].st_mode) == 0o2777
    assert stat.S_IMODE(found["f"].st_mode) == 0o775, "setgid is not for those outside the group to give"


def test_others_are_refused(tree: Mounted) -> None:
    os.mkdir(tree / "private", 0o700)
    os.mkdir(tree / "open", 0o777)
    os.chmod(tree / "open", 0o777)
    os.close(os.open(tree / "f", os.O_CREAT | os.O_WRONLY, 0o600))
    refused = {
        "stat": (errno.EACCES, lambda: os.stat("private/x")),
        "open": (errno.EACCES, lambda: os.open("f", os.O_RDONLY)),
        "chmod": (errno.EPERM, lambda: os.chmod("f", 0o666)),
        "chown": (errno.EPERM, lambda: os.chown("f", 1001, -1)),
        "utime": (errno.EACCES, lambda: os.utime("f")),
        "utime to": (errno.EPERM, lambda: os.utime("f", (1, 1))),
        "create": (errno.EACCES, lambda: os.mkdir("x")),
        "device": (errno.EPERM, lambda: os.mknod("open/x", stat.S_IFCHR | 0o666, os.makedev(1, 3))),
        "user xattr": (errno.EACCES, lambda: os.setxattr("f", "user.a", b"")),
        "trusted xattr": (errno.EPERM, lambda: os.setxattr("f", "trusted.a", b"")),
        "security xattr": (errno.EPERM, lambda: os.setxattr("f", "security.a", b"")),
    }  # fmt: skip
    for what, (code, do) in refused.items():
        assert (what, as_user(tree.path, 1001, 1001, [], do)) == (what, code)


def test_device_nodes_are_kept_but_not_opened(tree: Mounted) -> None:
    os.mknod(tree / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert os.stat(tree / "null").st_rdev == os.makedev(1, 3)
    with pytest.raises(PermissionError):
        os.open(tree / "null", os.O_RDWR)
