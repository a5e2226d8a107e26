"""A large file that is mostly holes takes what was written to it: on the disk, in the journal, in the map."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from makers import ME, open_volume

GIB = 1 << 30
SIZE = 50 * GIB


@pytest.mark.parametrize("kind", ["state", "memory"])
def test_fifty_gibibytes_of_holes_cost_what_is_written(kind: str, tmp_path: Path) -> None:
    volume = open_volume(kind, tmp_path / "volume")
    ino = volume.create_file(volume.root_ino, b"disk.img", 0o644, b"", ME).ino
    for offset in (0, 25 * GIB, SIZE - 4096):
        volume.write(ino, 0, offset, b"x" * 4096, ME)
    attr = volume.getattr(ino)
    assert (attr.size, attr.blocks) == (SIZE, 3 * 8)
    assert volume.used()[1] == 3 * 4096
    assert bytes(volume.read(ino, 0, 25 * GIB - 10, 20)) == bytes(10) + b"x" * 10
    assert volume.seek(ino, 0, 4096, os.SEEK_DATA) == 25 * GIB
    assert volume.seek(ino, 0, 25 * GIB, os.SEEK_HOLE) == 25 * GIB + 4096
    if kind == "state":
        assert os.stat(tmp_path / "volume/data").st_blocks * 512 < 1 << 20
        volume.close()
        volume = open_volume(kind, tmp_path / "volume")
        assert volume.getattr(ino).blocks == 3 * 8
    volume.close()
