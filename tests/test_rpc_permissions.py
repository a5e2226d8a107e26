"""What the kernel would refuse a shell's user, the tool door refuses too: ownership, groups, sticky and set-id bits."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from makers import close_vfs, done, open_vfs

import vfsd.doors.rpcfiles  # noqa: F401 - registers its operations
from vfsd.core.types import Caller
from vfsd.doors.rpcops import OPS, Session
from vfsd.paths import Paths

ROOT = Caller(0, 0, 0, "rpc")
ALICE = Caller(1001, 1001, 0, "rpc")
BOB = Caller(1002, 1002, 0, "rpc")
STAFF = Caller(1003, 1001, 0, "rpc")
"""In Alice's group."""


class Host:
    def __init__(self) -> None:
        self.uploaded = self.connections = 0
        self.status: Callable[[], dict[str, Any]] = dict
        self.shutdown: Callable[[], object] = object
        self.checkpoints = None


Ask = Callable[..., Any]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """``ask(caller, op, **params)`` gives the reply, or the name of the errno."""
    vfs = open_vfs({"/": ("memory", tmp_path)})
    session = Session(vfs, Paths(vfs), Host())

    def ask(caller: Caller, op: str, **params: Any) -> Any:
        try:
            return done(OPS[op](session, {"op": op, **params}, caller))  # type: ignore[arg-type]
        except OSError as exc:
            return errno.errorcode[exc.errno or 0]

    ask(ROOT, "chown", path=b"/", uid=0, gid=0)
    ask(ROOT, "chmod", path=b"/", perm=0o755)
    for name, owner in ((b"alice", ALICE), (b"bob", BOB)):
        ask(ROOT, "mkdir", path=b"/" + name)
        ask(ROOT, "write", path=b"/" + name + b"/f", data=b"data")
        ask(ROOT, "chown", path=b"/" + name, uid=owner.uid, gid=owner.gid)
        ask(ROOT, "chown", path=b"/" + name + b"/f", uid=owner.uid, gid=owner.gid)
    yield ask
    done(session.close())
    close_vfs(vfs)


def mode(ask: Ask, path: bytes) -> int:
    return stat.S_IMODE(ask(ROOT, "stat", path=path)["attr"]["mode"])


@pytest.mark.parametrize(
    ("op", "params"),
    [
        ("write", {"path": b"/bob/f", "data": b""}),
        ("write", {"path": b"/bob/new", "data": b""}),
        ("write", {"path": b"/new", "data": b""}),
        ("delete", {"path": b"/bob/f"}),
        ("delete", {"path": b"/bob"}),
        ("mkdir", {"path": b"/bob/d"}),
        ("mkdir", {"path": b"/bob/d/e", "parents": True}),
        ("mknod", {"path": b"/bob/n"}),
        ("rmdir", {"path": b"/bob"}),
        ("unlink", {"path": b"/bob/f"}),
        ("symlink", {"path": b"/bob/s", "target": b"x"}),
        ("link", {"old": b"/alice/f", "new": b"/bob/l"}),
        ("rename", {"old": b"/bob/f", "new": b"/alice/g"}),
        ("rename", {"old": b"/alice/f", "new": b"/bob/g"}),
        ("rename", {"old": b"/alice/f", "new": b"/bob/f"}),
        ("truncate", {"path": b"/bob/f", "size": 0}),
        ("open", {"path": b"/bob/f", "flags": os.O_WRONLY}),
        ("open", {"path": b"/bob/new", "flags": os.O_CREAT}),
        ("open", {"path": b"/bob", "flags": os.O_TMPFILE | os.O_RDWR}),
        ("setxattr", {"path": b"/bob/f", "name": b"user.x", "value": b"1"}),
        ("removexattr", {"path": b"/bob/f", "name": b"user.x"}),
    ],
)
def test_what_needs_write_permission(ask: Ask, op: str, params: dict[str, Any]) -> None:
    before = ask(ROOT, "stat", path=b"/bob/f"), ask(ROOT, "list", path=b"/bob"), ask(ROOT, "list", path=b"/alice")
    assert ask(ALICE, op, **params) == "EACCES"
    after = ask(ROOT, "stat", path=b"/bob/f"), ask(ROOT, "list", path=b"/bob"), ask(ROOT, "list", path=b"/alice")
    assert after == before


