"""What a route that waits asks of the place its files are in: the seam below ``vfsd.remote.volume``.

A remote keeps whole files by path, as stores, buckets and other people's objects do; what it can't keep (open files,
inode numbers, most errnos) is the volume's business. Every method may block: it is called on a worker thread, several
at a time, and never on the loop. It raises OSError with one of ``ERRNOS`` where the answer is no, and any exception of
its own where there is no answer: that becomes EIO, with the exception's text in the log.

Paths are bytes from the root of the route: ``/a/b``, and ``/`` for its root directory.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import xxhash

from vfsd.core.types import StatFs

_PASSWORD = re.compile(r"(//[^/:@]*:)[^/@]*(?=@)|([?&](?:ssl)?password=)[^&#]*")
"""As a part of the authority (RFC 3986) or, as libpq takes it too, of the query."""

_WAYS = {
    "store": {
        "sqlite": (r"sqlite:.+", "sqlite:PATH"),
        "postgresql": (r"postgresql:.+", "postgresql://USER@HOST/DATABASE"),
        "postgres": (r"postgres:.+", ""),
        "memory": (r"memory:", "memory:"),
        "factory": (r"factory:[^:]+:.+", "factory:MODULE:FUNCTION"),
    },
    "blob": {"": ("", "a directory"), "s3": (r"s3://[^/]+.*", "s3://BUCKET/PREFIX")},
    "backend": {"factory": (r"factory:[^:]+:.+", "factory:MODULE:FUNCTION")},
}
"""Per kind of route its schemes, each with how a place of it is written, as a pattern and for people."""

ERRNOS = frozenset(
    (
        errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC,
        errno.EFBIG, errno.EINVAL, errno.EILSEQ, errno.ENAMETOOLONG, errno.ESTALE, errno.EBADMSG, errno.EOPNOTSUPP,
        errno.ELOOP, errno.EBUSY, errno.EDQUOT, errno.ENODATA,
    )
)  # fmt: skip
"""What a remote may refuse with; any other errno is no answer of its, and reaches the caller as EIO."""

ANY = "any"
"""``put``: whatever is there is replaced."""
ABSENT = "absent"
"""``put``: EEXIST when something is there."""

Expect = str | int
"""ANY, ABSENT, or the xxh3_64 of the content that must be there now (ESTALE when it is another)."""


class Meta(NamedTuple):
    """The attributes of one file: POSIX struct stat's, times in nanoseconds. ``target`` is a symlink's.

    ``link`` is the same non-empty text for all names of one file, else empty.
    """

    mode: int
    uid: int
    gid: int
    rdev: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes | None = None
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    link: str = ""


class Found(NamedTuple):
    """One file or directory as the remote has it.

    ``meta`` is None where the remote keeps no attributes. ``size`` in bytes may be a guess until the content was
    fetched. ``etag`` changes when the content or ``meta`` does; None when only ``get`` can tell. ``data`` is the
    content where it came along.
    """

    path: bytes
    is_dir: bool
    size: int
    mtime_ns: int
    etag: Hashable = None
    data: bytes | None = None
    meta: Meta | None = None


class Moved(NamedTuple):
    """One name that becomes another. ``has_content`` is false for what only has attributes (directories, symlinks)."""

    old: bytes
    new: bytes
    meta: Meta
    has_content: bool


class News(NamedTuple):
    """What others did: files new or changed, and paths that are no more."""

    found: Sequence[Found]
    gone: Sequence[bytes]


class Source:
    """A content to be put: ``size`` bytes, in pieces, or whole as ``data()``. May be read more than once.

    ``digest`` is the xxh3_64 of a content that is in memory, None of one that is not.
    """

    def __init__(self, size: int, pieces: Callable[[], Iterable[bytes]], digest: int | None = None) -> None:
        self.size = size
        self.pieces = pieces
        self.digest = digest

    def data(self) -> bytes:
        """All of it."""
        return b"".join(self.pieces())

    @classmethod
    def of(cls, data: bytes) -> Source:
        """A content that is in memory."""
        return cls(len(data), lambda: (data,), xxhash.xxh3_64_intdigest(data))


class Remote(Protocol):
    """One place. Besides the methods it says what it is:

    ``lazy``: ``scan`` lists one directory, not all. ``ranges``: ``read`` gives a part of a content. ``verifies``: the
    path says what the content must be. ``keeps``: which of modes, times (where there are no modes), links, symlinks,
    special, xattrs and dirs outlive the daemon. ``poll_seconds``: how often to ask for news. ``cache_seconds``: how
    long the kernel may believe what it was told. ``max_size``: bytes in one content.
    """

    kind: str
    location: str
    lazy: bool
    ranges: bool
    verifies: bool
    keeps: frozenset[str]
    poll_seconds: float
    cache_seconds: float
    max_size: int

    def open(self) -> None:
        """Get ready; called again after a failure. The exception's text is shown to the user."""

    def check(self, path: bytes) -> None:
        """Raise OSError when no file can have this path (EILSEQ, ENAMETOOLONG, EINVAL). Does not block."""

    def scan(self, directory: bytes) -> Iterable[Found]:
        """All there is, or with ``lazy`` the entries of one directory; parents need not be listed."""

    def get(self, path: bytes) -> Found:
        """One file with its content; ENOENT."""

    def probe(self, path: bytes) -> Found | None:
        """One file without its content, None when there is none; only asked of a remote that ``verifies``."""

    def read(self, path: bytes, offset: int, length: int) -> bytes:
        """Bytes of a content; only asked of a remote with ``ranges``."""

    def put(self, path: bytes, source: Source, meta: Meta, expect: Expect) -> Hashable:
        """The whole content anew, all or nothing, and the attributes. Returns the new etag, None if unknown.

        Returns once the content is as safe as the place makes it.
        """

    def keep(self, metas: Sequence[tuple[bytes, Meta]]) -> None:
        """Attributes alone: of directories, of symlinks and special files (which have nothing else), of files."""

    def remove(self, paths: Sequence[bytes]) -> None:
        """These are no more; it is no error when one was not there."""

    def move(self, moves: Sequence[Moved]) -> None:
        """Rename, in this order of safety: what is named twice for a moment is well, what is lost is not."""

    def poll(self, known: Mapping[bytes, Hashable], again: Collection[bytes]) -> News | None:
        """What others did to the paths in ``known`` (path to etag) and beside them; None when nothing is new.

        ``again``: of these the last news could not be taken in, so look as if something had happened to them.
        """

    def statfs(self) -> StatFs | None:
        """Space, where the place has a limit of its own."""

    def close(self) -> None:
        """Let go."""


