"""``vfsd`` that kills itself when it has written its nth journal record: ``killed_daemon.py N mount ...``."""

from __future__ import annotations

import os
import signal
import sys

from vfsd.backends.journal import Journal
from vfsd.cli import main

left = int(sys.argv[1])
append = Journal.append


def counted(self: Journal, rows: list[tuple[object, ...]]) -> None:
    global left
    append(self, rows)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


Journal.append = counted  # type: ignore[method-assign]
sys.exit(main(sys.argv[2:]))
