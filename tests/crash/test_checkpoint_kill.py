"""kill -9 at each point of a session of checkpoints: the tree and every checkpoint are what had returned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from checkpointed import ME, Mount, State, state_of
from killed_checkpoints import STEPS

from vfsd.backends.sqlite import SqliteBackend
from vfsd.check import check_volume
from vfsd.feed import Feed
from vfsd.statevolume import StateVolume


class Reference:
    """The tree and the labelled checkpoints after each step, of a session that nobody ends."""

    def __init__(self, place: Path) -> None:
        self.trees: list[State] = [{}]
        self.held: list[dict[str, State]] = [{}]
        mount, held = Mount(place), dict[str, str]()

        async def play() -> None:
            for step in STEPS:
                await step(mount, held)
                self.trees.append(mount.state())
                self.held.append(labelled(mount))

        trio.run(play)
        mount.close()


def labelled(mount: Mount) -> dict[str, State]:
    return {mark.label: mount.past_state(mark.id) for mark in mount.checkpoints.all() if mark.cause == "user"}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_killed_at_every_point(tmp_path: Path) -> None:
    reference = Reference(tmp_path / "reference")
    program = Path(__file__).with_name("killed_checkpoints.py")
    done = subprocess.run([sys.executable, program, tmp_path / "k"], timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    places = sorted((tmp_path / "k").iterdir(), key=lambda p: int(p.name))
    assert len(places) > 2 * len(STEPS)
    for place in places:
        lines = (place / "done").read_text().splitlines()
        judge(place, len(lines), reference)


def judge(place: Path, returned: int, reference: Reference) -> None:
    """As after the steps that returned, or with the one that was under way as well."""
    volume = place / "main/root"
    assert check_volume(volume) == []
    mount = Mount(place)
    tree, held = mount.state(), labelled(mount)
    allowed = range(returned, min(returned + 2, len(reference.trees)))
    assert tree in [reference.trees[i] for i in allowed], (place.name, returned)
    assert held in [reference.held[i] for i in allowed], (place.name, returned)

    async def use() -> None:
        # All goes on: whatever else was left is dropped, and what is held can be gone back to.
        await mount.checkpoints.maintain()
        for mark in mount.checkpoints.all():
            await mount.checkpoints.restore(mark.id, ME)
            assert mount.state() == mount.past_state(mark.id)
        await mount.checkpoints.drop([mark.id for mark in mount.checkpoints.all()], ME)

    trio.run(use)
    mount.close()
    assert check_volume(volume) == []
    forked = place / "threads/forked"
    if forked.exists():
        assert check_volume(forked / "root") == []
        copy = StateVolume(0, SqliteBackend(forked / "root"), Feed(), lambda: 0)
        assert state_of(copy) == reference.held[7]["two"]
        copy.close()
    elif forked.parent.exists():
        # What a fork that was killed leaves is no thread, and the next fork of that name clears it away.
        assert all(name.startswith(".") for name in os.listdir(forked.parent))


def test_the_session_takes_what_it_says(tmp_path: Path) -> None:
    """The reference itself: two checkpoints, and both are gone at the end."""
    reference = Reference(tmp_path)
    assert set(reference.held[7]) == {"one", "two"}
    assert reference.held[-1] == {}
    assert set(reference.trees[-1]) == {b"/a", b"/d", b"/d/b", b"/d/c", b"/last"}
