"""``vfsd`` whose disk fails: ``failing_daemon.py FLAG mount ...``; while the file FLAG is there, each sync is EIO."""

from __future__ import annotations

import errno
import os
import sys

from vfsd.cli import main

flag = sys.argv[1]
fdatasync = os.fdatasync


def failing(fd: int) -> None:
    if os.path.exists(flag):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    fdatasync(fd)


os.fdatasync = failing
sys.exit(main(sys.argv[2:]))
