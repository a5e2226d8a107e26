"""The FUSE protocol module: layouts against the kernel's header, negotiation, and arbitrary bytes."""

from __future__ import annotations

import os
import stat
import struct
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfsd.core.types import SetAttr, StatFs
from vfsd.doors.engines.native import notifications as n
from vfsd.doors.engines.native import protocol as p

KERNEL_6_18_FLAGS = 0xFFFFFFFF


class FakeAttr(NamedTuple):
    ino: int = 7
    mode: int = stat.S_IFREG | 0o644
    nlink: int = 2
    uid: int = 1000
    gid: int = 1001
    rdev: int = 0
    size: int = 12345
    blocks: int = 32
    atime_ns: int = 1_500_000_000
    mtime_ns: int = -1
    ctime_ns: int = 2_000_000_001


def message(opcode: int, body: bytes, ino: int = 1, extlen: int = 0) -> memoryview:
    size = 40 + len(body)
    return memoryview(p.IN_HEADER.pack(size, opcode, 99, ino, 10, 20, 30, extlen, 0) + body)


def init_in(minor: int = 45, major: int = 7, low: int = 0xFFFFFFFF, high: int = 0xFFFFFFFF) -> memoryview:
    return memoryview(struct.pack("<IIIII", major, minor, 131072, low, high) + bytes(44))


def test_structure_sizes_are_the_kernels() -> None:
    """sizeof() of the structures in include/uapi/linux/fuse.h, 7.45."""
    assert len(p.entry(FakeAttr(), 1, 1)) == 128
    assert len(p.attr(FakeAttr(), 1)) == 104
    assert len(p.negative(1)) == 128
    assert len(p.opened(1, 0)) == 16
    assert len(p.written(1)) == 8
    assert len(p.statfs(StatFs(4096, 4096, 1, 1, 1, 1, 1, 1))) == 80
    assert len(n.inval_inode(1, 0, 0)) == 16 + 24
    assert len(n.inval_entry(1, b"name")) == 16 + 16 + 5
    assert len(n.store(1, 0, b"data")) == 16 + 24 + 4
    _, payload = p.negotiate(init_in())
    assert len(payload) == 64


def test_header() -> None:
    raw = message(p.LOOKUP, b"name\0", ino=5)
    assert p.parse_header(raw, len(raw)) == (p.LOOKUP, 99, 5, 10, 20, 30, 45)


def test_header_cuts_off_extensions() -> None:
    raw = message(p.LOOKUP, b"name\0" + bytes(16), extlen=2)
    assert p.parse_header(raw, len(raw))[6] == 45


@pytest.mark.parametrize(
    "raw",
    [
        memoryview(b""),
        memoryview(bytes(39)),
        message(p.LOOKUP, b""),
        message(p.WRITE, bytes(39)),
        message(p.LOOKUP, b"name\0", extlen=100),
        memoryview(bytes(message(p.LOOKUP, b"name\0"))[:-1]),
    ],
)
def test_a_wrong_length_is_refused(raw: memoryview) -> None:
    with pytest.raises(p.ProtocolError):
        p.parse_header(raw, len(raw))


@pytest.mark.parametrize("minor", [31, 35, 36, 38, 45, 60])
def test_negotiation_takes_the_smaller_minor(minor: int) -> None:
    settled, payload = p.negotiate(init_in(minor))
    assert settled is not None
    fields = struct.unpack_from("<IIIIHHIIHHI", payload)
    assert fields[:3] == (7, min(minor, 45), 131072)
    assert fields[6] == settled.max_write == 1 << 20
    assert fields[8] == 256
    assert fields[3] | fields[10] << 32 == settled.flags == p.WANTED


def test_negotiation_wants_nothing_the_kernel_does_not_offer() -> None:
    settled, payload = p.negotiate(memoryview(struct.pack("<IIII", 7, 31, 65536, p.ASYNC_READ | p.WRITEBACK_CACHE)))
    assert settled is not None
    assert settled.flags == p.ASYNC_READ
    assert settled.max_write == 32 * 4096
    assert struct.unpack_from("<HH", payload, 28) == (32, 0)


def test_negotiation_never_takes_what_breaks_coherence_or_locks() -> None:
    settled, _ = p.negotiate(init_in())
    assert settled is not None
    posix_locks, flock_locks, auto_inval = 1 << 1, 1 << 10, 1 << 12
    assert not settled.flags & (p.WRITEBACK_CACHE | posix_locks | flock_locks | auto_inval)


