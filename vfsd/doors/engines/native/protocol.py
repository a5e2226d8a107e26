"""The FUSE kernel protocol without I/O: bytes in, plain values out, and the way back.

Source of every layout, flag and number: include/uapi/linux/fuse.h of Linux 5.4 (7.31) to 6.18 (7.45). From 7.31 on
no structure that we send or read changes its size except INIT's (16 bytes before 7.36, 64 after), so the one
negotiated minor decides nothing else. Of the optional layouts one is asked for, extended setxattr (7.33).

Decoders take the body of one request (what follows the 40-byte header, extensions cut off) after ``parse_header``
has checked the least length of its opcode; they return plain values or raise ProtocolError, whatever the bytes are.
Must not know trio, the operating system, the door or a clock.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import cache
from typing import Final, NamedTuple

from vfsd.core.types import Attr, SetAttr, StatFs

MAJOR: Final = 7
MINOR_LEAST: Final = 31
"""Linux 5.4: the first with every structure at its present size."""
MINOR_MOST: Final = 45
"""Linux 6.18: the newest whose header was read for this module."""

MAX_TRANSFER: Final = 1 << 20
"""Bytes in one READ or WRITE (256 pages, FUSE_MAX_MAX_PAGES)."""
BUFFER_SIZE: Final = MAX_TRANSFER + 4096
"""What read(2) on the device must offer: a WRITE's header, its fuse_write_in and its data."""

# Opcodes (enum fuse_opcode).
LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = 1, 2, 3, 4, 5, 6
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE = range(8, 19)
FSYNC, SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR = range(20, 31)
ACCESS, CREATE, INTERRUPT, BMAP, DESTROY, IOCTL, POLL = range(34, 41)
BATCH_FORGET, FALLOCATE, READDIRPLUS, RENAME2, LSEEK, COPY_FILE_RANGE = range(42, 48)
SYNCFS, TMPFILE, STATX, COPY_FILE_RANGE_64 = range(50, 54)

# INIT flags.
ASYNC_READ = 1 << 0
ATOMIC_O_TRUNC = 1 << 3
EXPORT_SUPPORT = 1 << 4
BIG_WRITES = 1 << 5
DONT_MASK = 1 << 6
AUTO_INVAL_DATA = 1 << 12
DO_READDIRPLUS = 1 << 13
READDIRPLUS_AUTO = 1 << 14
WRITEBACK_CACHE = 1 << 16
NO_OPEN_SUPPORT = 1 << 17
PARALLEL_DIROPS = 1 << 18
ABORT_ERROR = 1 << 21
MAX_PAGES = 1 << 22
POSIX_ACL = 1 << 20
CACHE_SYMLINKS = 1 << 23
NO_OPENDIR_SUPPORT = 1 << 24
EXPLICIT_INVAL_DATA = 1 << 25
HANDLE_KILLPRIV_V2 = 1 << 28
SETXATTR_EXT = 1 << 29
INIT_EXT = 1 << 30
DIRECT_IO_ALLOW_MMAP = 1 << 36

WANTED: Final = (
    ASYNC_READ
    | ATOMIC_O_TRUNC
    | EXPORT_SUPPORT
    | BIG_WRITES
    | DONT_MASK
    | DO_READDIRPLUS
    | READDIRPLUS_AUTO
    | PARALLEL_DIROPS
    | POSIX_ACL
    | ABORT_ERROR
    | MAX_PAGES
    | CACHE_SYMLINKS
    | EXPLICIT_INVAL_DATA
    | HANDLE_KILLPRIV_V2
    | SETXATTR_EXT
    | INIT_EXT
    | DIRECT_IO_ALLOW_MMAP
)
"""What we ask for. Left out on purpose: WRITEBACK_CACHE (incoherent with a second door), POSIX_LOCKS and FLOCK_LOCKS
(the kernel's local locks are right, since all lockers go through this kernel), AUTO_INVAL_DATA (drops the page cache
after our own writes; every foreign change is told instead; see WANTED_SHARED), ASYNC_DIO (pages that were read amid
an asynchronous direct write stay, and stale: fuse_aio_complete drops none, Linux 6.18)."""

