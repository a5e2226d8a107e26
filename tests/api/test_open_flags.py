"""open(2): every combination of flags on every kind of target; the table is made on the host, then held against us."""

from __future__ import annotations

import errno
import itertools
import os
from typing import Any

import pytest
from drivers import Driver, read_file, write_file

FLAGS = {
    "CREAT": os.O_CREAT, "EXCL": os.O_EXCL, "TRUNC": os.O_TRUNC, "APPEND": os.O_APPEND, "NOFOLLOW": os.O_NOFOLLOW,
    "DIRECTORY": os.O_DIRECTORY,
}  # fmt: skip
ACCESS = {"RDONLY": os.O_RDONLY, "WRONLY": os.O_WRONLY, "RDWR": os.O_RDWR}
COMBINATIONS = {
    "|".join([access, *names]): ACCESS[access] | sum(FLAGS[name] for name in names)
    for access in ACCESS
    for count in range(len(FLAGS) + 1)
    for names in itertools.combinations(FLAGS, count)
}
TARGETS = ("nothing", "file", "directory", "link to file", "link to nothing", "link to directory", "link to itself")


def prepare(fs: Driver) -> None:
    for name in fs.listdir("/"):
        path = "/" + os.fsdecode(name)
        try:
            fs.unlink(path)
        except IsADirectoryError:
            fs.rmdir(path)
    write_file(fs, "/f", b"0123456789")
    fs.mkdir("/d")
    for target in ("f", "d", "nothing"):
        fs.symlink(target, f"/to{target}")
    fs.symlink("itself", "/itself")


PATHS = dict(zip(TARGETS, ("/nothing", "/f", "/d", "/tof", "/tonothing", "/tod", "/itself"), strict=True))


def outcome(fs: Driver, target: str, flags: int) -> Any:
    """The errno, or what the handle could do; and what is there afterwards."""

    def attempt(call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            assert error.errno is not None
            return errno.errorcode[error.errno]

    fh = attempt(fs.open, PATHS[target], flags, 0o640)
    found = [fh if isinstance(fh, str) else "opened"]
    if not isinstance(fh, str):
        found += [attempt(fs.pwrite, fh, b"XY", 0), attempt(fs.pread, fh, 20, 0)]
        fs.close(fh)
    return *found, fs.listdir("/"), attempt(read_file, fs, "/f"), attempt(read_file, fs, "/nothing")


def table(fs: Driver, target: str) -> dict[str, Any]:
    """The outcome of each combination, each on a fresh target."""
    found = {}
    fresh = False
    for names, flags in COMBINATIONS.items():
        if not fresh:
            prepare(fs)
        found[names] = outcome(fs, target, flags)
        fresh = found[names][-3:] == UNCHANGED
    return found


UNCHANGED = ([b"d", b"f", b"itself", b"tod", b"tof", b"tonothing"], b"0123456789", "ENOENT")
HOST_TABLES: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize("target", TARGETS)
def test_open_flags(target: str, fs: Driver, host: Driver) -> None:
    if target not in HOST_TABLES:
        HOST_TABLES[target] = table(host, target)
    expected, found = HOST_TABLES[target], table(fs, target)
    assert {k: (expected[k], found[k]) for k in expected if expected[k] != found[k]} == {}
