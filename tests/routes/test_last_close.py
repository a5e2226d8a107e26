"""A close that the store refuses, beside a program that opens the file again at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from makers import ME
from waiting import open_remote, store_at

WRITE = os.O_WRONLY | os.O_TRUNC


def test_a_refused_last_close_leaves_what_the_next_writer_has_written(tmp_path: Path) -> None:
    """The next writer's close must not return as if the store had it, when the earlier one's end undoes it."""
    volume = open_remote(store_at(tmp_path / "store")).volume
    put, broken = volume.remote.put, True

    def refusing(*args: Any) -> Any:
        if broken:
            raise OSError("the store is down")
        return put(*args)

    async def session() -> None:
        nonlocal broken
        broken = False
        ino = (await volume.create_file(volume.root_ino, b"f", 0o644, b"before", ME)).ino
        broken = True
        volume.remote.put = refusing
        first = volume.open(ino, WRITE, ME)
        volume.write(ino, first, 0, b"refused", ME)
        with pytest.raises(OSError):
            await volume.flush(ino, first, ME)
        async with trio.open_nursery() as nursery, volume.lane.whole():
            nursery.start_soon(volume.release, ino, first)
            await trio.testing.wait_all_tasks_blocked()
            second = volume.open(ino, WRITE, ME)
            volume.write(ino, second, 0, b"next", ME)
        broken = False
        flushed = volume.flush(ino, second, ME)
        assert flushed is not None
        await flushed
        volume.release(ino, second)
        assert volume.remote.get(b"/f").data == b"next"

    trio.run(session)
