"""The tree as an fsspec file system, ``vfsd://``: for pandas, pyarrow, duckdb and whatever else opens files by fsspec.

    pandas.read_parquet("vfsd:///data/table.parquet")                 # the mount "default", or VFSD_SOCKET's
    pandas.read_csv("vfsd://work/data.csv")                           # the mount "work"
    fsspec.filesystem("vfsd", socket="/run/vfsd/work.sock").ls("/")

Owns what fsspec calls things. Nothing is cached: each answer is the daemon's. A file is opened, and stays the same file
until it is closed, whatever becomes of its name; a whole file given at once (``pipe_file``) is one commit. Errors are
those of ``open`` and ``os``. The id of an ``agenttools.tool_call`` goes with what is changed.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from datetime import UTC, datetime
from typing import Any

try:
    from fsspec import AbstractFileSystem
    from fsspec.utils import stringify_path
except ImportError:
    raise ImportError("agenttools.fsspec needs fsspec: pip install 'vfsd[fsspec]'") from None

from agenttools.calls import tags
from agenttools.client import Client
from agenttools.wire import MAX_PIECE, MAX_UPLOAD, PIECE

BUFFER = 256 << 10
"""Bytes a file reads or writes at once when less is asked for."""

_MISSING = (FileNotFoundError, NotADirectoryError)
_NOREPLACE = 1
_WRITE = os.O_WRONLY | os.O_CREAT
_FLAGS = {"r": os.O_RDONLY, "w": _WRITE | os.O_TRUNC, "x": _WRITE | os.O_EXCL, "a": _WRITE | os.O_APPEND}

_clients: dict[str, Client] = {}
"""One for each socket, for all file systems: a client is for any number of threads."""


class VfsFileSystem(AbstractFileSystem):
    """The tree of one mount: ``name`` or ``socket``; without either ``VFSD_SOCKET``, else the mount "default".

    ``auto_mkdir``: writing a file makes the directories it needs. Paths begin with a slash at the root of the tree.
    """

    protocol = "vfsd"
    root_marker = "/"

    def __init__(
        self, name: str | None = None, socket: str | None = None, auto_mkdir: bool = True, **options: Any
    ) -> None:
        super().__init__(**options)
        self.name, self.socket, self.auto_mkdir = name, socket, auto_mkdir

    @property
    def client(self) -> Client:
        """The client of the daemon that the options, and the environment as it is now, mean."""
        fresh = Client(self.socket, self.name, client="fsspec")
        return _clients.setdefault(fresh.socket, fresh)

    def _ask(self, op: str, **params: Any) -> dict[str, Any]:
        return self.client.call(op, **params)

    def _change(self, op: str, **params: Any) -> dict[str, Any]:
        return self.client.call(op, **params, **tags("fsspec"))

    # ------------------------------------------------------------------ names

    @property
    def fsid(self) -> str:
        return f"vfsd:{self.client.socket}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = stringify_path(path)
        if path.startswith("vfsd://"):
            path = "/" + path[7:].partition("/")[2]
        return "/" + path.strip("/")

    def unstrip_protocol(self, name: str) -> str:
        return f"vfsd://{self.name or ''}{self._strip_protocol(name)}"

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        name = path[7:].partition("/")[0] if path.startswith("vfsd://") else ""
        return {"name": name} if name else {}

    def _wire(self, path: Any) -> bytes:
        return os.fsencode(self._strip_protocol(path))

    # ------------------------------------------------------------------ what is there

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Of a link: its target's, with ``islink`` and ``destination``."""
        wire = self._wire(path)
        attr = self._ask("stat", path=wire, follow=False)["attr"]
        link: dict[str, Any] = {"islink": stat.S_ISLNK(attr["mode"])}
        if link["islink"]:
            link["destination"] = os.fsdecode(self._ask("readlink", path=wire)["target"])
            attr = self._ask("stat", path=wire)["attr"]
        kept = {key: attr[key] for key in ("mode", "uid", "gid", "ino", "nlink")}
        times = {"created": attr["ctime_ns"] / 1e9, "mtime": attr["mtime_ns"] / 1e9}
        return {**_found(self._strip_protocol(path), attr["mode"], attr["size"]), **kept, **times, **link}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        wire = self._wire(path)
        top = os.fsdecode(wire.rstrip(b"/")) + "/"
        try:
            reply = self._ask("list", path=wire)
            listed = reply["entries"]
            while reply.get("more"):
                reply = self._ask("list", path=wire, **{"continue": reply["continue"]})
                listed += reply["entries"]
        except NotADirectoryError:
            one = self.info(path)
            return [one] if detail else [one["name"]]
        if not detail:
            return [top + os.fsdecode(name) for name, *_ in listed]
        entries = []
        for name, mode, size, mtime_ns in listed:
            full = top + os.fsdecode(name)
            link = stat.S_ISLNK(mode)
            if link:
                try:
                    attr = self._ask("stat", path=os.fsencode(full))["attr"]
                except OSError:  # it leads nowhere: "other", so that it is not opened
                    size = 0
                else:
                    mode, size, mtime_ns = attr["mode"], attr["size"], attr["mtime_ns"]
            entries.append({**_found(full, mode, size), "mode": mode, "mtime": mtime_ns / 1e9, "islink": link})
        return entries

    def exists(self, path: str, **kwargs: Any) -> bool:
        return self._type(path) != ""

    def lexists(self, path: str, **kwargs: Any) -> bool:
        return self._mode(path) != 0

    def isdir(self, path: str) -> bool:
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        return self._type(path) == "file"

    def islink(self, path: str) -> bool:
        return stat.S_ISLNK(self._mode(path))

    def _type(self, path: str) -> str:
        """``info(path)["type"]``, or "" when there is no such file. That there is no daemon is another matter."""
        try:
            return str(_found("", self._ask("stat", path=self._wire(path))["attr"]["mode"], 0)["type"])
        except _MISSING:
            return ""

    def _mode(self, path: str) -> int:
        try:
            return int(self._ask("stat", path=self._wire(path), follow=False)["attr"]["mode"])
        except _MISSING:
            return 0

    def created(self, path: str) -> datetime:
        """When the file last changed in any way: the tree keeps no time of birth."""
        return datetime.fromtimestamp(self.info(path)["created"], tz=UTC)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    # ------------------------------------------------------------------ changes of names

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        wire = self._wire(path)
        try:
            self._change("mkdir", path=wire)
        except FileNotFoundError:
            if not create_parents:
                raise
            self.makedirs(self._parent(path), exist_ok=True)
            self._change("mkdir", path=wire)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not exist_ok and self.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._strip_protocol(path))
        self._change("mkdir", path=self._wire(path), parents=True)

    def rmdir(self, path: str) -> None:
        self._change("rmdir", path=self._wire(path))

    def rm_file(self, path: str) -> None:
        self._change("unlink", path=self._wire(path))

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        if maxdepth is not None:
            super().rm(path, recursive, maxdepth)
            return
        for one in [path] if isinstance(path, str) else path:
            # A link that leads nowhere is there to be removed, and no glob finds it.
            for found in [one] if self.lexists(one) else self.expand_path(one):
                if recursive:
                    self._change("delete", path=self._wire(found))
                else:
                    self.rm_file(found)

    def mv(self, path1: Any, path2: Any, recursive: bool = True, maxdepth: int | None = None, **kwargs: Any) -> None:
        """One rename where that is possible: of one name, within a route. A directory goes whole, whatever is said."""
        if not isinstance(path1, str) or not isinstance(path2, str) or maxdepth is not None or not self.lexists(path1):
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
            return
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        if path2.endswith("/") or self.isdir(new):
            new = f"{new.rstrip('/')}/{old.rpartition('/')[2]}"
        if self.auto_mkdir:
            self.makedirs(self._parent(new), exist_ok=True)
        try:
            self._change("rename", old=os.fsencode(old), new=os.fsencode(new))
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            super().mv(old, new, recursive=self.isdir(old))

    def link(self, src: str, dst: str, **kwargs: Any) -> None:
        self._change("link", old=self._wire(src), new=self._wire(dst))

    def symlink(self, src: str, dst: str, **kwargs: Any) -> None:
        """``src`` is what the link says, absolute from the root of the tree or relative."""
        self._change("symlink", target=os.fsencode(stringify_path(src)), path=self._wire(dst))

    def chmod(self, path: str, mode: int) -> None:
        self._change("chmod", path=self._wire(path), perm=mode & 0o7777)

    # ------------------------------------------------------------------ contents

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        kind = mode.replace("b", "").replace("+", "")
        flags = _FLAGS.get(kind)
        if flags is None:
            raise ValueError(f"{mode!r} is no mode of a file")
        if "+" in mode:
            flags = flags & ~os.O_ACCMODE | os.O_RDWR
        if kind != "r" and self.auto_mkdir:
            self.makedirs(self._parent(path), exist_ok=True)
        size = block_size if isinstance(block_size, int) and block_size > 0 else BUFFER
        opened: type[Reader] | type[Writer] | type[Updater] = Reader if kind == "r" else Writer
        return (Updater if "+" in mode else opened)(self, path, mode, flags, size, autocommit or kind not in ("w", "x"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        first, last = start or 0, end if end is not None else MAX_PIECE
        if first >= 0 and last >= 0 and last - first <= MAX_PIECE:
            length = max(0, last - first)
            reply = self._ask("read", path=self._wire(path), offset=first, length=length)
            data: bytes = reply["data"]
            if end is not None or reply["size"] <= first + len(data):
                return data
        return bytes(super().cat_file(path, start, end, **kwargs))

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        if self._intrans or len(value) > MAX_UPLOAD:
            with self.open(path, "xb" if mode == "create" else "wb") as file:
                file.write(value)
            return
        options = {"parents": self.auto_mkdir, "exclusive": mode == "create"}
        self._change("write", path=self._wire(path), data=bytes(value), **options)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        if not truncate:
            try:
                now = int(datetime.now(UTC).timestamp() * 1e9)
                self._change("utime", path=self._wire(path), atime_ns=now, mtime_ns=now)
                return
            except FileNotFoundError:
                pass
        self.pipe_file(path, b"")

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            while data := source.read(PIECE):
                target.write(data)


def _found(name: str, mode: int, size: int) -> dict[str, Any]:
    if stat.S_ISDIR(mode):
        return {"name": name, "size": 0, "type": "directory"}
    return {"name": name, "size": size, "type": "file" if stat.S_ISREG(mode) else "other"}


# ---------------------------------------------------------------------- open files


class _Handle(io.RawIOBase):
    """One open file of the daemon's. It ends with the connection: then whatever is done with it raises."""

    def __init__(self, client: Client, path: str, mode: str, flags: int, perm: int) -> None:
        self.name, self.mode = path, mode
        self._client, self._flags, self._at, self._number = client, flags, 0, -1
        reply = client.call("open", path=os.fsencode(path), flags=flags, mode=perm, **tags("fsspec"))
        self._number = reply["fh"]
        if flags & os.O_APPEND:
            self._at = reply["attr"]["size"]
        if stat.S_ISDIR(reply["attr"]["mode"]):
            self.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)

    def size(self) -> int:
        return int(self._client.call("fstat", fh=self._number)["attr"]["size"])

    def readable(self) -> bool:
        return self._flags & os.O_ACCMODE != os.O_WRONLY

    def writable(self) -> bool:
        return self._flags & os.O_ACCMODE != os.O_RDONLY

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._client.call("pread", fh=self._number, offset=self._at, length=min(len(view), MAX_PIECE))["data"]
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def write(self, data: Any) -> int:
        piece = bytes(memoryview(data).cast("B")[:MAX_PIECE])
        reply = self._client.call("pwrite", fh=self._number, offset=self._at, data=piece, **tags("fsspec"))
        self._at += reply["written"]
        return int(reply["written"])

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + (0, self._at, self.size() if whence == os.SEEK_END else 0)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self.name)
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        size = self._at if size is None else size
        self._client.call("ftruncate", fh=self._number, size=size, **tags("fsspec"))
        return size

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        number, self._number = self._number, -1
        if number == -1:
            return
        try:
            self._client.call("close", fh=number)
        except OSError:
            if self.writable():  # a remote route says here that it could not be written
                raise


