"""A tree that only we change: the kernel opens files by itself, and nothing is lost by it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import World

from agenttools import tools
from agenttools.client import Client

pytestmark = pytest.mark.mount

SECONDS = 20
"""The most that anything here may take to come about."""


class Place:
    """A mount of a state route, with more of a configuration."""

    def __init__(self, base: Path) -> None:
        self.world = World(base)
        self.mp = self.world.mp

    def mount(self, also: str = "", first: str = "") -> Client:
        file = self.world.base / "vfsd.toml"
        (self.world.base / "l").mkdir(exist_ok=True)
        file.write_text(f'{first}\n[routes."/"]\nkind = "state"\nlocation = "{self.world.base}/root"\n{also}')
        self.world.vfsd("mount", "--config", file, self.mp)
        return Client(socket=self.world.run_dir / "vfsd/default.sock")

    def asked(self, *operations: str) -> int:
        """How often the kernel has asked for one of these."""
        done = self.world.status()["operations"]["fuse"]
        return sum(done[one]["count"] for one in operations if one in done)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.world.clean()


def wait_for(what: str, until: Any) -> None:
    for _ in range(SECONDS * 20):
        if until():
            return
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {SECONDS} s")


def test_a_warm_file_is_read_without_asking(place: Place) -> None:
    with place.mount() as client:
        assert place.world.status()["opens"] == "by the kernel"
        (place.mp / "f").write_text("first")
        assert (place.mp / "f").read_text() == "first"
        before = place.asked("open", "read", "release", "flush", "lookup", "getattr")
        for _ in range(10):
            assert (place.mp / "f").read_text() == "first"
        # The status itself looks at the mountpoint.
        assert place.asked("open", "read", "release", "flush", "lookup", "getattr") - before < 5
        tools.write(client, "/f", "second, by a tool")
        assert (place.mp / "f").read_text() == "second, by a tool"
        with open(place.mp / "f") as held:
            tools.write(client, "/f", "3")
            assert held.read() == "3"
            tools.write(client, "/f", "more than before")
            held.seek(0)
            assert held.read() == "more than before"


@pytest.mark.parametrize(
    ("also", "first", "why"),
    [
        ("", 'opens = "heard"', 'opens = "heard"'),
        ("", 'engine = "pyfuse3"', "engine pyfuse3"),
        ("", "root_squash = true", "root_squash"),
        ('[routes."/l/"]\nkind = "local"\nlocation = "l"\n', "", "route /l/ is of kind local"),
        ('[[rules]]\noperations = ["read"]\npaths = ["/x"]\nmode = "deny"\n', "", "rules"),
        ("[audit]\nreads = true\n", "", "the audit of reads"),
    ],
)
def test_opens_are_heard_where_somebody_has_to_hear(place: Place, also: str, first: str, why: str) -> None:
    with place.mount(also, first):
        assert place.world.status()["opens"] == f"heard: {why}"
        assert f"opens heard: {why}" in place.world.vfsd("status").stdout
        if not first.startswith("root_squash"):  # root is nobody then
            (place.mp / "f").write_text("x")
        with os.scandir(place.mp) as listing, contextlib.suppress(FileNotFoundError), open(place.mp / "f") as held:
            list(listing)
            assert held.read() == "x"
            assert place.world.status()["counters"]["open"] > 0


def test_files_without_a_name_live_as_long_as_they_are_open(place: Place) -> None:
    with place.mount() as client:
        (place.mp / "f").write_bytes(b"x" * 100_000)
        with open(place.mp / "f", "r+b") as held:
            os.unlink(place.mp / "f")
            held.write(b"y")
            held.flush()
            assert os.fstat(held.fileno()).st_nlink == 0
            os.posix_fadvise(held.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            held.seek(0)
            assert held.read() == b"y" + b"x" * 99_999
        with open(os.open(place.mp, os.O_TMPFILE | os.O_RDWR), "w+b") as held:
            held.write(b"z")
            held.flush()
            held.seek(0)
            assert held.read() == b"z"
        wait_for("both are gone", lambda: place.world.status()["counters"]["bytes"] == 0)
        assert tools.ls(client, "/").entries == []


def test_the_log_of_changes_shows_each_new_line_to_who_has_it_open(place: Place) -> None:
    with place.mount(), open(place.mp / ".vfsd/log.ndjson", "rb") as log:
        (place.mp / "f0").touch()
        seen = log.read()
        for i in range(1, 30):
            (place.mp / f"f{i}").touch()
            wait_for("the line", lambda: _more(log, seen))  # noqa: B023
            log.seek(0)
            now = log.read()
            assert now.startswith(seen) and b"\0" not in now and f"/f{i}".encode() in now
            os.listdir(place.mp / ".vfsd")
            seen = now


def test_who_only_reads_on_sees_each_new_line_at_once(place: Place) -> None:
    with place.mount(), open(place.mp / ".vfsd/log.ndjson", "rb", buffering=0) as log:
        for i in range(100):
            (place.mp / f"f{i}").touch()
            line = log.read(1 << 16)
            assert line.endswith(b"\n") and f'"/f{i}"'.encode() in line and b"\0" not in line
            if i % 3 == 0:
                assert log.read(10) == b""


def _more(log: Any, seen: bytes) -> bool:
    return os.fstat(log.fileno()).st_size > len(seen)


def test_a_host_directory_that_comes_later_shows_what_the_host_writes(place: Place, tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    (host / "f").write_text("a" * 10)
    with place.mount():
        place.world.vfsd("route", "add", f"/host/=local:{host}")
        with open(place.mp / "host/f") as held:
            assert held.read() == "a" * 10
            with open(host / "f", "a") as more:
                more.write("b" * 10)
            wait_for("the size", lambda: os.fstat(held.fileno()).st_size == 20)
            held.seek(0)
            assert held.read() == "a" * 10 + "b" * 10
            (place.mp / "host/g").write_text("mine")
            assert (host / "g").read_text() == "mine"
            os.unlink(place.mp / "host/f")
            held.seek(0)
            assert held.read() == "a" * 10 + "b" * 10


def test_a_route_that_comes_later_has_what_was_written_soon_after(place: Place, tmp_path: Path) -> None:
    database = tmp_path / "store.db"
    with place.mount() as client:
        place.world.vfsd("route", "add", f"/b/=store:sqlite:{database}")

        def stored(name: str) -> str:
            with contextlib.closing(sqlite3.connect(database)) as db:
                return str(
                    db.execute("SELECT group_concat(value) FROM store WHERE key LIKE ?", (f"%{name}",)).fetchone()[0]
                )

        with open(place.mp / "b/f", "wb", buffering=0) as writer:
            for _ in range(50):
                writer.write(b"x" * 1000)
        assert tools.read(client, "/b/f").content == "x" * 50_000
        wait_for("it is stored", lambda: "x" * 50_000 in stored("f"))
        with open(place.mp / "b/g", "wb", buffering=0) as writer:
            writer.write(b"now")
            os.fsync(writer.fileno())
            assert "now" in stored("g")
        (place.mp / "b/h").write_bytes(b"at the end")
    place.world.vfsd("umount", "default")
    assert "at the end" in stored("h")


def test_rules_that_come_later_hold_at_each_read_and_write(place: Place) -> None:
    with place.mount() as client:
        (place.mp / "secret").write_text("s" * 10)
        (place.mp / "fixed").write_text("f")
        with open(place.mp / "secret") as reader, open(place.mp / "fixed", "r+b", buffering=0) as writer:
            assert reader.read() == "s" * 10
            deny = [
                {"operations": ["read"], "paths": ["/secret"], "mode": "deny"},
                {"operations": ["write"], "paths": ["/fixed"], "mode": "deny"},
            ]
            client.call("rules_set", owner="agent", rules=deny)
            reader.seek(0)
            with pytest.raises(PermissionError):
                reader.read()
            with pytest.raises(PermissionError):
                writer.write(b"x")
        for refused in ((place.mp / "secret").read_text, lambda: (place.mp / "fixed").write_text("x")):
            with pytest.raises(PermissionError):
                refused()
        ask = [{"operations": ["read", "write"], "paths": ["/secret"], "mode": "interrupt"}]
        client.call("rules_set", owner="agent", rules=ask, waits=False)
        for refused in ((place.mp / "secret").read_text, lambda: os.truncate(place.mp / "secret", 1)):
            with pytest.raises(PermissionError):
                refused()
        with open(place.mp / "secret", "r+b", buffering=0) as writer, pytest.raises(PermissionError):
            writer.write(b"x")
        client.call("rules_set", owner="agent", rules=[])
        assert (place.mp / "secret").read_text() == "s" * 10
        assert (place.mp / "fixed").read_text() == "f"


@contextlib.contextmanager
def holding(file: Path, how: str) -> Iterator[None]:
    """A program that has the file open (``r``, ``r+``), or mapped and then closed (``map``)."""
    mapped = "import mmap; m = mmap.mmap(f.fileno(), 0); f.close()" if how == "map" else "pass"
    code = f"import sys; f = open(sys.argv[1], {'r+' if how == 'map' else how!r}); {mapped}; print('on'); input()"
    program = subprocess.Popen(["python3", "-uc", code, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stdout.readline() == b"on\n"
    try:
        yield
    finally:
        program.communicate(b"\n", timeout=SECONDS)


@pytest.mark.parametrize("how", ["r+", "map"])
def test_a_restore_takes_no_file_from_under_who_writes_it(place: Place, how: str) -> None:
    with place.mount():
        (place.mp / "a").write_text("old")
        place.world.vfsd("checkpoint", "create", "then")
        (place.mp / "a").write_text("new")
        with holding(place.mp / "a", how):
            said = place.world.refused("checkpoint", "restore", "then")
            assert "/a is open for writing and would change: close it first; nothing was changed" in said
        place.world.vfsd("checkpoint", "restore", "then")
        assert (place.mp / "a").read_text() == "old"


def test_who_reads_a_file_keeps_it_as_it_was_before_a_restore(place: Place) -> None:
    with place.mount():
        (place.mp / "a").write_text("old")
        place.world.vfsd("checkpoint", "create", "then")
        (place.mp / "a").write_text("newer")
        with open(place.mp / "a") as reader:
            assert reader.read() == "newer"
            place.world.vfsd("checkpoint", "restore", "then")
            assert (place.mp / "a").read_text() == "old"
            reader.seek(0)
            assert reader.read() == "newer"


def test_truncation_by_open_reaches_the_tree(place: Place) -> None:
    with place.mount() as client:
        (place.mp / "f").write_text("long enough")
        os.close(os.open(place.mp / "f", os.O_WRONLY | os.O_TRUNC))
        assert (place.mp / "f").stat().st_size == 0
        assert tools.read(client, "/f").content in ("", None)
        with pytest.raises(FileExistsError):
            os.open(place.mp / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        with open(place.mp / "f", "w+b") as file:
            file.truncate(8192)
            with mmap.mmap(file.fileno(), 8192) as mapped:
                mapped[:4] = b"mmap"
                mapped.flush()
        assert client.call("read", path=b"/f")["data"][:5] == b"mmap\0"
        with pytest.raises(OSError) as refused:
            os.open(place.mp / "missing", os.O_RDONLY)
        assert refused.value.errno == errno.ENOENT
