"""A tree to a tar archive and back, over the operations of the wire.

Owns which files go in, in what order, and what is done about those that can't. Must not know whether a daemon or this
process answers. A file that can't be read or made is told to ``warn`` and passed over; the rest goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import Callable, Collection, Iterator
from typing import Any, BinaryIO, NamedTuple

from vfsd.archive import tarstream
from vfsd.archive.atrest import Tree
from vfsd.archive.tarstream import Run

PIECE = 1 << 20

Warn = Callable[[str], None]
Step = Callable[[int, int], None]
"""Told of files and bytes as they are done."""


class Part(NamedTuple):
    """A route of the tree: where it stands, and where it is read from (a checkpoint's directory, or there)."""

    prefix: bytes
    source: bytes


class Export:
    """Writes one archive; a hard link is one also when its names are in several directories."""

    def __init__(self, tree: Tree, out: BinaryIO, warn: Warn, step: Step) -> None:
        self._tree = tree
        self._out = out
        self._warn = warn
        self._step = step
        self._linked: dict[int, bytes] = {}
        self._closed = False

    def write(self, parts: Collection[Part]) -> None:
        """The whole archive."""
        elsewhere = {part.prefix.rstrip(b"/") or b"/" for part in parts}
        for part in sorted(parts):
            top = part.prefix.rstrip(b"/") or b"/"
            for path in self._walk(part, top, elsewhere - {top}):
                source = _join(part.source, path[len(top.rstrip(b"/")) :])
                try:
                    self._member(path, source)
                except OSError as error:
                    if self._closed:
                        raise
                    self._warn(f"{_text(path)}: {error.strerror}")
        self._write(tarstream.END)

    def _write(self, data: bytes) -> None:
        """Some of the archive. Without it no other file can be put in: this is an end, not a file's own fault."""
        try:
            self._out.write(data)
        except OSError:
            self._closed = True
            raise

    def _walk(self, part: Part, top: bytes, elsewhere: Collection[bytes]) -> Iterator[bytes]:
        """Every path of a route, directories before what is in them; routes below it are left to their own turn."""
        todo = [top]
        while todo:
            path = todo.pop()
            yield path
            source = _join(part.source, path[len(top.rstrip(b"/")) :])
            try:
                entries = self._list(source)
            except OSError as error:
                if error.errno != errno.ENOTDIR:
                    self._warn(f"{_text(path)}: {error.strerror}")
                continue
            directories = []
            for name, mode in entries:
                child = _join(path, name)
                if child in elsewhere:
                    continue
                if stat.S_ISDIR(mode):
                    directories.append(child)
                else:
                    yield child
            todo += reversed(directories)

    def _list(self, source: bytes) -> list[tuple[bytes, int]]:
        reply = self._tree.call("list", path=source)
        found = [(name, mode) for name, mode, _, _ in reply["entries"]]
        while reply.get("more"):
            reply = self._tree.call("list", path=source, **{"continue": reply["continue"]})
            found += [(name, mode) for name, mode, _, _ in reply["entries"]]
        return found

    def _member(self, path: bytes, source: bytes) -> None:
        tree = self._tree
        attr = tree.call("stat", path=source, follow=False)["attr"]
        mode = attr["mode"]
        name = b"." + path + (b"/" if stat.S_ISDIR(mode) and path != b"/" else b"")
        if not tarstream.can_hold(mode):
            self._warn(f"{_text(path)}: a socket, which a tar can't hold, is left out")
            return
        if attr["nlink"] > 1 and not stat.S_ISDIR(mode):
            first = self._linked.setdefault(attr["ino"], name)
            if first != name:
                self._write(tarstream.header(name, attr, link=first, hard=True))
                self._step(1, 0)
                return
        names = tree.call("listxattr", path=source, follow=False)["names"]
        xattrs = {n: tree.call("getxattr", path=source, name=n, follow=False)["value"] for n in names}
        if stat.S_ISREG(mode):
            self._file(name, source, attr, xattrs)
        else:
            link = tree.call("readlink", path=source)["target"] if stat.S_ISLNK(mode) else b""
            self._write(tarstream.header(name, attr, link=link, xattrs=xattrs))
        self._step(1, 0)

    def _file(self, name: bytes, source: bytes, attr: dict[str, Any], xattrs: dict[bytes, bytes]) -> None:
        tree, size = self._tree, attr["size"]
        if size <= PIECE and attr["blocks"] * 512 >= size:
            data = tree.call("read", path=source, offset=0, length=PIECE)["data"] if size else b""
            self._write(tarstream.header(name, attr, xattrs=xattrs))
            self._put(name, data, size)
            self._write(tarstream.padding(size))
            return
        fh = tree.call("open", path=source, flags=os.O_RDONLY)["fh"]
        try:
            runs = self._runs(fh, size) if attr["blocks"] * 512 < size else [Run(0, size)]
            sparse = runs != [Run(0, size)]
            self._write(tarstream.header(name, attr, xattrs=xattrs, runs=runs if sparse else None))
            for run in runs:
                for at in range(run.offset, run.offset + run.length, PIECE):
                    want = min(PIECE, run.offset + run.length - at)
                    self._put(name, tree.call("pread", fh=fh, offset=at, length=want)["data"], want)
            self._write(tarstream.padding(sum(run.length for run in runs)))
        finally:
            tree.call("close", fh=fh)

    def _put(self, name: bytes, data: bytes, want: int) -> None:
        """``want`` bytes whatever there is: the header has promised them."""
        if len(data) != want:
            self._warn(f"{_text(name[1:])}: changed while it was read")
            data = data[:want] + bytes(want - len(data))
        self._write(data)
        self._step(0, want)

    def _runs(self, fh: int, size: int) -> list[Run]:
        runs: list[Run] = []
        at = 0
        with contextlib.suppress(OSError):  # ENXIO: no data any more
            while at < size:
                start = self._tree.call("seek", fh=fh, offset=at, whence=os.SEEK_DATA)["offset"]
                at = self._tree.call("seek", fh=fh, offset=start, whence=os.SEEK_HOLE)["offset"]
                runs.append(Run(start, at - start))
        return runs


def _join(path: bytes, name: bytes) -> bytes:
    return path.rstrip(b"/") + b"/" + name.lstrip(b"/") if name else path


def _text(path: bytes) -> str:
    return path.decode(errors="surrogateescape")


class Import:
    """Makes the members of an archive below ``into``; what is there under a member's name is replaced, but directories
    are kept and added to. ``own``: give files to the users the archive names, which only root may."""

    def __init__(self, tree: Tree, into: bytes, warn: Warn, step: Step, *, own: bool) -> None:
        self._tree = tree
        self._into = into.rstrip(b"/")
        self._warn = warn
        self._step = step
        self._own = own
        self._directories: list[tuple[bytes, tarfile.TarInfo]] = []

    def read(self, file: BinaryIO) -> None:
        """The whole archive, plain or compressed as Python can (gzip, bzip2, xz). Raises tarfile.TarError."""
        with tarfile.open(fileobj=file, mode="r|*", errors="surrogateescape") as archive:
            for member in archive:
                path = self._place(member.name)
                if path is None:
                    self._warn(f"{member.name}: a name with '..' in it is left out")
                    continue
                try:
                    self._make(archive, member, path)
                except OSError as error:
                    self._warn(f"{member.name}: {error.strerror}")
                self._step(1, 0)
        # Last, and those below first: to put something into a directory changes its times, and may not be allowed.
        for path, member in reversed(self._directories):
            try:
                self._finish(path, member)
            except OSError as error:
                self._warn(f"{member.name}: {error.strerror}")

    def _place(self, name: str) -> bytes | None:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            return None
        return self._into + b"/" + "/".join(parts).encode(errors="surrogateescape")

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> None:
        tree = self._tree
        if member.isdir():
            self._directory(path)
            self._directories.append((path, member))
            return
        if self._is_there(path):
            tree.call("unlink", path=path)
        if b"/" in path[1:]:
            tree.call("mkdir", path=path.rpartition(b"/")[0], parents=True)
        if member.islnk():
            target = self._place(member.linkname)
            if target is None:
                raise OSError(errno.EINVAL, "a link out of the archive is left out")
            tree.call("link", old=target, new=path)
            return
        if member.issym():
            tree.call("symlink", path=path, target=member.linkname.encode(errors="surrogateescape"))
        elif member.isfile():
            self._file(archive, member, path)
        elif member.isfifo():
            tree.call("mknod", path=path, mode=stat.S_IFIFO | 0o600)
        elif member.ischr() or member.isblk():
            kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            tree.call("mknod", path=path, mode=kind | 0o600, rdev=os.makedev(member.devmajor, member.devminor))
        else:
            raise OSError(errno.EINVAL, "a member of unknown type is left out")
        self._finish(path, member)

    def _is_there(self, path: bytes) -> bool:
        """Asked before it is removed: an attempt that fails would be in the audit log."""
        try:
            self._tree.call("stat", path=path, follow=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _directory(self, path: bytes) -> None:
        try:
            found = self._tree.call("stat", path=path, follow=False)["attr"]["mode"]
        except FileNotFoundError:
            found = None
        if found is not None and not stat.S_ISDIR(found):
            self._tree.call("unlink", path=path)
        self._tree.call("mkdir", path=path, perm=0o700, parents=True)

    def _file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> None:
        tree = self._tree
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fh = tree.call("open", path=path, flags=flags, mode=0o600)["fh"]
        try:
            content = archive.extractfile(member)
            assert content is not None
            sparse: list[tuple[int, int]] | None = member.sparse  # type: ignore[assignment]
            runs = [Run(0, member.size)] if sparse is None else [Run(*run) for run in sparse]
            at = 0
            for run in runs:
                # A stream can't be sought in: holes are read over, as the zeros they are.
                while at < run.offset:
                    at += len(content.read(min(PIECE, run.offset - at)))
                while at < run.offset + run.length:
                    data = content.read(min(PIECE, run.offset + run.length - at))
                    if not data:
                        raise OSError(errno.EIO, "the archive ends in the middle of it")
                    tree.call("pwrite", fh=fh, offset=at, data=data)
                    at += len(data)
                    self._step(0, len(data))
            if sparse is not None:
                tree.call("ftruncate", fh=fh, size=member.size)
        finally:
            tree.call("close", fh=fh)

    def _finish(self, path: bytes, member: tarfile.TarInfo) -> None:
        """Owner, mode, extended attributes and times, in the order in which none undoes another."""
        tree, pax = self._tree, member.pax_headers
        if self._own:
            tree.call("chown", path=path, uid=member.uid, gid=member.gid, follow=False)
        if not member.issym():
            tree.call("chmod", path=path, perm=member.mode & 0o7777)
        for key, text in pax.items():
            name = tarstream.xattr_name(key.encode(errors="surrogateescape"))
            if name is None:
                continue
            try:
                value = text.encode(errors="surrogateescape")
                tree.call("setxattr", path=path, name=name, value=value, follow=False)
            except OSError as error:
                self._warn(f"{member.name}: extended attribute {_text(name)}: {error.strerror}")
        mtime = tarstream.parse_time(pax["mtime"]) if "mtime" in pax else int(member.mtime) * 10**9
        atime = tarstream.parse_time(pax["atime"]) if "atime" in pax else mtime
        tree.call("utime", path=path, atime_ns=atime, mtime_ns=mtime, follow=False)
