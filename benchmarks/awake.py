"""Processors that never halt, as they don't on a machine with other work, for as long as something is measured."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_LOOP = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """On each processor a loop that gives way at once to whatever else wants to run (sched(7), SCHED_IDLE)."""
    command = [sys.executable, "-I", "-S", "-c", _LOOP]
    loops = [subprocess.Popen([*command, str(cpu), str(os.getpid())]) for cpu in sorted(os.sched_getaffinity(0))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
