"""Any object with Deep Agents' BackendProtocol as a remote: ``factory:MODULE:FUNCTION``.

Owns the way from its results to errnos: such objects answer with sentences. Uses ``ls``, ``download_files`` (or
``read`` where that is not there), ``upload_files`` (or ``write``) and ``delete``; an async-only one is driven through
its ``a*`` methods. Directories are listed when they are looked at, and then now and again. What it raises is EIO. One
object is called from several threads at once, as Deep Agents itself does.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import logging
import threading
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import xxhash

from vfsd.backends.factory import build
from vfsd.backends.items import ns_of
from vfsd.backends.remote import ABSENT, ANY, Expect, Found, Meta, Moved, News, RemoteError, Source, check_path, fail
from vfsd.core.types import StatFs

log = logging.getLogger(__name__)

_WORDS = (
    ("file_not_found", errno.ENOENT),
    ("path_not_found", errno.ENOENT),
    ("not found", errno.ENOENT),
    ("no such file", errno.ENOENT),
    ("does not exist", errno.ENOENT),
    ("permission", errno.EACCES),
    ("denied", errno.EACCES),
    ("not allowed", errno.EACCES),
    ("read-only", errno.EROFS),
    ("readonly", errno.EROFS),
    ("is_directory", errno.EISDIR),
    ("is a directory", errno.EISDIR),
    ("not_a_directory", errno.ENOTDIR),
    ("not a directory", errno.ENOTDIR),
    ("already exists", errno.EEXIST),
    ("invalid_path", errno.EINVAL),
    ("invalid path", errno.EINVAL),
    ("too large", errno.EFBIG),
    ("no space", errno.ENOSPC),
    ("quota", errno.EDQUOT),
)
"""What the sentences of Deep Agents' own backends, and those of users like them, say in other words."""

_METHODS = ("ls", "als")
WAIT_SECONDS = 60.0
"""How long an async method may take."""


def errno_of(sentence: str) -> int:
    """The errno for an error sentence; EIO when it says nothing we know."""
    text = sentence.lower()
    return next((code for words, code in _WORDS if words in text), errno.EIO)


def refuse(sentence: str) -> None:
    """Raise what an error sentence means."""
    code = errno_of(sentence)
    if code == errno.EIO:
        raise RemoteError(sentence)
    raise fail(code, sentence)


