"""Several volumes in one tree: their borders show in errnos only, and no operation takes a route away."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import EXCHANGE, VfsDriver, read_file, write_file
from makers import close_vfs, open_vfs


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[VfsDriver]:
    kinds = {"/": "state", "/mem/": "memory", "/work/": "local", "/deep/er/": "memory", "/mem/in/": "memory"}
    vfs = open_vfs({prefix: (kind, tmp_path / prefix.strip("/").replace("/", "-")) for prefix, kind in kinds.items()})
    yield VfsDriver(vfs)
    assert vfs.counters()["open"] == 0
    close_vfs(vfs)


def refused(code: int, call: object, *args: object) -> None:
    with pytest.raises(OSError) as caught:
        call(*args)  # type: ignore[operator]
    assert errno.errorcode[caught.value.errno or 0] == errno.errorcode[code]


def test_routes_are_listed_and_walked(fs: VfsDriver) -> None:
    assert fs.listdir("/") == [b"deep", b"mem", b"work"]
    assert fs.listdir("/deep") == [b"er"]
    assert fs.listdir("/mem") == [b"in"]
    write_file(fs, "/mem/in/f", b"x")
    assert read_file(fs, "/mem/../deep/er/../../mem/in/f") == b"x"
    assert fs.stat("/mem/in/..").ino == fs.stat("/mem").ino
    assert fs.stat("/").nlink == 2 + 3
    assert fs.stat("/mem").nlink == 2 + 1
    for path in ("/", "/mem", "/deep", "/deep/er"):
        inos = {fs.stat(f"{path}/{os.fsdecode(name)}").ino for name in fs.listdir(path)}
        assert len(inos) == len(fs.listdir(path))


def test_nothing_crosses_a_border(fs: VfsDriver) -> None:
    write_file(fs, "/f", b"x")
    fs.mkdir("/d")
    for target in ("/mem/f", "/work/f", "/deep/er/f", "/mem/in/f"):
        refused(errno.EXDEV, fs.link, "/f", target)
        refused(errno.EXDEV, fs.rename, "/f", target)
        refused(errno.EXDEV, fs.rename, "/d", target)
    write_file(fs, "/mem/f", b"y")
    refused(errno.EXDEV, fs.rename, "/f", "/mem/f", EXCHANGE)
    assert read_file(fs, "/f") == b"x"
    fs.symlink("/mem/f", "/work/l")
    assert read_file(fs, "/work/l") == b"y"


def test_a_route_stays(fs: VfsDriver) -> None:
    write_file(fs, "/f", b"x")
    fs.mkdir("/d")
    for path in ("/mem", "/work", "/deep/er", "/mem/in"):
        refused(errno.EBUSY, fs.rmdir, path)
        refused(errno.EBUSY, fs.unlink, path)
        refused(errno.EEXIST, fs.mkdir, path)
        refused(errno.EBUSY, fs.rename, path, "/elsewhere")
        refused(errno.EBUSY, fs.rename, "/d", path)
        refused(errno.EBUSY, fs.rename, "/d", path, EXCHANGE)
    refused(errno.ENOTEMPTY, fs.rmdir, "/deep")


def test_regression_a_directory_with_a_route_in_it_is_not_replaced(fs: VfsDriver) -> None:
    """It is empty in its own volume, but a rename over it would have left the route without a place."""
    fs.mkdir("/d")
    refused(errno.ENOTEMPTY, fs.rename, "/d", "/deep")
    assert fs.listdir("/deep") == [b"er"]
    fs.rename("/deep", "/deep")
    fs.rename("/deep", "/moved")
    assert fs.listdir("/moved") == [b"er"]
    write_file(fs, "/moved/er/f", b"x")
    fs.rename("/d", "/moved", EXCHANGE)
    assert fs.listdir("/d") == [b"er"]
    assert read_file(fs, "/d/er/f") == b"x"


def test_a_file_in_the_way_of_a_route(tmp_path: Path) -> None:
    first = VfsDriver(open_vfs({"/": ("state", tmp_path / "v")}))
    write_file(first, "/a", b"")
    close_vfs(first.vfs)
    with pytest.raises(NotADirectoryError):
        open_vfs({"/": ("state", tmp_path / "v"), "/a/b/": ("memory", tmp_path)})
