"""Calls that programs rarely make, and in odd ways: the answers of the mount are those of the host's file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import struct
import subprocess
import time
from collections.abc import Callable

import pytest
from stories import AT_FDCWD, ROOT, Told, compare, in_child, libc_call, make

OFD_SETLK = 37


def file_handle(path: str) -> bytes:
    """What name_to_handle_at(2) gives for a file of the mount."""
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    libc_call("name_to_handle_at", AT_FDCWD, os.fsencode(path), handle, ctypes.byref(mount_id), 0)
    return handle.raw


@pytest.mark.skipif(not ROOT, reason="open_by_handle_at(2) is root's")
def test_files_are_opened_by_handle_as_a_server_for_nfs_does(where: str) -> None:
    make(f"{where}/f", b"content")
    os.mkdir(f"{where}/d")
    make(f"{where}/d/g", b"deep")
    handles = {name: file_handle(f"{where}/{name}") for name in ("f", "d", "d/g")}
    at = os.open(where, os.O_RDONLY)
    for name, content in (("f", b"content"), ("d/g", b"deep")):
        fd = libc_call("open_by_handle_at", at, handles[name], os.O_RDONLY)
        assert os.read(fd, 100) == content
        os.close(fd)
    fd = libc_call("open_by_handle_at", at, handles["d"], os.O_RDONLY)
    assert os.listdir(fd) == ["g"]
    assert os.path.samestat(os.stat("..", dir_fd=fd), os.stat(where))
    os.close(fd)
    os.close(at)


def birth(path: str) -> int | None:
    """The time of birth in nanoseconds, by statx(2); the other fields are those of stat(2)."""
    buffer = ctypes.create_string_buffer(256)
    libc_call("statx", AT_FDCWD, os.fsencode(path), 0x100, 0xFFF, buffer)  # AT_SYMLINK_NOFOLLOW
    st = os.lstat(path)
    mask, blksize, _, *owner, mode = struct.unpack_from("IIQIIIH", buffer)
    assert (blksize, mode, owner) == (st.st_blksize, st.st_mode, [st.st_nlink, st.st_uid, st.st_gid])
    assert struct.unpack_from("QQQ", buffer, 32) == (st.st_ino, st.st_size, st.st_blocks)
    atime, born, ctime, mtime = (struct.unpack_from("qI", buffer, at) for at in (64, 80, 96, 112))
    times = [seconds * 10**9 + ns for seconds, ns in (atime, ctime, mtime)]
    assert times == [st.st_atime_ns, st.st_ctime_ns, st.st_mtime_ns]
    assert struct.unpack_from("II", buffer, 128) == (os.major(st.st_rdev), os.minor(st.st_rdev))
    assert mask & 0x7FF == 0x7FF
    return born[0] * 10**9 + born[1] if mask & 0x800 else None


def test_times_of_birth(where: str, request: pytest.FixtureRequest) -> None:
    """That of when the file was made, whatever was done with it since; pyfuse3 has no request for it."""
    paths = [f"{where}/{name}" for name in ("f", "d", "s")]
    make(paths[0], b"12345")
    os.mkdir(paths[1])
    os.symlink("f", paths[2])
    if "pyfuse3" in request.node.name:
        assert {birth(path) for path in paths} == {None}
        return
    born = {path: birth(path) for path in paths}
    for path, then in born.items():
        assert then is not None and abs(then - os.lstat(path).st_mtime_ns) < 10**9
        os.utime(path, ns=(10**9, 10**9), follow_symlinks=False)
        os.utime(path, ns=(7, 7), follow_symlinks=False)
        assert birth(path) == then
    os.rename(paths[0], f"{where}/g")
    os.link(f"{where}/g", paths[0])
    make(paths[0], b"again", 0o600)
    assert birth(paths[0]) == born[paths[0]]
    if ROOT:
        os.mknod(f"{where}/null", 0o20644, os.makedev(1, 3))
        birth(f"{where}/null")


def test_sizes_of_the_file_system(where: str) -> None:
    found = os.statvfs(where)
    assert 0 < found.f_bavail <= found.f_bfree <= found.f_blocks
    assert 0 < found.f_ffree <= found.f_files
    assert found.f_namemax == 255
    make(f"{where}/f", bytes(8 << 20))
    again = os.statvfs(where)
    assert again.f_frsize == found.f_frsize
    df = subprocess.run(["df", "--output=fstype,avail", where], capture_output=True, text=True, check=True)
    assert df.stdout.split()[2] == "fuse.vfsd"
    used = subprocess.run(["du", "-s", "-B1", f"{where}/f"], capture_output=True, text=True, check=True)
    assert int(used.stdout.split()[0]) >= 8 << 20


def rename_flags(at: str, t: Told) -> None:
    for name in ("a", "b"):
        make(f"{at}/{name}", name.encode())
    os.mkdir(f"{at}/d")

    def rename(old: str, new: str, flags: int) -> Callable[[], int]:
        paths = os.fsencode(f"{at}/{old}"), os.fsencode(f"{at}/{new}")
        return lambda: libc_call("renameat2", AT_FDCWD, paths[0], AT_FDCWD, paths[1], flags)

    for old, new, flags in (
        ("a", "b", 1), ("a", "c", 1), ("c", "b", 2), ("c", "d", 2), ("c", "gone", 2), ("b", "d", 0), ("d", "b", 3),
        ("b", "x", 8), ("d", "c/x", 0),
    ):  # fmt: skip
        t.call(rename(old, new, flags))
        t.tell(sorted(os.listdir(at)))


def whiteouts(at: str, t: Told) -> None:
    """What a union file system asks of its upper layer: a name moved and a mark of its absence left, at once."""
    make(f"{at}/a", b"a", 0o600)
    make(f"{at}/b", b"b")
    os.mkdir(f"{at}/d")
    os.mkdir(f"{at}/e")
    os.mkdir(f"{at}/e/sub")
    for old, new, flags in (
        ("a", "x", 4), ("a", "y", 4), ("b", "x", 5), ("b", "x", 6), ("b", "x", 4), ("e/sub", "d/sub", 4), ("d", "z", 5),
        ("gone", "w", 4), ("d", "x", 4),
    ):  # fmt: skip
        paths = os.fsencode(f"{at}/{old}"), os.fsencode(f"{at}/{new}")
        t.call(lambda o=paths[0], n=paths[1], f=flags: libc_call("renameat2", AT_FDCWD, o, AT_FDCWD, n, f))
        for directory, _, names in sorted(os.walk(at)):
            for name in (".", *sorted(names)):
                st = os.lstat(f"{directory}/{name}")
                t.tell((directory, name, oct(st.st_mode), st.st_nlink, st.st_rdev, st.st_uid, st.st_gid))
    os.unlink(f"{at}/e/sub")
    t.tell(sorted(os.listdir(f"{at}/e")))


def copying_ranges(at: str, t: Told) -> None:
    make(f"{at}/f", bytes(range(256)) * 64)
    make(f"{at}/g", b"g" * 100)
    f, g = os.open(f"{at}/f", os.O_RDWR), os.open(f"{at}/g", os.O_RDWR)
    r, a = os.open(f"{at}/f", os.O_RDONLY), os.open(f"{at}/g", os.O_WRONLY | os.O_APPEND)
    for source, target, length, offset, to in (
        (f, g, 1000, 0, 50), (f, f, 1000, 0, 500), (f, f, 1000, 0, 5000), (f, g, 10, 1 << 40, 0), (f, g, 0, 0, 0),
        (f, r, 10, 0, 0), (f, a, 10, 0, 0), (f, g, 1 << 30, 16000, 0), (g, f, 10, 0, 1 << 43),
    ):  # fmt: skip
        t.call(lambda s=source, o=target, n=length, i=offset, j=to: os.copy_file_range(s, o, n, i, j))
        t.tell((os.fstat(f).st_size, os.fstat(g).st_size, os.pread(g, 100, 40)))
    for fd in (f, g, r, a):
        os.close(fd)


def sending_and_splicing(at: str, t: Told) -> None:
    make(f"{at}/f", b"0123456789" * 5000)
    f, g = os.open(f"{at}/f", os.O_RDONLY), os.open(f"{at}/g", os.O_CREAT | os.O_RDWR, 0o644)
    t.call(lambda: os.sendfile(g, f, 5, 20000))
    reader, writer = os.pipe()
    t.call(lambda: os.splice(f, writer, 4000, offset_src=7) if hasattr(os, "splice") else None)
    t.call(lambda: os.splice(reader, g, 4000, offset_dst=100) if hasattr(os, "splice") else None)
    t.tell((os.fstat(g).st_size, os.pread(g, 20, 95)))
    t.call(lambda: os.posix_fadvise(f, 0, 0, os.POSIX_FADV_WILLNEED))
    t.call(lambda: os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED))
    t.call(lambda: libc_call("readahead", f, ctypes.c_int64(0), 65536))
    t.call(lambda: libc_call("sync_file_range", g, ctypes.c_int64(0), ctypes.c_int64(100), 7))
    t.tell(os.pread(f, 5, 12345))
    for fd in (f, g, reader, writer):
        os.close(fd)


def direct_io(at: str, t: Told) -> None:
    """With a mapping of the same file beside; the host's alignment rules are its own, so all is aligned here."""
    fd = os.open(f"{at}/f", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o644)
    plain = os.open(f"{at}/f", os.O_RDWR)
    os.ftruncate(plain, 16384)
    with mmap.mmap(-1, 8192) as block, mmap.mmap(plain, 16384) as shared:
        block[:] = b"d" * 8192
        t.call(lambda: os.pwritev(fd, [block], 4096))
        t.tell(shared[4090:4100])
        shared[4096:4106] = b"m" * 10
        shared.flush()
        t.call(lambda: os.preadv(fd, [block], 4096))
        t.tell(block[:12])
        os.pwrite(plain, b"p" * 10, 8192)
        t.call(lambda: os.preadv(fd, [block], 8192))
        t.tell(block[:12])
        t.call(lambda: os.preadv(fd, [block], 16384))
        t.call(lambda: os.preadv(fd, [block], 12288))
    os.close(fd)
    os.close(plain)


