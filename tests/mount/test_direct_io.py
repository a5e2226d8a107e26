"""O_DIRECT beside the page cache: what a direct write has replaced is not read from the cache afterwards."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mounted import SECONDS, Mounted

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls"),
    pytest.mark.skipif(os.getuid() != 0, reason="counts requests in /sys/fs/fuse/connections"),
]

IO_SETUP, IO_DESTROY, IO_GETEVENTS, IO_SUBMIT = 206, 207, 208, 209
IOCB_CMD_PWRITE = 1
SIZE = 66 << 20
"""More requests than the kernel hands out at once for what runs in the background (64 of a mebibyte)."""

_libc = ctypes.CDLL(None, use_errno=True)


def write_by_aio(fd: int, data: mmap.mmap) -> int:
    """One io_submit(2) of ``data`` at offset 0; returns what was written, once io_getevents(2) has said so."""
    address = ctypes.c_char.from_buffer(data)
    context = ctypes.c_ulong(0)
    if _libc.syscall(IO_SETUP, 1, ctypes.byref(context)) != 0:
        raise OSError(ctypes.get_errno(), "io_setup")
    block = ctypes.create_string_buffer(
        struct.pack("<QIIHhIQQqQII", 0, 0, 0, IOCB_CMD_PWRITE, 0, fd, ctypes.addressof(address), len(data), 0, 0, 0, 0)
    )
    blocks = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    event = ctypes.create_string_buffer(32)
    try:
        if _libc.syscall(IO_SUBMIT, context, ctypes.c_long(1), blocks) != 1:
            raise OSError(ctypes.get_errno(), "io_submit")
        if _libc.syscall(IO_GETEVENTS, context, ctypes.c_long(1), ctypes.c_long(1), event, None) != 1:
            raise OSError(ctypes.get_errno(), "io_getevents")
    finally:
        _libc.syscall(IO_DESTROY, context)
    result: int = struct.unpack("<QQqq", event.raw)[2]
    return result


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("engine", ["native"])
def test_a_read_amid_an_asynchronous_direct_write_leaves_nothing_stale(tree: Mounted) -> None:
    fd = os.open(tree / "f", os.O_CREAT | os.O_RDWR)
    os.truncate(fd, SIZE)
    direct = os.open(tree / "f", os.O_RDWR | os.O_DIRECT)
    buffered = os.open(tree / "f", os.O_RDONLY)
    os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_RANDOM)
    waiting = Path(f"/sys/fs/fuse/connections/{os.minor(os.stat(tree.path).st_dev)}/waiting")
    written: list[int] = []
    data = mmap.mmap(-1, SIZE)
    data[:] = b"n" * SIZE
    writer = threading.Thread(target=lambda: written.append(write_by_aio(direct, data)))
    reader = threading.Thread(target=lambda: os.pread(buffered, 4096, SIZE - 4096))
    os.kill(tree.process.pid, signal.SIGSTOP)
    try:
        writer.start()
        until(lambda: int(waiting.read_text()) >= 1)
        before = int(waiting.read_text())
        reader.start()
        until(lambda: int(waiting.read_text()) > before)
    finally:
        os.kill(tree.process.pid, signal.SIGCONT)
    writer.join(SECONDS)
    reader.join(SECONDS)
    assert written == [SIZE]
    assert os.pread(buffered, 4096, SIZE - 4096) == b"n" * 4096
    for one in (fd, direct, buffered):
        os.close(one)
