"""One line for each exit of the funnels: what it says, and that it is the only one."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makers import close_vfs, done, open_vfs

from vfsd.audit import log as auditlog
from vfsd.audit.history import Filter
from vfsd.audit.recorder import Audit
from vfsd.core.types import Caller, SetAttr
from vfsd.vfs import Vfs

ME = Caller(os.getuid(), os.getgid(), os.getpid(), "fuse")
TOOL = Caller(os.getuid(), os.getgid(), os.getpid(), "rpc", "write", "call_1")
SECRET = b"the content of a file"


class Watched:
    """A tree with an audit."""

    def __init__(self, base: Path, root: str = "state", **options: Any) -> None:
        (base / "local").mkdir()
        (base / "root").mkdir()
        self.vfs: Vfs = open_vfs({"/": (root, base / "root"), "/l/": ("local", base / "local")}, system=True)
        self.place = base / "audit"
        self.options = {"max_bytes": 1 << 20, "max_age": 86400.0, **options}
        self.open()

    def open(self) -> None:
        self.audit = self.vfs.witness = Audit(self.vfs, self.place, **self.options)

    def records(self, name: str = "log") -> list[dict[str, Any]]:
        return [json.loads(line) for line in auditlog.lines(self.place, name, 1 << 60)]

    def new(self) -> list[dict[str, Any]]:
        """The records since the last call."""
        found = self.records()
        seen, self.seen = getattr(self, "seen", 0), len(found)
        return found[seen:]

    def close(self) -> None:
        self.audit.close()
        close_vfs(self.vfs)


@pytest.fixture(params=["state", "memory", "local"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path, request.param)
    yield made
    made.close()


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


def told(record: dict[str, Any], *keys: str) -> tuple[Any, ...]:
    return tuple(record.get(key) for key in keys)


def make(vfs: Vfs, name: bytes, content: bytes = b"", parent: int = 1) -> int:
    return done(vfs.create_file(parent, name, 0o644, content, ME)).ino


def test_each_change_has_one_line(tree: Watched) -> None:
    vfs = tree.vfs
    attr, fh = done(vfs.create(1, b"f", 0o644, os.O_WRONLY, ME))
    ino = attr.ino

    def line(*keys: str) -> tuple[Any, ...]:
        (record,) = tree.new()
        assert record["result"] == "ok"
        return told(record, "op", *keys)

    assert line("path", "ino", "size") == ("create", "/f", ino, [None, 0])
    done(vfs.write(ino, fh, 0, SECRET, ME))
    assert line("path", "ino", "size") == ("write", "/f", ino, [0, len(SECRET)])
    done(vfs.write(ino, 0, 0, b"!", ME, append=True))
    assert line("path", "size") == ("write", "/f", [len(SECRET), len(SECRET) + 1])
    done(vfs.release(ino, fh))
    assert tree.new() == []
    done(vfs.setattr(ino, SetAttr(size=5), ME))
    assert line("path", "size") == ("truncate", "/f", [len(SECRET) + 1, 5])
    done(vfs.setattr(ino, SetAttr(perm=0o600), ME))
    assert line("path", "mode") == ("chmod", "/f", "0600")
    done(vfs.setattr(ino, SetAttr(uid=ME.uid, gid=ME.gid), ME))
    assert line("to_uid", "to_gid") == ("chown", ME.uid, ME.gid)
    done(vfs.setattr(ino, SetAttr(mtime_ns=1), ME))
    assert line("path") == ("utime", "/f")
    done(vfs.replace(ino, b"abc", TOOL))
    assert line("path", "size", "tool", "call") == ("write", "/f", [5, 3], "write", "call_1")
    done(vfs.fallocate(ino, 0, 0, 0, 100, ME))
    assert line("size") == ("fallocate", [3, 100])
    done(vfs.setxattr(ino, b"user.k", SECRET, 0, ME))
    assert line("path", "name") == ("setxattr", "/f", "user.k")
    done(vfs.removexattr(ino, b"user.k", ME))
    assert line("name") == ("removexattr", "user.k")
    done(vfs.link(ino, 1, b"g", ME))
    assert line("path", "path2", "ino") == ("link", "/f", "/g", ino)
    done(vfs.unlink(1, b"g", ME))
    assert line("path", "ino", "size") == ("unlink", "/g", ino, [100, None])
    sub = done(vfs.mkdir(1, b"d", 0o755, ME)).ino
    assert line("path", "ino", "size") == ("mkdir", "/d", sub, None)
    done(vfs.symlink(sub, b"s", b"target", ME))
    assert line("path") == ("symlink", "/d/s")
    done(vfs.mknod(sub, b"p", stat.S_IFIFO | 0o600, 0, ME))
    assert line("path", "size") == ("mknod", "/d/p", None)
    made = make(vfs, b"n", b"four", sub)
    assert line("path", "ino", "size") == ("create", "/d/n", made, [None, 4])
    done(vfs.copy_range(made, 0, 0, ino, 0, 0, 4, ME))
    assert line("size")[1] == [100, 100]
    done(vfs.rename(sub, b"n", 1, b"m", 0, ME))
    assert line("path", "path2", "ino", "size") == ("rename", "/d/n", "/m", made, [4, 4])
    done(vfs.rename(1, b"m", 1, b"f", 0, ME))
    assert line("path", "path2", "ino", "replaced") == ("rename", "/m", "/f", made, ino)
    fh = done(vfs.open(made, os.O_WRONLY | os.O_TRUNC, ME))
    assert line("path", "size") == ("truncate", "/f", [4, 0])
    done(vfs.release(made, fh))
    done(vfs.unlink(sub, b"s", ME))
    done(vfs.unlink(sub, b"p", ME))
    assert [r["op"] for r in tree.new()] == ["unlink", "unlink"]
    done(vfs.rmdir(1, b"d", ME))
    assert line("path") == ("rmdir", "/d")
    attr, fh = done(vfs.tmpfile(1, 0o600, os.O_RDWR, ME))
    assert line("path", "size") == ("tmpfile", None, [None, 0])
    text = b"\n".join(auditlog.lines(tree.place, "log", 1 << 60))
    assert SECRET not in text and b"target" not in text


def test_who_when_and_which(state: Watched) -> None:
    make(state.vfs, b"a")
    done(state.vfs.mkdir(1, b"b", 0o755, TOOL))
    first, second = state.new()
    assert told(first, "door", "pid", "uid", "tool") == ("fuse", os.getpid(), os.getuid(), None)
    assert told(second, "door", "tool", "call", "pid") == ("rpc", "write", "call_1", os.getpid())
    words = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode()
    assert first["command"].startswith(words)
    assert second["seq"] == first["seq"] + 1
    assert first["time"] <= second["time"] and first["time"].endswith("Z") and len(first["time"]) == 27


def test_each_failure_has_one_line_with_the_reason(tree: Watched) -> None:
    vfs = tree.vfs
    ino = make(vfs, b"f", b"data")
    sub = done(vfs.mkdir(1, b"d", 0o755, ME)).ino
    make(vfs, b"x", b"", sub)
    tree.new()
    link = done(vfs.lookup(1, b"l", ME)).ino
    inside = make(vfs, b"in", b"", link)
    tree.new()
    failures = [
        (vfs.mkdir(1, b"d", 0o755, ME), "EEXIST", "mkdir", "/d", None),
        (vfs.create(1, b"f", 0o644, os.O_EXCL, ME), "EEXIST", "create", "/f", None),
        (vfs.create_file(1, b"f", 0o644, b"", ME), "EEXIST", "create", "/f", None),
        (vfs.unlink(1, b"none", ME), "ENOENT", "unlink", "/none", None),
        (vfs.rmdir(1, b"d", ME), "ENOTEMPTY", "rmdir", "/d", None),
        (vfs.rename(1, b"none", sub, b"y", 0, ME), "ENOENT", "rename", "/none", "/d/y"),
        (vfs.link(sub, 1, b"e", ME), "EPERM", "link", "/d", "/e"),
        (vfs.setattr(sub, SetAttr(size=0), ME), "EISDIR", "truncate", "/d", None),
        (vfs.setxattr(ino, b"user.n", b"", 2, ME), "ENODATA", "setxattr", "/f", None),
        (vfs.replace(ino, b"y", ME, expect=1), "ESTALE", "write", "/f", None),
        # What the tree itself refuses, before any volume is asked:
        (vfs.rmdir(1, b"l", ME), "EBUSY", "rmdir", "/l", None),
        (vfs.unlink(1, b"usr", ME), "EBUSY", "unlink", "/usr", None),
        (vfs.mkdir(1, b"l", 0o755, ME), "EEXIST", "mkdir", "/l", None),
        (vfs.rename(1, b"l", 1, b"k", 0, ME), "EBUSY", "rename", "/l", "/k"),
        (vfs.rename(1, b"f", link, b"f", 0, ME), "EXDEV", "rename", "/f", "/l/f"),
        (vfs.link(ino, link, b"f", ME), "EXDEV", "link", "/f", "/l/f"),
        (vfs.copy_range(ino, 0, 0, inside, 0, 0, 1, ME), "EXDEV", "copy_range", "/l/in", None),
        (vfs.setxattr(ino, b"system.other", b"", 0, ME), "ENOTSUP", "setxattr", "/f", None),
    ]
    for operation, name, op, path, path2 in failures:
        with pytest.raises(OSError) as caught:
            done(operation)
        assert errno.errorcode[caught.value.errno or 0] == name
        (record,) = tree.new()
        assert told(record, "op", "path", "path2", "result") == (op, path, path2, name)
        assert record["error"] == os.strerror(caught.value.errno or 0)
    assert [r["seq"] for r in tree.records("errors")] == [r["seq"] for r in tree.records() if r["result"] != "ok"]


def test_what_was_only_not_found_has_no_line_but_a_refusal_has(tmp_path: Path) -> None:
    tree = Watched(tmp_path)
    ino = make(tree.vfs, b"f")
    usr = done(tree.vfs.lookup(1, b"usr", ME)).ino
    tree.new()
    for quiet in (
        tree.vfs.lookup(1, b"none", ME),
        tree.vfs.getxattr(ino, b"user.none", ME),
        tree.vfs.readlink(ino, ME),
        tree.vfs.opendir(ino, ME),
    ):
        with pytest.raises(OSError):
            done(quiet)
    assert tree.new() == []
    with pytest.raises(OSError):
        done(tree.vfs.open(usr, os.O_WRONLY, ME))
    host = done(tree.vfs.lookup(usr, b"bin", ME)).ino
    name = next(n for n, a in done(tree.vfs.children(host, ME)) if stat.S_ISREG(a.mode))
    program = done(tree.vfs.lookup(host, name, ME)).ino
    tree.new()
    with pytest.raises(OSError):
        done(tree.vfs.open(program, os.O_WRONLY, ME))
    (record,) = tree.new()
    assert told(record, "op", "path", "result") == ("open", f"/usr/bin/{name.decode()}", "EROFS")
    tree.close()


def test_a_refused_close_is_told_of(state: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: what was written is not there."""
    ino = make(state.vfs, b"f")
    fh = done(state.vfs.open(ino, os.O_WRONLY, ME))
    volume = state.vfs.table.volumes[0]
    for code in (errno.EBADMSG, errno.EIO):

        def refuse(*args: Any, code: int = code) -> None:
            raise OSError(code, "not taken")

        state.new()
        monkeypatch.setattr(volume, "flush", refuse)
        with pytest.raises(OSError):
            done(state.vfs.flush(ino, fh, ME))
        (record,) = state.new()
        assert told(record, "op", "path", "result", "error", "pid") == (
            "close", "/f", errno.errorcode[code], "not taken", os.getpid(),
        )  # fmt: skip
    assert [r["op"] for r in state.records("errors")] == ["close"] * 2
    done(state.vfs.release(ino, fh))


