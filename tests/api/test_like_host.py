"""Each script runs on a host directory and through a door of ours; whoever reads the two records can't tell which is
which: the same results, the same errnos, the same attributes, the same tree in the end.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from typing import Any

import pytest
from drivers import EXCHANGE, KEEP_SIZE, NOREPLACE, PUNCH_HOLE, Driver, Stat, VfsDriver, read_file, write_file

RW, RD, WR = os.O_RDWR, os.O_RDONLY, os.O_WRONLY
CREAT, EXCL, TRUNC, APPEND = os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND
LONG = "n" * 256


class Record:
    """A driver that writes down what each call gave: a plain result, or the errno."""

    def __init__(self, fs: Driver) -> None:
        self.fs = fs
        self.lines: list[Any] = []
        self._numbers: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.fs, name)

        def call(*args: Any) -> Any:
            try:
                result = method(*args)
            except OSError as error:
                assert error.errno is not None
                self.lines.append((name, [a for a in args if isinstance(a, str)], errno.errorcode[error.errno]))
                return None
            self.lines.append((name, self._seen(result) if name != "open" else "opened"))
            return result

        return call

    def put(self, path: str, data: bytes = b"") -> None:
        write_file(self.fs, path, data)

    def content(self, path: str) -> None:
        try:
            self.lines.append((path, read_file(self.fs, path)))
        except OSError as error:
            self.lines.append((path, error.errno))

    def note(self, what: Any) -> None:
        self.lines.append(what)

    def _seen(self, result: Any) -> Any:
        if not isinstance(result, Stat):
            return result
        return (*result[:5], None if stat.S_ISDIR(result.mode) else result.size)

    def _identified(self, result: Stat) -> Any:
        """Which names are one file; told at the end only, for numbers may be given again."""
        return self._seen(result), f"file {self._numbers.setdefault(result.ino, len(self._numbers))}"

    def moved(self, change: Callable[[], Any], *paths: str) -> None:
        """Which times of the paths a change moved."""
        before = {path: self.fs.lstat(path) for path in paths}
        time.sleep(0.012)  # the kernel's coarse clock ticks every 4 or 10 ms
        change()
        for path, was in before.items():
            try:
                now = self.fs.lstat(path)
            except OSError:
                continue
            self.lines.append((path, now.mtime_ns > was.mtime_ns, now.ctime_ns > was.ctime_ns))

    def everything(self, path: str = "") -> None:
        """The whole tree."""
        self.lines.append((path or "/", self._identified(self.fs.lstat(path or "/"))))
        for name in self.fs.listdir(path or "/"):
            below = f"{path}/{os.fsdecode(name)}"
            mode = self.fs.lstat(below).mode
            if stat.S_ISDIR(mode):
                self.everything(below)
            else:
                self.lines.append((below, self._identified(self.fs.lstat(below))))
                if stat.S_ISREG(mode):
                    self.content(below)
                elif stat.S_ISLNK(mode):
                    self.lines.append(self.fs.readlink(below))


def making(t: Record) -> None:
    t.mkdir("/d", 0o755)
    t.mkdir("/d", 0o755)
    t.mkdir("/d/s", 0o1777)
    t.mkdir("/no/d")
    t.mkdir("/d/../e")
    t.mkdir("/" + LONG)
    t.mkdir("/" + LONG[1:])
    t.put("/f", b"x")
    t.mkdir("/f/d")
    t.mkdir("/f")
    t.mknod("/fifo", stat.S_IFIFO | 0o640)
    t.mknod("/sock", stat.S_IFSOCK | 0o600)
    t.mknod("/reg", stat.S_IFREG | 0o4711)
    t.mknod("/fifo", stat.S_IFIFO | 0o600)
    t.mknod("/dev", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    t.symlink("f", "/l")
    t.symlink("f", "/l")
    t.symlink("x" * 4095, "/long")
    t.symlink("no/where", "/dangling")
    t.stat("/dangling")
    t.lstat("/dangling")
    t.readlink("/f")
    t.readlink("/d")
    t.stat("/l")
    t.stat("/l/")
    t.stat("/d/")
    t.stat("/f/")
    t.stat("/d/s/../../f")


def removing(t: Record) -> None:
    t.mkdir("/d")
    t.put("/d/f")
    t.symlink("d", "/l")
    for path in ("/d", "/d/f", "/l", "/no", "/d/f/x", "/no/x", "/" + LONG):
        t.rmdir(path)
    for path in ("/d", "/no", "/d/f/x", "/l/f", "/l", "/" + LONG, "/l"):
        t.unlink(path)
    t.rmdir("/d")
    t.rmdir("/d")


def renaming(t: Record) -> None:
    for path in ("/a", "/b", "/a/in", "/full"):
        t.mkdir(path)
    t.put("/full/x")
    t.put("/f", b"f")
    t.put("/g", b"g")
    t.symlink("f", "/l")
    for old, new in (
        ("/no", "/x"), ("/f", "/no/x"), ("/f", "/a"), ("/a", "/f"), ("/a", "/full"), ("/a", "/a/in/x"), ("/a", "/a"),
        ("/f", "/f"), ("/f/x", "/y"), ("/f", "/g/x"), ("/f", "/" + LONG), ("/a/in", "/a"), ("/l", "/m"), ("/f", "/g"),
        ("/b", "/a/in"), ("/a/in", "/b"), ("/full", "/b"), ("/g", "/b/x"), ("/m", "/b/x"),
    ):  # fmt: skip
        t.rename(old, new)
    t.listdir("/")


def renaming_with_flags(t: Record) -> None:
    for path in ("/a", "/b", "/a/in"):
        t.mkdir(path)
    t.put("/f", b"f")
    t.put("/b/g", b"g")
    t.link("/f", "/same")
    for old, new, flags in (
        ("/f", "/b/g", NOREPLACE), ("/f", "/new", NOREPLACE), ("/no", "/f", NOREPLACE), ("/a", "/b", NOREPLACE),
        ("/new", "/same", NOREPLACE), ("/new", "/b/g", EXCHANGE), ("/a", "/b/g", EXCHANGE), ("/new", "/no", EXCHANGE),
        ("/a", "/a/in", EXCHANGE), ("/a/in", "/a", EXCHANGE), ("/same", "/b/g", EXCHANGE), ("/b", "/f", 3),
        ("/b", "/b", EXCHANGE), ("/same", "/same", NOREPLACE),
    ):  # fmt: skip
        t.rename(old, new, flags)
        t.lstat("/")
    t.listdir("/b")


def linking(t: Record) -> None:
    t.mkdir("/d")
    t.put("/f", b"one")
    t.symlink("f", "/l")
    t.mknod("/p", stat.S_IFIFO | 0o600)
    for old, new in (
        ("/f", "/d/g"), ("/f", "/d/g"), ("/d", "/e"), ("/no", "/x"), ("/l", "/l2"), ("/p", "/p2"), ("/f", "/no/x"),
        ("/f", "/" + LONG), ("/f", "/f/x"), ("/f", "/d"),
    ):  # fmt: skip
        t.link(old, new)
    t.put("/d/g", b"through the other name")
    t.stat("/f")
    t.unlink("/f")
    t.stat("/d/g")
    t.lstat("/l2")


def attributes(t: Record) -> None:
    t.put("/f", b"x")
    t.mkdir("/d")
    t.symlink("f", "/l")
    t.symlink("no", "/dangling")
    t.chmod("/f", 0o7777)
    t.stat("/f")
    t.chmod("/l", 0o600)
    t.chmod("/d", 0o2770)
    t.chmod("/dangling", 0o600)
    t.chown("/f", 12, -1)
    t.chown("/l", -1, 34)
    t.chown("/d", 12, 34)
    t.chown("/no", 1, 1)
    for ns in (0, 1, -1, -1_000_000_001, 1_700_000_000_123_456_789, 4_000_000_000_000_000_001):
        t.utime("/l", ns, ns)
        t.note(t.fs.stat("/f").mtime_ns)
    t.utime("/no", 0, 0)


def setgid_directory(t: Record) -> None:
    t.mkdir("/d")
    t.chown("/d", 12, 34)
    t.chmod("/d", 0o2777)
    t.put("/d/f")
    t.mkdir("/d/below", 0o700)
    t.symlink("x", "/d/l")
    t.mknod("/d/p", stat.S_IFIFO | 0o600)


def truncating(t: Record) -> None:
    t.put("/f", b"0123456789" * 1000)
    t.mkdir("/d")
    t.mknod("/p", stat.S_IFIFO | 0o600)
    for size in (5000, 4096, 4095, 8192, 1, 0, 3, 100_000):
        t.truncate("/f", size)
        t.content("/f")
    for path in ("/d", "/no", "/p", "/f/x"):
        t.truncate(path, 0)
    t.truncate("/f", 1 << 50)
    ro, rw = t.open("/f", RD), t.open("/f", RW)
    t.ftruncate(rw, 7)
    t.fstat(ro)
    t.close(ro)
    t.close(rw)


def reading_and_writing(t: Record) -> None:
    t.put("/f", b"0123456789")
    fh = t.open("/f", RW)
    for data, offset in ((b"ab", 2), (b"tail", 8), (b"far", 10_000), (b"", 50_000), (b"page" * 1024, 4096)):
        t.pwrite(fh, data, offset)
        t.fstat(fh)
    for length, offset in ((4, 0), (100, 9_998), (5, 20_000), (0, 0), (70_000, 0)):
        t.pread(fh, length, offset)
    t.fsync(fh)
    other = t.open("/f", RD)
    t.pread(other, 4, 0)
    t.pwrite(other, b"no", 0)
    t.close(other)
    other = t.open("/f", WR)
    t.pread(other, 4, 0)
    t.close(other)
    t.close(fh)
    fh = t.open("/f", RD)
    t.pread(fh, 20, 4090)
    t.close(fh)


def appending(t: Record) -> None:
    t.put("/f", b"start ")
    one, two = t.open("/f", WR | APPEND), t.open("/f", WR | APPEND)
    plain = t.open("/f", RW)
    t.pwrite(one, b"one ", 0)
    t.pwrite(two, b"two ", 0)
    t.pwrite(plain, b"S", 0)
    t.pwrite(one, b"three", 3)
    t.pread(plain, 100, 0)
    for fh in (one, two, plain):
        t.close(fh)


def unlinked_but_open(t: Record) -> None:
    t.put("/f", b"still here")
    t.mkdir("/d")
    fh = t.open("/f", RW)
    t.unlink("/f")
    t.fstat(fh)
    t.pwrite(fh, b"S", 0)
    t.pread(fh, 20, 0)
    t.ftruncate(fh, 5)
    t.fstat(fh)
    t.put("/f", b"another")
    t.pread(fh, 20, 0)
    t.close(fh)
    fh = t.open("/f", RW)
    t.put("/g", b"g")
    t.rename("/g", "/f")
    t.pread(fh, 20, 0)
    t.fstat(fh)
    t.close(fh)


def removed_directory(t: Record) -> None:
    t.mkdir("/d")
    fh = t.open("/d", RD | os.O_DIRECTORY)
    t.rmdir("/d")
    t.fstat(fh)
    t.close(fh)


def sparse(t: Record) -> None:
    t.put("/f")
    fh = t.open("/f", RW)
    t.ftruncate(fh, 1 << 20)
    t.pwrite(fh, b"x" * 4096, 65_536)
    t.pwrite(fh, b"y" * 4096, 131_072)
    for offset in (0, 65_536, 65_540, 69_632, 131_072, 135_168, 1 << 20):
        t.seek(fh, offset, os.SEEK_DATA)
        t.seek(fh, offset, os.SEEK_HOLE)
    t.note(t.fs.fstat(fh).blocks)
    t.pread(fh, 20, 65_530)
    t.close(fh)


def allocating(t: Record) -> None:
    t.put("/f", b"x" * 20_000)
    fh = t.open("/f", RW)
    for mode, offset, length in (
        (0, 0, 100), (0, 0, 40_000), (KEEP_SIZE, 40_000, 40_000), (PUNCH_HOLE | KEEP_SIZE, 4000, 9000),
        (PUNCH_HOLE | KEEP_SIZE, 30_000, 100_000), (PUNCH_HOLE, 0, 4096), (0, 0, 0),
    ):  # fmt: skip
        t.fallocate(fh, mode, offset, length)
        t.fstat(fh)
    t.close(fh)
    ro = t.open("/f", RD)
    t.fallocate(ro, 0, 0, 100)
    t.close(ro)


def extended_attributes(t: Record) -> None:
    t.put("/f")
    t.mkdir("/d")
    t.symlink("f", "/l")
    t.setxattr("/f", "user.a", b"1")
    t.setxattr("/l", "user.b", b"\0\xff", os.XATTR_CREATE)
    t.setxattr("/f", "user.a", b"2", os.XATTR_CREATE)
    t.setxattr("/f", "user.c", b"2", os.XATTR_REPLACE)
    t.setxattr("/f", "user.a", b"longer value", os.XATTR_REPLACE)
    t.setxattr("/d", "user.d", b"")
    t.setxattr("/f", "trusted.t", b"root's")
    for path in ("/f", "/d", "/l", "/no"):
        t.listxattr(path)
    for path, name in (("/f", "user.a"), ("/l", "user.b"), ("/d", "user.d"), ("/f", "user.no"), ("/no", "user.a")):
        t.getxattr(path, name)
        t.removexattr(path, name)
        t.getxattr(path, name)
    for name in ("nowhere.a", "a", "user.", "system.a"):
        t.setxattr("/d", name, b"")
        t.getxattr("/d", name)
        t.removexattr("/d", name)
    t.rename("/f", "/g")
    t.listxattr("/g")


def odd_names(t: Record) -> None:
    for name in ("spaced out", "-dash", "new\nline", "tab\t", "ünï", "\udcff\udcfe", "..a", "...", "*?[]", "\\", "%s"):
        t.put("/" + name, name.encode(errors="surrogateescape"))
    t.listdir("/")


def walking(t: Record) -> None:
    t.mkdir("/d")
    t.put("/d/f", b"x")
    t.symlink("d", "/up")
    t.symlink("../d", "/d/self")
    t.symlink("loop2", "/loop1")
    t.symlink("loop1", "/loop2")
    for path in (
        "/up/f", "/up/self/self/f", "/loop1", "/loop1/x", "/d//f", "/d/./f", "/d/f/", "/d/f/.", "/d/no/../f", "/up/",
        "/d/self/../d/f", "/" + "d/../" * 200 + "d/f",
    ):  # fmt: skip
        t.stat(path)
        t.lstat(path)
    t.listdir("/up")
    t.listdir("/d/f")
    t.listdir("/no")


def times(t: Record) -> None:
    t.mkdir("/d")
    t.mkdir("/e")
    t.put("/f", b"x")
    fh = t.fs.open("/f", RW)
    t.moved(lambda: t.put("/d/new"), "/d", "/")
    t.moved(lambda: t.link("/f", "/d/l"), "/f", "/d")
    t.moved(lambda: t.unlink("/d/l"), "/f", "/d")
    t.moved(lambda: t.rename("/d/new", "/e/new"), "/d", "/e", "/")
    t.moved(lambda: t.rename("/f", "/g"), "/")
    t.moved(lambda: t.chmod("/g", 0o600), "/g", "/")
    t.moved(lambda: t.setxattr("/g", "user.a", b""), "/g")
    t.moved(lambda: t.pwrite(fh, b"y", 0), "/g")
    t.moved(lambda: t.pwrite(fh, b"", 0), "/g")
    t.moved(lambda: t.pread(fh, 1, 0), "/g")
    t.moved(lambda: t.ftruncate(fh, 1), "/g")
    t.moved(lambda: t.truncate("/g", 10), "/g")
    t.moved(lambda: t.utime("/g", 1, 1), "/g")
    t.moved(lambda: t.put("/g", b""), "/g")
    t.moved(lambda: t.mkdir("/d/sub"), "/d")
    t.moved(lambda: t.rmdir("/d/sub"), "/d")
    t.moved(lambda: t.mkdir("/d"), "/d", "/")
    t.fs.close(fh)


def times_of_allocating(t: Record) -> None:
    t.put("/f", b"x")
    fh = t.fs.open("/f", RW)
    t.moved(lambda: t.fallocate(fh, 0, 0, 1), "/f")
    t.moved(lambda: t.fallocate(fh, KEEP_SIZE, 0, 100_000), "/f")
    t.moved(lambda: t.fallocate(fh, KEEP_SIZE | PUNCH_HOLE, 0, 100_000), "/f")
    t.fs.close(fh)


SCRIPTS = [
    making, removing, renaming, renaming_with_flags, linking, attributes, setgid_directory, truncating,
    reading_and_writing, appending, unlinked_but_open, removed_directory, sparse, allocating, extended_attributes,
    odd_names, walking, times, times_of_allocating,
]  # fmt: skip

NEED_ROOT = (making, attributes, setgid_directory, extended_attributes)


DEVIATIONS: dict[str, tuple[str, str]] = {
    "sparse": ("mount-pyfuse3", "pyfuse3 offers no lseek: the kernel takes all for data"),
    "allocating": ("mount-pyfuse3", "pyfuse3 offers no fallocate: the kernel says EOPNOTSUPP"),
    "times_of_allocating": ("mount-pyfuse3", "pyfuse3 offers no fallocate"),
    "removed_directory": ("-local", "no descriptor is held for a directory handle, so it can't be asked once removed"),
}
"""Script -> (in which drivers it can't pass, why)."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_host_and_we_answer_alike(
    script: Callable[[Record], None], fs: Driver, host: Driver, request: pytest.FixtureRequest
) -> None:
    where, why = DEVIATIONS.get(script.__name__, ("none", ""))
    if where in request.node.callspec.params["fs"]:
        pytest.skip(why)
    if os.geteuid() and script in NEED_ROOT and isinstance(fs, VfsDriver):
        pytest.skip("what the kernel or the tool door refuses an ordinary user is not refused below them")
    records = []
    for driver in (host, fs):
        record = Record(driver)
        driver.chmod("/", 0o755)
        script(record)
        record.everything()
        records.append(record.lines)
    assert records[1] == records[0]
