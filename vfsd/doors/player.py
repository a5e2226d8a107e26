"""A program that goes once more through what a tool did, on the mount, so that the kernel tells those who watch.

Started by ``events``, whose door plays along and changes nothing. A process of its own, since its system calls wait
for the daemon. Standard library only. Each line in is a JSON list ``[operation, argument...]``, each line out an errno,
0 for none.
"""

from __future__ import annotations

import json
import os
import stat
import sys


def create(path: str, fmt: int) -> None:
    """IN_CREATE of a file of type ``fmt``."""
    if fmt == stat.S_IFDIR:
        os.mkdir(path)
    elif fmt == stat.S_IFLNK:
        os.symlink("x", path)
    else:
        os.mknod(path, fmt | 0o600)


def remove(path: str, fmt: int) -> None:
    """IN_DELETE, and where the file itself is watched IN_DELETE_SELF."""
    (os.rmdir if fmt == stat.S_IFDIR else os.unlink)(path)


def rename(old: str, new: str) -> None:
    """IN_MOVED_FROM, IN_MOVED_TO, IN_MOVE_SELF."""
    os.rename(old, new)


def modify(path: str) -> None:
    """IN_OPEN, IN_MODIFY, IN_CLOSE_WRITE."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def attrib(path: str) -> None:
    """IN_ATTRIB."""
    os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode))


OPERATIONS = {f.__name__: f for f in (create, remove, rename, modify, attrib)}


def main() -> None:
    """Until standard input ends."""
    os.chdir("/")
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        code = 0
        try:
            OPERATIONS[operation](*arguments)
        except OSError as e:
            code = e.errno or -1
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
