"""Random sessions on two trees at once; after each step nobody may be able to tell them apart.

The reference is the dumb model or a host directory, the subject one of our doors. An operation gives the same result or
the same errno on both; one that raised has changed nothing, times included.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, ClassVar

from drivers import KEEP_SIZE, PUNCH_HOLE, Driver, read_file
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, precondition, rule

NAMES = ("a", "b", "c")
PATHS = st.builds(lambda names: "/" + "/".join(names), st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
OFFSETS = st.integers(0, 20_000) | st.sampled_from((0, 4095, 4096, 8192, 100_000))
LENGTHS = st.integers(0, 9000) | st.sampled_from((1, 4096, 8192))
PERMS = st.sampled_from((0o644, 0o600, 0o755, 0o4755, 0o2770, 0o1777))


class Ops:
    """A driver with the model's whole-file operations."""

    def __init__(self, fs: Driver) -> None:
        self.fs = fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fs, name)

    def mkdir(self, path: str, perm: int) -> None:
        self.fs.mkdir(path, perm & 0o1777)
        self.fs.chmod(path, perm)

    def mknod(self, path: str, mode: int) -> None:
        self.fs.mknod(path, mode)
        self.fs.chmod(path, stat.S_IMODE(mode))

    def _do(self, path: str, name: str, *args: Any) -> None:
        """On a handle opened for one call; non-blocking, for a FIFO would wait for its other end."""
        mode = self.fs.lstat(path).mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "")
        fh = self.fs.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_APPEND if args[-1] is None else 0))
        try:
            getattr(self.fs, name)(fh, *(0 if arg is None else arg for arg in args))
        finally:
            self.fs.close(fh)

    def write(self, path: str, data: bytes, offset: int | None) -> None:
        self._do(path, "pwrite", data, offset)

    def zero(self, path: str, offset: int, length: int) -> None:
        self._do(path, "fallocate", KEEP_SIZE | PUNCH_HOLE, offset, length)

    def truncate(self, path: str, size: int) -> None:
        self._do(path, "ftruncate", size)

    def read(self, path: str) -> bytes:
        return read_file(self.fs, path)

    def chmod(self, path: str, perm: int) -> None:
        if stat.S_ISLNK(self.fs.lstat(path).mode):
            raise OSError(errno.EOPNOTSUPP, "")
        self.fs.chmod(path, perm)

    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        self._real(path)
        self.fs.setxattr(path, name, value, flags)

    def removexattr(self, path: str, name: str) -> None:
        self._real(path)
        self.fs.removexattr(path, name)

    def _real(self, path: str) -> None:
        """User attributes are for files and directories only (xattr(7))."""
        mode = self.fs.lstat(path).mode
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise OSError(errno.EPERM, "")

    def xattrs(self, path: str) -> dict[str, bytes]:
        return {os.fsdecode(name): self.fs.getxattr(path, os.fsdecode(name)) for name in self.fs.listxattr(path)}

    def hold(self, path: str) -> int:
        mode = self.fs.lstat(path).mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "")
        return self.fs.open(path, os.O_RDWR)

    def held_write(self, fh: int, data: bytes, offset: int) -> None:
        self.fs.pwrite(fh, data, offset)

    def held_read(self, fh: int) -> bytes:
        return self.fs.pread(fh, 1 << 20, 0)

    def let_go(self, fh: int) -> None:
        self.fs.close(fh)


def everything(ops: Any, *, times: bool = False) -> dict[str, Any]:
    """The whole tree by path: mode, links, content, attributes, and which paths are one file."""
    found: dict[str, Any] = {}
    first: dict[int, str] = {}

    def visit(path: str) -> None:
        st_ = ops.lstat(path or "/")
        content: Any = None
        if stat.S_ISREG(st_.mode):
            content = ops.read(path)
            assert st_.size == len(content)
        elif stat.S_ISLNK(st_.mode):
            content = ops.readlink(path)
        elif stat.S_ISDIR(st_.mode):
            content = ops.listdir(path or "/")
        xattrs = ops.xattrs(path or "/") if stat.S_ISREG(st_.mode) or stat.S_ISDIR(st_.mode) else {}
        same = first.setdefault(st_.ino, path)
        found[path or "/"] = (oct(st_.mode), st_.nlink, content, xattrs, same)
        if times:
            found[path or "/"] += (st_.mtime_ns, st_.ctime_ns)
        if stat.S_ISDIR(st_.mode):
            for name in content:
                visit(f"{path}/{os.fsdecode(name)}")

    visit("")
    return found


