"""One store, used by a mount and by Deep Agents' own StoreBackend at once: both see the same files, both ways."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Postgres, World, wait_until

pytest.importorskip("deepagents")

from deepagents.backends.store import StoreBackend

pytestmark = [pytest.mark.mount, pytest.mark.filterwarnings("ignore")]
NAMESPACE = ("alice", "filesystem")
Place = tuple[str, Any]


@contextlib.contextmanager
def sqlite_store(path: Path) -> Iterator[Any]:
    from langgraph.store.sqlite import SqliteStore

    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
    store = SqliteStore(db)
    store.setup()
    yield store
    db.close()


@contextlib.contextmanager
def postgres_store(uri: str) -> Iterator[Any]:
    from langgraph.store.postgres import PostgresStore

    with PostgresStore.from_conn_string(uri) as store:
        store.setup()
        yield store


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """(location, store): the mount's place and the app's store on the same."""
    if request.param == "sqlite":
        with sqlite_store(tmp_path / "store.db") as store:
            yield f"sqlite:{tmp_path}/store.db", store
    else:
        server: Postgres = request.getfixturevalue("postgres")
        with postgres_store(server.uri) as store:
            yield server.uri, store


@pytest.fixture
def backend(place: Place) -> Any:
    return StoreBackend(store=place[1], namespace=lambda runtime: NAMESPACE)


@pytest.fixture
def mounted(place: Place, world: World) -> Callable[..., Path]:
    def mount(name: str = "one") -> Path:
        return world.mount(f"/m/=store:{place[0]}#{'/'.join(NAMESPACE)}", name=name) / "m"

    return mount


def test_what_the_shell_writes_the_app_reads(mounted: Callable[..., Path], backend: Any) -> None:
    m = mounted()
    (m / "notes").mkdir()
    (m / "notes" / "a.md").write_text("one\r\ntwo\n")
    (m / "bin").write_bytes(b"\xff\x00\x01")
    (m / "nul.txt").write_bytes(b"a\0b")
    (m / "empty").touch()
    assert backend.read("/notes/a.md").file_data["content"].replace("\r\n", "\n") == "one\ntwo\n"
    answers = backend.download_files(["/bin", "/nul.txt", "/empty", "/notes/a.md"])
    assert [a.content for a in answers] == [b"\xff\x00\x01", b"a\0b", b"", b"one\r\ntwo\n"]
    assert {e["path"] for e in backend.ls("/").entries} == {"/bin", "/empty", "/notes/", "/nul.txt"}
    (m / "notes").rename(m / "kept")
    assert [f["path"] for f in backend.glob("**/*.md").matches] == ["/kept/a.md"]
    (m / "kept" / "a.md").unlink()
    (m / "kept").rmdir()
    assert backend.read("/kept/a.md").error
    assert set(place_value(backend, "/bin")) == {"content", "encoding", "created_at", "modified_at"}


def place_value(backend: Any, key: str) -> Any:
    return backend._store.get(NAMESPACE, key).value


def test_what_the_app_writes_the_shell_reads_within_a_second(mounted: Callable[..., Path], backend: Any) -> None:
    m = mounted()
    backend.write("/deep/er/x.txt", "first")
    wait_until(lambda: (m / "deep/er/x.txt").read_text() == "first", 1.5)
    backend.edit("/deep/er/x.txt", "first", "second")
    wait_until(lambda: (m / "deep/er/x.txt").read_text() == "second", 1.5)
    backend.upload_files([("/b", b"\x80")])
    wait_until(lambda: (m / "b").read_bytes() == b"\x80", 1.5)
    with open(m / "deep/er/x.txt") as held:
        backend.delete("/deep")
        wait_until(lambda: not (m / "deep").exists(), 1.5)
        assert held.read() == "second"
    backend.write("/b", "again")
    backend.delete("/b")
    backend.write("/b", "newer")
    wait_until(lambda: (m / "b").read_bytes() == b"newer", 1.5)


def test_what_an_item_cannot_hold_is_kept_and_never_seen(mounted: Callable[..., Path], backend: Any) -> None:
    m = mounted()
    (m / "f").write_text("x")
    os.chmod(m / "f", 0o600)
    os.setxattr(m / "f", "user.k", b"v\0")
    with pytest.raises(OSError, match="not supported"):
        os.setxattr(
            m / "f",
            "system.posix_acl_access",
            bytes.fromhex("02000000 01000600ffffffff 04000400ffffffff 20000400ffffffff"),
        )
    os.link(m / "f", m / "g")
    os.symlink("f", m / "l")
    (m / "void" / "er").mkdir(parents=True)
    os.utime(m / "f", ns=(1, 1_234_567_890_123_456_789))
    assert {e["path"] for e in backend.ls("/").entries} == {"/f", "/g"}
    backend.write("/f", "rewritten")
    wait_until(lambda: (m / "g").read_text() == "rewritten", 1.5)
    st = os.stat(m / "f")
    assert (st.st_mode & 0o7777, st.st_nlink, os.getxattr(m / "f", "user.k")) == (0o600, 2, b"v\0")
    assert st.st_mtime_ns != 1_234_567_890_123_456_789
    assert os.readlink(m / "l") == "f"
    os.unlink(m / "g")
    backend.delete("/f")
    wait_until(lambda: not (m / "f").exists(), 1.5)
    wait_until(lambda: backend._store.get(("!vfsd", *NAMESPACE), "/f") is None, 1.5)
    backend.write("/f", "new")
    wait_until(lambda: os.stat(m / "f").st_mode & 0o777 == 0o644, 1.5)
    assert os.listdir(m / "void") == ["er"]


def test_legacy_items_and_what_is_no_file(mounted: Callable[..., Path], place: Place, world: World) -> None:
    store = place[1]
    store.put(NAMESPACE, "/old.txt", {"content": ["a", "b"], "created_at": "x", "modified_at": "2024-01-01T00:00:00"})
    store.put(NAMESPACE, "no slash", {"content": "x", "encoding": "utf-8"})
    store.put(NAMESPACE, "/thing", {"other": 1})
    store.put(NAMESPACE, "/both", {"content": "file", "encoding": "utf-8"})
    store.put(NAMESPACE, "/both/below", {"content": "below", "encoding": "utf-8"})
    store.put((*NAMESPACE, "inner"), "/inner", {"content": "x", "encoding": "utf-8"})
    m = mounted()
    assert sorted(os.listdir(m)) == ["both", "old.txt"]
    assert (m / "old.txt").read_text() == "a\nb"
    assert os.stat(m / "old.txt").st_mtime == 1704067200
    assert (m / "both" / "below").read_text() == "below"
    assert "'no slash'" in world.log()
    assert "'/thing'" in world.log()


def test_more_than_a_page_of_items(mounted: Callable[..., Path], place: Place) -> None:
    from langgraph.store.base import PutOp

    value = {"content": "x", "encoding": "utf-8", "created_at": "", "modified_at": ""}
    for start in range(0, 10_200, 400):
        keys = range(start, min(start + 400, 10_200))
        place[1].batch([PutOp(NAMESPACE, f"/d{i % 3}/{i:05}", dict(value)) for i in keys])
    m = mounted()
    assert sum(len(os.listdir(m / d)) for d in os.listdir(m)) == 10_200


def test_two_mounts_of_one_store(mounted: Callable[..., Path], world: World) -> None:
    from agenttools import tools
    from agenttools.client import Client

    a, b = mounted("one"), mounted("two")
    (a / "f").write_text("from one\n")
    wait_until(lambda: (b / "f").read_text() == "from one\n", 1.5)
    os.chmod(b / "f", 0o640)
    wait_until(lambda: os.stat(a / "f").st_mode & 0o777 == 0o640, 1.5)
    with Client(socket=world.socket("one")) as one, Client(socket=world.socket("two")) as two:
        known = one.call("read", path=b"/m/f", offset=0, length=100)["data"]
        assert tools.edit(two, "/m/f", "from", "edited by", False).error is None
        import xxhash

        expect = xxhash.xxh3_64_intdigest(known)
        with pytest.raises(OSError, match="changed since it was read"):
            one.call("write", path=b"/m/f", data=b"lost", expect=expect)
    assert (a / "f").read_text() == "edited by one\n"
    big = [letter * 300_000 for letter in "xy"]
    (a / "whole").write_text(big[0])
    (b / "whole").write_text(big[1])
    wait_until(lambda: (a / "whole").read_text() == (b / "whole").read_text() == big[1], 3)


def test_it_is_all_there_at_the_next_mount(mounted: Callable[..., Path], world: World) -> None:
    m = mounted()
    (m / "d").mkdir(mode=0o750)
    for i in range(30):
        (m / "d" / str(i)).write_text(str(i))
    os.symlink("d", m / "l")
    times = [os.stat(m / "d" / str(i)).st_mtime_ns for i in range(30)]
    world.umount()
    m = mounted()
    assert [(m / "l" / str(i)).read_text() for i in range(30)] == [str(i) for i in range(30)]
    assert [os.stat(m / "d" / str(i)).st_mtime_ns for i in range(30)] == times
    assert os.stat(m / "d").st_mode & 0o777 == 0o750


def test_what_was_closed_outlives_a_killed_daemon(mounted: Callable[..., Path], backend: Any, world: World) -> None:
    m = mounted()
    for i in range(20):
        (m / f"f{i}").write_text(str(i))
    pid = json.loads(world.vfsd("status", "--json").stdout)[0]["pid"]
    held = open(m / "open", "w")  # noqa: SIM115 (it is to be open when the daemon dies)
    held.write("never closed")
    held.flush()
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        held.close()
    answers = backend.download_files([f"/f{i}" for i in range(20)])
    assert [a.content for a in answers] == [str(i).encode() for i in range(20)]
    assert backend.read("/open").error
    wait_until(lambda: world.vfsd("umount", "one", code=None).returncode == 0)
    m = mounted("two")
    assert sorted(os.listdir(m)) == sorted(f"f{i}" for i in range(20))


def test_an_agent_on_the_same_tables_made_by_us(tmp_path: Path) -> None:
    """The SQLite tables that a mount makes are the ones that LangGraph would have made."""
    from waiting import store_at

    remote = store_at(tmp_path / "ours")
    remote.open()
    remote.close()

    def schema(path: Path) -> list[Any]:
        db = sqlite3.connect(path)
        columns = [db.execute(f"PRAGMA table_info({t})").fetchall() for t in ("store", "store_migrations")]
        indexes = db.execute("SELECT name FROM sqlite_master WHERE type = 'index' ORDER BY 1").fetchall()
        migrations = db.execute("SELECT v FROM store_migrations ORDER BY 1").fetchall()
        db.close()
        return [columns, indexes, migrations]

    with sqlite_store(tmp_path / "theirs.db"):
        pass
    assert schema(tmp_path / "ours" / "store.db") == schema(tmp_path / "theirs.db")


def test_names_of_one_file_that_an_app_writes(mounted: Callable[..., Path], backend: Any) -> None:
    """The mounts bring all names to what one of them got, and never over what the app wrote since."""
    one, two = mounted("one"), mounted("two")
    (one / "a").write_text("0\n")
    os.link(one / "a", one / "b")
    wait_until(lambda: os.stat(two / "b").st_nlink == 2)
    for n in (1, 3, 5):
        backend.write("/b", f"{n}\n")
        wait_until(lambda n=n: (one / "a").read_text() == f"{n}\n")
        backend.write("/a", f"{n + 1}\n")
        time.sleep(1.5)
        for read in (
            lambda: (one / "b").read_text(),
            lambda: (two / "a").read_text(),
            lambda: backend_text(backend, "/b"),
        ):
            wait_until(lambda read=read, n=n: read() == f"{n + 1}\n")
        assert backend_text(backend, "/a") == f"{n + 1}\n"
    assert os.stat(two / "a").st_ino == os.stat(two / "b").st_ino


def backend_text(backend: Any, path: str) -> str:
    return str(backend.read(path).file_data["content"])


def test_a_file_where_a_directory_is_needed(mounted: Callable[..., Path], place: Place) -> None:
    m = mounted()
    value = {"content": "file", "encoding": "utf-8", "created_at": "", "modified_at": ""}
    place[1].put(NAMESPACE, "/f", dict(value))
    wait_until(lambda: (m / "f").read_text() == "file")
    place[1].put(NAMESPACE, "/f/g", dict(value, content="below"))
    wait_until(lambda: (m / "f" / "g").read_text() == "below")
    place[1].delete(NAMESPACE, "/f/g")
    wait_until(lambda: (m / "f").read_text() == "file")


def test_links_that_others_made_or_changed(world: World, tmp_path: Path) -> None:
    route = f"/m/=store:sqlite:{tmp_path}/links.db"
    one, two = world.mount(route) / "m", world.mount(route, name="two") / "m"
    os.symlink("here", one / "link")
    os.mkfifo(one / "pipe")
    (two / "mark").write_text("x")
    wait_until(lambda: os.readlink(two / "link") == "here" and (one / "mark").exists())
    # Its own links come back to the first mount as news too, and stay what they are.
    os.symlink("there", one / "new")
    os.rename(one / "new", one / "link")
    (two / "mark").write_text("y")
    wait_until(lambda: os.readlink(two / "link") == "there" and (one / "mark").read_text() == "y")
    for place in (one, two):
        assert os.readlink(place / "link") == "there"
        os.lstat(place / "pipe")
    os.unlink(one / "link")
    os.unlink(one / "pipe")
    wait_until(lambda: os.listdir(two) == ["mark"])