WANTED_UNHEARD: Final = WANTED & ~ATOMIC_O_TRUNC | NO_OPEN_SUPPORT  # with no OPEN it would never ask to truncate

WANTED_SHARED: Final = WANTED & ~EXPLICIT_INVAL_DATA | AUTO_INVAL_DATA
"""For a tree with files that others change untold (a host directory): the kernel drops pages when size or mtime moved.
With EXPLICIT_INVAL_DATA an open descriptor reads zeros where the host has appended to a page already cached."""

# Reply flags of OPEN, CREATE and OPENDIR.
FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_CACHE_DIR = 1 << 3
FOPEN_NOFLUSH = 1 << 5

OPEN_KILL_SUIDGID = 1 << 0
WRITE_CACHE = 1 << 0
WRITE_KILL_SUIDGID = 1 << 2
FSYNC_FDATASYNC = 1 << 0
SETXATTR_ACL_KILL_SGID = 1 << 0
GETATTR_FH = 1 << 0
STATX_BASIC_STATS, STATX_BTIME = 0x7FF, 0x800
FATTR_MODE, FATTR_UID, FATTR_GID, FATTR_SIZE, FATTR_ATIME, FATTR_MTIME, FATTR_FH = (1 << bit for bit in range(7))
FATTR_ATIME_NOW, FATTR_MTIME_NOW, FATTR_LOCKOWNER, FATTR_CTIME, FATTR_KILL_SUIDGID = (1 << bit for bit in range(7, 12))


