"""Both doors, checkpoints, restores, undo and kill -9 in random order against a plain model of the tree."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from daemons import Daemon

from agenttools import checkpoints, tools

STEPS = 90

Tree = dict[str, bytes | None]
"""Contents by path below the mount; None for a directory."""


class Session:
    """``model`` is what the tree must be, ``held`` what it was at each checkpoint."""

    def __init__(self, seed: int, daemon: Daemon) -> None:
        self.random = random.Random(seed)
        self.daemon = daemon
        self.model: Tree = {}
        self.held: dict[str, Tree] = {}

    def run(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (6, self.write_by_shell), (6, self.write_by_tool), (3, self.append), (3, self.edit), (2, self.mkdir),
            (3, self.rename), (2, self.remove_by_shell), (2, self.delete_by_tool), (3, self.create), (2, self.restore),
            (1, self.drop), (1, self.kill),
        ]  # fmt: skip
        for _ in range(STEPS):
            self.random.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()
            assert self.seen_by_shell() == self.model
        for name, tree in self.held.items():
            assert self.walked(self.daemon.point / ".checkpoints" / name) == tree

    # -- the tree as each door shows it

    def seen_by_shell(self) -> Tree:
        seen = self.walked(self.daemon.point)
        for path, content in seen.items():
            if content is not None and self.random.random() < 0.2:
                assert self.daemon.client.call("read", path=b"/" + os.fsencode(path))["data"] == content
        return seen

    @staticmethod
    def walked(top: Path) -> Tree:
        found: Tree = {}
        for above, directories, files in os.walk(top):
            for name in directories:
                found[os.path.relpath(os.path.join(above, name), top)] = None
            for name in files:
                path = os.path.join(above, name)
                found[os.path.relpath(path, top)] = Path(path).read_bytes()
        return found

    # -- where

    def directory(self) -> str:
        return self.random.choice(["", *(path + "/" for path, content in self.model.items() if content is None)])

    def fresh(self) -> str:
        return self.directory() + self.random.choice("abcde")

    def file(self) -> str | None:
        files = [path for path, content in self.model.items() if content is not None]
        return self.random.choice(files) if files else None

    def content(self) -> bytes:
        return self.random.choice([b"", b"line\n", self.random.randbytes(self.random.randrange(12_000))])

    def target(self) -> str | None:
        """A path that is a file or nothing."""
        path = self.fresh()
        return None if path in self.model and self.model[path] is None else path

    # -- changes

    def write_by_shell(self) -> None:
        path, content = self.target(), self.content()
        if path is not None:
            (self.daemon.point / path).write_bytes(content)
            self.model[path] = content

    def write_by_tool(self) -> None:
        path, content = self.target(), self.content()
        if path is not None:
            assert tools.write(self.daemon.client, "/" + path, content).error is None
            self.model[path] = content

    def append(self) -> None:
        path, content = self.file(), self.content()
        if path is not None:
            with open(self.daemon.point / path, "ab") as file:
                file.write(content)
            self.model[path] = (self.model[path] or b"") + content

    def edit(self) -> None:
        path = self.file()
        if path is not None and (self.model[path] or b"").count(b"line") == 1:
            old = self.model[path] or b""
            if tools.edit(self.daemon.client, "/" + path, "line", "LINE").error is None:
                self.model[path] = old.replace(b"line", b"LINE")

    def mkdir(self) -> None:
        path = self.fresh()
        if path not in self.model:
            (self.daemon.point / path).mkdir()
            self.model[path] = None

    def rename(self) -> None:
        path, new = self.file(), self.target()
        if path is not None and new is not None:
            (self.daemon.point / path).rename(self.daemon.point / new)
            self.model[new] = self.model.pop(path)

    def remove_by_shell(self) -> None:
        path = self.file()
        if path is not None:
            (self.daemon.point / path).unlink()
            del self.model[path]

    def delete_by_tool(self) -> None:
        if self.model:
            path = self.random.choice(list(self.model))
            assert tools.delete(self.daemon.client, "/" + path).error is None
            for gone in [p for p in self.model if p == path or p.startswith(path + "/")]:
                del self.model[gone]

    # -- checkpoints

    def create(self) -> None:
        made = checkpoints.create(self.daemon.client)
        assert made.error is None, made
        self.held[made.data["id"]] = dict(self.model)

    def restore(self) -> None:
        if self.held:
            name = self.random.choice(list(self.held))
            done = checkpoints.restore(self.daemon.client, name)
            assert done.error is None, done
            if done.data["before"] is not None:
                self.held[done.data["before"]] = self.model
            self.model = dict(self.held[name])

    def drop(self) -> None:
        if self.held:
            name = self.random.choice(list(self.held))
            assert checkpoints.drop(self.daemon.client, [name]).error is None
            del self.held[name]
            assert not (self.daemon.point / ".checkpoints" / name).exists()

    def kill(self) -> None:
        self.daemon.kill()
        self.daemon.start()


@pytest.mark.parametrize("seed", range(int(os.environ.get("CHECKPOINT_SEEDS", "2"))))
def test_nothing_held_or_acknowledged_is_lost(seed: int, engine: str, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, engine)
    try:
        daemon.start()
        Session(seed, daemon).run()
        daemon.stop()
    finally:
        daemon.abort()
