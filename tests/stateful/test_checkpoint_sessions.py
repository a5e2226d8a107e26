"""Random changes of a tree among random checkpoints, restores, drops, forks, kills: what was held is what is found."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from checkpointed import ME, Mount, State, state_of

from vfsd.backends.sqlite import SqliteBackend
from vfsd.check import check_volume
from vfsd.core.types import SetAttr
from vfsd.feed import Feed
from vfsd.statevolume import StateVolume

STEPS = 160

pytestmark = pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")


class Walk:
    """One random walk; ``held`` has what each checkpoint must show."""

    def __init__(self, seed: int, home: Path) -> None:
        self.random = random.Random(seed)
        self.mount = Mount(home)
        self.held: dict[str, State] = {}
        self.forks = 0
        tree: list[Callable[[], None]] = [
            self.make, self.mkdir, self.write, self.replace, self.truncate, self.punch, self.unlink, self.rmdir,
            self.rename, self.link, self.symlink, self.xattr, self.chmod,
        ]  # fmt: skip
        whole: list[Callable[[], Awaitable[None]]] = [
            self.create, self.restore, self.drop, self.fork, self.compare, self.reopen, self.crash, self.maintain,
        ]  # fmt: skip
        self.tree, self.whole = tree, whole

    async def run(self) -> None:
        for _ in range(STEPS):
            if self.random.random() < 0.8:
                before = self.mount.state()
                try:
                    self.random.choice(self.tree)()
                except OSError:
                    assert self.mount.state() == before
            else:
                await self.random.choice(self.whole)()
        for name, state in self.held.items():
            assert self.mount.past_state(name) == state
            await self.mount.checkpoints.restore(name, ME)
            assert self.mount.state() == state
        await self.free_all()
        self.mount.close()
        assert check_volume(self.mount.place("/")) == []

    async def free_all(self) -> None:
        """With no checkpoint left every block is a file's or free."""
        await self.mount.checkpoints.drop([mark.id for mark in self.mount.checkpoints.all()], ME)
        await self.mount.root.maintain()
        store, nodes = self.mount.root.store, self.mount.root.tree.nodes.values()
        used = sum(store.blocks(node.id) for node in nodes if stat.S_ISREG(node.mode)) * 512
        free = store._data.free
        assert used + sum(free.runs.values()) + free._left + store._data.quarantined() == free.end

    # -- where

    def entries(self) -> list[tuple[int, bytes, Any]]:
        found: list[tuple[int, bytes, Any]] = []
        todo = [self.mount.root.root_ino]
        while todo:
            at = todo.pop()
            for name, node in self.mount.root.children(at):
                found.append((at, name, node))
                if stat.S_ISDIR(node.mode):
                    todo.append(node.ino)
        return found

    def entry(self, kind: int = 0) -> tuple[int, bytes, Any]:
        found = [e for e in self.entries() if not kind or stat.S_IFMT(e[2].mode) == kind]
        if not found:
            raise FileNotFoundError
        return self.random.choice(found)

    def directory(self) -> int:
        below = [e[2].ino for e in self.entries() if stat.S_ISDIR(e[2].mode)]
        return self.random.choice([self.mount.root.root_ino, *below])

    def name(self) -> bytes:
        return b"n%d" % self.random.randrange(10)

    def data(self) -> bytes:
        return self.random.randbytes(self.random.randrange(1, 9000))

    # -- changes

    def make(self) -> None:
        self.mount.root.mknod(self.directory(), self.name(), stat.S_IFREG | 0o644, 0, ME)

    def mkdir(self) -> None:
        self.mount.root.mkdir(self.directory(), self.name(), 0o755, ME)

    def write(self) -> None:
        self.mount.root.write(self.entry(stat.S_IFREG)[2].ino, 0, self.random.randrange(20000), self.data(), ME)

    def replace(self) -> None:
        self.mount.root.replace(self.entry(stat.S_IFREG)[2].ino, self.data(), ME)

    def truncate(self) -> None:
        self.mount.root.setattr(self.entry(stat.S_IFREG)[2].ino, SetAttr(size=self.random.randrange(20000)), ME)

    def punch(self) -> None:
        ino = self.entry(stat.S_IFREG)[2].ino
        self.mount.root.fallocate(ino, 0, 3, self.random.randrange(9000), self.random.randrange(1, 9000), ME)

    def unlink(self) -> None:
        at, name, _ = self.entry()
        self.mount.root.unlink(at, name, ME)

    def rmdir(self) -> None:
        at, name, _ = self.entry(stat.S_IFDIR)
        self.mount.root.rmdir(at, name, ME)

    def rename(self) -> None:
        at, name, _ = self.entry()
        self.mount.root.rename(at, name, self.directory(), self.name(), self.random.choice([0, 0, 0, 2]), ME)

    def link(self) -> None:
        self.mount.root.link(self.entry(stat.S_IFREG)[2].ino, self.directory(), self.name(), ME)

    def symlink(self) -> None:
        self.mount.root.symlink(self.directory(), self.name(), self.name(), ME)

    def xattr(self) -> None:
        self.mount.root.setxattr(self.entry()[2].ino, b"user." + self.name(), self.random.randbytes(3), 0, ME)

    def chmod(self) -> None:
        self.mount.root.setattr(self.entry()[2].ino, SetAttr(perm=self.random.choice([0o600, 0o644, 0o755])), ME)

    # -- checkpoints

    def some(self) -> str | None:
        return self.random.choice(list(self.held)) if self.held else None

    async def create(self) -> None:
        made = await self.mount.checkpoints.create("", ME)
        self.held[made["id"]] = self.mount.state()

    async def restore(self) -> None:
        name = self.some()
        if name is not None:
            before = self.mount.state()
            done = await self.mount.checkpoints.restore(name, ME)
            assert self.mount.state() == self.held[name]
            if done["before"] is not None:
                self.held[done["before"]] = before

    async def drop(self) -> None:
        name = self.some()
        if name is not None:
            await self.mount.checkpoints.drop([name], ME)
            del self.held[name]
            with pytest.raises(FileNotFoundError):
                self.mount.past_state(name)

    async def fork(self) -> None:
        name = self.some()
        if name is not None:
            self.forks += 1
            made = await self.mount.checkpoints.fork(name, f"t{self.forks}")
            (place,) = made["volumes"]
            assert check_volume(Path(place)) == []
            forked = StateVolume(0, SqliteBackend(Path(place)), Feed(), lambda: 0)
            assert state_of(forked) == self.held[name]
            forked.close()

    async def compare(self) -> None:
        name = self.some()
        if name is not None:
            then, now = self.held[name], self.mount.state()
            found = (await self.mount.checkpoints.diff(name, None, patch=False))["changes"]
            assert reached(then, found) == set(now)
            assert bool(found) == (without_links(then) != without_links(now))
            other = self.some()
            assert other is not None
            found = (await self.mount.checkpoints.diff(name, other, patch=False))["changes"]
            assert reached(then, found) == set(self.held[other])
            assert self.mount.past_state(name) == then

    async def reopen(self) -> None:
        state = self.mount.state()
        self.mount.close()
        assert check_volume(self.mount.place("/")) == []
        self.mount.open()
        assert self.mount.state() == state

    async def crash(self) -> None:
        state = self.mount.state()
        self.mount.crash()
        assert check_volume(self.mount.place("/")) == []
        self.mount.open()
        assert self.mount.state() == state

    async def maintain(self) -> None:
        if self.random.random() < 0.3:
            await self.mount.checkpoints.collect()
        else:
            await self.mount.root.maintain()


def without_links(state: State) -> State:
    return {path: (*seen[:3], *seen[4:]) for path, seen in state.items()}


def reached(then: State, changes: list[dict[str, Any]]) -> set[bytes]:
    """The paths there must be after the changes."""
    deleted = {c["path"] for c in changes if c["kind"] == "deleted"}
    renamed = {c["old_path"]: c["path"] for c in changes if c["kind"] == "renamed"}
    paths = {c["path"] for c in changes if c["kind"] == "added"}
    for path in then.keys() - deleted:
        above = path
        while above and above not in renamed:
            above = above.rpartition(b"/")[0]
        paths.add(renamed[above] + path[len(above) :] if above else path)
    return paths


@pytest.mark.parametrize("seed", range(int(os.environ.get("CHECKPOINT_SEEDS", "6"))))
def test_what_was_held_is_found(seed: int, tmp_path: Path) -> None:
    trio.run(Walk(seed, tmp_path).run)
