"""Space comes back: much is written through a tree that stays small, with checkpoints that come and go."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import trio
from checkpointed import ME, Mount

from vfsd.check import check_volume
from vfsd.config import CheckpointPolicy
from vfsd.past import checkpoints

MIB = 1 << 20
WRITTEN = int(os.environ.get("VFSD_CHURN_MIB", "1024")) * MIB
TREE = 100 * MIB
KEEP = 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_tree_that_stays_small_stays_small_on_disk(tmp_path: Path) -> None:
    mount = Mount(tmp_path, policy=CheckpointPolicy(every_calls=1, keep=KEEP))
    rng, written, most, turn = random.Random(1), 0, 0, 0
    sizes: dict[str, int] = {}
    block = rng.randbytes(2 * MIB)

    async def churn() -> None:
        nonlocal written, most, turn
        while written < WRITTEN:
            # A round of work: about a tenth of the tree is written anew, in files of all sizes.
            await mount.checkpoints.before_call(f"round {turn}", "", ME)
            turn += 1
            goal = written + TREE // 10
            while written < goal:
                path, size = f"/d{rng.randrange(20)}/f{rng.randrange(30)}", rng.choice([10, 5000, 300_000, 2 * MIB])
                while sum(sizes.values()) - sizes.get(path, 0) + size > TREE:
                    gone = rng.choice(list(sizes))
                    directory, _, name = gone.rpartition("/")
                    mount.root.unlink(mount.find(directory).ino, name.encode(), ME)
                    del sizes[gone]
                mount.write(path, block[:size])
                sizes[path] = size
                written += size
            await mount.root.maintain()
            await mount.checkpoints.maintain()
            most = max(most, mount.root.store.disk_used())
        # The checkpoints that stay hold what was changed since them, and no more.
        assert most < TREE + (KEEP + 1) * TREE // 10 + 40 * MIB
        await mount.checkpoints.drop([mark.id for mark in mount.checkpoints.all()], ME)
        await mount.checkpoints.collect()

    trio.run(churn)
    assert mount.root.store.disk_used() < sum(sizes.values()) + 20 * MIB
    print(f"{written >> 20} MiB written: disk at most {most >> 20} MiB, after gc {mount.root.store.disk_used() >> 20}")
    # Nor does the file get longer and longer, holes or not.
    assert os.stat(mount.place("/") / "data").st_size < TREE + (KEEP + 1) * TREE // 10 + 40 * MIB
    state = mount.state()
    assert {path.decode(): seen[4] for path, seen in state.items() if seen[0] >> 12 == 8} == sizes
    mount.close()
    assert check_volume(mount.place("/")) == []


def test_space_comes_back_by_itself_when_the_mount_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted and synced, with nobody asking for it: neither blocks nor length of the data file stay."""
    mount = Mount(tmp_path)
    data = mount.place("/") / "data"
    for i in range(40):
        mount.write(f"/f{i}", bytes([i]) * MIB)
    mount.write("/last", b"kept" * 1000)

    async def rest() -> None:
        for _ in range(2):
            await mount.root.maintain()
            await mount.checkpoints.maintain()

    async def work() -> None:
        await mount.root.maintain()
        await mount.checkpoints.create("one", ME)
        for i in range(40):
            mount.root.unlink(mount.root.root_ino, b"f%d" % i, ME)
        await mount.root.syncfs()
        await mount.checkpoints.drop([mark.id for mark in mount.checkpoints.all()], ME)
        for i in range(20):
            mount.write(f"/g{i}", bytes([i]) * MIB)
        for i in range(20):
            mount.root.unlink(mount.root.root_ino, b"g%d" % i, ME)
        await mount.root.syncfs()
        monkeypatch.setattr(checkpoints, "REST_SECONDS", -1.0)
        await rest()

    trio.run(work)
    assert mount.root.store.disk_used() < 8 * MIB
    # The one file that was written last lies behind what was deleted.
    assert data.stat().st_size < 42 * MIB and data.stat().st_blocks * 512 < 2 * MIB
    mount.root.replace(mount.find("/last").ino, b"kept" * 1000, ME)
    trio.run(rest)
    assert data.stat().st_size < 2 * MIB
    assert mount.state()[b"/last"][5] == b"kept" * 1000
    mount.close()
    assert check_volume(mount.place("/")) == []
