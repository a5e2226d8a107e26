"""Large contents, written to free blocks before the commit that gives them to a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash
from makers import KINDS, close_vfs, done, open_vfs

from vfsd.check import check_volume
from vfsd.core.types import Caller
from vfsd.paths import Paths

ROOT = Caller(0, 0, 0, "rpc")


@pytest.fixture(params=KINDS)
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Paths]:
    vfs = open_vfs({"/": (request.param, tmp_path / "volume")})
    yield Paths(vfs)
    close_vfs(vfs)


def whole(paths: Paths, path: bytes) -> bytes:
    return bytes(done(paths.read_file(path, 0, 1 << 30, ROOT))[1])


def large(filler: int) -> list[bytes]:
    """Content whose blocks are written before the commit, in pieces that end within blocks."""
    return [bytes([filler + i]) * (700_001 + i) for i in range(3)]


def test_large_content_is_written_whole(paths: Paths) -> None:
    first, second = large(1), large(5)[:2]
    trio.run(lambda: paths.write_file(b"/d/f", first, ROOT))
    assert whole(paths, b"/d/f") == b"".join(first)
    digest = xxhash.xxh3_64_intdigest(b"".join(first))
    trio.run(lambda: paths.write_file(b"/d/f", second, ROOT, expect=digest))
    assert whole(paths, b"/d/f") == b"".join(second)
    with pytest.raises(OSError, match="changed since it was read"):
        trio.run(lambda: paths.write_file(b"/d/f", first, ROOT, expect=digest))
    trio.run(lambda: paths.write_file(b"/d/f", b"small", ROOT, expect=xxhash.xxh3_64_intdigest(b"".join(second))))
    assert whole(paths, b"/d/f") == b"small"
    with pytest.raises(FileExistsError):
        trio.run(lambda: paths.write_file(b"/d/f", first, ROOT, exclusive=True))


@pytest.fixture(params=("state", "memory"))
def laying(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Paths]:
    """A volume that writes large contents beforehand; whole, with all else free, at the end."""
    vfs = open_vfs({"/": (request.param, tmp_path / "volume")})
    yield Paths(vfs)
    (volume,) = vfs.table.volumes[:1]
    data, nodes = volume.backend._data, volume.tree.nodes
    used = sorted((disk, n) for node in nodes for _, n, disk, _ in data.map(node).extents)
    free = sorted([*data.free.runs.items(), (data.free._start, data.free._left), *data._quarantine])
    assert sum(n for _, n in used + free) == data.free.end, "no block is lost"
    close_vfs(vfs)
    if request.param == "state":
        assert check_volume(tmp_path / "volume") == []


def meanwhile(paths: Paths, monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    """Have ``other`` done while the next content is written beforehand."""
    backend = paths.vfs.table.volumes[0].backend

    def lay(laid: Any) -> None:
        backend._data.lay(laid)
        monkeypatch.setattr(backend, "lay", backend._data.lay)
        trio.from_thread.run(other)

    monkeypatch.setattr(backend, "lay", lay)


def test_what_others_do_while_large_content_is_written_counts(laying: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        old, new = b"".join(large(1)), large(5)
        digest = xxhash.xxh3_64_intdigest(old)
        await laying.write_file(b"/f", old, ROOT)
        meanwhile(laying, monkeypatch, lambda: laying.write_file(b"/f", b"theirs", ROOT))
        with pytest.raises(OSError, match="changed since it was read"):
            await laying.write_file(b"/f", new, ROOT, expect=digest)
        assert whole(laying, b"/f") == b"theirs"
        meanwhile(laying, monkeypatch, lambda: laying.write_file(b"/new", b"theirs", ROOT))
        assert (await laying.write_file(b"/new", new, ROOT))[0] is False
        assert whole(laying, b"/new") == b"".join(new)
        meanwhile(laying, monkeypatch, lambda: laying.delete(b"/new", ROOT))
        assert (await laying.write_file(b"/new", new, ROOT))[0] is True
        assert whole(laying, b"/new") == b"".join(new)
        ino = (await laying.resolve(b"/new", ROOT)).ino
        expect = xxhash.xxh3_64_intdigest(b"".join(new))
        meanwhile(laying, monkeypatch, lambda: laying.vfs.write(ino, 0, 1_000_000, b"!", ROOT))
        with pytest.raises(OSError, match="changed since it was read"):
            await laying.write_file(b"/new", b"small", ROOT, expect=expect)

    trio.run(main)


def test_large_content_that_can_not_be_written_leaves_all_as_it_was(
    laying: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = laying.vfs.table.volumes[0].backend

    def failing(code: int) -> Any:
        def lay(laid: Any) -> None:
            raise OSError(code, os.strerror(code))

        return lay

    async def main() -> None:
        await laying.write_file(b"/f", large(1), ROOT)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "lay", failing(errno.EIO))
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                await laying.write_file(b"/f", large(5), ROOT)
            assert whole(laying, b"/f") == b"".join(large(1))
            patch.setattr(backend, "lay", failing(errno.ENOSPC))
            await laying.write_file(b"/f", large(5), ROOT)
        assert whole(laying, b"/f") == b"".join(large(5))
        with trio.CancelScope() as scope:
            meanwhile(laying, monkeypatch, lambda: _cancel(scope))
            await laying.write_file(b"/f", large(9), ROOT)
        assert scope.cancelled_caught
        assert whole(laying, b"/f") == b"".join(large(5))

    async def _cancel(scope: trio.CancelScope) -> None:
        scope.cancel()

    trio.run(main)
