"""The members of a tar archive as bytes: POSIX pax headers (POSIX.1-2017, pax) with what GNU tar adds.

Pure. Extended attributes are ``SCHILY.xattr.NAME`` records, holes are GNU sparse format 1.0 (GNU tar manual, appendix
D.2), times have nanoseconds. Names and values are bytes as they are, which GNU tar reads so.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

BLOCK = 512
END = bytes(20 * BLOCK)
"""Two blocks of zeros end an archive; GNU tar writes records of twenty."""

_TYPES = {
    stat.S_IFREG: b"0",
    stat.S_IFLNK: b"2",
    stat.S_IFCHR: b"3",
    stat.S_IFBLK: b"4",
    stat.S_IFDIR: b"5",
    stat.S_IFIFO: b"6",
}
_HARD_LINK = b"1"

XATTR = b"SCHILY.xattr."
"""What a record's key begins with; the attribute's name follows, its ``=`` and ``%`` as GNU tar writes them."""


class Run(NamedTuple):
    """A part of a file that holds data."""

    offset: int
    length: int


def padding(size: int) -> bytes:
    """What fills the last block of ``size`` bytes."""
    return bytes(-size % BLOCK)


def can_hold(mode: int) -> bool:
    """False for a socket, which no tar can hold."""
    return stat.S_IFMT(mode) in _TYPES


def header(
    path: bytes,
    attr: Mapping[str, Any],
    *,
    link: bytes = b"",
    hard: bool = False,
    xattrs: Mapping[bytes, bytes] | None = None,
    runs: Sequence[Run] | None = None,
) -> bytes:
    """What comes before a member's data. ``attr`` as the wire has it; ``runs`` of a file with holes.

    The data that must follow is ``runs`` one after the other, or the whole file, with ``padding`` of their sum.
    """
    mode = attr["mode"]
    size = attr["size"] if stat.S_ISREG(mode) and not hard else 0
    records: dict[bytes, bytes] = {b"mtime": _time(attr["mtime_ns"]), b"atime": _time(attr["atime_ns"])}
    name, sparse = path, b""
    if runs is not None:
        records |= {
            b"GNU.sparse.major": b"1",
            b"GNU.sparse.minor": b"0",
            b"GNU.sparse.name": path,
            b"GNU.sparse.realsize": b"%d" % size,
        }
        name = b"./GNUSparseFile.0/" + path.rpartition(b"/")[2]
        sparse = _sparse_map(runs, size)
        size = len(sparse) + sum(run.length for run in runs)
    for key, value, room in ((b"path", name, 100), (b"linkpath", link, 100)):
        if len(value) > room or not value.isascii():
            records[key] = value
    for key, number, limit in ((b"size", size, 8**11), (b"uid", attr["uid"], 8**7), (b"gid", attr["gid"], 8**7)):
        if number >= limit:
            records[key] = b"%d" % number
    for key, value in (xattrs or {}).items():
        records[XATTR + key.replace(b"%", b"%25").replace(b"=", b"%3D")] = value
    extended = b"".join(_record(key, value) for key, value in records.items())
    kind = _HARD_LINK if hard else _TYPES[stat.S_IFMT(mode)]
    return (
        _block(b"./PaxHeaders/" + path.rstrip(b"/").rpartition(b"/")[2], {}, b"x", len(extended), b"")
        + extended
        + padding(len(extended))
        + _block(name, attr, kind, size, link)
        + sparse
    )


def _sparse_map(runs: Sequence[Run], size: int) -> bytes:
    """The map at the head of a sparse member's data; GNU tar ends it with an empty run at the file's end."""
    listed = [*runs]
    if not listed or listed[-1].offset + listed[-1].length < size:
        listed.append(Run(size, 0))
    text = b"%d\n" % len(listed) + b"".join(b"%d\n%d\n" % run for run in listed)
    return text + padding(len(text))


def _time(ns: int) -> bytes:
    """Seconds, with as many decimals as are needed."""
    sign, ns = (b"-", -ns) if ns < 0 else (b"", ns)
    seconds, rest = divmod(ns, 10**9)
    return sign + b"%d" % seconds + (b".%09d" % rest).rstrip(b"0").rstrip(b".")


def parse_time(text: str) -> int:
    """Nanoseconds of a pax time. ValueError."""
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text)
    seconds, _, rest = text.partition(".")
    return sign * (int(seconds) * 10**9 + int((rest + "0" * 9)[:9]))


def xattr_name(key: bytes) -> bytes | None:
    """The extended attribute that a record of this key is of; None when it is another kind of record."""
    if not key.startswith(XATTR):
        return None
    return key[len(XATTR) :].replace(b"%3D", b"=").replace(b"%25", b"%")


def _record(key: bytes, value: bytes) -> bytes:
    """A pax record, which begins with its own length."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while length != len(b"%d" % length) + len(rest):
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


def _block(name: bytes, attr: Mapping[str, Any], kind: bytes, size: int, link: bytes) -> bytes:
    """One ustar header; a number or name too large for it is cut here, and whole in the records before."""
    mode, rdev = attr.get("mode", 0o644), attr.get("rdev", 0)
    # As makedev(3): 12 bits of major, 20 of minor.
    major, minor = (rdev >> 8) & 0xFFF, (rdev & 0xFF) | (rdev >> 12 & 0xFFF00)
    seconds = max(0, attr.get("mtime_ns", 0)) // 10**9
    fields = [
        name[:100].ljust(100, b"\0"),
        _octal(mode & 0o7777, 8),
        _octal(attr.get("uid", 0), 8),
        _octal(attr.get("gid", 0), 8),
        _octal(size, 12),
        _octal(seconds, 12),
        b" " * 8,
        kind,
        link[:100].ljust(100, b"\0"),
        b"ustar\x0000",
        bytes(64),
        _octal(major, 8),
        _octal(minor, 8),
        bytes(155),
        bytes(12),
    ]
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _octal(number: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, number if number < 8 ** (width - 1) else 0)
