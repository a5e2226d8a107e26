"""The files of a mounted volume are deleted: nothing is safe any more, and whoever asks is told so."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from daemons import Daemon

pytestmark = pytest.mark.mount


@pytest.mark.parametrize("what", ["all", "journal.0", "journal.1", "data"])
def test_fsync_fails_when_a_file_of_the_volume_was_deleted(tmp_path: Path, engine: str, what: str) -> None:
    daemon = Daemon(tmp_path, engine)
    daemon.start()
    try:
        with open(daemon.point / "f", "wb", buffering=0) as file:
            file.write(b"safe")
            os.fsync(file.fileno())
            if what == "all":
                shutil.rmtree(daemon.volume)
            else:
                (daemon.volume / what).unlink()
            file.write(b"lost")
            with pytest.raises(OSError) as caught:
                os.fsync(file.fileno())
            assert caught.value.errno == errno.EIO
            with pytest.raises(OSError) as caught:
                file.write(b"no more")
            assert caught.value.errno == errno.EROFS
        (line,) = daemon.unexpected()
        gone = "tree.db" if what == "all" else what
        assert f"volume {daemon.volume} is read-only from now on: its file {gone} has been removed or replaced" in line
    finally:
        daemon.abort()
