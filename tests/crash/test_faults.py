"""System calls that fail under a volume: whatever raised changed nothing, and what did not raise is there."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
from faults import Calls, failing
from makers import ME, dump, open_volume, ticking
from workload import steps

from vfsd.backends import ballast, durable, extents, journal
from vfsd.check import check_volume
from vfsd.core.types import SetAttr

DATA = ("pwrite", "pwritev")
IN_PLACE = {"write in place", "append", "grow", "punch", "truncate"}
"""Steps that may write into blocks the file has; an EIO there may leave them half written, as on any file system."""


def without_content(tree: dict[bytes, tuple[Any, ...]]) -> dict[bytes, tuple[Any, ...]]:
    return {path: (same, attr, xattrs) for path, (same, attr, _, xattrs) in tree.items()}


def play(volume: Any, in_place_is_lost: bool = False) -> list[str]:
    """All steps; the names of those that failed. A step after a failed one may have nothing to work on."""
    failed = []
    for name, step in steps():
        before = dump(volume)
        try:
            step(volume)
        except OSError as error:
            failed.append(f"{name}: {errno.errorcode[error.errno or 0]}")
            after = dump(volume)
            if in_place_is_lost and name in IN_PLACE:
                before, after = without_content(before), without_content(after)
            assert after == before, name
    return failed


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "volume"
    assert check_volume(tmp_path / "volume") == []


def sites() -> list[Any]:
    return [
        pytest.param(module, names, code, torn, id=f"{names[0]}-{errno.errorcode[code]}{'-torn' if torn else ''}")
        for module, names, codes, tears in (
            (extents, DATA, (errno.EIO, errno.ENOSPC), (False,)),
            (extents, ("host_fallocate",), (errno.EIO, errno.ENOSPC), (False,)),
            (journal, ("write",), (errno.EIO, errno.ENOSPC), (False, True)),
        )
        for code in codes
        for torn in tears
    ]


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize(("module", "names", "code", "torn"), sites())
def test_the_nth_call_fails(
    module: ModuleType, names: tuple[str, ...], code: int, torn: bool, for_good: bool, tmp_path: Path
) -> None:
    n = 1
    while True:
        place = tmp_path / f"v{n}"
        volume = open_volume("state", place, clock=ticking())
        with failing(module, *names, code=code, nth=n, for_good=for_good, torn=torn) as calls:
            failed = play(volume, in_place_is_lost=True)
        _then_it_works_again(volume)
        before = dump(volume)
        volume.close()
        assert check_volume(place) == []
        again = open_volume("state", place)
        assert dump(again) == before
        again.close()
        if not calls.failed:
            assert failed == []
            break
        n += 1 if n < 4 else 7
    assert n > 1


def _then_it_works_again(volume: Any) -> None:
    ino = volume.create_file(volume.root_ino, b"afterwards", 0o644, b"fine", ME).ino
    assert bytes(volume.read(ino, 0, 0, 10)) == b"fine"


def test_a_full_disk_refuses_writes_whole_and_unlinks_still_work(place: Path) -> None:
    """No block and no journal space is to be had; then a file is deleted, for which the ballast is given up."""
    volume = open_volume("state", place)
    root = volume.root_ino
    ino = volume.create_file(root, b"old", 0o644, b"o" * 50_000, ME).ino
    for i in range(2000):  # until the journal's reserve is used up
        volume.create_file(root, b"fill%d" % i, 0o644, b"", ME)
    full = _full(volume)
    before = dump(volume)
    with full as calls:
        for change in (
            lambda: volume.create_file(root, b"new", 0o644, b"n" * 50_000, ME),
            lambda: volume.write(ino, 0, 0, b"in place", ME),
            lambda: volume.write(ino, 0, 50_000, b"more" * 5000, ME),
            lambda: volume.replace(ino, b"r" * 9000, ME),
            lambda: volume.fallocate(ino, 0, 0, 0, 1 << 20, ME),
            lambda: volume.mkdir(root, b"d", 0o755, ME),
        ):
            with pytest.raises(OSError, match="No space"):
                change()
            assert dump(volume) == before
        assert calls.failed >= 6
        volume.unlink(root, b"old", ME)
        assert not (place / "ballast").exists()
    ino = volume.create_file(root, b"new", 0o644, b"n" * 50_000, ME).ino
    assert bytes(volume.read(ino, 0, 0, 50_000)) == b"n" * 50_000
    trio.run(volume.maintain)
    assert (place / "ballast").exists()
    before = dump(volume)
    volume.close()
    volume = open_volume("state", place)
    assert dump(volume) == before
    volume.close()


class _Full:
    """A disk with room for nothing but what the ballast left behind."""

    def __init__(self, volume: Any) -> None:
        self.volume = volume
        self.ballast = volume.backend._dir / "ballast"

    def __enter__(self) -> Calls:
        self._patches = pytest.MonkeyPatch()
        self.calls = calls = Calls()

        def refusing(real: Any, always: bool) -> Any:
            def call(*args: Any) -> Any:
                calls.made += 1
                if always or self.ballast.exists():
                    calls.failed += 1
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*args)

            return call

        journal_file = self.volume.backend._journal
        journal_file._reserved = journal_file.size
        self._patches.setattr(journal, "host_fallocate", refusing(journal.host_fallocate, False))
        self._patches.setattr(extents, "host_fallocate", refusing(extents.host_fallocate, True))
        self._patches.setattr(ballast, "host_fallocate", refusing(ballast.host_fallocate, True))
        return calls

    def __exit__(self, *exc: object) -> None:
        self._patches.undo()


def _full(volume: Any) -> _Full:
    return _Full(volume)


@pytest.mark.parametrize("nth", [1, 2], ids=["data", "journal"])
def test_a_failed_sync_ends_all_writing(nth: int, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel reports a lost page once; a later sync that succeeds would be a lie."""
    volume = open_volume("state", place)
    ino = volume.create_file(volume.root_ino, b"f", 0o644, b"x" * 9000, ME).ino
    with failing(durable, "fdatasync", code=errno.EIO, nth=nth), pytest.raises(OSError, match="Input/output"):
        trio.run(volume.fsync, ino, 0, False)
    with pytest.raises(OSError, match="Read-only"):
        volume.write(ino, 0, 0, b"y", ME)
    with pytest.raises(OSError, match="Input/output"):
        trio.run(volume.fsync, ino, 0, False)
    assert bytes(volume.read(ino, 0, 0, 5)) == b"xxxxx"
    assert "read-only from now on: a sync failed (Input/output error)" in caplog.text
    volume.close()
    volume = open_volume("state", place)
    ino = volume.lookup(volume.root_ino, b"f").ino
    assert bytes(volume.read(ino, 0, 0, 9000)) == b"x" * 9000
    volume.write(ino, 0, 0, b"y", ME)
    volume.close()