def test_a_fault_of_ours_and_a_cancelled_change_are_told_of(state: Watched) -> None:
    volume = state.vfs.table.volumes[0]
    for raised, name in ((ZeroDivisionError(), "EIO"), (KeyboardInterrupt(), "EINTR")):

        def broken(*args: object, raised: BaseException = raised) -> None:
            raise raised

        volume.mkdir = broken
        with pytest.raises(type(raised)):
            done(state.vfs.mkdir(1, b"d", 0o755, ME))
        (record,) = state.new()
        assert told(record, "op", "path", "result") == ("mkdir", "/d", name)
    del volume.mkdir


def test_paths_follow_renames_of_directories(tree: Watched) -> None:
    vfs = tree.vfs
    top = done(vfs.mkdir(1, b"a", 0o755, ME)).ino
    sub = done(vfs.mkdir(top, b"b", 0o755, ME)).ino
    ino = make(vfs, b"f", b"", sub)
    done(vfs.write(ino, 0, 0, b"1", ME))
    done(vfs.rename(1, b"a", 1, b"z", 0, ME))
    done(vfs.write(ino, 0, 0, b"2", ME))
    make(vfs, b"g", b"", sub)
    done(vfs.rename(sub, b"f", top, b"f2", 0, ME))
    done(vfs.write(ino, 0, 0, b"3", ME))
    found = [told(r, "op", "path", "path2") for r in tree.new()][3:]
    assert found == [
        ("write", "/a/b/f", None),
        ("rename", "/a", "/z"),
        ("write", "/z/b/f", None),
        ("create", "/z/b/g", None),
        ("rename", "/z/b/f", "/z/f2"),
        ("write", "/z/f2", None),
    ]