class _File:
    """What fsspec wants of a file besides Python's own. With ``autocommit`` off it is under another name until
    ``commit``, and never anywhere after ``discard``."""

    raw: Any

    def __init__(self, fs: VfsFileSystem, path: str, mode: str, flags: int, buffer_size: int, autocommit: bool) -> None:
        self.fs, self.path, self.autocommit = fs, path, autocommit
        perm = 0o644
        if not autocommit:
            known = fs._mode(path)
            if known and "x" in mode:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            perm = known & 0o777 if stat.S_ISREG(known) else perm
            flags |= os.O_EXCL
            path = self._apart = f"{path}.{secrets.token_hex(4)}.partial"
        super().__init__(_Handle(fs.client, path, mode, flags, perm), buffer_size)  # type: ignore[call-arg]

    @property
    def size(self) -> int:
        """Bytes in the file, without what is still to be written."""
        return int(self.raw.size())

    @property
    def full_name(self) -> str:
        return self.fs.unstrip_protocol(self.path)

    @property
    def details(self) -> dict[str, Any]:
        return self.fs.info(self.path)

    def commit(self) -> None:
        """Give the file its name."""
        if not self.autocommit:
            self.close()  # type: ignore[attr-defined]
            flags = _NOREPLACE if "x" in self.raw.mode else 0
            self.fs._change("rename", old=os.fsencode(self._apart), new=os.fsencode(self.path), flags=flags)

    def discard(self) -> None:
        if not self.autocommit:
            self.close()  # type: ignore[attr-defined]
            self.fs.rm_file(self._apart)


class Reader(_File, io.BufferedReader):
    """A file open for reading."""


class Writer(_File, io.BufferedWriter):
    """A file open for writing."""


class Updater(_File, io.BufferedRandom):
    """A file open for both."""
