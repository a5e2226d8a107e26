"""glob and grep over the tree: walk, match and search on the loop, without holding it.

Owns how a search walks, what a glob pattern means and when a search stops early. Must not know doors or frames.
Invariants: no more than SLICE_S between two checkpoints, but for one backend call; paths come out whole, in byte order
and once; symlinks are never followed below the root of the search; what a directory does not list is not entered.

A pattern without ``/`` matches names at any depth, one with ``/`` the path below the root of the search. ``**`` crosses
directories, braces nest, and a name that starts with a dot needs a pattern segment that does (ripgrep's rules, which
Deep Agents' tools follow).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import islice
from typing import NamedTuple

import trio

from vfsd.core import globs
from vfsd.core.types import Attr, Caller
from vfsd.paths import READ, SEARCH, Paths, may

SLICE_S = 0.003
"""Longest time a search keeps the loop to itself, in seconds; it aims at half of it."""

GLOB_BUDGET_S = 5.0
GREP_BUDGET_S = 15.0
"""Seconds after which a search gives what it has (Deep Agents gives up on a glob after 10, on a grep after 35)."""

MAX_REPLY_BYTES = 8 << 20
"""About what the matches of one search may take together: a reply is one frame."""

MAX_LINE_SHOWN = 16384
"""Bytes of a matching line that are returned."""

MAX_LINE = 16 << 20
"""A file with a longer line than this is not text."""

_PIECE = 256 << 10
_BATCH = 250
_LONG = 256
"""Characters of a pattern that takes about a millisecond to compile; braces may stand for a thousand patterns."""
_MAGIC = re.compile(r"[*?\[\]{}()!+@|\\]")
_SUFFIX = re.compile(r"\*([\w.-]*)(?:\{([\w.-]+(?:,[\w.-]+)+)\})?([\w.-]*)", re.ASCII)
_DOT_SEGMENT = re.compile(r"(?:^|[/{,(|\[\\])\.")
_TICK_S = SLICE_S / 2


class Found(NamedTuple):
    """One file of a glob: its whole path, size in bytes and mtime."""

    path: bytes
    size: int
    mtime_ns: int


class Hit(NamedTuple):
    """One line of a grep: its file, number from 1, and bytes without the ending."""

    path: bytes
    line: int
    text: bytes


class GlobFound(NamedTuple):
    """``reason`` is None when complete, else ``budget`` (time or size) or ``unreadable`` (a directory)."""

    matches: list[Found]
    truncated: bool
    reason: str | None


class GrepFound(NamedTuple):
    """``truncated``: there are more lines than these, or may be; ``reason`` as of GlobFound, of files too."""

    matches: list[Hit]
    truncated: bool
    reason: str | None


class Matcher:
    """A compiled pattern: ``match(name, below)`` for a file's name and its path below the root of the search.

    ``literal`` are the names the path must begin with, ``depth`` the most names it can have (None: any), ``dots``
    whether it can match below a directory whose name starts with a dot. Raises EINVAL for a pattern with a ``..``
    segment or one that expands to too many.
    """

    __slots__ = ("depth", "dots", "literal", "match")

    def __init__(self, pattern: str) -> None:
        segments = [segment for segment in pattern.split("/") if segment]
        if ".." in pattern.replace("\\", "/").split("/"):
            raise OSError(errno.EINVAL, f"Path traversal not allowed in glob pattern {pattern!r}")
        self.literal: tuple[bytes, ...] = ()
        self.depth: int | None = None
        self.dots = True
        self.match: Callable[[bytes, bytes], bool]
        if "/" not in pattern:
            self.match = _name_matcher(pattern)
            return
        self.dots = _DOT_SEGMENT.search(pattern) is not None
        # Braces may hold slashes, and brackets too: then segments are not what a split finds.
        if "{" not in pattern and "[" not in pattern:
            literal: list[bytes] = []
            for segment in segments[:-1]:
                if _MAGIC.search(segment):
                    break
                literal.append(os.fsencode(segment))
            self.literal = tuple(literal)
            if "**" not in pattern:
                self.depth = len(segments)
        if not self.dots and segments[len(self.literal) : -1] == ["**"] and not pattern.endswith("/"):
            # Names below a dot are never reached, so that any depth will do; this is many times faster than a regex.
            start = b"".join(name + b"/" for name in self.literal)
            fits_name = _name_matcher(segments[-1])
            self.match = lambda name, below: below.startswith(start) and fits_name(name, below)
            return
        fits = _regex(pattern.lstrip("/"), pattern)
        self.match = lambda name, below: fits(os.fsdecode(below)) is not None

    def enters(self, depth: int, name: bytes) -> bool:
        """Whether a file the pattern matches can be below directory ``name``, itself below ``depth`` others."""
        if depth < len(self.literal):
            return name == self.literal[depth]
        if self.depth is not None and depth + 1 >= self.depth:
            return False
        return self.dots or not name.startswith(b".")


def _name_matcher(pattern: str) -> Callable[[bytes, bytes], bool]:
    simple = _SUFFIX.fullmatch(pattern)
    if simple:
        head, several, tail = simple.groups()
        suffixes = tuple(f"{head}{part}{tail}".encode() for part in (several or "").split(","))
        return lambda name, below: name.endswith(suffixes) and not name.startswith(b".")
    fits = _regex(pattern, pattern)
    return lambda name, below: fits(os.fsdecode(name)) is not None


def _regex(pattern: str, given: str) -> Callable[[str], re.Match[str] | None]:
    try:
        return globs.compiled(pattern)
    except ValueError as exc:
        raise OSError(errno.EINVAL, f"Invalid glob pattern {given!r}: {exc}") from exc


async def _matcher(pattern: str) -> Matcher:
    """``Matcher``, in a thread where it may take long."""
    if "{" not in pattern and len(pattern) <= _LONG:
        return Matcher(pattern)
    return await trio.to_thread.run_sync(Matcher, pattern)


class _OutOfTime(Exception):
    """The search has used up its time or its reply's room, or has all it was asked for."""


