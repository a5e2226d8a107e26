"""fallocate(2) with a mode, which os.posix_fallocate lacks."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def host_fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Raises OSError."""
    if _libc.fallocate(fd, mode, offset, length):
        err = ctypes.get_errno()
        raise OSError(err, os.strerror(err))
