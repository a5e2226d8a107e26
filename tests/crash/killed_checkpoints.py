"""Kills a process at each point of a session of checkpoints; run as a program.

``killed_checkpoints.py BASE``: for k = 0, 1, ... a child plays the session on ``BASE/k`` and kills itself at the kth
point, until one gets to the end. ``BASE/k/done`` has one line for each step that had returned. Points: before and after
a journal record, after the journal turns, inside and after the transaction of a fold, before and after a fork's
directory gets its name.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import trio
from checkpointed import ME, Mount

from vfsd.backends import database, history
from vfsd.backends.journal import Journal
from vfsd.past import fork

Step = Callable[[Mount, dict[str, str]], Awaitable[None]]


def change(path: str, data: bytes) -> Step:
    """Write a file, in one commit."""

    async def step(mount: Mount, held: dict[str, str]) -> None:
        mount.write(path, data)

    return step


async def mkdir(mount: Mount, held: dict[str, str]) -> None:
    mount.root.mkdir(mount.root.root_ino, b"d", 0o755, ME)


def create(name: str) -> Step:
    async def step(mount: Mount, held: dict[str, str]) -> None:
        held[name] = (await mount.checkpoints.create(name, ME))["id"]

    return step


def restore(name: str) -> Step:
    async def step(mount: Mount, held: dict[str, str]) -> None:
        await mount.checkpoints.restore(held[name], ME)

    return step


def drop(name: str) -> Step:
    async def step(mount: Mount, held: dict[str, str]) -> None:
        await mount.checkpoints.drop([held[name]], ME)

    return step


async def maintain(mount: Mount, held: dict[str, str]) -> None:
    await mount.root.maintain()


async def gc(mount: Mount, held: dict[str, str]) -> None:
    await mount.checkpoints.collect()


async def make_fork(mount: Mount, held: dict[str, str]) -> None:
    await mount.checkpoints.fork(held["two"], "forked")


STEPS: list[Step] = [
    change("/a", b"one"),
    mkdir,
    change("/d/b", b"b" * 10_000),
    create("one"),
    change("/a", b"two" * 3000),
    change("/d/c", b"c"),
    create("two"),
    maintain,
    change("/d/b", b"B" * 5000),
    restore("one"),
    change("/a", b"three"),
    restore("two"),
    make_fork,
    drop("one"),
    change("/e", b"e" * 9000),
    gc,
    change("/a", b"four"),
    restore("two"),
    drop("two"),
    change("/last", b"last"),
]


class Points:
    """Counts the points passed; at the one that was chosen the process dies."""

    def __init__(self, fatal: int) -> None:
        self.left = fatal

    def passed(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def around(self, owner: Any, name: str, *, before: bool = True) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.passed()
            result = real(*args, **kwargs)
            self.passed()
            return result

        setattr(owner, name, call)


async def play(place: Path, fatal: int) -> None:
    points = Points(fatal)
    place.mkdir(parents=True)
    with open(place / "done", "a", buffering=1) as done:
        mount, held = Mount(place), dict[str, str]()
        points.around(Journal, "append")
        points.around(Journal, "rotate", before=False)
        points.around(Journal, "clear_folded")
        points.around(database, "fold", before=False)
        points.around(history, "keep")
        points.around(history, "drop", before=False)
        points.around(fork.os, "rename")
        for i, step in enumerate(STEPS):
            await step(mount, held)
            done.write(f"{i}\n")
        mount.close()


def main(base: Path) -> None:
    k = 0
    while True:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                trio.run(play, base / str(k), k)
                status = 0
            finally:
                os._exit(status)
        result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if result == 0:
            return
        if result != -signal.SIGKILL:
            sys.exit(f"child {k} ended with status {result}")
        k += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