def test_negotiation_with_a_newer_major_asks_for_another_init() -> None:
    settled, payload = p.negotiate(init_in(minor=0, major=8))
    assert settled is None
    assert struct.unpack_from("<I", payload) == (7,)


@pytest.mark.parametrize(("major", "minor"), [(7, 30), (6, 40)])
def test_negotiation_with_an_old_kernel_fails_with_a_sentence(major: int, minor: int) -> None:
    with pytest.raises(p.VersionError, match=rf"{major}\.{minor}.*7\.31"):
        p.negotiate(init_in(minor, major))


def test_entry_splits_times_and_lifetimes() -> None:
    fields = p._ENTRY_OUT.unpack(p.entry(FakeAttr(), 86400.0, 1.5))
    assert fields[:6] == (7, 0, 86400, 1, 0, 500_000_000)
    assert fields[6:9] == (7, 12345, 32)
    assert fields[9:12] == (1, -1, 2)  # one nanosecond before the epoch is second -1 ...
    assert fields[12:15] == (500_000_000, 999_999_999, 1)  # ... and 999,999,999 ns
    assert fields[15:20] == (stat.S_IFREG | 0o644, 2, 1000, 1001, 0)


def test_rdev_is_the_kernels_encoding() -> None:
    fields = p._ATTR_OUT.unpack(p.attr(FakeAttr(rdev=os.makedev(260, 70000)), 0))
    encoded = fields[-3]
    assert (encoded >> 8 & 0xFFF, (encoded & 0xFF) | (encoded >> 12 & 0xFFF00)) == (260, 70000)


def test_statx_has_the_time_of_birth_where_it_is_known() -> None:
    a = FakeAttr(mode=stat.S_IFCHR | 0o600, rdev=os.makedev(260, 70000))
    fields = p._STATX_OUT.unpack(p.statx(a, -1, 1.5))
    assert len(p.statx(a, -1, 1.5)) == 288 and fields[:2] == (1, 500_000_000)
    assert fields[3:10] == (0xFFF, p.BLKSIZE, 0, a.nlink, a.uid, a.gid, a.mode)
    assert fields[10:14] == (7, 12345, 32, 0)
    assert fields[14:22] == (1, 500_000_000, -1, 999_999_999, 2, 1, -1, 999_999_999)  # atime birth ctime mtime
    assert fields[22:24] == (260, 70000)
    assert p._STATX_OUT.unpack(p.statx(a, None, 0))[3] == 0x7FF


def test_setattr() -> None:
    valid = p.FATTR_MODE | p.FATTR_SIZE | p.FATTR_MTIME | p.FATTR_MTIME_NOW | p.FATTR_ATIME | p.FATTR_FH
    body = struct.pack("<IIQQQqqqIIIIIIII", valid, 0, 3, 100, 0, -2, 9, 0, 5, 0, 0, 0o100755, 0, 1, 2, 0)
    change, fh = p.setattr_in(memoryview(body), lambda: 42)
    assert (change, fh) == (SetAttr(perm=0o755, size=100, atime_ns=-1_999_999_995, mtime_ns=42), 3)


def test_setattr_without_a_handle_or_change() -> None:
    change, fh = p.setattr_in(memoryview(struct.pack("<I", p.FATTR_KILL_SUIDGID) + bytes(84)), lambda: 0)
    assert (change, fh) == (SetAttr(clear_suid=True), None)


def test_names() -> None:
    assert p.name_of(memoryview(b"\xff\n\0")) == b"\xff\n"
    assert p.rename2(memoryview(struct.pack("<QII", 9, 2, 0) + b"old\0new\0")) == (9, 2, b"old", b"new")
    assert p.rename(memoryview(struct.pack("<Q", 9) + b"old\0new\0")) == (9, b"old", b"new")
    assert p.symlink(memoryview(b"name\0/a/target\0")) == (b"name", b"/a/target")
    assert p.link(memoryview(struct.pack("<Q", 9) + b"name\0")) == (9, b"name")


@pytest.mark.parametrize("raw", [b"", b"\0", b"name", b"na\0me\0", b"a/b\0", b"name\0\0"])
def test_a_bad_name_is_refused(raw: bytes) -> None:
    with pytest.raises(p.ProtocolError):
        p.name_of(memoryview(raw))