class ForeignRemote:
    """The files of one backend object."""

    kind = "backend"
    lazy = True
    ranges = False
    verifies = False
    keeps: frozenset[str] = frozenset()
    poll_seconds = 1.0
    cache_seconds = 1.0
    max_size = 64 << 20

    def __init__(self, location: str, owner: tuple[int, int]) -> None:
        self.location = location
        self.owner = owner
        self._backend: Any = None
        self._listed: dict[bytes, dict[bytes, Found]] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        if self._backend is None:
            made = build(self.location)
            if not any(callable(getattr(made, name, None)) for name in _METHODS):
                raise RemoteError(f"{self.location} made {type(made).__name__}, which has no ls: it is no backend")
            self._backend = made

    def close(self) -> None:
        self._backend = None

    def statfs(self) -> StatFs | None:
        return None

    def check(self, path: bytes) -> None:
        check_path(path)
        try:
            path.decode()
        except UnicodeDecodeError:
            raise fail(errno.EILSEQ, "a name in a backend must be UTF-8") from None

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method, or its async twin; NotImplementedError when it has neither. One that exits has failed."""
        try:
            return self._call(method, *args)
        except SystemExit as exc:
            raise RemoteError(f"SystemExit: {exc}") from exc

    def _call(self, method: str, *args: Any) -> Any:
        function = getattr(self._backend, method, None)
        if callable(function):
            try:
                return function(*args)
            except NotImplementedError:
                pass
        twin = getattr(self._backend, f"a{method}", None)
        if not callable(twin):
            raise NotImplementedError(method)
        return asyncio.run(asyncio.wait_for(twin(*args), WAIT_SECONDS))

    # -- reading

    def scan(self, directory: bytes) -> Iterable[Found]:
        path = directory.decode()
        result = self._ask("ls", path)
        entries = _field(result, "entries")
        error = _field(result, "error")
        if isinstance(result, list):
            entries, error = result, None
        if error:
            refuse(str(error))
        if entries is None and not (hasattr(result, "entries") or isinstance(result, Mapping)):
            raise RemoteError(f"ls {path} answered {type(result).__name__}, which is no listing")
        prefix = path.rstrip("/") + "/"
        found: dict[bytes, Found] = {}
        unsized: list[bytes] = []
        for entry in entries or ():
            text = str(_field(entry, "path"))
            name = text.removeprefix(prefix).strip("/") if text.startswith(prefix) else text.strip("/")
            if not name or "/" in name:
                continue
            at = (prefix + name).encode()
            try:
                self.check(at)
            except OSError:
                log.warning("backend %s: entry %r is not shown: its name can't be a file's", self.location, text)
                continue
            is_dir = bool(_field(entry, "is_dir")) or text.endswith("/")
            size, mtime = _field(entry, "size"), ns_of(_field(entry, "modified_at")) or 0
            if not is_dir and not isinstance(size, int):
                unsized.append(at)
            found[at] = Found(at, is_dir, size if isinstance(size, int) else 0, mtime, (size, mtime, is_dir))
        for at in unsized:
            try:
                data = self.get(at).data
            except OSError:
                continue
            found[at] = found[at]._replace(size=len(data or b""), data=data, etag=xxhash.xxh3_64_intdigest(data or b""))
        with self._lock:
            self._listed[directory] = found
        return list(found.values())

    def get(self, path: bytes) -> Found:
        text = path.decode()
        try:
            answer = self._ask("download_files", [text])[0]
        except NotImplementedError:
            return self._read_whole(path, text)
        error, content = _field(answer, "error"), _field(answer, "content")
        if error:
            refuse(f"{text}: {error}")
        if isinstance(content, str):
            content = content.encode()
        if not isinstance(content, bytes):
            raise RemoteError(f"{text}: no content in the answer")
        return Found(path, False, len(content), 0, None, content)

    def _read_whole(self, path: bytes, text: str) -> Found:
        pieces: list[str] = []
        offset = 0
        while True:
            result = self._ask("read", text, offset, 1 << 30)
            if isinstance(result, str):
                return Found(path, False, len(result.encode()), 0, None, result.encode())
            if _field(result, "error"):
                refuse(str(_field(result, "error")))
            data = _field(result, "file_data")
            if not isinstance(data, Mapping):
                raise RemoteError(f"{text}: no content in the answer")
            content = data.get("content", "")
            if data.get("encoding") == "base64":
                raw = base64.b64decode(content)
                return Found(path, False, len(raw), 0, None, raw)
            pieces.append(content)
            following = _field(result, "next_offset")
            if not isinstance(following, int) or following <= offset:
                whole = "".join(pieces).encode()
                return Found(path, False, len(whole), 0, None, whole)
            offset = following

    def probe(self, path: bytes) -> Found | None:
        try:
            return self.get(path)
        except FileNotFoundError:
            return None

    def read(self, path: bytes, offset: int, length: int) -> bytes:
        return (self.get(path).data or b"")[offset : offset + length]

    # -- writing

    def put(self, path: bytes, source: Source, meta: Meta, expect: Expect) -> Hashable:
        text, data = path.decode(), source.data()
        if expect != ANY:
            try:
                now = self.get(path).data or b""
            except FileNotFoundError:
                if expect != ABSENT:
                    raise fail(errno.ESTALE) from None
            else:
                if expect == ABSENT:
                    raise fail(errno.EEXIST)
                if xxhash.xxh3_64_intdigest(now) != expect:
                    raise fail(errno.ESTALE)
        try:
            answer = self._ask("upload_files", [(text, data)])[0]
        except NotImplementedError:
            try:
                answer = self._ask("write", text, data.decode())
            except UnicodeDecodeError:
                raise fail(errno.EILSEQ, "this backend takes text only") from None
        error = _field(answer, "error")
        if error:
            refuse(f"{text}: {error}")
        return None

    def keep(self, metas: Sequence[tuple[bytes, Meta]]) -> None:
        """Nothing is kept but contents."""

    def remove(self, paths: Sequence[bytes]) -> None:
        for path in paths:
            try:
                result = self._ask("delete", path.decode())
            except NotImplementedError:
                raise fail(errno.EPERM, "this backend can't delete") from None
            error = _field(result, "error")
            if error and errno_of(str(error)) != errno.ENOENT:
                refuse(str(error))

    def move(self, moves: Sequence[Moved]) -> None:
        """Copies first, then the old names go."""
        files = [move for move in moves if move.has_content]
        contents = [self.get(move.old).data or b"" for move in files]
        for move, data in zip(files, contents, strict=True):
            self.put(move.new, Source.of(data), move.meta, ANY)
        fresh = {move.new for move in files}
        self.remove([move.old for move in files if move.old not in fresh])

    # -- what others did

    def poll(self, known: Mapping[bytes, Hashable], again: Collection[bytes]) -> News | None:
        """List anew what was listed; an entry that looks as before is taken to be so."""
        fresh: list[Found] = []
        gone: list[bytes] = []
        for directory, before in list(self._listed.items()):
            try:
                now = {f.path: f for f in self.scan(directory)}
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
                with self._lock:
                    self._listed.pop(directory, None)
                now = {}
            fresh += [f for path, f in now.items() if path not in before or before[path].etag != f.etag]
            gone += [path for path in before if path not in now and path in known]
        return News(fresh, gone) if fresh or gone else None


def _field(result: Any, name: str) -> Any:
    """A field of a result that may be an object or a mapping."""
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