IN_HEADER = struct.Struct("<IIQQIIIHH")  # len opcode unique nodeid uid gid pid total_extlen padding
OUT_HEADER = struct.Struct("<IiQ")  # len error unique
_ATTR = "QQQqqqIIIIIIIIII"  # ino size blocks atime mtime ctime, their nsec, mode nlink uid gid rdev blksize flags
_ENTRY_OUT = struct.Struct("<QQQQII" + _ATTR)  # nodeid generation entry_valid attr_valid, their nsec, attr
_ATTR_OUT = struct.Struct("<QII" + _ATTR)
_STATX_OUT = struct.Struct("<QII16xIIQIIIH2xQQQQ" + "qI4x" * 4 + "IIII112x")  # as the fields of statx below
_OPEN_OUT = struct.Struct("<QIi")  # fh open_flags backing_id
_WRITE_OUT = struct.Struct("<II")
_U64 = struct.Struct("<Q")
_STATFS_OUT = struct.Struct("<QQQQQIIII24x")
_DIRENT = struct.Struct("<QQII")  # ino off namelen type
_INIT_IN = struct.Struct("<IIII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
_SETATTR_IN = struct.Struct("<I4xQQQqqqIIIIIII4x")
_CREATE_IN = struct.Struct("<IIII")
_READ_IN = struct.Struct("<QQIIQI4x")
_RENAME2_IN = struct.Struct("<QI4x")
_COPY_IN = struct.Struct("<QQQQQQQ")
_FALLOCATE_IN = struct.Struct("<QQQI4x")
_PAIR = struct.Struct("<II")
_HANDLE_IN = struct.Struct("<QI4x")
_LSEEK_IN = struct.Struct("<QQI4x")
_FORGET_ONE = struct.Struct("<QQ")

HEADER_SIZE: Final = IN_HEADER.size
BLKSIZE: Final = 65536
"""st_blksize: the I/O size we like best. stdio and Python buffer by it, and each unbuffered write is one request."""
_NS: Final = 10**9

_LEAST_BODY: Final = {
    LOOKUP: 2, FORGET: 8, GETATTR: 16, SETATTR: 88, SYMLINK: 4, MKNOD: 18, MKDIR: 10, UNLINK: 2, RMDIR: 2,
    RENAME: 12, LINK: 10, OPEN: 8, READ: 40, WRITE: 40, RELEASE: 24, FSYNC: 16, SETXATTR: 10, GETXATTR: 10,
    LISTXATTR: 8, REMOVEXATTR: 2, FLUSH: 24, INIT: 16, OPENDIR: 8, READDIR: 40, RELEASEDIR: 24, FSYNCDIR: 16,
    CREATE: 18, INTERRUPT: 8, BATCH_FORGET: 8, FALLOCATE: 32, READDIRPLUS: 40, RENAME2: 20, LSEEK: 24,
    COPY_FILE_RANGE: 56, TMPFILE: 16, STATX: 24, COPY_FILE_RANGE_64: 56,
}  # fmt: skip


class ProtocolError(Exception):
    """Bytes that no kernel of the negotiated protocol sends."""


class VersionError(ProtocolError):
    """A kernel whose protocol we do not speak."""


class Negotiated(NamedTuple):
    """What INIT settled: the smaller minor, the flags both sides have, bytes in one write."""

    minor: int
    flags: int
    max_write: int


def parse_header(message: memoryview, size: int) -> tuple[int, int, int, int, int, int, int]:
    """(opcode, unique, ino, uid, gid, pid, end) of the request in ``message[:size]``; its body is [HEADER_SIZE:end].

    Its lengths are checked, also that the body has the least size of its opcode.
    """
    if size < HEADER_SIZE:
        raise ProtocolError(f"a request of {size} bytes")
    length, opcode, unique, ino, uid, gid, pid, extlen, _ = IN_HEADER.unpack_from(message)
    end = size - 8 * extlen
    if length != size or end < HEADER_SIZE + _LEAST_BODY.get(opcode, 0):
        raise ProtocolError(f"opcode {opcode}: length {length}, {extlen} x 8 bytes of extensions, {size} bytes read")
    return opcode, unique, ino, uid, gid, pid, end


# ---- INIT


def negotiate(body: memoryview, wanted: int = WANTED) -> tuple[Negotiated | None, bytes]:
    """(what is settled, the reply's payload); None: a newer major, the kernel will send INIT again with ours.

    Raises VersionError for a kernel older than 7.31 (Linux 5.4).
    """
    major, minor, max_readahead, low = _INIT_IN.unpack_from(body)
    if major > MAJOR:
        return None, _INIT_OUT.pack(MAJOR, MINOR_MOST, *(0,) * 10)
    if major < MAJOR or minor < MINOR_LEAST:
        raise VersionError(
            f"the kernel speaks FUSE {major}.{minor}; at least {MAJOR}.{MINOR_LEAST} (Linux 5.4) is needed"
        )
    offered = low
    if low & INIT_EXT and len(body) >= 20:
        offered |= int.from_bytes(body[16:20], "little") << 32
    flags = offered & wanted
    if not offered & INIT_EXT:
        flags &= 0xFFFFFFFF
    pages = MAX_TRANSFER >> 12 if flags & MAX_PAGES else 32
    settled = Negotiated(min(minor, MINOR_MOST), flags, pages << 12)
    payload = _INIT_OUT.pack(
        MAJOR, settled.minor, max_readahead, flags & 0xFFFFFFFF, 64, 48, settled.max_write, 1, pages, 0, flags >> 32, 0
    )  # max_background 64, congestion_threshold 48, time_gran 1 ns
    return settled, payload


# ---- decoding


def name_of(body: memoryview, start: int = 0) -> bytes:
    """The one NUL-terminated name that fills ``body[start:]``."""
    raw = bytes(body[start:])
    end = raw.find(0)
    if end < 1 or end != len(raw) - 1 or 47 in raw:
        raise ProtocolError("a name without its one NUL, empty or with a slash")
    return raw[:end]


def two_names(body: memoryview, start: int) -> tuple[bytes, bytes]:
    """The two NUL-terminated names that fill ``body[start:]`` (rename)."""
    first, second = _two_strings(body, start)
    if not first or not second or 47 in first or 47 in second:
        raise ProtocolError("an empty name or one with a slash")
    return first, second


def _two_strings(body: memoryview, start: int) -> tuple[bytes, bytes]:
    parts = bytes(body[start:]).split(b"\0")
    if len(parts) != 3 or parts[2]:
        raise ProtocolError("not two NUL-terminated strings")
    return parts[0], parts[1]


def symlink(body: memoryview) -> tuple[bytes, bytes]:
    """(name, target)"""
    name, target = _two_strings(body, 0)
    if not name or 47 in name:
        raise ProtocolError("an empty name or one with a slash")
    return name, target


def rename(body: memoryview) -> tuple[int, bytes, bytes]:
    """(new parent, old name, new name)"""
    return _U64.unpack_from(body)[0], *two_names(body, 8)


def rename2(body: memoryview) -> tuple[int, int, bytes, bytes]:
    """(new parent, flags, old name, new name)"""
    parent, flags = _RENAME2_IN.unpack_from(body)
    return parent, flags, *two_names(body, 16)


def link(body: memoryview) -> tuple[int, bytes]:
    """(existing ino, new name)"""
    return _U64.unpack_from(body)[0], name_of(body, 8)


def getattr_in(body: memoryview) -> int | None:
    """The handle asked about, if any (GETATTR and STATX)."""
    flags, _ = _PAIR.unpack_from(body)
    return _U64.unpack_from(body, 8)[0] if flags & GETATTR_FH else None


def setattr_in(body: memoryview, clock: Callable[[], int]) -> tuple[SetAttr, int | None]:
    """(what to change, the handle if any); ``clock`` gives the nanoseconds that UTIME_NOW stands for."""
    valid, fh, size, _, atime, mtime, ctime, atime_n, mtime_n, ctime_n, mode, _, uid, gid = _SETATTR_IN.unpack_from(
        body
    )
    now = clock() if valid & (FATTR_ATIME_NOW | FATTR_MTIME_NOW) else 0
    atime_ns = mtime_ns = None
    if valid & FATTR_ATIME:
        atime_ns = now if valid & FATTR_ATIME_NOW else atime * _NS + atime_n
    if valid & FATTR_MTIME:
        mtime_ns = now if valid & FATTR_MTIME_NOW else mtime * _NS + mtime_n
    change = SetAttr(
        mode & 0o7777 if valid & FATTR_MODE else None,
        uid if valid & FATTR_UID else None,
        gid if valid & FATTR_GID else None,
        size if valid & FATTR_SIZE else None,
        atime_ns,
        mtime_ns,
        ctime * _NS + ctime_n if valid & FATTR_CTIME else None,
        # A request to change nothing is chown(-1, -1), or a write about to drop setuid and setgid: with
        # HANDLE_KILLPRIV_V2 fuse_setattr leaves both to us and says no more (6.18).
        bool(valid & FATTR_KILL_SUIDGID) or not valid & ~(FATTR_FH | FATTR_LOCKOWNER),
    )
    return change, fh if valid & FATTR_FH else None


def mknod(body: memoryview) -> tuple[int, int, int, bytes]:
    """(mode, rdev, umask, name); with DONT_MASK the umask is ours to apply."""
    mode, rdev, umask, _ = _CREATE_IN.unpack_from(body)
    return mode, rdev, umask, name_of(body, 16)


def mkdir(body: memoryview) -> tuple[int, int, bytes]:
    """(perm, umask, name)"""
    return *_PAIR.unpack_from(body), name_of(body, 8)


def create(body: memoryview) -> tuple[int, int, int, bytes]:
    """(open flags, mode, umask, name)"""
    flags, mode, umask, _ = _CREATE_IN.unpack_from(body)
    return flags, mode, umask, name_of(body, 16)


def tmpfile(body: memoryview) -> tuple[int, int, int]:
    """(open flags, mode, umask); the name that follows is the kernel's own and means nothing."""
    flags, mode, umask, _ = _CREATE_IN.unpack_from(body)
    return flags, mode, umask


def open_in(body: memoryview) -> tuple[int, bool]:
    """(open flags, setuid and setgid are to be dropped with O_TRUNC)"""
    flags, more = _PAIR.unpack_from(body)
    return flags, bool(more & OPEN_KILL_SUIDGID)


def read_in(body: memoryview) -> tuple[int, int, int]:
    """(fh, offset, length) of READ, READDIR and READDIRPLUS"""
    fh, offset, length, _, _, _ = _READ_IN.unpack_from(body)
    return fh, offset, min(length, MAX_TRANSFER)


def write_in(body: memoryview) -> tuple[int, int, int, int, memoryview]:
    """(fh, offset, write flags, open flags, data); ``data`` is a view of ``body``."""
    fh, offset, size, write_flags, _, flags = _READ_IN.unpack_from(body)
    data = body[40 : 40 + size]
    if len(data) != size:
        raise ProtocolError(f"a write of {size} bytes that brings {len(data)}")
    return fh, offset, write_flags, flags, data


def handle(body: memoryview) -> tuple[int, int]:
    """(fh, flags) of RELEASE, FSYNC, FLUSH and their directory twins"""
    fh, flags = _HANDLE_IN.unpack_from(body)
    return fh, flags


def setxattr(body: memoryview, extended: bool) -> tuple[int, bytes, memoryview, bool]:
    """(flags, name, value, setgid is to be dropped with an access control list); ``extended``: with SETXATTR_EXT."""
    size, flags = _PAIR.unpack_from(body)
    name_at, value_at = 16 if extended else 8, len(body) - size
    if value_at < name_at + 2:
        raise ProtocolError("an extended attribute longer than its request")
    clear = extended and bool(body[8] & SETXATTR_ACL_KILL_SGID)
    return flags, xattr_name(body[name_at:value_at]), body[value_at:], clear


def xattr_name(body: memoryview) -> bytes:
    """An extended attribute's name: any bytes (also a slash) up to the one NUL."""
    raw = bytes(body)
    end = raw.find(0)
    if end < 1 or end != len(raw) - 1:
        raise ProtocolError("an extended attribute's name without its one NUL")
    return raw[:end]


def getxattr(body: memoryview) -> tuple[int, bytes]:
    """(bytes there is room for, 0 asks the size only; name)"""
    return _PAIR.unpack_from(body)[0], xattr_name(body[8:])


def room(body: memoryview) -> int:
    """Bytes there is room for (LISTXATTR)."""
    return int.from_bytes(body[:4], "little")


def fallocate(body: memoryview) -> tuple[int, int, int, int]:
    """(fh, offset, length, mode)"""
    fh, offset, length, mode = _FALLOCATE_IN.unpack_from(body)
    return fh, offset, length, mode


def lseek(body: memoryview) -> tuple[int, int, int]:
    """(fh, offset, whence)"""
    fh, offset, whence = _LSEEK_IN.unpack_from(body)
    return fh, offset, whence


def copy_file_range(body: memoryview) -> tuple[int, int, int, int, int, int]:
    """(fh in, offset in, ino out, fh out, offset out, length)"""
    fh_in, off_in, ino_out, fh_out, off_out, length, _ = _COPY_IN.unpack_from(body)
    return fh_in, off_in, ino_out, fh_out, off_out, length


def forget(body: memoryview) -> int:
    """Lookups the kernel gives back; also the unique an INTERRUPT is about."""
    return int(_U64.unpack_from(body)[0])


def batch_forget(body: memoryview) -> list[tuple[int, int]]:
    """[(ino, lookups given back)]"""
    count, _ = _PAIR.unpack_from(body)
    if 8 + 16 * count > len(body):
        raise ProtocolError(f"a batch of {count} forgets in {len(body)} bytes")
    return list(_FORGET_ONE.iter_unpack(body[8 : 8 + 16 * count]))


# ---- encoding


def reply(unique: int, error: int = 0, size: int = 0) -> bytes:
    """The header of a reply with ``size`` bytes of payload; ``error`` a positive errno."""
    return OUT_HEADER.pack(16 + size, -error, unique)


@cache
def _span(seconds: float) -> tuple[int, int]:
    """(seconds, nanoseconds); of the few times to live there are."""
    return int(seconds), int(seconds % 1 * _NS)


def entry(a: Attr, entry_ttl: float, attr_ttl: float) -> bytes:
    """fuse_entry_out: what a name is, with how long (seconds) the name and its attributes may be cached."""
    atime, mtime, ctime = a.atime_ns, a.mtime_ns, a.ctime_ns
    ino = a.ino
    (entry_s, entry_ns), (attr_s, attr_ns) = _span(entry_ttl), _span(attr_ttl)
    return _ENTRY_OUT.pack(
        ino, 0, entry_s, attr_s, entry_ns, attr_ns,
        ino, a.size, a.blocks, atime // _NS, mtime // _NS, ctime // _NS, atime % _NS, mtime % _NS, ctime % _NS,
        a.mode, a.nlink, a.uid, a.gid, a.rdev & 0xFFFFFFFF, BLKSIZE, 0,
    )  # fmt: skip


def attr(a: Attr, ttl: float) -> bytes:
    """fuse_attr_out"""
    atime, mtime, ctime = a.atime_ns, a.mtime_ns, a.ctime_ns
    return _ATTR_OUT.pack(
        *_span(ttl), 0,
        a.ino, a.size, a.blocks, atime // _NS, mtime // _NS, ctime // _NS, atime % _NS, mtime % _NS, ctime % _NS,
        a.mode, a.nlink, a.uid, a.gid, a.rdev & 0xFFFFFFFF, BLKSIZE, 0,
    )  # fmt: skip


def statx(a: Attr, birth_ns: int | None, ttl: float) -> bytes:
    """fuse_statx_out; the time of birth is left out where it is None."""
    mask, born = (STATX_BASIC_STATS, 0) if birth_ns is None else (STATX_BASIC_STATS | STATX_BTIME, birth_ns)
    times = (part for t in (a.atime_ns, born, a.ctime_ns, a.mtime_ns) for part in divmod(t, _NS))
    rdev = a.rdev & 0xFFFFFFFF
    return _STATX_OUT.pack(
        *_span(ttl), 0, mask, BLKSIZE, 0, a.nlink, a.uid, a.gid, a.mode, a.ino, a.size, a.blocks, 0, *times,
        rdev >> 8 & 0xFFF, rdev & 0xFF | rdev >> 12 & 0xFFF00, 0, 0,
    )  # fmt: skip


def negative(ttl: float) -> bytes:
    """fuse_entry_out for a name that is nothing, to be remembered for ``ttl`` seconds."""
    seconds, ns = _span(ttl)
    return _ENTRY_OUT.pack(0, 0, seconds, 0, ns, *(0,) * 17)


NO_ENTRY: Final = negative(0.0)
ENTRY_SIZE: Final = len(NO_ENTRY)


def opened(fh: int, flags: int) -> bytes:
    """fuse_open_out"""
    return _OPEN_OUT.pack(fh, flags, 0)


def written(size: int) -> bytes:
    """fuse_write_out; also fuse_getxattr_out"""
    return _WRITE_OUT.pack(size, 0)


def u64(value: int) -> bytes:
    """fuse_lseek_out; also fuse_copy_file_range_out"""
    return _U64.pack(value)


def statfs(s: StatFs) -> bytes:
    """fuse_statfs_out; the kernel has one count of free files, the unprivileged one"""
    return _STATFS_OUT.pack(s.blocks, s.bfree, s.bavail, s.files, s.favail, s.bsize, s.namemax, s.frsize, 0)


def dirent(name: bytes, ino: int, mode: int, offset: int) -> bytes:
    """One fuse_dirent, padded to 8 bytes."""
    size = len(name)
    return _DIRENT.pack(ino, offset, size, mode >> 12) + name + bytes(-size & 7)


def names(values: Iterable[bytes]) -> bytes:
    """LISTXATTR's payload."""
    return b"".join(value + b"\0" for value in values)
