"""``vfsd gc --blobs``: what mentions a blob, and that nothing else is needed to lose one."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from servers import Postgres, World

from agenttools.client import Client
from vfsd.mentions import Mentions

OLD = time.time() - 30 * 86400


def named(data: bytes) -> str:
    return sha256(data).hexdigest()


def blob(directory: Path, text: str, *, old: bool = True) -> str:
    """A blob of this content; its name."""
    directory.mkdir(exist_ok=True)
    name = named(text.encode())
    (directory / name).write_text(text)
    if old:
        os.utime(directory / name, (OLD, OLD))
    return name


def gc(world: World, *args: str, code: int = 0) -> dict[str, Any]:
    done = world.vfsd("gc", "--blobs", "--json", "--name", "one", *args, code=code)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.mount
def test_what_mentions_a_blob(world: World, tmp_path: Path) -> None:
    blobs, local = tmp_path / "blobs", tmp_path / "local"
    local.mkdir()
    what = (
        "text", "link", "name", "xattr", "history", "thread", "item", "encoded", "others", "local", "memory", "blob",
        "also", "checkpointer", "split",
    )  # fmt: skip
    n = {word: blob(blobs, word) for word in what}
    lost, young = blob(blobs, "mentioned nowhere"), blob(blobs, "just made", old=False)
    n["manifest"] = blob(blobs, f"see {n['blob']}")
    store = tmp_path / "s.db"
    m = world.mount(
        f"/blobs/=blob:{blobs}", f"/m/=store:sqlite:{store}", f"/local/=local:{local}", "/mem/=memory",
        root=f"/=state:{tmp_path}/elsewhere",
    )  # fmt: skip
    (m / "text").write_text(f"see /blobs/{n['text']} and /blobs/{n['manifest']}.")
    (m / "split").write_bytes(b"-" * (4096 - 20) + n["split"].encode())
    os.symlink(f"/blobs/{n['link']}", m / "link")
    (m / n["name"]).mkdir()
    os.setxattr(m / "text", "user.blob", n["xattr"].encode())
    (m / "gone").write_text(n["history"])
    with Client(socket=world.socket()) as client:
        client.call("checkpoint", action="create", label="before")
    (m / "gone").unlink()
    (m / "m" / "note").write_text(f"/blobs/{n['item']}")
    (m / "m" / "binary").write_bytes(b"\0\xff" + n["encoded"].encode())
    (m / "mem" / "note").write_text(n["memory"])
    (local / "note").write_text(n["local"])
    other = world.mount(name="two", root="/=state")
    (other / "note").write_text(n["thread"])
    world.umount("two")
    with sqlite3.connect(store) as db:
        value = {"messages": [base64.b64encode(b"x").decode(), {"url": f"/blobs/{n['others']}"}]}
        db.execute("INSERT INTO store (prefix, key, value) VALUES ('another.app', 'k', ?)", (json.dumps(value),))
        db.execute("CREATE TABLE writes (value BLOB)")
        db.execute("INSERT INTO writes VALUES (?)", (b"\x81\xa3url" + n["checkpointer"].encode(),))
    db.close()
    conversation = tmp_path / "conversation"
    conversation.write_text(n["also"])
    found = gc(world, "--also", str(conversation))
    assert found["problems"] == []
    assert [one["name"] for one in found["unmentioned"]] == [lost]
    assert found["unmentioned"][0]["size"] == len("mentioned nowhere")
    assert found["mentioned"] == len(what) + 1 and found["young"] == 1
    assert (blobs / lost).exists()
    shown = world.vfsd("gc", "--blobs", "--name", "one", "--also", str(conversation)).stdout
    assert lost in shown and "--remove" in shown
    assert (blobs / lost).exists()
    assert gc(world, "--also", str(conversation), "--remove")["removed"] == 1
    assert not (blobs / lost).exists()
    assert (blobs / young).exists()
    assert {name.name for name in blobs.iterdir()} >= {*n.values()}
    with Client(socket=world.socket()) as client:
        labels = [mark["label"] for mark in client.call("checkpoint", action="list")["result"]["checkpoints"]]
    assert "before" in labels and "vfsd gc" not in labels


@pytest.mark.mount
def test_nothing_is_removed_where_something_cannot_be_looked_into(world: World, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    lost = blob(blobs, "mentioned nowhere")
    (tmp_path / "local").mkdir()
    world.mount(f"/blobs/=blob:{blobs}", f"/local/=local:{tmp_path}/local")
    world.umount()
    world.mount(f"/blobs/=blob:{blobs}")
    (tmp_path / "local").rmdir()
    found = gc(world, "--remove", code=1)
    assert found["removed"] == 0
    assert f"local {tmp_path}/local (on the list " in found["problems"][0]
    assert [one["name"] for one in found["unmentioned"]] == [lost]
    assert (blobs / lost).exists()
    done = world.vfsd("gc", "--blobs", "--remove", "--name", "one", code=1)
    assert "nothing was removed" in done.stderr
    (tmp_path / "state/vfsd/places").write_text("")
    assert gc(world, "--remove")["removed"] == 1


@pytest.mark.mount
def test_a_recorded_place_that_cannot_be_read_is_named_and_the_others_are_read(world: World, tmp_path: Path) -> None:
    blobs, local = tmp_path / "blobs", tmp_path / "local"
    lost, kept = blob(blobs, "mentioned nowhere"), blob(blobs, "mentioned")
    local.mkdir()
    (local / "note").write_text(kept)
    world.mount(f"/blobs/=blob:{blobs}", f"/local/=local:{local}")
    places = tmp_path / "state/vfsd/places"
    good = places.read_text()
    bad = {
        '{"home": "", "kind": "store", "place": "redis://:***@host:1"}': "a store has no scheme 'redis'",
        '{"home": "", "kind": "disk", "place": "/x"}': "'disk' is no kind of place",
        '{"home": "", "kind": 3, "place": "/x"}': "is no place",
        '{"kind": ': "is no place",
        "[]": "is no place",
    }
    places.write_text("\n".join([*bad, good]))
    found = gc(world, "--remove", code=1)
    assert [one["name"] for one in found["unmentioned"]] == [lost]
    assert found["removed"] == 0
    assert len(found["problems"]) == len(bad)
    for why in bad.values():
        assert [p for p in found["problems"] if why in p and str(places) in p and "delete its line" in p]
    assert "nothing was removed" in world.vfsd("gc", "--blobs", "--remove", "--name", "one", code=1).stderr
    places.write_text(good)
    assert gc(world, "--remove")["removed"] == 1


@pytest.mark.mount
def test_a_store_on_postgresql(world: World, postgres: Postgres, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    n = {word: blob(blobs, word) for word in ("item", "encoded", "conversation", "nowhere")}
    m = world.mount(f"/blobs/=blob:{blobs}", f"/m/=store:{postgres.uri}")
    (m / "m" / "note").write_text(n["item"])
    (m / "m" / "binary").write_bytes(b"\0" + n["encoded"].encode())
    postgres.sql("CREATE TABLE checkpoint_writes (channel text, blob bytea)")
    try:
        postgres.sql("INSERT INTO checkpoint_writes VALUES ('messages', %s)", b"\x82" + n["conversation"].encode())
        found = gc(world)
    finally:
        postgres.sql("DROP TABLE checkpoint_writes")
    assert found["problems"] == []
    assert [one["name"] for one in found["unmentioned"]] == [n["nowhere"]]


@pytest.mark.mount
def test_put_again_is_young_again(world: World, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    one, two = blob(blobs, "one"), blob(blobs, "two")
    m = world.mount(f"/blobs/=blob:{blobs}")
    assert len(gc(world)["unmentioned"]) == 2
    (tmp_path / "file").write_text("one")
    world.vfsd("blob", "put", tmp_path / "file", "--name", "one")
    (m / "blobs" / two).write_text("two")
    assert gc(world) | {"place": ""} == {
        "place": "", "unmentioned": [], "mentioned": 0, "young": 2, "removed": 0, "problems": [],
    }  # fmt: skip
    assert (blobs / one).read_text() == "one"


@pytest.mark.mount
def test_refused(world: World, tmp_path: Path) -> None:
    world.mount()
    assert "no route of kind blob" in world.vfsd("gc", "--blobs", "--name", "one", code=1).stderr
    assert "there are no blobs" in world.vfsd("gc", "--blobs", code=1).stderr
    for days in ("nan", "-1"):
        assert "must not be negative" in world.vfsd("gc", "--blobs", "--days", days, code=1).stderr
    assert "go with --blobs" in world.vfsd("gc", "--remove", code=1).stderr
    world.vfsd("route", "add", "/b/=blob:s3://bucket/p", "--name", "one", code=1)
    assert "other machines" in world.vfsd("gc", "--blobs", "--name", "one", code=1).stderr


@pytest.mark.parametrize("cut", [1, 20, 32, 33, 63])
def test_a_digest_in_two_places(cut: int) -> None:
    name = named(b"x")
    mentions = Mentions([name, named(b"y")])
    mentions.look(b"-" + name[:cut].encode())
    mentions.look(name[cut:].encode() + b"/")
    assert mentions.found == {name}


def test_pieces_and_neighbours() -> None:
    name = named(b"x")
    mentions = Mentions([name])
    mentions.look_through([name[:10].encode(), name[10:31].encode()])
    assert not mentions.found
    mentions.look_through([b"00" + name[:10].encode(), name[10:40].upper().encode(), b"ff"])
    assert mentions.found == {name}


def test_a_file_with_holes(tmp_path: Path) -> None:
    name = named(b"x")
    with open(tmp_path / "f", "wb") as file:
        file.seek(1 << 30)
        file.write(name.encode())
        file.truncate(1 << 32)
    mentions = Mentions([name])
    mentions.read_file(tmp_path / "f")
    assert mentions.found == {name}