def test_exchanged_names(state: Watched) -> None:
    vfs = state.vfs
    one, two = make(vfs, b"one"), make(vfs, b"two")
    done(vfs.rename(1, b"one", 1, b"two", 2, ME))
    done(vfs.write(one, 0, 0, b"1", ME))
    done(vfs.write(two, 0, 0, b"2", ME))
    exchanged, first, second = state.new()[-3:]
    assert told(exchanged, "path", "path2", "exchange") == ("/one", "/two", True)
    assert (first["path"], second["path"]) == ("/two", "/one")


def test_a_whiteout_left_behind(state: Watched) -> None:
    make(state.vfs, b"moved")
    done(state.vfs.rename(1, b"moved", 1, b"away", 4, ME))
    assert told(state.new()[-1], "op", "path", "path2", "whiteout") == ("rename", "/moved", "/away", True)


def test_an_unlinked_file_is_told_of_by_its_last_path(state: Watched) -> None:
    attr, fh = done(state.vfs.create(1, b"gone", 0o600, os.O_RDWR, ME))
    done(state.vfs.unlink(1, b"gone", ME))
    done(state.vfs.write(attr.ino, fh, 0, b"x", ME))
    assert told(state.new()[-1], "op", "path", "unlinked", "size") == ("write", "/gone", True, [0, 1])