@pytest.mark.parametrize(
    ("op", "params"),
    [
        ("chmod", {"path": b"/bob/f", "perm": 0o777}),
        ("chown", {"path": b"/bob/f", "uid": 1001}),
        ("chown", {"path": b"/alice/f", "uid": 1002}),
        ("chown", {"path": b"/alice/f", "gid": 1002}),
        ("utime", {"path": b"/bob/f", "mtime_ns": 0}),
        ("mknod", {"path": b"/alice/n", "mode": stat.S_IFBLK | 0o600}),
        ("setxattr", {"path": b"/alice/f", "name": b"trusted.x", "value": b"1"}),
        ("setxattr", {"path": b"/bob/f", "name": b"security.x", "value": b"1"}),
    ],
)
def test_what_needs_ownership_or_root(ask: Ask, op: str, params: dict[str, Any]) -> None:
    assert ask(ALICE, op, **params) == "EPERM"


def test_what_one_owns_one_may_change(ask: Ask) -> None:
    ask(ALICE, "chmod", path=b"/alice/f", perm=0o600)
    ask(ALICE, "chown", path=b"/alice/f", uid=1001, gid=1001)
    ask(ALICE, "utime", path=b"/alice/f", mtime_ns=5)
    ask(ALICE, "setxattr", path=b"/alice/f", name=b"user.x", value=b"1")
    ask(ALICE, "rename", old=b"/alice/f", new=b"/alice/g")
    attr = ask(ALICE, "stat", path=b"/alice/g")["attr"]
    assert (stat.S_IMODE(attr["mode"]), attr["mtime_ns"]) == (0o600, 5)
    assert ask(ALICE, "getxattr", path=b"/alice/g", name=b"user.x") == {"value": b"1"}
    assert ask(BOB, "getxattr", path=b"/alice/g", name=b"user.x") == "EACCES"
    assert ask(ALICE, "mknod", path=b"/alice/n", mode=stat.S_IFIFO | 0o600)["attr"]["uid"] == ALICE.uid


def test_trusted_names_are_roots_own(ask: Ask) -> None:
    ask(ROOT, "setxattr", path=b"/alice/f", name=b"trusted.x", value=b"1")
    assert ask(ALICE, "listxattr", path=b"/alice/f") == {"names": []}
    assert ask(ALICE, "getxattr", path=b"/alice/f", name=b"trusted.x") == "ENODATA"
    assert ask(ROOT, "listxattr", path=b"/alice/f") == {"names": [b"trusted.x"]}


def test_the_sticky_bit_keeps_a_file_from_being_renamed_away_or_over(ask: Ask) -> None:
    ask(ROOT, "mkdir", path=b"/tmp")
    ask(ROOT, "chmod", path=b"/tmp", perm=0o1777)
    ask(ALICE, "write", path=b"/tmp/a", data=b"")
    ask(BOB, "write", path=b"/tmp/b", data=b"")
    assert ask(BOB, "rename", old=b"/tmp/a", new=b"/tmp/c") == "EPERM"
    assert ask(BOB, "rename", old=b"/tmp/b", new=b"/tmp/a") == "EPERM"
    assert ask(BOB, "unlink", path=b"/tmp/a") == "EPERM"
    assert ask(ALICE, "rename", old=b"/tmp/a", new=b"/tmp/c") == {}


def test_moving_a_directory_changes_it(ask: Ask) -> None:
    ask(ALICE, "mkdir", path=b"/alice/d", perm=0o555)
    ask(ALICE, "mkdir", path=b"/alice/e")
    assert ask(ALICE, "rename", old=b"/alice/d", new=b"/alice/d2") == {}
    assert ask(ALICE, "rename", old=b"/alice/d2", new=b"/alice/e/d") == "EACCES"


