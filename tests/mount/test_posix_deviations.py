"""What differs from a local file system, as docs/semantics.md lists it: held here so that it neither grows nor goes
unnoticed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mounted import Mounted

KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE, INSERT_RANGE, UNSHARE_RANGE = 1, 2, 8, 16, 32, 64
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FICLONE = 0x80086601, 0x40086602, 0x40049409
FS_IOC_GETVERSION, FS_IOC_GETFSLABEL, FITRIM, FS_IOC_FIEMAP = 0x80087601, 0x81009431, 0xC0185879, 0xC020660B

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def code(do: Callable[[], object]) -> int:
    """The errno ``do`` fails with, 0 when it doesn't."""
    try:
        do()
    except OSError as e:
        return e.errno or -1
    return 0


def fallocate(fd: int, mode: int) -> int:
    return ctypes.get_errno() if _libc.fallocate(fd, mode, 0, 4096) else 0


@pytest.fixture
def fd(tree: Mounted) -> int:
    """16 KiB of ``x``, open for reading and writing; the test's process closes it at its end."""
    fd = os.open(tree / "f", os.O_CREAT | os.O_RDWR)
    os.write(fd, b"x" * 16384)
    return fd


def test_access_times_change_only_when_set(tree: Mounted, fd: int) -> None:
    os.utime(fd, ns=(10**9, 2 * 10**9))
    assert os.pread(fd, 10, 0) == b"x" * 10
    os.listdir(tree.path)
    assert os.fstat(fd).st_atime_ns == 10**9
    os.close(fd)


def test_times_reach_from_1678_to_2262(tree: Mounted, fd: int) -> None:
    for seconds, found in ((0, 0), (-(2**33), -(2**33)), (2**33, 2**33), (2**40, 2**63 // 10**9)):
        os.utime(fd, (seconds, seconds))
        assert os.fstat(fd).st_mtime_ns // 10**9 == found
    os.close(fd)


def test_a_file_without_a_label_says_that_there_are_none(tree: Mounted, fd: int) -> None:
    assert code(lambda: os.getxattr(fd, "security.selinux")) == errno.EOPNOTSUPP
    assert code(lambda: os.getxattr(fd, "security.other")) == errno.ENODATA
    if os.geteuid() == 0:
        os.setxattr(fd, "security.selinux", b"a label")
        assert os.getxattr(fd, "security.selinux") == b"a label"
    os.close(fd)


def test_file_flags_and_clones_are_refused(tree: Mounted, fd: int) -> None:
    other = os.open(tree / "g", os.O_CREAT | os.O_RDWR)
    assert code(lambda: fcntl.ioctl(fd, FS_IOC_GETFLAGS, bytes(8))) == errno.ENOTTY
    assert code(lambda: fcntl.ioctl(fd, FS_IOC_SETFLAGS, (16).to_bytes(8, "little"))) == errno.ENOTTY
    for request in (FS_IOC_GETVERSION, FS_IOC_GETFSLABEL, FITRIM):
        assert code(lambda r=request: fcntl.ioctl(fd, r, bytes(256))) == errno.ENOTTY
    assert code(lambda: fcntl.ioctl(fd, FS_IOC_FIEMAP, bytes(32))) == errno.EOPNOTSUPP
    assert code(lambda: fcntl.ioctl(other, FICLONE, fd)) == errno.EOPNOTSUPP
    os.close(fd)
    os.close(other)


def test_epoll_takes_a_regular_file(tree: Mounted, fd: int) -> None:
    with select.epoll() as epoll:
        epoll.register(fd, select.EPOLLIN | select.EPOLLOUT)
        assert epoll.poll(0) == [(fd, select.EPOLLIN | select.EPOLLOUT)]
    os.close(fd)


def test_an_offset_may_be_beyond_the_largest_file(tree: Mounted, fd: int) -> None:
    assert os.lseek(fd, 1 << 62, os.SEEK_SET) == 1 << 62
    assert os.read(fd, 10) == b""
    os.close(fd)


def test_stores_through_a_map_are_a_change_when_they_are_written_out(tree: Mounted, fd: int) -> None:
    with mmap.mmap(fd, 16384) as mapped:
        mapped[0] = 0
        os.utime(fd, ns=(7, 7))
        assert os.fstat(fd).st_mtime_ns == 7
        mapped.flush()
        assert os.fstat(fd).st_mtime_ns > 7
        os.utime(fd, ns=(7, 7))
        mapped.flush()
    assert os.fstat(fd).st_mtime_ns == 7
    os.close(fd)


def test_stores_behind_the_end_come_out_when_the_file_grows_under_a_map(tree: Mounted, fd: int) -> None:
    with mmap.mmap(fd, 16384) as mapped:
        os.ftruncate(fd, 4097)
        mapped[4097] = ord("C")
        os.ftruncate(fd, 8192)
        assert os.pread(fd, 3, 4096) == b"xC\0"
    os.ftruncate(fd, 5000)
    with mmap.mmap(fd, 5000) as mapped:
        mapped.flush()
    os.ftruncate(fd, 8192)
    assert os.pread(fd, 10, 4999) == b"\0" * 10
    os.close(fd)


def test_reads_that_may_not_wait_are_refused(tree: Mounted, fd: int) -> None:
    assert code(lambda: os.preadv(fd, [bytearray(3)], 0, os.RWF_NOWAIT)) == errno.EOPNOTSUPP
    os.close(fd)


def test_a_touch_gives_no_time_before_the_making(tree: Mounted) -> None:
    earlier = 0
    for i in range(100):
        path = tree / f"f{i}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        made = os.stat(path).st_mtime_ns
        os.utime(path)
        earlier += os.stat(path).st_mtime_ns < made
    assert earlier == 0


def test_what_fallocate_does_with_each_engine(tree: Mounted, engine: str, fd: int) -> None:
    for mode in (COLLAPSE_RANGE, INSERT_RANGE, UNSHARE_RANGE):
        assert fallocate(fd, mode) == errno.EOPNOTSUPP
    for mode in (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE):
        assert fallocate(fd, mode) == (errno.EOPNOTSUPP if engine == "pyfuse3" else 0)
    os.posix_fallocate(fd, 0, 20000)  # glibc writes zeros where the call is not there
    assert os.fstat(fd).st_size == 20000
    os.close(fd)


def test_what_works_in_another_way_with_pyfuse3(tree: Mounted, engine: str, fd: int) -> None:
    os.ftruncate(fd, 1 << 20)
    end = 16384 if engine == "native" else 1 << 20
    assert os.lseek(fd, 0, os.SEEK_HOLE) == end
    other = os.open(tree / "g", os.O_CREAT | os.O_RDWR)
    assert os.copy_file_range(fd, other, 10000, 0, 0) == 10000
    assert os.pread(other, 20000, 0) == b"x" * 10000
    without_name = code(lambda: os.close(os.open(tree.path, os.O_TMPFILE | os.O_RDWR)))
    assert without_name == (errno.EOPNOTSUPP if engine == "pyfuse3" else 0)
    os.close(fd)
    os.close(other)