@pytest.mark.parametrize("name", [b'q"uo\\te', b"new\nline", b"\xff\xfe", "ümläut 文".encode(), b"\x1b[31m"])
def test_any_name_is_one_line_of_json(state: Watched, name: bytes) -> None:
    make(state.vfs, name)
    done(state.vfs.rename(1, name, 1, name + b"2", 0, ME))
    first, second = state.new()
    assert os.fsencode(first["path"]) == b"/" + name
    assert os.fsencode(second["path2"]) == b"/" + name + b"2"


def test_reads_when_they_are_wanted(tmp_path: Path) -> None:
    tree = Watched(tmp_path, reads=True)
    ino = make(tree.vfs, b"f", b"data")
    tree.new()
    fh = done(tree.vfs.open(ino, os.O_RDONLY, ME))
    assert bytes(done(tree.vfs.read(ino, fh, 0, 10, TOOL))) == b"data"
    done(tree.vfs.children(1, ME))
    done(tree.vfs.getattr(ino, ME))
    found = [told(r, "op", "path", "tool") for r in tree.new()]
    assert found == [("open", "/f", None), ("read", "/f", "write"), ("list", "/", None)]
    tree.close()


def test_numbers_go_on_after_a_restart(state: Watched) -> None:
    make(state.vfs, b"a")
    state.audit.close()
    state.open()
    make(state.vfs, b"b")
    assert [r["seq"] for r in state.records()] == [1, 2]