def test_set_id_bits_go_where_the_kernel_takes_them(ask: Ask) -> None:
    ask(ALICE, "chmod", path=b"/alice/f", perm=0o6777)
    assert mode(ask, b"/alice/f") == 0o6777
    ask(ROOT, "chown", path=b"/alice/f", gid=1001)
    assert mode(ask, b"/alice/f") == 0o777
    ask(ALICE, "chmod", path=b"/alice/f", perm=0o4777)
    ask(BOB, "truncate", path=b"/alice/f", size=1)
    assert mode(ask, b"/alice/f") == 0o777
    ask(ALICE, "chmod", path=b"/alice/f", perm=0o4777)
    ask(BOB, "write", path=b"/alice/f", data=b"other")
    assert mode(ask, b"/alice/f") == 0o777
    ask(ALICE, "chmod", path=b"/alice/f", perm=0o4777)
    fh = ask(BOB, "open", path=b"/alice/f", flags=os.O_RDWR)["fh"]
    ask(BOB, "pwrite", fh=fh, offset=0, data=b"x")
    assert mode(ask, b"/alice/f") == 0o777
    ask(ROOT, "chown", path=b"/alice/f", gid=1002)
    ask(ALICE, "chmod", path=b"/alice/f", perm=0o2777)
    assert mode(ask, b"/alice/f") == 0o777


def test_the_group_has_its_own_bits(ask: Ask) -> None:
    ask(ALICE, "chmod", path=b"/alice/f", perm=0o640)
    assert ask(STAFF, "read", path=b"/alice/f")["data"] == b"data"
    assert ask(STAFF, "write", path=b"/alice/f", data=b"") == "EACCES"
    assert ask(BOB, "read", path=b"/alice/f") == "EACCES"


def acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NO_ID = 0xFFFFFFFF
LET_BOB = acl((1, 6, NO_ID), (2, 6, BOB.uid), (4, 0, NO_ID), (16, 6, NO_ID), (32, 0, NO_ID))


def test_access_control_lists(ask: Ask) -> None:
    access, default = b"system.posix_acl_access", b"system.posix_acl_default"
    assert ask(ALICE, "chmod", path=b"/alice/f", perm=0o600)
    assert ask(BOB, "read", path=b"/alice/f") == "EACCES"
    assert ask(BOB, "setxattr", path=b"/alice/f", name=access, value=LET_BOB) == "EPERM"
    assert ask(ALICE, "setxattr", path=b"/alice/f", name=access, value=LET_BOB) == {}
    assert ask(BOB, "read", path=b"/alice/f")["data"] == b"data"
    assert ask(STAFF, "read", path=b"/alice/f") == "EACCES", "the group has less than the mask now shows"
    assert ask(ALICE, "chmod", path=b"/alice/f", perm=0o600)
    assert ask(BOB, "read", path=b"/alice/f") == "EACCES", "chmod sets the mask"
    assert ask(ALICE, "setxattr", path=b"/alice/f", name=default, value=LET_BOB) == "EACCES"
    shared = acl((1, 7, NO_ID), (2, 7, BOB.uid), (4, 0, NO_ID), (16, 7, NO_ID), (32, 0, NO_ID))
    assert ask(ALICE, "setxattr", path=b"/alice", name=default, value=shared) == {}
    assert ask(ALICE, "write", path=b"/alice/sub/new", data=b"shared")["created"]
    assert ask(ALICE, "getxattr", path=b"/alice/sub", name=default)["value"] == shared
    without_execution = acl((1, 6, NO_ID), (2, 7, BOB.uid), (4, 0, NO_ID), (16, 6, NO_ID), (32, 0, NO_ID))
    assert ask(ALICE, "getxattr", path=b"/alice/sub/new", name=access)["value"] == without_execution
    assert ask(ALICE, "removexattr", path=b"/alice/sub", name=default) == {}
    assert ask(ALICE, "removexattr", path=b"/alice/sub", name=default) == {}


def test_setgid_goes_with_a_list_set_by_a_stranger_to_the_group(ask: Ask) -> None:
    access = b"system.posix_acl_access"
    for gid, expected in ((ALICE.gid, 0o2760), (5000, 0o760)):
        ask(ROOT, "chown", path=b"/alice/f", gid=gid)
        ask(ROOT, "chmod", path=b"/alice/f", perm=0o2640)
        value = acl((1, 7, NO_ID), (4, 6, NO_ID), (32, 0, NO_ID))
        assert ask(ALICE, "setxattr", path=b"/alice/f", name=access, value=value) == {}
        assert ask(ROOT, "stat", path=b"/alice/f")["attr"]["mode"] & 0o7777 == expected
