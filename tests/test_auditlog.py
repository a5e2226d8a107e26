"""The segments of the audit log: what is kept, what is dropped, and what a reader sees meanwhile."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from vfsd.audit import log as auditlog
from vfsd.audit.log import SegmentLog

LINE = b'{"seq":%07d}' + b"." * 80 + b"\n"
DAY = 86400.0


def numbered(directory: Path, end: int = 1 << 60) -> list[int]:
    return [int(line[7:14]) for line in auditlog.lines(directory, "log", end)]


def disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_lines_are_there_at_once_and_after_reopening(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path / "a", "log", 1 << 20, DAY)
    for i in range(10):
        log.append(LINE % i)
        assert numbered(tmp_path / "a") == list(range(i + 1))
    log.close()
    again = SegmentLog(tmp_path / "a", "log", 1 << 20, DAY)
    again.append(LINE % 10)
    assert numbered(tmp_path / "a") == list(range(11))
    assert again.read(0, 1 << 20) == b"".join(LINE % i for i in range(11))
    assert oct((tmp_path / "a").stat().st_mode & 0o777) == "0o700"
    again.close()


def test_half_a_line_left_by_a_lost_machine_is_cut_off(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, "log", 1 << 20, DAY)
    log.append(LINE % 1)
    log.close()
    (segment,) = auditlog.segments(tmp_path, "log")
    with open(segment.path, "ab") as file:
        file.write(b'{"seq":2,"half')
    assert numbered(tmp_path) == [1]
    assert [line[7:14] for line in auditlog.lines_back(tmp_path, "log")] == [b"0000001"]
    log = SegmentLog(tmp_path, "log", 1 << 20, DAY)
    log.append(LINE % 2)
    assert numbered(tmp_path) == [1, 2]
    log.close()


def test_size_is_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, "log", 1 << 16, DAY)
    for i in range(5000):
        log.append(LINE % i)
        assert disk(tmp_path) <= 1 << 16
    kept = numbered(tmp_path)
    assert kept == list(range(kept[0], 5000))
    assert len(kept) * len(LINE % 0) > 1 << 15
    back = [int(line[7:14]) for line in auditlog.lines_back(tmp_path, "log")]
    assert back == kept[::-1]
    log.close()


def test_age_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SegmentLog(tmp_path, "log", 1 << 20, 1000)
    log.append(LINE % 1)
    now = time.time()
    monkeypatch.setattr(auditlog.time, "time", lambda: now + 200)
    log.maintain()  # a new segment, so that the old one can go alone
    log.append(LINE % 2)
    assert numbered(tmp_path) == [1, 2]
    for segment, written in zip(auditlog.segments(tmp_path, "log"), (now, now + 200), strict=True):
        os.utime(segment.path, (written, written))
    monkeypatch.setattr(auditlog.time, "time", lambda: now + 1001)
    log.maintain()
    assert numbered(tmp_path) == [2]
    log.close()


def test_positions_stay_true_when_the_front_goes(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, "log", 1 << 16, DAY)
    written = b""
    for i in range(2000):
        log.append(LINE % i)
        written += LINE % i
    assert 0 < log.origin < log.end == len(written)
    at, seen = log.origin - 10, b""
    while piece := log.read(at + len(seen), 777):
        seen += piece
    assert seen == b"\n" * 10 + written[log.origin :]
    log.close()


def test_no_room_loses_the_line_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SegmentLog(tmp_path, "log", 1 << 20, DAY)
    log.append(LINE % 1)
    whole = os.write
    monkeypatch.setattr(auditlog.os, "write", lambda fd, data: whole(fd, data[:20]))
    with pytest.raises(OSError) as caught:
        log.append(LINE % 2)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    log.append(LINE % 3)
    assert numbered(tmp_path) == [1, 3]
    log.close()


def test_what_power_loss_would_take_is_known(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, "log", 1 << 20, DAY)
    log.append(LINE % 1)
    assert log.dirty
    log.sync()
    assert not log.dirty
    log.append(LINE % 2)
    assert log.dirty
    log.close()
