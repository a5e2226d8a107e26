"""Ownership and permission as POSIX and Linux have them, judged by the kernel and by us together."""

from __future__ import annotations

import os
import stat
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


def test_chown_of_a_directory_keeps_setgid(tree: Mounted) -> None:
    path = tree / "d"
    os.mkdir(path)
    os.chmod(path, 0o6755)
    os.chown(path, NOBODY, NOBODY)
    assert perm(path) == 0o6755


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR])
def test_chown_of_a_special_file_drops_setuid_and_setgid(tree: Mounted, kind: int) -> None:
    path = tree / "f"
    os.mknod(path, kind | 0o600, os.makedev(1, 3) if kind == stat.S_IFCHR else 0)
    os.chown(path, NOBODY, NOBODY)
    os.chmod(path, 0o6555)
    assert as_user(tree.path, NOBODY, NOBODY, [NOBODY, 500], lambda: os.chown("f", -1, 500)) == 0
    assert (os.stat(path).st_gid, perm(path)) == (500, 0o555)