_Entry = tuple[bytes, int, int, int]
"""Path (a directory's ends with a slash), ino, size, mtime_ns."""


class _Walk:
    """The files below a directory in byte order of their paths, in batches; keeps the clock of the search."""

    def __init__(self, paths: Paths, caller: Caller, budget_s: float) -> None:
        self._vfs = paths.vfs
        self._caller = caller
        now = time.perf_counter()
        self.due = now + _TICK_S
        self._deadline = now + budget_s
        self._stack: list[_Entry] = []
        self._base = 0
        self._matcher: Matcher | None = None
        self._skip: bytes | None = None
        self._contents = False
        self.unreadable = False
        self.failed: OSError | None = None
        """Why something that is there and allowed can't be looked into: a disk fails, a remote is down."""

    def fails(self, error: OSError) -> None:
        """A file or directory can't be read."""
        # Removed or replaced since its parent was listed: then it is not part of the tree any more.
        if error.errno not in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
            self.unreadable = True
            if error.errno not in (errno.EACCES, errno.EPERM):
                self.failed = error

    async def tick(self) -> None:
        """Let others run when the slice is used up. Raises _OutOfTime when the budget is."""
        now = time.perf_counter()
        if now > self.due:
            if now > self._deadline:
                raise _OutOfTime
            await self._give_way()

    async def _give_way(self) -> None:
        await trio.lowlevel.checkpoint()
        self.due = time.perf_counter() + _TICK_S

    async def start(self, root: bytes, attr: Attr, matcher: Matcher | None, *, contents: bool = False) -> None:
        """Begin at directory ``root``, a whole path that ends with a slash.

        ``contents``: what is in the files is wanted, so leave out empty and unreadable ones and all in ``.git``.
        """
        self._base = len(root)
        self._matcher = matcher
        self._contents = contents
        self._skip = b".git" if contents else None
        if not may(self._vfs, self._caller, attr, READ | SEARCH):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        await self._expand(root, attr.ino)

    async def batch(self) -> list[_Entry]:
        """The next files: path, ino, size, mtime_ns. Empty at the end."""
        files: list[_Entry] = []
        stack = self._stack
        while stack and len(files) < _BATCH:
            item = stack.pop()
            if not item[0].endswith(b"/"):
                files.append(item)
                continue
            if files:
                stack.append(item)
                break
            try:
                await self._expand(item[0], item[1])
            except OSError as exc:
                self.fails(exc)
        return files

    async def _expand(self, directory: bytes, ino: int) -> None:
        below = directory[self._base :]
        depth = below.count(b"/")
        matcher, caller, skip, contents = self._matcher, self._caller, self._skip, self._contents
        match = matcher.match if matcher is not None else None
        now = time.perf_counter
        # What a rule denies, or would have somebody asked for, is passed by.
        allowed = _any if self._vfs.guard is None else self._vfs.guard.may_read
        runs: list[list[_Entry]] = []
        entries = iter(await self._vfs.children(ino, caller))
        while chunk := list(islice(entries, _BATCH)):
            found: list[_Entry] = []
            for name, attr in chunk:
                if now() > self.due:  # a pattern with a thousand alternatives takes a millisecond a name
                    await self._give_way()
                kind = attr.mode & 0o170000
                if kind == 0o100000:
                    if (match is None or match(name, below + name)) and (
                        not contents or (attr.size and may(self._vfs, caller, attr, READ) and allowed(attr.ino))
                    ):
                        found.append((directory + name, attr.ino, attr.size, attr.mtime_ns))
                elif kind == 0o040000 and name != skip and (matcher is None or matcher.enters(depth, name)):
                    if may(self._vfs, caller, attr, READ | SEARCH) and allowed(attr.ino):
                        # The slash puts a directory where its files belong among its neighbours: a.c before a/b.
                        found.append((directory + name + b"/", attr.ino, 0, 0))
                    else:
                        self.unreadable = True
            found.sort(reverse=True)
            runs.append(found)
            await self.tick()
        if len(runs) < 2:
            self._stack += runs[0] if runs else []
            return
        merged = merge(*runs, reverse=True)
        while batch := list(islice(merged, _BATCH)):
            self._stack += batch
            await self.tick()