def test_write_gives_a_view_of_its_data() -> None:
    body = struct.pack("<QQIIQII", 1, 4096, 3, p.WRITE_CACHE, 0, os.O_RDWR, 0) + b"abc"
    fh, offset, write_flags, flags, data = p.write_in(memoryview(body))
    assert (fh, offset, write_flags, flags, bytes(data)) == (1, 4096, p.WRITE_CACHE, os.O_RDWR, b"abc")
    assert isinstance(data, memoryview)


def test_a_write_longer_than_its_message_is_refused() -> None:
    with pytest.raises(p.ProtocolError):
        p.write_in(memoryview(struct.pack("<QQIIQII", 1, 0, 4, 0, 0, 0, 0) + b"abc"))


def test_setxattr_value_may_hold_nul() -> None:
    for extended, fields in ((False, b""), (True, struct.pack("<II", p.SETXATTR_ACL_KILL_SGID, 0))):
        body = struct.pack("<II", 3, 1) + fields + b"user.a/b\0" + b"x\0y"
        flags, name, value, clear = p.setxattr(memoryview(body), extended)
        assert (flags, name, bytes(value), clear) == (1, b"user.a/b", b"x\0y", extended)


def test_batch_forget() -> None:
    body = struct.pack("<IIQQQQ", 2, 0, 5, 1, 6, 3)
    assert p.batch_forget(memoryview(body)) == [(5, 1), (6, 3)]
    with pytest.raises(p.ProtocolError):
        p.batch_forget(memoryview(struct.pack("<IIQQ", 2, 0, 5, 1)))


def test_dirent_is_padded_to_eight() -> None:
    for length in range(1, 20):
        raw = p.dirent(b"n" * length, 3, stat.S_IFDIR | 0o755, 17)
        assert len(raw) % 8 == 0
        assert struct.unpack_from("<QQII", raw) == (3, 17, length, 4)  # DT_DIR
        assert raw[24 : 24 + length] == b"n" * length


def test_reply_and_notifications_tell_their_own_length() -> None:
    assert p.OUT_HEADER.unpack(p.reply(5, 2)) == (16, -2, 5)
    assert p.OUT_HEADER.unpack(p.reply(5, 0, 100)) == (116, 0, 5)
    for raw, code in ((n.inval_inode(9, -1, 0), 2), (n.inval_entry(9, b"x" * 255), 3), (n.store(9, 7, b"y"), 4)):
        length, error, unique = p.OUT_HEADER.unpack_from(raw)
        assert (length, error, unique) == (len(raw), code, 0)


DECODERS = {
    p.LOOKUP: p.name_of, p.FORGET: p.forget, p.GETATTR: p.getattr_in, p.SYMLINK: p.symlink, p.MKNOD: p.mknod,
    p.MKDIR: p.mkdir, p.UNLINK: p.name_of, p.RENAME: p.rename, p.LINK: p.link, p.OPEN: p.open_in, p.READ: p.read_in,
    p.WRITE: p.write_in, p.RELEASE: p.handle, p.FSYNC: p.handle, p.GETXATTR: p.getxattr,
    p.SETXATTR: lambda body: p.setxattr(body, len(body) % 2 == 0), p.LISTXATTR: p.room, p.REMOVEXATTR: p.xattr_name,
    p.FLUSH: p.handle, p.INIT: p.negotiate, p.READDIR: p.read_in,
    p.CREATE: p.create, p.INTERRUPT: p.forget, p.BATCH_FORGET: p.batch_forget, p.FALLOCATE: p.fallocate,
    p.RENAME2: p.rename2, p.LSEEK: p.lseek, p.COPY_FILE_RANGE: p.copy_file_range, p.TMPFILE: p.tmpfile,
    p.SETATTR: lambda body: p.setattr_in(body, lambda: 0),
}  # fmt: skip


@settings(max_examples=1000)
@given(st.sampled_from([*sorted(DECODERS), 0, 7, 52, 4096]), st.binary(max_size=120), st.booleans(), st.integers(0, 3))
@pytest.mark.slow
def test_any_bytes_decode_or_raise_protocol_error(opcode: int, body: bytes, honest: bool, extlen: int) -> None:
    raw = message(opcode, body, extlen=extlen) if honest else memoryview(body)
    try:
        found, *_, end = p.parse_header(raw, len(raw))
        decoder = DECODERS.get(found)
        if decoder is not None:
            decoder(raw[p.HEADER_SIZE : end])
    except p.ProtocolError:
        pass
