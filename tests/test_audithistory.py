"""Which records are wanted, and what happened to one file under all its names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from vfsd.audit.history import Filter, blame, pattern, since


def lines(*records: dict[str, Any]) -> list[bytes]:
    """Records as the log has them: no blanks, numbers and success added."""
    return [
        json.dumps({"seq": i, "result": "ok", **r}, separators=(",", ":")).encode() for i, r in enumerate(records, 1)
    ]


def create(path: str, ino: int) -> dict[str, Any]:
    return {"op": "create", "path": path, "ino": ino, "size": [None, 0]}


def write(path: str, ino: int) -> dict[str, Any]:
    return {"op": "write", "path": path, "ino": ino, "size": [0, 1]}


def rename(old: str, new: str, ino: int, **more: Any) -> dict[str, Any]:
    return {"op": "rename", "path": old, "path2": new, "ino": ino, **more}


def blamed(found: Iterable[bytes], path: str) -> list[int]:
    log = list(found)
    return [record["seq"] for _, record in blame(lambda: reversed(log), path)]


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("/a/b", ["/a/b", "/a/b/c/d"], ["/a", "/a/bc", "/x/a/b"]),
        ("/a/*", ["/a/b"], ["/a/b/c", "/a"]),
        ("/a/**", ["/a/b", "/a/b/c", "/a"], ["/ab"]),
        ("/**/x.py", ["/x.py", "/a/x.py", "/a/b/x.py"], ["/a/xx.py"]),
        ("*.py", ["/x.py", "/a/b/x.py"], ["/x.pyc", "/x.py/y"]),
        ("name", ["/name", "/a/name"], ["/a/names"]),
        ("/f?[0-9].txt", ["/fa1.txt"], ["/f/1.txt", "/fab.txt"]),
        ("/[!a]", ["/b"], ["/a"]),
        ("/", ["/", "/a/b"], []),
        ("/a+(b)", ["/a+(b)"], ["/aab"]),
    ],
)
def test_patterns(glob: str, yes: list[str], no: list[str]) -> None:
    assert [p for p in yes if not pattern(glob).match(p)] == []
    assert [p for p in no if pattern(glob).match(p)] == []


def test_moments() -> None:
    now = 1_900_000_000.0
    assert since("10m", now) == "2030-03-17T17:36:40.000000Z"
    assert since("1.5h", now) == "2030-03-17T16:16:40.000000Z"
    assert since("2d", now) == "2030-03-15T17:46:40.000000Z"
    assert since("2030-01-31T12:00+02:00") == "2030-01-31T10:00:00.000000Z"
    assert since("2030-01-31").startswith("2030-01-3")
    for bad in ("yesterday", "10", "", "99999999999999d", "2030-13-01"):
        with pytest.raises(ValueError, match="is no moment"):
            since(bad)


def test_filters() -> None:
    log = lines(
        {"op": "write", "path": "/a/f", "pid": 1, "call": "c1", "time": "2030-01-01T00:00:00.000000Z"},
        {"op": "write", "path": "/b", "pid": 2, "execute": "e1", "call": "c2", "time": "2030-01-02T00:00:00.000000Z"},
        {"op": "rename", "path": "/b", "path2": "/a/g", "result": "EACCES", "time": "2030-01-03T00:00:00.000000Z"},
        {"op": "write", "path": None, "time": "2030-01-04T00:00:00.000000Z", "command": "echo c1"},
    )

    def wanted(**by: Any) -> list[int]:
        return [record["seq"] for _, record in Filter(**by).records([*log, b"damaged", b"[1]"])]

    assert wanted() == [1, 2, 3, 4]
    assert wanted(path=pattern("/a")) == [1, 3]
    assert wanted(call="c1") == [1]
    assert wanted(call="e1") == [2]
    assert wanted(pid=2) == [2]
    assert wanted(since="2030-01-02T12") == [3, 4]
    assert wanted(failed=True) == [3]


def test_blame_is_newest_first_and_of_that_file_alone() -> None:
    log = lines(create("/a", 5), write("/a", 5), create("/b", 6), write("/b", 6), write("/a", 5))
    assert blamed(log, "/a") == [5, 2, 1]
    assert blamed(log, "/none") == []


def test_blame_goes_through_renames_of_it_and_of_directories_above() -> None:
    log = lines(
        create("/tmp", 9),
        create("/d/old", 5),
        write("/d/old", 5),
        rename("/d/old", "/d/new", 5),
        rename("/d", "/e", 3),
        write("/e/new", 5),
    )
    assert blamed(log, "/e/new") == [6, 5, 4, 3, 2]


def test_blame_of_a_file_saved_by_way_of_another_name() -> None:
    log = lines(
        create("/f", 1),
        create("/.f.tmp", 2),
        write("/.f.tmp", 2),
        rename("/.f.tmp", "/f", 2, replaced=1),
        create("/.f.tmp", 3),
        {"op": "unlink", "path": "/.f.tmp", "ino": 3, "size": [0, None]},
    )
    assert blamed(log, "/f") == [4, 3, 2, 1]


def test_blame_sees_what_was_done_by_another_link() -> None:
    log = lines(
        create("/a", 5), {"op": "link", "path": "/a", "ino": 5, "path2": "/b"}, write("/b", 5), write("/c", 8)
    )  # fmt: skip
    assert blamed(log, "/a") == [3, 2, 1]
    assert blamed(log, "/b") == [3, 2, 1]


def test_blame_knows_a_number_used_before_for_another() -> None:
    log = lines(write("/x", 5), create("/a", 5), write("/a", 5))
    assert blamed(log, "/a") == [3, 2]


def test_blame_of_exchanged_and_of_removed_files() -> None:
    log = lines(create("/a", 1), create("/b", 2), rename("/a", "/b", 1, exchange=True), write("/a", 2))
    assert blamed(log, "/a") == [4, 3, 2, 1]
    log = lines(create("/a", 1), {"op": "unlink", "path": "/a", "ino": 1, "size": [0, None]})
    assert blamed(log, "/a") == [2, 1]
    log = lines(create("/a", 1), rename("/a", "/b", 1))
    assert blamed(log, "/a") == [2, 1]


def test_blame_counts_restores_and_no_failures() -> None:
    log = lines(
        create("/a", 1), {**write("/a", 1), "result": "ENOSPC"}, {"op": "restore", "path": "/", "checkpoint": "c"}
    )  # fmt: skip
    assert blamed(log, "/a") == [3, 1]


def test_blame_of_what_never_was_names_no_restore() -> None:
    log = [
        b'{"seq":1,"op":"create","path":"/a","ino":5,"size":[null,0],"result":"ok"}',
        b'{"seq":2,"op":"restore","path":"/","result":"ok"}',
    ]
    assert list(blame(lambda: reversed(log), "/never")) == []
    assert [r["seq"] for _, r in blame(lambda: reversed(log), "/a")] == [2, 1]
    # Its own lines may be dropped already.
    assert [r["seq"] for _, r in blame(lambda: reversed(log), "/old", exists=True)] == [2]
