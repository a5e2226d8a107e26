"""Space given back to the host."""

from __future__ import annotations

import os

from faults import failing

from vfsd.backends import extents
from vfsd.backends.extents import BLOCK, ExtentFile


def test_neighbours_are_punched_together() -> None:
    """A thousand small files deleted one by one lie side by side, and a call to the host costs up to a millisecond."""
    file = ExtentFile(os.memfd_create("extents"), lambda node: [], lambda node: True)
    for node in range(1, 1001):
        file.write(node, 0, b"x" * 100)
    file.write(2000, 0, b"y" * 100)
    file.end(True)
    for node in sorted(range(1, 1001), key=lambda n: n * 7 % 1000):
        file.drop(node)
        file.end(True)
    runs = file.drain()
    assert len(runs) == 1000
    with failing(extents, "host_fallocate", code=0, nth=0) as calls:
        file.punch(runs)
    assert calls.made == 1
    assert os.fstat(file.fd).st_blocks * 512 <= 300 * BLOCK
    assert file.read(2000, 0, 100) == b"y" * 100
