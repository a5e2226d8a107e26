"""Linux calls that Python's ``os`` does not offer, for the ``local`` volume.

Owns the ctypes declarations and nothing else: no state, no policy. Each function raises OSError with the host's errno.
Sources: openat2(2), renameat2(2), statx(2), fallocate(2), utimensat(2), syncfs(2).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct

log = logging.getLogger(__name__)

AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_EMPTY_PATH = 0x1000
UTIME_OMIT = (1 << 30) - 2
FALLOC_KEEP_SIZE = 0x01

_SYS_OPENAT2 = 437  # the same on every architecture: system calls since 5.1 share one table
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_STATX_BTIME = 0x800
_O_PATH_NOFOLLOW = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_HOW = struct.pack("=QQQ", _O_PATH_NOFOLLOW, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
_PATH_BYTES = 4095

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_fallocate = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_statx = getattr(_libc, "statx", None)
_renameat2 = getattr(_libc, "renameat2", None)


def _fail() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def open_beneath_by_steps(root: int, names: list[bytes]) -> int:
    """An O_PATH descriptor of the file ``names`` lead to from directory ``root``, one name at a time.

    No step can leave the tree: a single name, not ``..``, opened O_NOFOLLOW; a symlink on the way is ENOTDIR.
    """
    fd = root
    try:
        for name in names:
            step = os.open(name, _O_PATH_NOFOLLOW, dir_fd=fd)
            if fd != root:
                os.close(fd)
            fd = step
    except BaseException:
        if fd != root:
            os.close(fd)
        raise
    return fd


def open_beneath_at_once(root: int, names: list[bytes]) -> int:
    """The same by one openat2(2), where a rename on the way cannot mix two states of the tree."""
    path = b"/".join(names)
    if len(path) > _PATH_BYTES:
        return open_beneath_by_steps(root, names)
    fd: int = _syscall(_SYS_OPENAT2, root, ctypes.c_char_p(path), ctypes.c_char_p(_OPEN_HOW), len(_OPEN_HOW))
    if fd < 0:
        raise _fail()
    return fd


def _has_openat2() -> bool:
    try:
        os.close(open_beneath_at_once(AT_FDCWD, [b"."]))
    except OSError as exc:
        # ENOSYS before Linux 5.6; EPERM is what older container seccomp profiles answer.
        log.info("openat2 is not to be had (%s): paths on local routes are walked one name at a time", exc.strerror)
        return False
    return True


open_beneath = open_beneath_at_once if _has_openat2() else open_beneath_by_steps


def birth_ns(dir_fd: int, name: bytes) -> int | None:
    """When the file ``name`` in ``dir_fd`` (or, without a name, of that descriptor) was created, in nanoseconds.

    None where the host does not say.
    """
    if _statx is None:
        return None
    buffer = ctypes.create_string_buffer(256)
    if _statx(dir_fd, ctypes.c_char_p(name), AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH, _STATX_BTIME, buffer) != 0:
        raise _fail()
    if not struct.unpack_from("=I", buffer)[0] & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 80)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


def rename(old_fd: int, old: bytes, new_fd: int, new: bytes, flags: int) -> None:
    """renameat2(2)."""
    if _renameat2 is None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if _renameat2(old_fd, ctypes.c_char_p(old), new_fd, ctypes.c_char_p(new), ctypes.c_uint(flags)) != 0:
        raise _fail()


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2); unlike posix_fallocate never emulated by writing."""
    if _fallocate(fd, mode, offset, length) != 0:
        raise _fail()


def set_times(path: bytes, atime_ns: int | None, mtime_ns: int | None) -> None:
    """utimensat(2), following ``path``; None leaves a time as it is."""
    times = b"".join(
        struct.pack("@ll", *((0, UTIME_OMIT) if ns is None else divmod(ns, 1_000_000_000)))
        for ns in (atime_ns, mtime_ns)
    )
    if _libc.utimensat(AT_FDCWD, ctypes.c_char_p(path), ctypes.c_char_p(times), 0) != 0:
        raise _fail()


def syncfs(fd: int) -> None:
    """syncfs(2): the whole file system of an open (not O_PATH) descriptor."""
    if _libc.syncfs(fd) != 0:
        raise _fail()