class Machine(RuleBasedStateMachine):
    """Subclasses set ``reference`` and ``subject`` in ``__init__``. Handles are pairs, the reference's first."""

    reference: Any
    subject: Any
    punches: ClassVar[bool] = True
    handles = Bundle("handles")

    def both(self, name: str, *args: Any) -> tuple[Any, Any] | None:
        """Do it to both; None when both refused."""
        before = everything(self.watch(), times=True)
        results: list[Any] = []
        for ops in (self.reference, self.subject):
            try:
                results.append(getattr(ops, name)(*args))
            except OSError as error:
                results.append(error)
        codes = [errno.errorcode[r.errno or 0] if isinstance(r, OSError) else None for r in results]
        assert codes[0] == codes[1], f"{name}{args}: the reference says {codes[0]}, the subject {codes[1]}"
        if codes[0] is not None:
            assert everything(self.watch(), times=True) == before, f"{name}{args} raised and changed something"
            return None
        assert everything(self.watch()) == everything(self.reference)
        return results[0], results[1]

    def watch(self) -> Any:
        """The door that is looked through."""
        return self.subject

    @rule(path=PATHS, perm=PERMS)
    def mkdir(self, path: str, perm: int) -> None:
        self.both("mkdir", path, perm)

    @rule(path=PATHS, perm=PERMS, kind=st.sampled_from((stat.S_IFREG, stat.S_IFREG, stat.S_IFIFO)))
    def mknod(self, path: str, perm: int, kind: int) -> None:
        self.both("mknod", path, kind | perm)

    @rule(path=PATHS)
    def symlink(self, path: str) -> None:
        # To nowhere, so that no path has a symlink on its way: walking is tested elsewhere.
        self.both("symlink", "no/where", path)

    @rule(old=PATHS, new=PATHS)
    def link(self, old: str, new: str) -> None:
        self.both("link", old, new)

    @rule(path=PATHS)
    def unlink(self, path: str) -> None:
        self.both("unlink", path)

    @rule(path=PATHS)
    def rmdir(self, path: str) -> None:
        self.both("rmdir", path)

    @rule(old=PATHS, new=PATHS, flags=st.sampled_from((0, 0, 1, 2)))
    def rename(self, old: str, new: str, flags: int) -> None:
        self.both("rename", old, new, flags)

    @rule(path=PATHS, perm=PERMS)
    def chmod(self, path: str, perm: int) -> None:
        self.both("chmod", path, perm)

    @rule(path=PATHS, offset=st.none() | OFFSETS, length=LENGTHS, fill=st.integers(1, 255))
    def write(self, path: str, offset: int | None, length: int, fill: int) -> None:
        self.both("write", path, bytes([fill]) * length, offset)

    @rule(path=PATHS, size=OFFSETS)
    def truncate(self, path: str, size: int) -> None:
        self.both("truncate", path, size)

    @precondition(lambda self: self.punches)
    @rule(path=PATHS, offset=OFFSETS, length=LENGTHS.filter(bool))
    def punch(self, path: str, offset: int, length: int) -> None:
        self.both("zero", path, offset, length)

    @rule(path=PATHS, name=st.sampled_from(("user.x", "user.y")), value=st.binary(max_size=50), flags=st.integers(0, 2))
    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        self.both("setxattr", path, name, value, flags)

    @rule(path=PATHS, name=st.sampled_from(("user.x", "user.y")))
    def removexattr(self, path: str, name: str) -> None:
        self.both("removexattr", path, name)

    @rule(target=handles, path=PATHS)
    def hold(self, path: str) -> Any:
        return self.both("hold", path)

    @rule(pair=handles, offset=OFFSETS, length=LENGTHS, fill=st.integers(1, 255))
    def write_held(self, pair: Any, offset: int, length: int, fill: int) -> None:
        if pair is not None and self.alive(pair):
            data = bytes([fill]) * length
            if data:
                self.reference.held_write(pair[0], data, offset)
                self.holder().held_write(pair[1], data, offset)
            self.same_held(pair)
            assert everything(self.watch()) == everything(self.reference)

    def same_held(self, pair: Any) -> None:
        assert self.holder().held_read(pair[1]) == self.reference.held_read(pair[0])

    def holder(self) -> Any:
        """Whose the handles are."""
        return self.watch()

    def alive(self, pair: Any) -> bool:
        """False for a handle that its daemon took along."""
        return True

    @rule(pair=consumes(handles))
    def let_go(self, pair: Any) -> None:
        if pair is not None and self.alive(pair):
            self.same_held(pair)
            self.reference.let_go(pair[0])
            self.holder().let_go(pair[1])
            self.forget(pair)

    def forget(self, pair: Any) -> None:
        """The handle is closed."""