def test_a_sync_asks_the_disk_only_for_what_has_news(place: Path) -> None:
    volume = open_volume("state", place)
    ino = volume.create_file(volume.root_ino, b"f", 0o644, b"x" * 9000, ME).ino

    def syncs() -> int:
        with failing(durable, "fdatasync", code=errno.EIO, nth=99) as calls:
            trio.run(volume.fsync, ino, 0, False)
        return calls.made

    assert syncs() == 2  # the contents, the journal
    assert syncs() == 0
    volume.mkdir(volume.root_ino, b"d", 0o755, ME)
    assert syncs() == 1
    volume.write(ino, 0, 0, b"y", ME)
    assert syncs() == 2
    volume.close()


def test_regression_blocks_of_a_failed_sync_are_not_handed_out(place: Path) -> None:
    """What frees a block must be durable before the block is used again."""
    volume = open_volume("state", place)
    root = volume.root_ino
    volume.create_file(root, b"f", 0o644, b"x" * 40_960, ME)
    trio.run(volume.syncfs)
    volume.unlink(root, b"f", ME)
    waiting = volume.backend._data.quarantined()
    assert waiting == 40_960
    with failing(durable, "fdatasync", code=errno.EIO), pytest.raises(OSError):
        trio.run(volume.syncfs)
    assert volume.backend._data.quarantined() == waiting
    volume.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_fold_that_fails_is_done_later(code: int, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The journal keeps what could not be folded, through a restart too."""
    volume = open_volume("state", place)
    play(volume)
    with failing(journal, "ftruncate", code=code, for_good=True):
        trio.run(volume.maintain)
    assert "not folded yet" in caplog.text
    volume.create_file(volume.root_ino, b"since", 0o644, b"s", ME)
    before = dump(volume)
    trio.run(volume.maintain)
    assert dump(volume) == before
    volume.close()
    volume = open_volume("state", place)
    assert dump(volume) == before
    volume.close()


def test_a_database_that_refuses_makes_the_volume_read_only(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    volume = open_volume("state", place)
    play(volume)
    before = dump(volume)
    volume.backend._db.execute("CREATE TRIGGER no BEFORE UPDATE ON folded BEGIN SELECT RAISE(ABORT, 'no'); END")
    trio.run(volume.maintain)
    assert "read-only from now on" in caplog.text
    with pytest.raises(OSError, match="Read-only"):
        volume.mkdir(volume.root_ino, b"x", 0o755, ME)
    assert dump(volume) == before
    volume.backend._db.execute("DROP TRIGGER no")
    volume.close()
    volume = open_volume("state", place)
    assert dump(volume) == before
    volume.close()


def test_folding_while_changes_go_on(place: Path) -> None:
    """Whatever is changed between the turn of the journal and the end of the fold stays, whenever the daemon ends."""
    volume = open_volume("state", place)

    async def both() -> None:
        for name, step in steps():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volume.maintain)
                await trio.lowlevel.checkpoint()
                step(volume)
                volume.setattr(volume.root_ino, SetAttr(perm=0o700 if len(name) % 2 else 0o755), ME)

    trio.run(both)
    before = dump(volume)
    volume.close()
    volume = open_volume("state", place)
    assert dump(volume) == before
    volume.close()


@pytest.fixture(autouse=True)
def warnings_are_expected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