def locks(at: str, t: Told) -> None:
    """Of three kinds, among processes."""
    make(f"{at}/f", b"x" * 100)
    fd = os.open(f"{at}/f", os.O_RDWR)

    def record(kind: int, start: int, length: int, command: int = fcntl.F_SETLK) -> Callable[[], object]:
        def lock() -> None:
            mine = os.open(f"{at}/f", os.O_RDWR)
            fcntl.fcntl(mine, command, struct.pack("hhqqi4x", kind, 0, start, length, 0))

        return lock

    def flock(kind: int) -> Callable[[], object]:
        return lambda: fcntl.flock(os.open(f"{at}/f", os.O_RDWR), kind | fcntl.LOCK_NB)

    fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20)
    for kind, start, length in ((fcntl.F_WRLCK, 0, 10), (fcntl.F_RDLCK, 25, 10), (fcntl.F_WRLCK, 30, 0)):
        t.tell(in_child(record(kind, start, length)))
        t.tell(in_child(record(kind, start, length, OFD_SETLK)))
    fcntl.lockf(fd, fcntl.LOCK_UN)
    t.tell(in_child(record(fcntl.F_WRLCK, 0, 0)))
    fcntl.fcntl(fd, OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 50, 0))
    t.tell(in_child(record(fcntl.F_RDLCK, 49, 1)))
    t.tell(in_child(record(fcntl.F_RDLCK, 50, 1, OFD_SETLK)))
    other = os.open(f"{at}/f", os.O_RDWR)
    t.call(lambda: fcntl.fcntl(other, OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 50, 0)) and None)
    os.close(other)
    t.tell(in_child(record(fcntl.F_RDLCK, 49, 1)))
    fcntl.flock(fd, fcntl.LOCK_SH)
    t.tell((in_child(flock(fcntl.LOCK_SH)), in_child(flock(fcntl.LOCK_EX))))
    os.close(fd)
    t.tell((in_child(flock(fcntl.LOCK_EX)), in_child(record(fcntl.F_RDLCK, 49, 1))))