def test_a_full_disk_is_logged_when_it_begins_and_when_it_ends(
    state: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not each time: a short line may find room again and again where no other does."""
    write = os.write

    def nearly_full(fd: int, data: bytes) -> int:
        if len(data) > 120 and data.startswith(b'{"seq"'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("vfsd.audit.log.os.write", nearly_full)
    for i in range(50):
        make(state.vfs, b"%d" % i)
        with pytest.raises(FileExistsError):
            make(state.vfs, b"%d" % i)
        if i % 10 == 0:
            state.audit.maintain()
    said = [r.getMessage() for r in caplog.records if r.name.startswith("vfsd.audit")]
    assert said == ["the audit log can't be written: No space left on device"]
    monkeypatch.undo()
    for _ in range(3):
        make(state.vfs, b"after%d" % _)
        state.audit.maintain()
    said = [r.getMessage() for r in caplog.records if r.name.startswith("vfsd.audit")]
    assert said[1:] == ["the audit log can be written again; 150 lines are missing"]


def test_a_full_disk_stops_no_one_and_is_told_of(state: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    append = state.audit.log.append
    monkeypatch.setattr(state.audit, "_append", lambda line: full(0, line))
    monkeypatch.setattr(state.audit.log, "append", lambda line: full(0, line))
    for name in (b"a", b"b", b"c"):
        make(state.vfs, name)
    assert state.audit.counters()["audit_lost"] == 3
    monkeypatch.undo()
    assert state.audit.log.append == append
    make(state.vfs, b"d")
    found = [told(r, "op", "count", "path") for r in state.records()]
    assert found == [("lost", 3, None), ("create", None, "/d")]
    numbers = [r["seq"] for r in state.records()]
    assert len(set(numbers)) == len(numbers)


def test_who_has_no_pid_here_did_it_while_known_executes_ran(state: Watched) -> None:
    """Processes of a pid namespace that is not below ours: the kernel gives 0 for all of them."""
    unseen = ME._replace(pid=0)

    def among(caller: Caller) -> list[str] | None:
        done(state.vfs.mkdir(1, b"d%d" % len(state.records()), 0o755, caller))
        (record,) = state.new()
        assert "call" not in record and "execute" not in record
        return [one["execute"] + one["call"] for one in record["among"]] if "among" in record else None

    assert among(unseen) is None
    state.audit.began("e1", "call_1")
    assert among(unseen) == ["e1call_1"]
    state.audit.began("e2", "")
    assert among(unseen) == ["e1call_1", "e2"]
    assert among(ME) is None
    state.audit.ended("e1")
    assert among(unseen) == ["e2"]
    state.audit.ended("e2")
    assert among(unseen) is None
    line = b'{"seq":1,"result":"ok","path":"/f","among":[{"execute":"e1","call":"c1"},{"execute":"e2","call":"c2"}]}'
    assert [len(list(Filter(call=call).records([line]))) for call in ("c1", "e2", "c3")] == [1, 1, 0]
