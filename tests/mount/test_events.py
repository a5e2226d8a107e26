"""Who watches files in the mount is woken by what tools do, as by what programs do."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon
from trees import watched

from vfsd.core.changes import Change, Dentry, NoDentry, Put, Write, Xattr
from vfsd.doors.happenings import ATTRIB, CREATE, MODIFY, REMOVE, RENAME, Happening, happenings

NAMES = {
    0x2: "MODIFY", 0x4: "ATTRIB", 0x8: "CLOSE_WRITE", 0x40: "MOVED_FROM", 0x80: "MOVED_TO", 0x100: "CREATE",
    0x200: "DELETE", 0x400: "DELETE_SELF", 0x800: "MOVE_SELF",
}  # fmt: skip
SECONDS = 20.0
libc = ctypes.CDLL(None, use_errno=True)


class Watcher:
    """inotify(7) on some paths."""

    def __init__(self, *paths: str) -> None:
        self.fd = libc.inotify_init1(os.O_NONBLOCK)
        self.paths = {}
        for path in paths:
            wd = libc.inotify_add_watch(self.fd, os.fsencode(path), sum(NAMES))
            assert wd > 0, os.strerror(ctypes.get_errno())
            self.paths[wd] = os.path.basename(path)

    def until(self, last: str) -> list[str]:
        """Events as ``PLACE/NAME EVENT``, up to ``last``."""
        found: list[str] = []
        end = time.monotonic() + SECONDS
        while last not in found:
            waiter = select.poll()
            waiter.register(self.fd, select.POLLIN)
            if not waiter.poll(max(0.0, end - time.monotonic()) * 1000):
                raise AssertionError(f"no {last} in {SECONDS} s after {found}")
            data = os.read(self.fd, 65536)
            while data:
                wd, mask, _, length = struct.unpack_from("iIII", data)
                name = data[16 : 16 + length].rstrip(b"\0").decode()
                at = self.paths[wd] + (f"/{name}" if name else "")
                found += [f"{at} {NAMES[bit]}" for bit in NAMES if mask & bit]
                data = data[16 + length :]
        return found

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture(params=["native-state", "native-local", "pyfuse3-memory"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    engine, kind = request.param.split("-")
    daemon = Daemon(tmp_path, engine, kind)
    daemon.start()
    with watched(daemon.point):
        yield daemon
    daemon.stop()


def test_watchers_see_what_tools_do(daemon: Daemon) -> None:
    at, call = str(daemon.point), daemon.client.call
    for name in ("d", "e"):
        os.mkdir(f"{at}/{name}")
    for name in ("d/f", "d/g"):
        Path(at, name).write_text("before")
    os.utime(f"{at}/d", (1, 1))
    watcher = Watcher(f"{at}/d", f"{at}/e", f"{at}/d/f")
    call("write", path=b"/d/f", data=b"after")
    assert watcher.until("f CLOSE_WRITE") == [
        "d/f MODIFY", "f MODIFY", "d/f CLOSE_WRITE", "f CLOSE_WRITE",
    ]  # fmt: skip
    call("write", path=b"/d/new", data=b"text")
    assert watcher.until("d/new CLOSE_WRITE") == ["d/new CREATE", "d/new MODIFY", "d/new CLOSE_WRITE"]
    call("chmod", path=b"/d/f", perm=0o700)
    assert watcher.until("f ATTRIB") == ["d/f ATTRIB", "f ATTRIB"]
    call("write", path=b"/d/f", data=b"again")  # may be executed, which an open for writing would forbid
    assert watcher.until("f ATTRIB") == ["d/f ATTRIB", "f ATTRIB"]
    call("rename", old=b"/d/new", new=b"/e/moved")
    assert watcher.until("e/moved MOVED_TO") == ["d/new MOVED_FROM", "e/moved MOVED_TO"]
    call("rename", old=b"/e/moved", new=b"/d/g")
    assert watcher.until("d/g MOVED_TO") == ["e/moved MOVED_FROM", "d/g MOVED_TO"]
    call("rename", old=b"/d/f", new=b"/d/h")
    assert watcher.until("f MOVE_SELF") == ["d/f MOVED_FROM", "d/h MOVED_TO", "f MOVE_SELF"]
    call("mkdir", path=b"/e/sub")
    assert watcher.until("e/sub CREATE") == ["e/sub CREATE"]
    call("symlink", target=b"nowhere", path=b"/e/link")
    assert watcher.until("e/link CREATE") == ["e/link CREATE"]
    call("unlink", path=b"/d/h")
    assert watcher.until("d/h DELETE") == ["f ATTRIB", "f DELETE_SELF", "d/h DELETE"]
    call("rmdir", path=b"/e/sub")
    assert watcher.until("e/sub DELETE") == ["e/sub DELETE"]
    # What programs find is what the tools have made, and nothing but that was recorded.
    assert (sorted(os.listdir(f"{at}/d")), sorted(os.listdir(f"{at}/e"))) == (["g"], ["link"])
    assert Path(at, "d/g").read_text() == "text"
    assert os.readlink(f"{at}/e/link") == "nowhere"
    assert not os.path.exists(f"{at}/d/h")
    assert not os.path.exists(f"{at}/e/moved")
    recorded = [json.loads(line) for line in Path(at, ".vfsd/log.ndjson").read_text().splitlines()]
    assert len([line for line in recorded if line["door"] != "fuse"]) == 11
    assert {line["pid"] for line in recorded} == {os.getpid()}
    mutated = daemon.client.call("status")["counters"]["mutated"]
    call("write", path=b"/d/g", data=b"x" * 10)
    before = os.stat(f"{at}/d/g")
    watcher.until("d/g CLOSE_WRITE")
    assert os.stat(f"{at}/d/g").st_mtime_ns == before.st_mtime_ns
    assert os.stat(f"{at}/d/g").st_ctime_ns == before.st_ctime_ns
    assert daemon.client.call("status")["counters"]["mutated"] == mutated + 1
    watcher.close()


def test_a_storm_ends_and_all_is_as_the_tools_left_it(daemon: Daemon) -> None:
    """Names that come and go faster than they are told, and programs in the same directory meanwhile."""
    at, call = str(daemon.point), daemon.client.call
    os.mkdir(f"{at}/d")
    watcher = Watcher(f"{at}/d")
    for i in range(60):
        call("write", path=b"/d/%d" % (i % 5), data=b"%d" % i)
        assert os.path.exists(f"{at}/d/{i % 5}")
        if i % 3 == 0:
            call("rename", old=b"/d/%d" % (i % 5), new=b"/d/%d" % ((i + 1) % 5))
        elif i % 4 == 0:
            call("unlink", path=b"/d/%d" % (i % 5))
        assert os.path.exists(f"{at}/d/{i % 5}") == (i % 3 != 0 and i % 4 != 0)
        Path(at, "d", f"shell{i % 3}").write_text(str(i))
    call("write", path=b"/d/last", data=b"")
    watcher.until("d/last CREATE")
    watcher.close()
    listed = daemon.client.call("list", path=b"/d")["entries"]
    names = sorted(os.fsdecode(entry["name"] if isinstance(entry, dict) else entry[0]) for entry in listed)
    assert sorted(os.listdir(f"{at}/d")) == names
    for name in names:
        assert Path(at, "d", name).read_bytes() == call("read", path=os.fsencode(f"/d/{name}"))["data"]
    for name in map(str, range(5)):
        assert os.path.exists(f"{at}/d/{name}") == (name in names)


def helpers(daemon: Daemon) -> list[int]:
    """The ids of the daemon's helpers; from /proc, as ps cuts a command line to a width that it guesses."""
    assert daemon.process is not None
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int(entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()[1])
            if parent == daemon.process.pid and b"player.py" in entry.joinpath("cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def test_without_watchers_there_is_no_helper(daemon: Daemon) -> None:
    at, call = str(daemon.point), daemon.client.call
    call("write", path=b"/f", data=b"")
    watcher = Watcher(at)
    call("write", path=b"/g", data=b"")
    assert watcher.until(f"{os.path.basename(at)}/g CREATE")
    assert len(helpers(daemon)) == 1
    watcher.close()
    end = time.monotonic() + SECONDS
    while helpers(daemon):
        assert time.monotonic() < end
        call("write", path=b"/f", data=b"")
        time.sleep(0.1)


def test_tail_follows_what_tools_write(daemon: Daemon) -> None:
    Path(daemon.point, "log").write_text("first\n")
    command = ["tail", "-n", "+1", "-F", f"{daemon.point}/log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline() == "first\n"
        daemon.client.call("write", path=b"/log", data=b"first\nsecond\n")
        assert tail.stdout.readline() == "second\n"
        daemon.client.call("write", path=b"/other", data=b"first\nsecond\nthird\n")
        daemon.client.call("rename", old=b"/other", new=b"/log")
        assert [tail.stdout.readline() for _ in range(3)] == ["first\n", "second\n", "third\n"]
        tail.kill()


def test_a_killed_helper_is_replaced(daemon: Daemon) -> None:
    at, call = str(daemon.point), daemon.client.call
    os.mkdir(f"{at}/d")
    watcher = Watcher(f"{at}/d")
    call("write", path=b"/d/f", data=b"")
    watcher.until("d/f CREATE")
    (helper,) = helpers(daemon)
    os.kill(helper, 9)
    for i in range(100):
        call("write", path=b"/d/%d" % i, data=b"")
        if helpers(daemon) not in ([], [helper]):
            break
        time.sleep(0.1)
    call("write", path=b"/d/g", data=b"")
    watcher.until("d/g CREATE")
    watcher.close()


def test_a_killed_helper_keeps_its_pid_until_it_is_missed(tmp_path: Path) -> None:
    """Also where the daemon was started by a program that ignores SIGCHLD, which lets the kernel reap at once."""
    daemon = Daemon(tmp_path / "d", root="memory")
    daemon.command = ["env", "--ignore-signal=CHLD", *daemon.command]
    try:
        daemon.start()
        with watched(daemon.point):
            watcher = Watcher(str(daemon.point))
            daemon.client.call("write", path=b"/f", data=b"")
            watcher.until(f"{daemon.point.name}/f CREATE")
            (helper,) = helpers(daemon)
            os.kill(helper, 9)
            end = time.monotonic() + SECONDS
            while Path(f"/proc/{helper}/stat").read_text().split()[2] != "Z":
                assert time.monotonic() < end
            watcher.close()
        daemon.stop()
    finally:
        daemon.abort()


FILE = Put(5, 0o100644, 1, 0, 0, 0, 3, 0, 0, 0)
PARENT = Put(2, 0o040755, 2, 0, 0, 0, 0, 0, 0, 0)


def test_what_commits_are_told_as() -> None:
    cases = (
        ("create", [FILE, Dentry(2, b"f", 5), PARENT], [Happening(CREATE, 5, 2, b"f"), Happening(MODIFY, 5)]),
        ("mknod", [FILE._replace(size=0), Dentry(2, b"f", 5), PARENT], [Happening(CREATE, 5, 2, b"f")]),
        ("mkdir", [PARENT._replace(node=5, size=4096), Dentry(2, b"d", 5), PARENT], [Happening(CREATE, 5, 2, b"d")]),
        ("link", [Dentry(2, b"l", 5), FILE, PARENT], [Happening(CREATE, 5, 2, b"l")]),
        ("unlink", [NoDentry(2, b"f", 5), FILE, PARENT], [Happening(REMOVE, 5, 2, b"f")]),
        ("rmdir", [NoDentry(2, b"f", 5), PARENT], [Happening(REMOVE, 5, 2, b"f", is_dir=True)]),
        (
            "rename",
            [NoDentry(2, b"f", 5), NoDentry(2, b"g", 6), Dentry(2, b"g", 5), FILE, PARENT],
            [Happening(RENAME, 5, 2, b"f", 2, b"g", 6)],
        ),
        ("write", [Write(5, 0, b"x"), FILE], [Happening(MODIFY, 5)]),
        ("setxattr", [Xattr(5, b"user.a", b""), FILE], [Happening(ATTRIB, 5)]),
        ("rules", [], []),
    )
    for op, changes, told in cases:
        assert happenings(0, op, changes) == told, op  # type: ignore[arg-type]
    assert happenings(1 << 48, "write", [Write(5, 0, b"x")]) == [Happening(MODIFY, 1 << 48 | 5)]


def test_a_commit_of_many_changes_is_looked_through_a_few_times_only() -> None:
    """A restore that removed 10,000 files held the loop for half a minute: each was looked for among all of them."""

    class Changes(list[Change]):
        passes = 0

        def __iter__(self) -> Iterator[Change]:
            self.passes += 1
            return super().__iter__()

    changes = Changes(NoDentry(1, b"%d" % i, i + 2) for i in range(100))
    assert len(happenings(0, "restore", changes)) == 100
    assert changes.passes < 20