def _any(ino: int) -> bool:
    return True


async def glob(
    paths: Paths, pattern: str, path: bytes, caller: Caller, *, budget_s: float = GLOB_BUDGET_S
) -> GlobFound:
    """The regular files below directory ``path`` that ``pattern`` matches.

    Raises EINVAL for a refused pattern, ENOTDIR when ``path`` is no directory, and what a lookup of it raises.
    """
    matcher = await _matcher(pattern)
    attr = await paths.resolve(path, caller)
    if not stat.S_ISDIR(attr.mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    walk = _Walk(paths, caller, budget_s)
    matches: list[Found] = []
    room = MAX_REPLY_BYTES
    try:
        await walk.start(_whole(path), attr, matcher)
        while batch := await walk.batch():
            for name, _, size, mtime_ns in batch:
                room -= len(name) + 24
                matches.append(Found(name, size, mtime_ns))
            if room < 0:
                raise _OutOfTime
            await walk.tick()
    except _OutOfTime:
        return GlobFound(matches, True, "budget")
    return GlobFound(matches, walk.unreadable, "unreadable" if walk.unreadable else None)


async def grep(
    paths: Paths,
    pattern: bytes,
    path: bytes,
    caller: Caller,
    *,
    glob: str | None = None,
    max_count: int | None = None,
    budget_s: float = GREP_BUDGET_S,
) -> GrepFound:
    """The lines that contain ``pattern``, byte for byte, in the text files at or below ``path``.

    Hidden and ignored files are searched too, ``.git`` below ``path`` is not. ``glob`` narrows the files; at most
    ``max_count`` lines come back. Raises EINVAL for a refused ``glob``, what a lookup of ``path`` raises, and what
    reading it does when it is a file.
    """
    matcher = await _matcher(glob) if glob else None
    attr = await paths.resolve(path, caller)
    walk = _Walk(paths, caller, budget_s)
    search = _Search(paths, pattern, walk, max_count, caller)
    try:
        if stat.S_ISDIR(attr.mode):
            await walk.start(_whole(path), attr, matcher, contents=True)
            while batch := await walk.batch():
                for name, ino, size, _ in batch:
                    if size > _PIECE:
                        await search.large_file(name, ino)
                    elif not search.rules_out(ino, size):
                        await search.file(name, ino, size)
                    if time.perf_counter() > walk.due:
                        await walk.tick()
        elif stat.S_ISREG(attr.mode):
            whole = _whole(path)[:-1]
            name = whole.rpartition(b"/")[2]
            if not may(paths.vfs, caller, attr, READ):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            if paths.vfs.guard is not None:
                # The file that was asked for: here a rule is told of, or somebody asked.
                await paths.vfs.read(attr.ino, 0, 0, 0, caller)
            if matcher is None or matcher.match(name, name):
                await (
                    search.large_file(whole, attr.ino)
                    if attr.size > _PIECE
                    else search.file(whole, attr.ino, attr.size)
                )
            if walk.failed is not None:
                raise walk.failed
    except _OutOfTime:
        return GrepFound(search.hits, True, "budget")
    return GrepFound(search.hits, walk.failed is not None, None if walk.failed is None else "unreadable")


def _whole(path: bytes) -> bytes:
    """``path`` with one slash at both ends."""
    inner = b"/".join(part for part in path.split(b"/") if part not in (b"", b"."))
    return b"/" + inner + b"/" if inner else b"/"


class _Search:
    """Looks for one pattern in file after file and keeps the hits. Raises _OutOfTime when it may take no more."""

    def __init__(self, paths: Paths, pattern: bytes, walk: _Walk, max_count: int | None, caller: Caller) -> None:
        self._read = paths.vfs.read
        self._read_now = paths.vfs.reader()
        self._caller = caller
        self._pattern = pattern
        self._walk = walk
        self._left = max_count
        self._room = MAX_REPLY_BYTES
        self._over = False
        self.hits: list[Hit] = []

    def rules_out(self, ino: int, size: int) -> bool:
        """True when the file is known at once not to hold the pattern, as most do not."""
        if self._read_now is None:
            return False
        try:
            data = self._read_now(ino, size)
        except OSError as error:
            self._walk.fails(error)
            return True
        return data is not None and self._pattern not in data

    async def file(self, path: bytes, ino: int, size: int) -> None:
        """Add the hits in one file, none if it is not text or can't be read."""
        try:
            data = await self._read(ino, 0, 0, size, self._caller)
        except OSError as error:
            self._walk.fails(error)
            return
        if type(data) is not bytes:
            data = bytes(data)
        if self._pattern in data and is_text(data):
            await self._lines(data, path, 0)
            if self._over:
                raise _OutOfTime

    async def large_file(self, path: bytes, ino: int) -> None:
        """As ``file``, for one that is not to be held whole."""
        before = len(self.hits), self._left, self._room
        text = False
        try:
            text = await self._pieces(path, ino)
        except OSError as error:
            self._walk.fails(error)
        finally:
            # Hits in a file count when all of it has been seen to be text.
            if not text:
                known, self._left, self._room = before
                del self.hits[known:]
                self._over = False
        if self._over:
            raise _OutOfTime

    async def _lines(self, data: bytes, path: bytes, before: int) -> None:
        """Add the lines of ``data``, which ``before`` others precede, until one is ``_over`` what may be kept."""
        for count, hit in enumerate(_scan(data, self._pattern, path, before), 1):
            self._room -= len(path) + len(hit.text) + 16
            if self._left == 0 or self._room < 0:
                self._over = True
                return
            if self._left is not None:
                self._left -= 1
            self.hits.append(hit)
            if count % _BATCH == 0:
                await self._walk.tick()

    async def _pieces(self, path: bytes, ino: int) -> bool:
        """Add the hits of a large file, and say whether it is text; holds a piece and one unfinished line of it."""
        rest = b""
        offset = line = 0
        while True:
            data = bytes(await self._read(ino, 0, offset, _PIECE, self._caller))
            offset += len(data)
            if b"\0" in data:
                return False
            rest += data
            # A line may end in a CR whose LF is in the next piece: so only LF ends what is searched now.
            end = rest.rfind(b"\n") + 1 if data else len(rest)
            if not end and len(rest) > MAX_LINE:
                return False
            chunk, rest = rest[:end], rest[end:]
            if not is_text(chunk):
                return False
            if self._pattern in chunk and not self._over:
                await self._lines(chunk, path, line)
            line += chunk.count(b"\n")
            if b"\r" in chunk:
                line += chunk.count(b"\r") - chunk.count(b"\r\n")
            if not data:
                return True
            await self._walk.tick()


def is_text(data: bytes) -> bool:
    """UTF-8 without NUL: the same rule as the read tool's."""
    if b"\0" in data:
        return False
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _scan(data: bytes, pattern: bytes, path: bytes, before: int) -> Iterator[Hit]:
    """The lines of ``data`` with ``pattern`` in them; ``before`` lines precede ``data``."""
    if b"\n" in pattern or b"\r" in pattern:
        return
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    start = counted = 0
    size = len(data)
    while start < size:
        at = data.find(pattern, start)
        if at < 0 or at >= size:
            return
        before += data.count(b"\n", counted, at)
        begin = data.rfind(b"\n", 0, at) + 1
        end = data.find(b"\n", at)
        if end < 0:
            end = size
        text = data[begin:end]
        if len(text) > MAX_LINE_SHOWN:
            text = text[:MAX_LINE_SHOWN].decode(errors="ignore").encode()
        yield Hit(path, before + 1, text)
        counted = at
        start = end + 1