def appending_by_fcntl(at: str, t: Told) -> None:
    """O_APPEND is what F_SETFL has made of it, not what open(2) was given."""
    make(f"{at}/g", b"source")
    source = os.open(f"{at}/g", os.O_RDONLY)
    for flags in (os.O_APPEND, 0):
        make(f"{at}/f", b"abcdef")
        fd = os.open(f"{at}/f", os.O_RDWR | flags)
        for now in (0, os.O_APPEND, 0):
            fcntl.fcntl(fd, fcntl.F_SETFL, now)
            os.lseek(fd, 2, os.SEEK_SET)
            t.call(lambda fd=fd: (os.write(fd, b"W"), os.pwrite(fd, b"P", 4), os.lseek(fd, 0, os.SEEK_CUR)))
            t.call(lambda fd=fd: os.copy_file_range(source, fd, 2, 0, 0))
            t.tell(os.pread(fd, 100, 0))
        os.close(fd)
    os.close(source)


def leases(at: str, t: Told) -> None:
    make(f"{at}/f")
    fd = os.open(f"{at}/f", os.O_RDONLY)
    t.call(lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK))
    t.call(lambda: fcntl.fcntl(fd, fcntl.F_GETLEASE))
    t.call(lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK))
    os.close(fd)


def times(at: str, t: Told) -> None:
    make(f"{at}/f")
    for ns in (0, 1, 999_999_999, -1, -(10**18), 2**31 * 10**9 + 7, 4 * 10**18):
        t.call(lambda ns=ns: os.utime(f"{at}/f", ns=(ns, ns + 1)))
        t.tell((os.stat(f"{at}/f").st_atime_ns, os.stat(f"{at}/f").st_mtime_ns))
    old = os.stat(f"{at}/f").st_ctime_ns
    time.sleep(0.012)  # with pyfuse3 times are those of the kernel's ticks, 4 or 10 ms apart
    now_and_omit = (ctypes.c_long * 4)(0, (1 << 30) - 1, 0, (1 << 30) - 2)
    t.call(lambda: libc_call("utimensat", AT_FDCWD, os.fsencode(f"{at}/f"), now_and_omit, 0))
    st = os.stat(f"{at}/f")
    t.tell((st.st_atime_ns > 10**18, st.st_mtime_ns, st.st_ctime_ns > old))


