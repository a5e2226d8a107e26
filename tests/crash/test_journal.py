"""The journal: what is whole is replayed, in order and up to the first doubt; nothing else ever is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from faults import failing
from hypothesis import given, settings
from hypothesis import strategies as st

from vfsd.backends import journal as module
from vfsd.backends.journal import Journal

RECORDS = [[(0, i, b"name" * i)] for i in range(1, 9)]


def filled(directory: Path, records: list[list[tuple[int, int, bytes]]] | None = None) -> Journal:
    directory.mkdir(exist_ok=True)
    journal = Journal(directory)
    for rows in RECORDS if records is None else records:
        journal.append(rows)  # type: ignore[arg-type]
    return journal


def replayed(directory: Path, after: int = 0) -> list[object]:
    journal = Journal(directory)
    try:
        return list(journal.replay(after))
    finally:
        journal.close()


def test_whole_records_come_back_in_order(tmp_path: Path) -> None:
    filled(tmp_path).close()
    assert replayed(tmp_path) == RECORDS
    assert replayed(tmp_path, after=5) == RECORDS[5:]
    assert replayed(tmp_path, after=8) == []


def test_cut_at_every_byte_what_is_whole_before_it_remains(tmp_path: Path) -> None:
    journal = filled(tmp_path, [])
    ends = [0]
    for rows in RECORDS:
        journal.append(rows)  # type: ignore[arg-type]
        ends.append(journal.size)
    journal.close()
    for length in range(ends[-1], -1, -1):
        os.truncate(tmp_path / "journal.0", length)
        assert replayed(tmp_path) == RECORDS[: sum(end <= length for end in ends[1:])]


@settings(max_examples=60)
@given(
    tail=st.binary(min_size=1, max_size=80) | st.integers(1, 80).map(bytes) | st.integers(1, 80).map(b"\xff".__mul__)
)
def test_a_garbage_tail_is_no_record(tail: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("journal")
    filled(directory).close()
    with open(directory / "journal.0", "ab") as file:
        file.write(tail)
    assert replayed(directory) == RECORDS


def test_a_garbled_byte_anywhere_ends_the_replay_there(tmp_path: Path) -> None:
    filled(tmp_path).close()
    path = tmp_path / "journal.0"
    good = path.read_bytes()
    harmless = 0
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        found = replayed(tmp_path)
        assert found == RECORDS[: len(found)]
        harmless += len(found) == len(RECORDS)
    assert harmless == 4 * len(RECORDS)  # the reserved word of each head, which no reader looks at


def two_files(tmp_path: Path) -> None:
    """Records 1 to 4 in the older file, 5 to 8 in the newer."""
    journal = filled(tmp_path, RECORDS[:4])
    journal.rotate()
    for rows in RECORDS[4:]:
        journal.append(rows)  # type: ignore[arg-type]
    journal.close()


def test_both_files_are_one_sequence(tmp_path: Path) -> None:
    two_files(tmp_path)
    assert replayed(tmp_path) == RECORDS
    os.rename(tmp_path / "journal.0", tmp_path / "x")
    os.rename(tmp_path / "journal.1", tmp_path / "journal.0")
    os.rename(tmp_path / "x", tmp_path / "journal.1")
    assert replayed(tmp_path) == RECORDS


def test_nothing_is_replayed_past_a_gap(tmp_path: Path) -> None:
    two_files(tmp_path)
    whole = (tmp_path / "journal.0").stat().st_size
    os.truncate(tmp_path / "journal.0", whole - 1)
    assert replayed(tmp_path) == RECORDS[:3]
    os.truncate(tmp_path / "journal.0", 0)
    assert replayed(tmp_path) == []
    assert replayed(tmp_path, after=4) == RECORDS[4:]


def test_regression_records_after_a_gap_are_gone_for_good(tmp_path: Path) -> None:
    """A start that found a gap must not leave what lay behind it to follow the records of a later run."""
    two_files(tmp_path)
    os.truncate(tmp_path / "journal.0", (tmp_path / "journal.0").stat().st_size - 1)
    journal = Journal(tmp_path)
    assert list(journal.replay(0)) == RECORDS[:3]
    journal.reset()
    journal.append([(0, 99, b"new")])
    journal.close()
    assert replayed(tmp_path, after=3) == [[(0, 99, b"new")]]


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_record_refused_leaves_no_trace(code: int, torn: bool, tmp_path: Path) -> None:
    journal = filled(tmp_path, RECORDS[:2])
    with failing(module, "write", code=code, torn=torn), pytest.raises(OSError, match=os.strerror(code)):
        journal.append(RECORDS[2])  # type: ignore[arg-type]
    for rows in RECORDS[2:]:
        journal.append(rows)  # type: ignore[arg-type]
    journal.close()
    assert replayed(tmp_path) == RECORDS


def test_a_short_write_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(tmp_path, RECORDS[:2])
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", lambda fd, data: real(fd, data[:-1]))
        with pytest.raises(OSError, match="No space"):
            journal.append(RECORDS[2])  # type: ignore[arg-type]
    journal.append(RECORDS[2])  # type: ignore[arg-type]
    journal.close()
    assert replayed(tmp_path) == RECORDS[:3]


def test_regression_nothing_follows_half_a_record_that_could_not_be_cut_off(tmp_path: Path) -> None:
    """Else replay would stop there and lose every record acknowledged since."""
    journal = filled(tmp_path, RECORDS[:2])
    with failing(module, "ftruncate", code=errno.EIO, for_good=True):
        with failing(module, "write", code=errno.ENOSPC, torn=True), pytest.raises(OSError):
            journal.append(RECORDS[2])  # type: ignore[arg-type]
        for attempt in (lambda: journal.append(RECORDS[2]), journal.rotate):  # type: ignore[arg-type]
            with pytest.raises(OSError):
                attempt()
    for rows in RECORDS[2:]:
        journal.append(rows)  # type: ignore[arg-type]
    journal.close()
    assert replayed(tmp_path) == RECORDS


def test_no_room_for_a_record_is_known_before(tmp_path: Path) -> None:
    journal = filled(tmp_path, RECORDS[:2])
    with failing(module, "host_fallocate", code=errno.ENOSPC, for_good=True) as calls:
        with pytest.raises(OSError, match="No space"):
            journal.ensure_room()
        assert calls.failed == 1
    journal.ensure_room()
    assert os.fstat(journal._fd).st_blocks * 512 >= 64 << 10
    with failing(module, "host_fallocate", code=errno.EOPNOTSUPP, for_good=True) as calls:
        journal.rotate()
        journal.ensure_room()  # a file system that can't promise
        journal.ensure_room()
        assert calls.failed == 1
    journal.close()
    assert replayed(tmp_path) == RECORDS[:2]
