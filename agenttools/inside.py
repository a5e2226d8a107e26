"""Files of the tree, opened by its mountpoint without following a link that a command has put in the way.

The kernel resolves an absolute link in the tree from the host's root: who opens ``MOUNTPOINT/x`` by its path can be
sent anywhere with the caller's rights, which a confined command has not. So each component is opened on its own.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from errno import EINVAL

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def directory(mountpoint: str, names: Sequence[str], *, make: bool) -> Iterator[int]:
    """A descriptor (O_PATH) of the directory ``names`` below ``mountpoint``; with ``make`` missing ones are made.

    Raises OSError, ENOTDIR for a link in the way (open(2): O_DIRECTORY with O_NOFOLLOW).
    """
    fd = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=fd)
            inner = os.open(name, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def create(mountpoint: str, path: str) -> int:
    """A descriptor to write the regular file ``path`` of the tree, emptied, with the directories above it made.

    Raises OSError: ELOOP or ENOTDIR for a link, EINVAL or ENXIO for what is no regular file.
    """
    *above, name = path.strip("/").split("/")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with directory(mountpoint, above, make=True) as where:
        fd = os.open(name, flags, 0o644, dir_fd=where)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(EINVAL, "it is not a regular file")
        os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_directory(mountpoint: str, path: str, perm: int) -> bool:
    """Make the directory ``path`` of the tree; True if it was made now. With exactly ``perm``, whatever the umask.

    A tree that cannot be written to (read-only, a rule), or a link in the way, is no reason not to run: False then.
    """
    *above, name = path.strip("/").split("/")
    try:
        with directory(mountpoint, above, make=False) as where:
            os.mkdir(name, 0o700, dir_fd=where)
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=where)
            try:
                os.fchmod(fd, perm)
            finally:
                os.close(fd)
    except OSError:
        return False
    return True
