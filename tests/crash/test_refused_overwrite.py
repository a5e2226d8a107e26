"""A write over the end of a file on a disk that has room for none of the new blocks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from makers import ME, dump, open_volume

from vfsd.backends import extents


class _NoMoreBlocks:
    """``os``, on a disk where a host file can't grow any more."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._refuse(fd, offset + len(data))
        return os.pwrite(fd, data, offset)

    def pwritev(self, fd: int, parts: list[bytes], offset: int) -> int:
        self._refuse(fd, offset + sum(map(len, parts)))
        return os.pwritev(fd, parts, offset)

    @staticmethod
    def _refuse(fd: int, end: int) -> None:
        if end > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("offset", [0, 5000])
def test_what_a_refused_write_would_have_written_over_is_as_it_was(
    offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = open_volume("state", tmp_path / "volume")
    ino = volume.create_file(volume.root_ino, b"f", 0o644, b"old" * 10_000, ME).ino
    before = dump(volume)
    with monkeypatch.context() as patch:
        patch.setattr(extents, "os", _NoMoreBlocks())
        with pytest.raises(OSError, match="No space"):
            volume.write(ino, 0, offset, b"new" * 700_000, ME)
        assert dump(volume) == before
    assert volume.write(ino, 0, offset, b"new" * 700_000, ME) == 2_100_000
    assert bytes(volume.read(ino, 0, offset, 3_000_000)) == b"new" * 700_000
    volume.close()
