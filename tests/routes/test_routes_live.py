"""Routes added and removed while mounted, broken ones, nested ones, and searches above them."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest
from servers import Postgres, World, wait_until

from agenttools import tools
from agenttools.client import Client

pytestmark = pytest.mark.mount


def test_added_and_removed_while_mounted(world: World, tmp_path: Path) -> None:
    m = world.mount()
    assert not (m / "late").exists()
    store = f"sqlite:{tmp_path}/s.db"
    assert "/late/ store" in world.vfsd("route", "add", f"/late/=store:{store}", "--name", "one").stdout
    (m / "late" / "f").write_text("kept\n")
    assert os.listdir(m) == ["late"]
    assert "/late/ store sqlite:" in world.vfsd("route", "list", "--name", "one").stdout
    with Client(socket=world.socket()) as client:
        assert tools.read(client, "/late/f").content == "kept\n"
        world.vfsd("route", "add", f"/late/=store:{store}", "--name", "one", code=1)
        with open(m / "late" / "f"):
            assert "open" in world.vfsd("route", "remove", "/late", "--name", "one", code=1).stderr
        world.vfsd("route", "remove", "/late", "--name", "one")
        assert not (m / "late").exists()
        assert os.listdir(m) == []
        assert tools.read(client, "/late/f").error
    world.vfsd("route", "add", f"/back/=store:{store}", "--name", "one")
    assert (m / "back" / "f").read_text() == "kept\n"
    world.umount()


def test_a_removal_waits_for_what_is_being_closed(world: World, tmp_path: Path) -> None:
    m = world.mount("/late/=memory")
    (m / "late" / "f").write_text("x")
    file = open(m / "late" / "f")  # noqa: SIM115
    closing = threading.Timer(0.1, file.close)
    with Client(socket=world.socket()) as client:
        closing.start()
        client.call("route", action="remove", prefix="/late/")
    closing.join()
    assert not (m / "late").exists()
    world.umount()


def test_an_added_route_does_not_share_the_files_of_a_volume(world: World, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    world.mount(f"/v/=state:{volume}")
    for where in (f"local:{volume}", f"local:{tmp_path}", f"state:{volume}/sub", f"blob:{volume}/blobs"):
        refused = world.vfsd("route", "add", f"/x/={where}", "--name", "one", code=1).stderr
        assert refused.startswith("vfsd: routes /v/ and /x/ both use "), refused
    world.vfsd("route", "add", f"/x/=state:{tmp_path}/other", "--name", "one")


def test_nested_routes_and_searches_from_above(world: World, tmp_path: Path) -> None:
    m = world.mount(
        f"/mem/=store:sqlite:{tmp_path}/a.db",
        f"/mem/projects/=store:sqlite:{tmp_path}/b.db#projects",
        "/deep/er/=memory",
    )
    (m / "mem" / "one.md").write_text("deadline one\n")
    (m / "mem" / "projects" / "two.md").write_text("deadline two\n")
    assert sorted(os.listdir(m / "mem")) == ["one.md", "projects"]
    with Client(socket=world.socket()) as client:
        found = tools.grep(client, "deadline", "/")
        assert [match.path for match in found.matches or []] == ["/mem/one.md", "/mem/projects/two.md"]
        assert [e.path for e in tools.glob(client, "*.md", "/mem").matches or []] == [
            "/mem/one.md", "/mem/projects/two.md",
        ]  # fmt: skip
        missing = tools.read(client, "/mem/projects/no.md").error
        assert missing is not None
        assert "/mem/projects/no.md" in missing
    grep = subprocess.run(["grep", "-rl", "deadline", "."], cwd=m, capture_output=True, text=True, check=True)
    assert sorted(grep.stdout.split()) == ["./mem/one.md", "./mem/projects/two.md"]
    with pytest.raises(OSError, match="cross-device"):
        os.rename(m / "mem" / "one.md", m / "mem" / "projects" / "one.md")
    subprocess.run(["mv", "mem/one.md", "mem/projects/"], cwd=m, check=True)
    assert (m / "mem" / "projects" / "one.md").read_text() == "deadline one\n"


def test_a_route_that_cannot_work_says_which_and_why(world: World, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    bad = {
        "/name/": (f"store:sqlite:{tmp_path}/x.db#a.b", "namespace component 'a.b'"),
        "/hole/": (f"store:sqlite:{tmp_path}/x.db#" + "{nobody}", "{nobody}"),
        "/directory/": (f"store:sqlite:{tmp_path}/d", ""),
        "/down/": (f"store:postgresql://nobody@/none?host={tmp_path}", "connection"),
        "/module/": ("backend:factory:no_such_module:make", "no_such_module"),
        "/nonsense/": ("backend:factory:factories:nonsense", "no ls"),
        "/raises/": ("store:factory:factories:raises", "made to fail"),
        "/nothing/": ("store:factory:factories:nothing", "NoneType"),
        "/later/": ("backend:factory:factories:later", "coroutine"),
        "/function/": ("backend:factory:factories:no_such_function", "no function 'no_such_function'"),
        "/number/": ("store:factory:factories:nonsense", "no LangGraph BaseStore"),
    }
    m = world.mount(*(f"{prefix}={text}" for prefix, (text, _) in bad.items()), f"/good/=store:sqlite:{tmp_path}/g.db")
    for prefix, (_, why) in bad.items():
        lines = [line for line in world.said.splitlines() if f"route {prefix} " in line]
        assert len(lines) == 1
        assert why in lines[0]
        with pytest.raises(OSError, match="Input/output error"):
            os.listdir(m / prefix.strip("/"))
        with pytest.raises(OSError, match="Input/output error"):
            (m / prefix.strip("/") / "f").write_text("x")
    (m / "good" / "f").write_text("x")
    assert (m / "good" / "f").read_text() == "x"


def test_a_place_that_is_none_is_refused_and_recorded_nowhere(world: World, tmp_path: Path) -> None:
    why = "route /r/: a store has no scheme 'redis': use sqlite:PATH, postgresql://"
    config = tmp_path / "vfsd.toml"
    plain = '[routes."/"]\nkind = "memory"\n'
    config.write_text(plain)
    (tmp_path / "mnt").mkdir()
    world.vfsd("mount", tmp_path / "mnt", "--name", "two", "--config", config)
    config.write_text(f'{plain}[routes."/r/"]\nkind = "store"\nlocation = "redis://:secret@x"\n')
    try:
        for args, code in (
            (("mount", tmp_path, "--route", "/r/=store:redis://:secret@x"), 2),
            (("mount", tmp_path, "--config", config), 1),
            (("route", "add", "/r/=store:redis://:secret@x", "--name", "two"), 2),
            (("reload", "two"), 1),
        ):
            said = world.vfsd(*args, code=code).stderr
            assert why in said
            assert len(said.splitlines()) == 1
            assert "secret" not in said
        assert "/r/" not in world.vfsd("status", "--json").stdout
        assert not (tmp_path / "state/vfsd/places").exists()
    finally:
        world.vfsd("umount", "two")


def test_what_a_new_route_would_hide(world: World, tmp_path: Path) -> None:
    m = world.mount("/m/=memory", "/deep/er/=memory", f"/store/=store:sqlite:{tmp_path}/s.db")
    with Client(socket=world.socket()) as client:

        def added(prefix: str) -> list[str]:
            warnings: list[str] = client.call("route", action="add", route=f"{prefix}=memory")["route"]["warnings"]
            return warnings

        for top, at in ((m, "/"), (m / "m", "/m/"), (m / "store", "/store/")):
            (top / "file").write_text("seen\n")
            (top / "link").symlink_to("full")
            (top / "full").mkdir()
            (top / "full" / "a").write_text("a\n")
            (top / "empty").mkdir()
            for name, what in (("file", "a file"), ("link", "a symbolic link"), ("file/below", "a file")):
                first = name.partition("/")[0]
                why = f"route {at}{name}/ can't be added: {at}{first} is {what} in the tree: move or delete it first"
                with pytest.raises(OSError, match=why):
                    added(at + name)
            assert (top / "file").read_text() == "seen\n"
            assert added(f"{at}full") == [f"route {at}full/ hides 1 entry of the tree until it is removed"]
            assert os.listdir(top / "full") == []
            assert added(f"{at}empty") == []
            client.call("route", action="remove", prefix=f"{at}full")
            assert os.listdir(top / "full") == ["a"]
        why = "route /deep/ can't be added: route /deep/er/ is mounted there, which it would hide: remove that first"
        with pytest.raises(OSError, match=why):
            added("/deep")
    done = world.vfsd("route", "add", "/full=memory", "--name", "one")
    assert done.stderr == "vfsd: route /full/ hides 1 entry of the tree until it is removed\n"


def test_a_database_in_no_directory_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "mnt-two").mkdir()
    missing = tmp_path / "typo" / "deep"
    route = f"/m/=store:sqlite:{missing}/x.db"
    why = f"route /m/: location sqlite:{missing}/x.db: there is no directory {missing}: mkdir -p {missing}"
    assert world.vfsd("mount", tmp_path / "mnt-two", "--route", route, code=1).stderr == f"vfsd: {why}\n"
    world.mount()
    assert why in world.vfsd("route", "add", route, "--name", "one", code=1).stderr
    assert not missing.parent.exists()
    assert not (tmp_path / "state/vfsd/places").exists()
    # The default one is vfsd's own.
    world.vfsd("route", "add", "/memories/=store", "--name", "one")
    assert (tmp_path / "state/vfsd/memories.db").exists()


@pytest.mark.parametrize("kind", ["state", "blob"])
def test_a_location_below_no_directory_is_refused(world: World, tmp_path: Path, kind: str) -> None:
    (tmp_path / "mnt-two").mkdir()
    missing = tmp_path / "typo" / "deep"
    route = f"/m/={kind}:{missing}/x"
    why = f"route /m/: location {missing}/x: there is no directory {missing}: mkdir -p {missing}"
    assert world.vfsd("mount", tmp_path / "mnt-two", "--route", route, code=1).stderr == f"vfsd: {why}\n"
    file = tmp_path / "vfsd.toml"
    file.write_text(f'[routes."/m/"]\nkind = "{kind}"\nlocation = "typo/deep/x"\n')
    assert world.vfsd("mount", tmp_path / "mnt-two", "--config", file, code=1).stderr == f"vfsd: {why}\n"
    world.mount()
    assert why in world.vfsd("route", "add", route, "--name", "one", code=1).stderr
    assert not missing.parent.exists()
    # The directory itself is made, and all that is below vfsd's own.
    world.vfsd("route", "add", f"/m/={kind}:{tmp_path}/x", "--name", "one")
    world.vfsd("route", "add", f"/n/={kind}:{tmp_path}/state/vfsd/deep/y", "--name", "one")
    assert (tmp_path / "x").is_dir() and (tmp_path / "state/vfsd/deep/y").is_dir()


def test_a_login_and_a_database_that_postgresql_does_not_have(world: World, postgres: Postgres) -> None:
    postgres.sql("DROP ROLE IF EXISTS guest")
    postgres.sql("CREATE ROLE guest NOLOGIN")
    host = postgres.home
    bad = {
        "/login/": (f"postgresql://guest@/postgres?host={host}", "not permitted to log in"),
        "/user/": (f"postgresql://nobody@/postgres?host={host}", 'role "nobody" does not exist'),
        "/database/": (f"postgresql://postgres@/missing?host={host}", 'database "missing" does not exist'),
    }
    routes = [f"{prefix}=store:{uri}" for prefix, (uri, _) in bad.items()]
    m = world.mount(*routes, f"/good/=store:{postgres.uri}")
    status = world.vfsd("status").stdout
    with Client(socket=world.socket()) as client:
        for prefix, (_, why) in bad.items():
            said = [line for line in world.said.splitlines() if f"route {prefix} " in line]
            assert len(said) == 1
            assert why in said[0]
            assert why in status
            with pytest.raises(OSError, match="Input/output error"):
                os.listdir(m / prefix.strip("/"))
            error = tools.write(client, f"{prefix}f", "x").error
            assert error is not None
            assert prefix in error
            assert why in error
        assert tools.write(client, "/good/f", "x").error is None
    # Once it is let in, it works by itself.
    postgres.sql("ALTER ROLE guest LOGIN SUPERUSER")
    wait_until(lambda: (m / "login" / "f").read_text() == "x", 20)
    world.umount()
    postgres.sql("DROP ROLE guest")


def test_one_namespace_a_user(world: World, tmp_path: Path) -> None:
    config = tmp_path / "vfsd.toml"
    config.write_text(
        '[routes."/"]\nkind = "memory"\n[routes."/m/"]\nkind = "store"\n'
        'location = "sqlite:s.db"\nnamespace = ["{user}", "filesystem"]\nset = { user = "alice" }\n'
    )
    for name, args in (("alice", ()), ("bob", ("--set", "user=bob"))):
        (tmp_path / name).mkdir()
        world.vfsd("mount", tmp_path / name, "--name", name, "--config", config, *args)
        (tmp_path / name / "m" / "who").write_text(name)
        world.vfsd("umount", name)
    with sqlite3.connect(tmp_path / "s.db") as db:
        rows = db.execute("SELECT prefix, value ->> 'content' FROM store WHERE key = '/who' ORDER BY 1").fetchall()
    db.close()
    assert [row for row in rows if "!" not in row[0]] == [("alice.filesystem", "alice"), ("bob.filesystem", "bob")]


def test_a_password_is_not_shown(world: World, tmp_path: Path) -> None:
    world.mount(f"/m/=store:postgresql://me:secret@/none?host={tmp_path}")
    told = world.said + world.vfsd("status", "--json").stdout + world.log()
    assert "secret" not in told
    assert "me:***@" in told


def test_a_blob_put_by_command(world: World, tmp_path: Path) -> None:
    m = world.mount(f"/blobs/=blob:{tmp_path}/blobs")
    (tmp_path / "file").write_bytes(b"content" * 1000)
    path = world.vfsd("blob", "put", str(tmp_path / "file"), "--name", "one").stdout.strip()
    assert (m / path[1:]).read_bytes() == b"content" * 1000
    assert world.vfsd("blob", "put", str(tmp_path / "file"), "--name", "one").stdout.strip() == path
    wait_until(lambda: len(os.listdir(m / "blobs")) == 1)
