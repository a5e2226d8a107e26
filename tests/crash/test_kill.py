"""kill -9 at each commit boundary and each step of a fold: what had returned is there, and nothing half done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from makers import ME, dump, open_volume, ticking
from test_faults import IN_PLACE, without_content
from workload import steps

from vfsd.backends.database import connect
from vfsd.check import check_volume

Dump = dict[bytes, tuple[Any, ...]]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Dump]:
    """The tree after each step, the first before any."""
    volume = open_volume("memory", tmp_path_factory.mktemp("reference"), clock=ticking())
    found = [dump(volume)]
    for _, step in steps():
        step(volume)
        found.append(dump(volume))
    volume.close()
    return found


def promised(place: Path, states: list[Dump], returned: int) -> None:
    """The volume opens, is sound, and holds all that had returned, with or without the step that was under way."""
    assert check_volume(place) == []
    volume = open_volume("state", place, clock=ticking())
    found = dump(volume)
    volume.close()
    assert check_volume(place) == []
    if returned == 0:
        assert list(found) == [b"/"]
        return
    allowed = states[returned - 1 : returned + 1]
    if found not in allowed:
        under_way = steps()[returned - 1][0]
        assert under_way in IN_PLACE
        assert without_content(found) == without_content(allowed[0])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_killed_at_every_point(states: list[Dump], tmp_path: Path) -> None:
    program = Path(__file__).with_name("killed.py")
    done = subprocess.run([sys.executable, program, tmp_path], timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    points = len(list(tmp_path.glob("*.done")))
    assert points > 2 * len(states)
    for k in range(points):
        if (tmp_path / str(k) / "tree.db").exists():
            promised(tmp_path / str(k), states, len((tmp_path / f"{k}.done").read_bytes()))


@pytest.mark.slow
def test_a_journal_cut_inside_each_record(states: list[Dump], tmp_path: Path) -> None:
    """A record that is not whole is a commit that never was; those before it all are."""
    ends = [0]
    for cut in range(len(steps()) + 1):
        place = tmp_path / str(cut)
        volume = open_volume("state", place, clock=ticking())
        ends = [volume.backend._journal.size]
        for _, step in steps():
            step(volume)
            ends.append(volume.backend._journal.size)
        _let_go(volume)
        whole = ends[cut]
        end = whole if cut == len(steps()) else (whole + ends[cut + 1]) // 2
        with open(place / "journal.0", "r+b") as file:
            file.truncate(end)
            file.seek(end)
            file.write(b"\0garbage\xff" if cut % 2 else b"")
        before_cut = without_content(states[cut])
        assert check_volume(place) == []
        volume = open_volume("state", place, clock=ticking())
        assert without_content(dump(volume)) == before_cut
        volume.close()


def _let_go(volume: Any) -> None:
    """What the death of a process does: descriptors are closed, nothing is folded."""
    backend = volume.backend
    backend._journal.close()
    backend._db.close()
    os.close(backend._data.fd)
    os.close(backend._lock)


def test_files_open_and_unlinked_are_purged_at_the_next_start(tmp_path: Path) -> None:
    place = tmp_path / "volume"
    volume = open_volume("state", place)
    root = volume.root_ino
    kept = volume.create_file(root, b"kept", 0o644, b"k" * 5000, ME).ino
    gone = volume.create_file(root, b"gone", 0o644, b"g" * 500_000, ME).ino
    nameless, _ = volume.tmpfile(root, 0o600, 2, ME)
    volume.open(gone, 0, ME)
    volume.unlink(root, b"gone", ME)
    assert volume.getattr(gone).nlink == 0
    _let_go(volume)
    for read_only in (True, False):
        volume = open_volume("state", place, read_only=read_only)
        assert [name for name, _ in volume.children(volume.root_ino)] == [b"kept"]
        assert {kept & 0xFFFF, 1} == set(volume.tree.nodes)
        volume.close()
        assert check_volume(place) == []
    db = connect(place)
    assert db.execute("SELECT count(*) FROM node WHERE id IN (?, ?)", (gone, nameless.id)).fetchone() == (0,)
    assert db.execute("SELECT sum(length) FROM extent").fetchone() == (8192,)
    db.close()


def test_a_new_volume_may_be_read_only(tmp_path: Path) -> None:
    volume = open_volume("state", tmp_path / "volume", read_only=True)
    assert volume.children(volume.root_ino) == []
    with pytest.raises(OSError, match="Read-only"):
        volume.mkdir(volume.root_ino, b"d", 0o755, ME)
    volume.close()