class RemoteError(Exception):
    """The place gives no answer, or can't be used; the text is for the user."""


def fail(code: int, text: str = "") -> OSError:
    """The OSError for a refusal."""
    return OSError(code, text or os.strerror(code))


def parents(path: bytes) -> Iterator[bytes]:
    """The directories above a path, the root first: ``/``, ``/a`` for ``/a/b``."""
    yield b"/"
    at = path.find(b"/", 1)
    while at > 0:
        yield path[:at]
        at = path.find(b"/", at + 1)


def split(path: bytes) -> tuple[bytes, bytes]:
    """(directory, name) of a path."""
    above, _, name = path.rpartition(b"/")
    return above or b"/", name


def check_path(path: bytes) -> None:
    """EINVAL or ENAMETOOLONG for what is no canonical path of a file."""
    if not path.startswith(b"/") or b"\0" in path:
        raise fail(errno.EINVAL)
    for part in path[1:].split(b"/"):
        if part in (b"", b".", b".."):
            raise fail(errno.EINVAL)
        if len(part) > 255:
            raise fail(errno.ENAMETOOLONG)


def shown(location: str) -> str:
    """A location without its password."""
    return _PASSWORD.sub(r"\1\2***", location)


def check_place(kind: str, place: str) -> None:
    """RemoteError when ``place`` is written as no place of a store, blob or backend is."""
    ways = _WAYS[kind]
    scheme, colon, _ = place.partition(":")
    if scheme in ways and re.fullmatch(ways[scheme][0], place, re.DOTALL):
        return
    if not colon:
        wrong = f"{place!r} has no scheme"
    elif scheme in ways:
        wrong = f"{shown(place)!r} names no place"
    else:
        wrong = f"a {kind} has no scheme {scheme!r}"
    *most, last = [text for _, text in ways.values() if text]
    raise RemoteError(f"{wrong}: use {', '.join(most)}{' or ' if most else ''}{last}")
