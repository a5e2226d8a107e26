"""Both doors, searches and checkpoints for a while: afterwards the daemon holds no more than before.

``VFSD_SOAK_MINUTES=60 pytest tests/mount/test_soak.py`` does it for an hour; in the suite it is seconds.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon

from agenttools import checkpoints, tools
from agenttools.client import Client

SECONDS = float(os.environ.get("VFSD_SOAK_MINUTES", "0.1")) * 60
FILES = 400
SPARE = 3
"""Descriptors that may come on top: SQLite keeps those of closed connections for the next ones while another connection
has the file open (unix.c, pending closes), so there are as many as were ever open at once."""

GROWTH = 12 << 20
"""Bytes of memory that may come on top: what an allocator does not give back, not what is kept for each operation."""

pytestmark = [pytest.mark.mount, pytest.mark.slow, pytest.mark.timeout(300 + 2 * SECONDS)]


@pytest.fixture(params=["native", "pyfuse3"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path, request.param)
    made.start()
    try:
        yield made
        made.stop()
    finally:
        made.abort()


def held(daemon: Daemon) -> dict[str, int]:
    """What the daemon holds, at rest."""
    assert daemon.process is not None
    proc = Path(f"/proc/{daemon.process.pid}")
    status = daemon.client.call("status")
    return {
        "descriptors": len(os.listdir(proc / "fd")),
        "handles": status["counters"]["open"],
        "connections": status["connections"],
        "tasks": status["tasks"],
        "nodes": status["counters"]["nodes"],
        "memory": int((proc / "status").read_text().partition("RssAnon:")[2].split()[0]) * 1024,
    }


def files(daemon: Daemon) -> list[str]:
    """What the daemon has open."""
    assert daemon.process is not None
    place = f"/proc/{daemon.process.pid}/fd"
    return sorted(os.readlink(f"{place}/{fd}") for fd in os.listdir(place))


class Work:
    """Who works on the tree until ``ends``; what goes wrong is kept for the test."""

    def __init__(self, daemon: Daemon, seconds: float) -> None:
        self.daemon = daemon
        self.ends = time.monotonic() + seconds
        self.failed: list[BaseException] = []
        self.rounds: dict[str, int] = {}

    def run(self, *workers: Callable[[random.Random, Path], object]) -> None:
        threads = [threading.Thread(target=self._loop, args=(worker, i)) for i, worker in enumerate(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]
        assert all(self.rounds.get(worker.__name__) for worker in workers), self.rounds

    def _loop(self, worker: Callable[[random.Random, Path], object], number: int) -> None:
        chance, place = random.Random(number), self.daemon.point / worker.__name__
        place.mkdir(exist_ok=True)
        try:
            while True:
                worker(chance, place)
                self.rounds[worker.__name__] = self.rounds.get(worker.__name__, 0) + 1
                if time.monotonic() > self.ends:
                    break
            shutil.rmtree(place)
        except BaseException as exc:
            self.failed.append(exc)

    def shell(self, chance: random.Random, place: Path) -> None:
        for _ in range(50):
            path = place / f"f{chance.randrange(FILES)}"
            path.write_bytes(chance.randbytes(chance.choice((10, 5000, 200_000))))
            assert path.stat().st_size
            with contextlib.suppress(FileNotFoundError):
                os.rename(place / f"f{chance.randrange(FILES)}", path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place / f"f{chance.randrange(FILES)}")
            with contextlib.suppress(FileNotFoundError), open(place / f"f{chance.randrange(FILES)}", "rb") as file:
                file.seek(4000)
                file.read()
        assert len(os.listdir(place)) <= FILES

    def programs(self, chance: random.Random, place: Path) -> None:
        tree = place / "tree"
        script = "mkdir -p $0/a/b && for i in 1 2 3 4 5; do echo $i > $0/a/b/$i; done && cp -r $0/a $0/c && rm -r $0"
        subprocess.run(["sh", "-c", script, str(tree)], check=True, timeout=120)

    def by_tool(self, chance: random.Random, place: Path) -> None:
        with Client(socket=self.daemon.socket) as client:
            for _ in range(30):
                path = f"/{place.name}/t{chance.randrange(FILES)}"
                assert tools.write(client, path, f"number {chance.random()}\n" * chance.randrange(1, 500)).error is None
                assert tools.edit(client, path, "number", "figure", replace_all=True).error is None
                assert tools.read(client, path).error is None
                assert tools.delete(client, path).error is None

    def searches(self, chance: random.Random, place: Path) -> None:
        with Client(socket=self.daemon.socket) as client:
            assert tools.grep(client, "figure", "/").error is None
            assert tools.glob(client, "**/*[0-5]", "/").error is None

    def going_back(self, chance: random.Random, place: Path) -> None:
        (place / "kept").write_text(str(chance.random()))
        with Client(socket=self.daemon.socket) as client:
            made = checkpoints.create(client)
            assert made.error is None
            assert checkpoints.diff(client, made.data["id"]).error is None
            assert checkpoints.drop(client, [made.data["id"]]).error is None


def rested(daemon: Daemon, usual: dict[str, int] | None = None) -> dict[str, int]:
    """What is held once maintenance has had its turn and, where ``usual`` is given, all else is as usual."""
    counted: Any = {}
    for _ in range(60):
        time.sleep(0.5)
        before, counted = counted, held(daemon)
        still = all(before.get(key) == counted[key] for key in counted if key != "memory")
        counts = ("handles", "connections", "tasks", "nodes")
        if still and (usual is None or all(counted[key] <= usual[key] for key in counts)):
            break
    return dict(counted)


def test_nothing_grows(daemon: Daemon) -> None:
    def work(seconds: float) -> None:
        w = Work(daemon, seconds)
        w.run(w.shell, w.programs, w.by_tool, w.searches, w.going_back)

    work(min(60.0, max(4.0, SECONDS / 4)))
    usual = rested(daemon)
    work(SECONDS)
    after = rested(daemon, usual)
    print(f"before {usual}\nafter {after}")
    for key in ("descriptors", "handles", "connections", "tasks", "nodes"):
        assert after[key] <= usual[key] + (SPARE if key == "descriptors" else 0), (key, usual, after, files(daemon))
    assert after["memory"] <= usual["memory"] + GROWTH, (usual, after)
