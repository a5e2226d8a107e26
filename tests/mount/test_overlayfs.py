"""The kernel's union file system (overlayfs) with its upper layer in the mount, as container engines use one."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stories import ROOT, Told, compare

pytestmark = pytest.mark.skipif(not ROOT, reason="mounting an overlay is root's")


@contextmanager
def overlay(at: str) -> Iterator[str]:
    """Where a small lower layer on the host and an empty upper one in the directory ``at`` are one."""
    with tempfile.TemporaryDirectory() as beside:
        lower, merged = f"{beside}/lower", f"{beside}/merged"
        for path in (f"{lower}/d/sub", f"{at}/upper", f"{at}/work", merged):
            os.makedirs(path)
        for name in ("f", "g", "d/h"):
            Path(lower, name).write_text(f"{name} below\n")
        options = f"lowerdir={lower},upperdir={at}/upper,workdir={at}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], check=True)
        try:
            yield merged
        finally:
            subprocess.run(["umount", merged], check=True)


def whole(top: str) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for directory, _, names in sorted(os.walk(top)):
        for path in (directory, *(f"{directory}/{name}" for name in sorted(names))):
            st = os.lstat(path)
            found.append((path.removeprefix(top), oct(st.st_mode), st.st_rdev, st.st_uid, st.st_gid))
    return found


def union(at: str, t: Told) -> None:
    upper = f"{at}/upper"
    with overlay(at) as top:
        with open(f"{top}/f", "a") as file:
            file.write("above\n")
        t.tell(Path(top, "f").read_text())
        os.unlink(f"{top}/g")
        os.rename(f"{top}/d/h", f"{top}/h")
        t.tell((sorted(os.listdir(top)), sorted(os.listdir(f"{top}/d")), whole(upper)))
        shutil.rmtree(f"{top}/d")
        os.mkdir(f"{top}/d")
        t.tell((os.listdir(f"{top}/d"), sorted(os.listxattr(f"{upper}/d"))))
        os.chmod(f"{top}/f", 0o600)
        os.chown(f"{top}/h", 1234, 1234)
        os.symlink("f", f"{top}/s")
        os.link(f"{top}/f", f"{top}/f2")
        os.rename(f"{top}/f2", f"{top}/h")
        t.call(lambda: os.rename(f"{top}/d", f"{top}/f"))
        with open(f"{top}/m", "w+b") as file:
            file.write(bytes(10000))
            file.flush()
            with mmap.mmap(file.fileno(), 10000) as mapped:
                mapped[5000] = 65
                mapped.flush()
            t.tell(os.pread(file.fileno(), 1, 5000))
        t.tell((whole(top), whole(upper)))


def test_the_mount_may_be_an_upper_layer(where: str, host: str) -> None:
    compare(union, host, where)
