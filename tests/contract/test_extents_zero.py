"""Zeroing ranges that hold no whole block."""

from __future__ import annotations

import os

from vfsd.backends.extents import BLOCK, ExtentFile


def test_regression_zeroing_across_one_block_edge_frees_nothing() -> None:
    file = ExtentFile(os.memfd_create("extents"), lambda node: [], lambda node: True)
    file.write(1, 0, b"x" * 4 * BLOCK)
    before = list(file.map(1).extents)
    file.zero(1, 2 * BLOCK - 10, 2 * BLOCK + 10)
    file.end(True)
    assert file.map(1).extents == before
    assert file.drain() == []
    data = file.read(1, 0, 4 * BLOCK)
    assert data == b"x" * (2 * BLOCK - 10) + bytes(20) + b"x" * (2 * BLOCK - 10)
