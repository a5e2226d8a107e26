"""What files on routes that wait can't be or do otherwise than POSIX has it; the list is in docs/semantics.md."""

from __future__ import annotations

import ctypes
import errno
import os
import sqlite3
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from servers import World, wait_until

pytestmark = pytest.mark.mount


def refused(code: int, call: Callable[..., object], *args: object) -> None:
    with pytest.raises(OSError) as caught:
        call(*args)
    assert caught.value.errno == code


def stored(store: Path, key: str) -> str | None:
    with sqlite3.connect(store) as db:
        row = db.execute("SELECT value ->> 'content' FROM store WHERE key = ? AND prefix = 'filesystem'", (key,))
        found = row.fetchone()
    db.close()
    return None if found is None else str(found[0])


def test_store(world: World, tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    m, other = (world.mount(f"/m/=store:sqlite:{store}", name=name) / "m" for name in ("one", "two"))
    # A file is one item, of 64 MiB at most.
    with open(m / "large", "wb") as file:
        refused(errno.EFBIG, os.pwrite, file.fileno(), b"x", 64 << 20)
        refused(errno.EFBIG, os.ftruncate, file.fileno(), (64 << 20) + 1)
    # Each close of a descriptor brings out what there is, also of a duplicate.
    fd = os.open(m / "dup", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"first ")
    os.close(os.dup(fd))
    assert stored(store, "/dup") == "first "
    os.write(fd, b"second")
    assert stored(store, "/dup") == "first "
    os.close(fd)
    assert stored(store, "/dup") == "first second"
    # What others remove while it is open for writing is there again at the close.
    with open(m / "back", "w") as file:
        file.write("one")
        file.flush()
        os.fsync(file.fileno())
        wait_until(lambda: (other / "back").unlink() is None)
        wait_until(lambda: not (other / "back").exists())
        file.write(", two")
    wait_until(lambda: (other / "back").read_text() == "one, two")
    # A directory's times get there within a second, a file's at once.
    (m / "d").mkdir()
    wait_until(lambda: (other / "d").is_dir())
    os.utime(m / "d", ns=(0, 0))
    (m / "d" / "f").touch()
    assert (m / "d").stat().st_mtime_ns > 0
    wait_until(lambda: (other / "d").stat().st_mtime_ns == (m / "d").stat().st_mtime_ns)


def test_blob(world: World, tmp_path: Path) -> None:
    m = world.mount(f"/b/=blob:{tmp_path}/b") / "b"
    data = b"the whole content"
    name = sha256(data).hexdigest()
    # A close with a part of the content fails, and no harm is done; nobody reads it meanwhile.
    fd = os.open(m / name, os.O_WRONLY | os.O_CREAT)
    os.write(fd, data[:5])
    refused(errno.EBADMSG, os.close, os.dup(fd))
    refused(errno.EBUSY, (m / name).read_bytes)
    os.write(fd, data[5:])
    os.close(fd)
    assert (m / name).read_bytes() == data
    for call in (
        lambda: os.open(m / name, os.O_WRONLY),
        lambda: os.truncate(m / name, 1),
        lambda: os.chmod(m / name, 0o600),
        lambda: os.rename(m / name, m / sha256(b"").hexdigest()),
        lambda: os.link(m / name, m / sha256(b"").hexdigest()),
        lambda: os.symlink("x", m / sha256(b"").hexdigest()),
        lambda: (m / "directory").mkdir(),
    ):
        refused(errno.EPERM, call)
    refused(errno.EOPNOTSUPP, os.setxattr, m / name, "user.a", b"")
    refused(errno.EINVAL, (m / "name").write_bytes, b"")
    os.utime(m / name, ns=(1, 1))
    assert (m / name).read_bytes() == data


def test_backend(world: World, tmp_path: Path) -> None:
    pytest.importorskip("deepagents")
    (tmp_path / "fs").mkdir()
    world.env["VFSD_TEST_DIRECTORY"] = str(tmp_path / "fs")
    m = world.mount("/f/=backend:factory:factories:filesystem") / "f"
    (m / "f").write_text("text")
    refused(errno.EPERM, os.symlink, "f", m / "link")
    refused(errno.EPERM, os.link, m / "f", m / "link")
    refused(errno.EPERM, os.mkfifo, m / "pipe")
    refused(errno.EOPNOTSUPP, os.setxattr, m / "f", "user.a", b"")
    refused(errno.EILSEQ, os.open, os.fsencode(m) + b"/\xff", os.O_CREAT | os.O_WRONLY)
    # Deep Agents' FilesystemBackend takes two dots anywhere in a name for a way out.
    with pytest.raises(OSError, match="Invalid argument"), open(m / "a..b", "w") as file:
        file.write("x")
    # Permissions are only here, as long as the route is mounted.
    os.chmod(m / "f", 0o640)
    assert (m / "f").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "fs/f").stat().st_mode & 0o777 != 0o640


def test_whiteouts_are_refused(world: World, tmp_path: Path) -> None:
    pytest.importorskip("deepagents")
    (tmp_path / "fs").mkdir()
    world.env["VFSD_TEST_DIRECTORY"] = str(tmp_path / "fs")
    mount = world.mount(f"/s/=store:sqlite:{tmp_path}/s.db", "/b/=backend:factory:factories:filesystem")
    libc = ctypes.CDLL(None, use_errno=True)
    for m in (mount / "s", mount / "b"):
        (m / "f").write_text("x")
        paths = os.fsencode(m / "f"), os.fsencode(m / "g")
        assert libc.renameat2(-100, paths[0], -100, paths[1], 4) == -1 and ctypes.get_errno() == errno.EINVAL
        assert os.listdir(m) == ["f"]
