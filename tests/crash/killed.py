"""Kills a process that works on a volume at each point of a small session; run as a program.

``killed.py BASE``: for k = 0, 1, ... a child plays the workload on ``BASE/k`` and kills itself at the kth point, until
one gets to the end. ``BASE/k.done`` has one byte for each step that had returned. Points: before and after a journal
record, after the journal turns, after the database has taken a batch, before and after the journal file is emptied.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import trio
from makers import open_volume, ticking
from workload import steps

from vfsd.backends import database
from vfsd.backends.journal import Journal

FOLD_EVERY = 6
"""Steps between two folds."""


class Points:
    """Counts the points passed; at the one that was chosen the process dies."""

    def __init__(self, fatal: int) -> None:
        self.left = fatal

    def passed(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def around(self, owner: Any, name: str, *, before: bool) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any) -> Any:
            if before:
                self.passed()
            result = real(*args)
            self.passed()
            return result

        setattr(owner, name, call)


def play(place: Path, fatal: int) -> None:
    points = Points(fatal)
    points.around(Journal, "append", before=True)
    points.around(Journal, "rotate", before=False)
    points.around(Journal, "clear_folded", before=True)
    points.around(database, "fold", before=False)
    done = os.open(f"{place}.done", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    volume = open_volume("state", place, clock=ticking())
    os.write(done, b".")
    for i, (_, step) in enumerate(steps()):
        step(volume)
        os.write(done, b".")
        if i % FOLD_EVERY == FOLD_EVERY - 1:
            trio.run(volume.maintain)
    volume.close()


def main(base: Path) -> None:
    k = 0
    while True:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                play(base / str(k), k)
                status = 0
            finally:
                os._exit(status)
        result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if result == 0:
            return
        if result != -signal.SIGKILL:
            sys.exit(f"child {k} ended with status {result}")
        k += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
