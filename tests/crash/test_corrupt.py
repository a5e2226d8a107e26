"""Volumes that are damaged, of a newer format, in use, or none: one sentence, and nothing made worse."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from makers import dump, open_volume
from workload import steps

from vfsd.backends.base import VolumeError
from vfsd.check import check_volume


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A volume at rest with something of everything."""
    place = tmp_path / "volume"
    volume = open_volume("state", place)
    for _, step in steps()[:20]:
        step(volume)
    volume.close()
    return place


def sql(place: Path, *statements: str) -> None:
    db = sqlite3.connect(place / "tree.db", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


def test_a_newer_format_is_refused(place: Path) -> None:
    sql(place, "PRAGMA user_version=99")
    with pytest.raises(VolumeError, match="has format 99, this vfsd reads up to"):
        open_volume("state", place)
    assert check_volume(place) != []


def test_another_database_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "volume"
    place.mkdir()
    sql(place, "CREATE TABLE theirs (x)")
    with pytest.raises(VolumeError, match="not a vfsd volume"):
        open_volume("state", place)


def test_a_second_daemon_is_told_the_pid(place: Path) -> None:
    volume = open_volume("state", place)
    with pytest.raises(VolumeError, match=f"in use by pid {os.getpid()}"):
        open_volume("state", place)
    volume.close()


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_contents_without_a_database_are_no_new_volume(damage: str, place: Path) -> None:
    for path in place.glob("tree.db*"):
        path.unlink()
    if damage == "empty":
        (place / "tree.db").touch()
    data = (place / "data").read_bytes()
    for _ in range(2):
        with pytest.raises(VolumeError, match=r"its tree\.db is missing or empty: put that back"):
            open_volume("state", place)
    assert (place / "data").read_bytes() == data


def test_no_volume_there(tmp_path: Path) -> None:
    assert check_volume(tmp_path) == [f"{tmp_path} holds no volume (no tree.db)"]
    (tmp_path / "file").write_text("")
    with pytest.raises(VolumeError, match=r"can't be opened: (Not a directory|File exists)"):
        open_volume("state", tmp_path / "file")


@pytest.mark.parametrize("damage", ["truncated", "zeros", "noise", "text", "header"])
def test_a_corrupt_database_is_one_sentence(damage: str, place: Path) -> None:
    """Opening refuses it, or what is opened answers with the tree or with EIO, never with anything else."""
    path = place / "tree.db"
    good = path.read_bytes()
    bad = {
        "truncated": good[: len(good) // 2],
        "zeros": good[:4096] + bytes(len(good) - 4096),
        "noise": good[:4096] + os.urandom(len(good) - 4096),
        "text": b"not a database at all\n" * 1000,
        "header": b"\xff" * 100 + good[100:],
    }[damage]
    path.write_bytes(bad)
    for name in ("tree.db-wal", "tree.db-shm"):
        (place / name).unlink(missing_ok=True)
    assert check_volume(place) != []
    try:
        volume = open_volume("state", place)
    except VolumeError as error:
        assert str(place) in str(error)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            dump(volume)
        volume.close()


@pytest.mark.parametrize("page", range(1, 12))
def test_one_damaged_page(page: int, place: Path) -> None:
    path = place / "tree.db"
    data = bytearray(path.read_bytes())
    if page * 4096 >= len(data):
        pytest.skip("the database is smaller")
    data[page * 4096 : (page + 1) * 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    try:
        volume = open_volume("state", place)
    except VolumeError as error:
        assert str(place) in str(error)
        return
    try:
        dump(volume)
    except OSError as error:
        assert error.strerror == "Input/output error"
    volume.close()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("DELETE FROM node WHERE id=1", "the root directory is missing"),
        ("DELETE FROM node WHERE id=3", "which does not exist"),
        ("UPDATE node SET nlink=7 WHERE id=3", "has nlink 7"),
        ("UPDATE node SET nlink=9 WHERE id=2", "directory 2 has nlink 9"),
        ("DELETE FROM dentry WHERE name=CAST('e' AS BLOB)", "can't be reached from the root"),
        ("UPDATE node SET target=x'41' WHERE id=2", "symlink without a target, or has one and is none"),
        ("INSERT INTO xattr VALUES (999, x'41', x'42')", "which does not exist"),
        ("INSERT INTO dentry VALUES (1, x'41', 2)", "entries that lead to it"),
        ("UPDATE extent SET length=length+1", "not in blocks of 4096"),
        ("UPDATE extent SET disk=(SELECT min(disk) FROM extent)", "belongs to node"),
        ("UPDATE extent SET disk=disk+1073741824", "the data file has"),
    ],
)
def test_fsck_finds(damage: str, sentence: str, place: Path) -> None:
    assert check_volume(place) == []
    sql(place, damage)
    problems = check_volume(place)
    assert any(sentence in problem for problem in problems), problems
