"""Memory that goes back to the machine."""

from __future__ import annotations

import subprocess
import sys

from vfsd.process.memory import Idle

FREED = """
import ctypes
from vfsd.process.memory import give_back
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
many = [bytes(2000) for _ in range(50_000)]
few = many[::500]
del many
before = rss()
give_back(0)
assert len(few) == 100 and rss() < before - 50, (before, rss())
"""


def test_what_was_freed_between_what_is_in_use_goes_back() -> None:
    subprocess.run([sys.executable, "-c", FREED], check=True, timeout=30)


def test_work_that_ended_is_noticed_once() -> None:
    idle = Idle()
    assert [idle.now(done) for done in (0, 0, 5, 9, 9, 9, 9, 12, 12, 12)] == [
        *(False, False),  # nothing was ever done
        *(False, False, True, False, False),
        *(False, True, False),
    ]