def extended_attributes(at: str, t: Told) -> None:
    make(f"{at}/f")
    os.symlink("f", f"{at}/l")
    os.mkfifo(f"{at}/p")
    names = ["user.a", "trusted.a", "security.a", "system.a", "other.a", "user.", "a", "user." + "n" * 250]
    for path in (f"{at}/f", f"{at}/l", f"{at}/p", at):
        for name in names if ROOT else names[:1]:
            t.tell(name)
            t.call(lambda p=path, n=name: os.setxattr(p, n, b"v\0w", follow_symlinks=False))
            t.call(lambda p=path, n=name: os.getxattr(p, n, follow_symlinks=False))
        t.tell(sorted(n for n in os.listxattr(path, follow_symlinks=False) if not n.startswith("security.selinux")))
        t.call(lambda p=path: os.removexattr(p, "user.a", follow_symlinks=False))
        t.call(lambda p=path: os.getxattr(p, "user.a", follow_symlinks=False))
    os.setxattr(f"{at}/f", "user.b", b"12345")
    for size in (0, 4, 5, 100):
        buffer = ctypes.create_string_buffer(size or 1)
        t.call(lambda n=size, b=buffer: libc_call("getxattr", os.fsencode(f"{at}/f"), b"user.b", b, n))
        t.call(lambda n=size, b=buffer: libc_call("listxattr", os.fsencode(f"{at}/f"), b, n) > 0)
    os.setxattr(f"{at}/f", "user.c", b"")
    t.tell(os.getxattr(f"{at}/f", "user.c"))


def limits_of_size(at: str, t: Told) -> None:
    def write(ignored: bool, how: Callable[[int], object]) -> Callable[[], None]:
        def run() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN if ignored else signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            fd = os.open(f"{at}/f", os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
            how(fd)

        return run

    def short(fd: int) -> None:
        if os.pwrite(fd, b"x" * 20_000, 0) != 10_000:
            raise OSError(errno.EILSEQ, "not cut")

    for how in (
        short, lambda fd: os.pwrite(fd, b"x", 10_000), lambda fd: os.pwrite(fd, b"x", 9_999),
        lambda fd: os.ftruncate(fd, 10_001), lambda fd: os.ftruncate(fd, 10_000),
        lambda fd: os.posix_fallocate(fd, 0, 10_001),
    ):  # fmt: skip
        for ignored in (True, False):
            t.tell((in_child(write(ignored, how)), os.path.getsize(f"{at}/f")))


def signals(at: str, t: Told) -> None:
    """No call on a regular file is cut short by a signal that is handled, though many come."""
    came = 0

    def count(*args: object) -> None:
        nonlocal came
        came += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        fd = os.open(f"{at}/f", os.O_CREAT | os.O_RDWR, 0o644)
        data = os.urandom(1 << 20)
        for i in range(20):
            if os.pwrite(fd, data, i << 20) != len(data):
                t.tell("a write was cut short")
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.pread(fd, len(data), i << 20) != data:
                t.tell("a read was cut short")
            os.mkdir(f"{at}/{i}")
            os.listdir(at)
        os.fsync(fd)
        os.close(fd)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    t.tell(came > 10)


STORIES = [
    rename_flags, whiteouts, copying_ranges, sending_and_splicing, direct_io, locks, appending_by_fcntl, leases, times,
    extended_attributes, limits_of_size, signals,
]  # fmt: skip


@pytest.mark.parametrize("story", STORIES, ids=[story.__name__ for story in STORIES])
def test_answers_are_the_hosts(story: Callable[[str, Told], None], where: str, host: str) -> None:
    compare(story, host, where)
