"""Checkpoints by the command line, the socket and the mount together."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import pty
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from cli_world import World

from agenttools import checkpoints, tools
from agenttools.client import Client
from vfsd.check import check_volume


class Place(World):
    """A world with one mount, ``default``."""

    engine = "native"

    def mount(self, *args: str | Path) -> None:
        self.vfsd("mount", self.mp, "--engine", self.engine, *args)

    def remount(self, *args: str | Path) -> None:
        self.vfsd("umount", "default")
        self.mount(*args)

    def json(self, *args: str) -> Any:
        return json.loads(self.vfsd(*args, "--json").stdout)

    def create(self, *label: str) -> str:
        return str(self.json("checkpoint", "create", *label)["id"])

    def client(self) -> Client:
        return Client(socket=self.run_dir / "vfsd/default.sock")

    @property
    def volume(self) -> Path:
        return self.base / "state/vfsd/default/threads/default/root"


@pytest.fixture(params=["native", "pyfuse3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    place = Place(tmp_path)
    place.engine = request.param
    place.mount()
    yield place
    place.clean()
    log = (tmp_path / "state/vfsd/default/vfsd.log").read_text()
    assert not [line for line in log.splitlines() if " WARNING " in line or " ERROR " in line or "Traceback" in line]
    assert check_volume(place.volume) == []


@pytest.fixture
def native(tmp_path: Path) -> Iterator[Place]:
    """For what has nothing to do with the kernel."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    place = Place(tmp_path)
    place.mount()
    yield place
    place.clean()


# -- the mount


def test_the_past_is_a_directory_for_every_program(place: Place) -> None:
    mp = place.mp
    (mp / "d").mkdir()
    (mp / "d/text").write_text("old\n")
    (mp / "link").symlink_to("d/text")
    os.link(mp / "d/text", mp / "hard")
    copy = place.base / "copy"
    shutil.copytree(mp, copy, symlinks=True)
    past = mp / ".checkpoints" / place.create("first")
    (mp / "d/text").write_text("new\n")
    (mp / "more").touch()

    assert (
        subprocess.run(["diff", "-r", "--no-dereference", "-x", "memories", "-x", "blobs", past, copy]).returncode == 0
    )
    assert (past / "hard").stat().st_ino == (past / "d/text").stat().st_ino
    taken = place.base / "taken"
    subprocess.run(["cp", "-a", past, taken], check=True)
    assert (
        subprocess.run(["diff", "-r", "--no-dereference", "-x", "memories", "-x", "blobs", taken, copy]).returncode == 0
    )
    if shutil.which("git"):
        said = subprocess.run(
            ["git", "diff", "--no-index", past / "d/text", mp / "d/text"], capture_output=True, text=True
        ).stdout
        assert "-old\n+new\n" in said
    # Found by name, never met in a walk of the tree.
    assert ".checkpoints" not in os.listdir(mp)
    assert [p.name for p in (mp / ".checkpoints").iterdir()] == [past.name]
    with place.client() as client:
        assert tools.read(client, f"/.checkpoints/{past.name}/d/text").content == "old\n"
        assert tools.glob(client, "**/text", "/").text.count("text") == 1
        assert tools.write(client, f"/.checkpoints/{past.name}/d/text", "x").error is not None
    for attempt in (
        lambda: (past / "new").touch(),
        lambda: (past / "d/text").write_text("x"),
        lambda: (past / "hard").unlink(),
        lambda: past.rename(mp / "y"),
        lambda: os.truncate(past / "hard", 0),
        lambda: (past / "hard").chmod(0o600),
    ):
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno in (errno.EROFS, errno.EXDEV)


def test_a_checkpoint_comes_and_goes_in_the_kernels_caches(place: Place) -> None:
    top = place.mp / ".checkpoints"
    (place.mp / "a").write_text("old")
    assert os.listdir(top) == []
    name = place.create()
    assert os.listdir(top) == [name]
    assert (top / name / "a").read_text() == "old"
    held = os.open(top / name, os.O_RDONLY | os.O_DIRECTORY)
    place.vfsd("checkpoint", "drop", name)
    assert os.listdir(top) == []
    with pytest.raises(FileNotFoundError):
        (top / name / "a").read_text()
    with pytest.raises(OSError) as caught:
        os.stat("a", dir_fd=held)
    assert caught.value.errno in (errno.ESTALE, errno.ENOENT)
    os.close(held)


def test_a_restore_shows_at_once_everywhere(place: Place) -> None:
    mp = place.mp
    (mp / "a").write_text("old")
    (mp / "gone").write_text("here")
    (mp / "d").mkdir()
    name = place.create()
    (mp / "a").write_text("newer")
    (mp / "gone").unlink()
    (mp / "d/late").write_text("x")
    os.chmod(mp / "d", 0o700)
    # Everything the kernel can remember of it.
    reader = open(mp / "a")  # noqa: SIM115
    assert reader.read() == "newer"
    assert not (mp / "gone").exists()
    assert os.listdir(mp / "d") == ["late"]
    assert (mp / "d/late").read_text() == "x"

    done = place.json("checkpoint", "restore", name)
    assert (mp / "a").read_text() == "old"
    assert (mp / "a").stat().st_size == 3
    assert (mp / "gone").read_text() == "here"
    assert os.listdir(mp / "d") == []
    assert not (mp / "d/late").exists()
    assert (mp / "d").stat().st_mode & 0o777 == 0o755
    with place.client() as client:
        assert tools.read(client, "/a").content == "old"
    reader.seek(0)
    assert reader.read() == "newer"
    reader.close()
    place.vfsd("checkpoint", "restore", done["before"])
    assert (mp / "a").read_text() == "newer"
    assert (mp / "d/late").read_text() == "x"


def test_a_file_open_for_writing_refuses(place: Place) -> None:
    (place.mp / "a").write_text("old")
    name = place.create()
    with open(place.mp / "a", "w") as writer:
        writer.write("new")
        writer.flush()
        said = place.refused("checkpoint", "restore", name)
        assert said == "/a is open for writing and would change: close it first; nothing was changed"
        assert (place.mp / "a").read_text() == "new"
        assert [mark["id"] for mark in place.json("checkpoint", "list")] == [name]
    place.vfsd("checkpoint", "restore", name)
    assert (place.mp / "a").read_text() == "old"


def test_undo_takes_back_an_execute(place: Place) -> None:
    (place.mp / "a").write_text("old")
    (place.mp / "d").mkdir()
    with place.client() as client:
        ran = tools.execute(client, "echo new > a; rmdir d; echo more > b", view="mount", profile="open")
        assert ran.exit_code == 0, ran
        assert tools.execute(client, "cat a", view="mount", profile="open").output == "new\n"
    said = place.vfsd("undo").stdout
    assert said.startswith("took back execute: echo new > a; rmdir d; echo more > b: ")
    assert (place.mp / "a").read_text() == "old"
    assert (place.mp / "d").is_dir() and not (place.mp / "b").exists()
    again = said.rpartition(" ")[2].strip()
    place.vfsd("checkpoint", "restore", again)
    assert (place.mp / "b").read_text() == "more\n"


# -- the commands


def test_the_commands_say_what_they_did(native: Place) -> None:
    mp = native.mp
    (mp / "text").write_text("one\ntwo\n")
    (mp / "gone").touch()
    made = native.json("checkpoint", "create", "first one")
    assert made["label"] == "first one" and made["cause"] == "user" and made["routes"] == ["/"]
    (mp / "text").write_text("one\n2\n")
    (mp / "gone").unlink()
    (mp / "new").mkdir()
    (mp / "text").chmod(0o755)
    assert native.vfsd("checkpoint", "diff", "first one").stdout == "D /gone\nA /new/\nM /text (0644 -> 0755)\n"
    patch = native.vfsd("checkpoint", "diff", "-p", made["id"]).stdout
    assert patch.startswith("A /new/\ndiff --git a/gone b/gone\n")
    assert "-two\n+2\n" in patch and "old mode 100644\nnew mode 100755\n" in patch
    found = native.json("checkpoint", "diff", made["id"][:4])
    assert [(c["kind"], c["path"], c["what"]) for c in found["changes"]] == [
        ("deleted", "/gone", []),
        ("added", "/new", []),
        ("modified", "/text", ["content", "mode"]),
    ]
    second = native.create()
    assert native.vfsd("checkpoint", "diff", second).stdout == ""
    assert native.vfsd("checkpoint", "diff", made["id"], second).stdout.count("\n") == 3
    shown = native.json("checkpoint", "show", "first one")
    assert (shown["files"], shown["bytes"]) == (2, 8)
    assert made["id"] in native.vfsd("checkpoint", "show", made["id"]).stdout
    lines = native.vfsd("checkpoint", "list").stdout.splitlines()
    assert lines[0].startswith(made["id"]) and lines[0].endswith("user     first one")
    assert native.vfsd("checkpoint", "restore", "first one").stdout.startswith(f"restored {made['id']} (first one): ")
    assert native.vfsd("checkpoint", "restore", "first one").stdout.startswith("nothing to restore")
    assert native.vfsd("checkpoint", "drop", "first one", second).stdout.count("dropped") == 2
    assert native.refused("checkpoint", "show", "first one") == (
        "no checkpoint is called 'first one': see vfsd checkpoint list"
    )
    assert native.vfsd("gc").stdout.startswith("gave back ")
    assert native.json("gc")["after"] > 0
    assert native.refused("undo").startswith("there is nothing to undo")
    assert native.refused("checkpoint", "list", "--name", "other") == (
        "no mount is called 'other': start it with vfsd mount --name other MOUNTPOINT"
    )


def test_there_is_colour_on_a_terminal_and_nowhere_else(native: Place) -> None:
    (native.mp / "a").write_text("x\n")
    name = native.create()
    (native.mp / "a").write_text("y\n")

    def on_terminal(**env: str) -> str:
        main, side = pty.openpty()
        command = [sys.executable, "-m", "vfsd", "checkpoint", "diff", "-p", name]
        subprocess.run(command, stdout=side, env={**native.env, **env}, check=True, timeout=30)
        os.close(side)
        said = b""
        try:
            while data := os.read(main, 65536):
                said += data
        except OSError:  # EIO: the other end is closed
            pass
        os.close(main)
        return said.decode()

    assert "\033[32m+y\033[m" in on_terminal(NO_COLOR="")
    assert "\033" not in on_terminal(NO_COLOR="1")
    assert "\033" not in native.vfsd("checkpoint", "diff", "-p", name).stdout


def test_a_fork_can_be_mounted_beside(native: Place) -> None:
    (native.mp / "a").write_text("old")
    name = native.create()
    (native.mp / "a").write_text("new")
    said = native.vfsd("checkpoint", "fork", name, "--thread", "other").stdout
    command = next(line for line in said.splitlines() if line.startswith("mount it: vfsd mount ")).split()[4:-1]
    there = native.directory("there")
    native.vfsd("mount", *command, there)
    assert (there / "a").read_text() == "old"
    (there / "a").write_text("its own")
    assert (native.mp / "a").read_text() == "new"
    assert "thread 'other' exists already" in native.refused("checkpoint", "fork", name, "--thread", "other")
    assert "thread 'default' exists already" in native.refused("checkpoint", "fork", name, "--thread", "default")
    wrong = native.vfsd("checkpoint", "fork", name, "--thread", "../up", code=2)
    assert "use 1 to 64 letters" in wrong.stderr
    assert sorted(p.name for p in (native.base / "state/vfsd/default/threads").iterdir()) == ["default", "other"]


def test_what_is_not_included_is_said(native: Place) -> None:
    host = native.directory("host")
    native.remount("--route", f"/host/=local:{host}", "--route", "/ram/=memory")
    said = native.vfsd("checkpoint", "create", "x").stdout
    assert "/host/ (local) is not included: its files are the host's, and a restore leaves them as they are\n" in said
    assert "/ram/ (memory) is not included: it is in memory only, and a restore leaves it as it is\n" in said
    (native.mp / "host/h").write_text("x")
    (native.mp / "ram/r").write_text("x")
    (native.mp / "a").write_text("x")
    native.vfsd("checkpoint", "restore", "x")
    assert (native.mp / "host/h").exists() and (native.mp / "ram/r").exists() and not (native.mp / "a").exists()


def test_a_configured_policy_is_followed(native: Place) -> None:
    config = native.base / "vfsd.toml"
    config.write_text("[checkpoints]\nevery_calls = 2\nevery_execute = false\nkeep = 2\n")
    native.remount("--config", config)
    with native.client() as client:
        for i in range(6):
            assert tools.write(client, f"/{i}", "x").error is None
        tools.execute(client, "touch by-execute", view="mount", profile="open")
        assert tools.edit(client, "/0", "x", "y").error is None
    assert [mark["label"] for mark in native.json("checkpoint", "list")] == [
        "write /0",
        "write /2",
        "write /4",
        "edit /0",
    ]
    native.wait(lambda: len(native.json("checkpoint", "list")) == 2)
    native.vfsd("undo")
    assert (native.mp / "0").read_text() == "x"
    config.write_text("[checkpoints]\nkeep = 0\n")
    native.vfsd("umount", "default")
    said = native.refused("mount", native.mp, "--config", config)
    assert said == f"{config}:2: keep must be at least 1"


def test_a_store_of_a_newer_version_says_so(native: Place) -> None:
    native.create()
    native.vfsd("umount", "default")
    db = sqlite3.connect(native.volume / "tree.db")
    db.execute("PRAGMA user_version=99")
    db.close()
    for command in (("mount", native.mp), ("gc",), ("export", native.base / "x.tar")):
        said = native.refused(*command)
        assert said == f"volume {native.volume} has format 99, this vfsd reads up to 1: upgrade vfsd"
    db = sqlite3.connect(native.volume / "tree.db")
    assert db.execute("SELECT count(*) FROM checkpoint").fetchone() == (1,)
    db.execute("PRAGMA user_version=1")
    db.close()


# -- the socket


def test_the_same_through_agenttools(native: Place) -> None:
    (native.mp / "a").write_text("old\n")
    with native.client() as client:
        made = checkpoints.create(client, "mine")
        assert made.error is None and made.text.startswith(f"Checkpoint {made.data['id']} made")
        (native.mp / "a").write_text("new\n")
        assert checkpoints.diff(client, "mine").text == "M /a"
        assert "-old\n+new\n" in checkpoints.diff(client, "mine", patch=True).text
        assert checkpoints.show(client, "mine").data["files"] == 1
        done = checkpoints.restore(client, "mine")
        assert (native.mp / "a").read_text() == "old\n"
        assert [m["id"] for m in checkpoints.all_of(client).data["checkpoints"]] == [
            made.data["id"],
            done.data["before"],
        ]
        assert checkpoints.fork(client, "mine", "t2").data["thread"] == "t2"
        assert checkpoints.restore(client, "nope").text == (
            "Error: no checkpoint is called 'nope': see vfsd checkpoint list"
        )
        assert checkpoints.drop(client, ["mine"]).text == f"Dropped {made.data['id']}."
        assert checkpoints.undo(client).error is not None
        with pytest.raises(OSError, match="has no action 'explode'"):
            client.call("checkpoint", action="explode")
        with pytest.raises(OSError, match="needs 'ref' as text"):
            client.call("checkpoint", action="restore")

        async def main() -> None:
            assert (await checkpoints.acreate(client, "async")).error is None

        trio.run(main)
    program = [sys.executable, "-m", "agenttools"]

    def agenttools(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*program, *args], env=native.env, capture_output=True, text=True, timeout=30)

    assert json.loads(agenttools("checkpoint", "create", "--json").stdout)["id"]
    assert agenttools("checkpoint", "list").stdout.count("user") == 2
    assert agenttools("checkpoint", "drop", "async").returncode == 0
    assert agenttools("checkpoint", "diff", "async").returncode == 1
    assert agenttools("checkpoint").returncode == 2


# -- archives


def test_a_mounted_tree_goes_into_a_tar_and_back(native: Place) -> None:
    host = native.directory("host")
    native.remount("--route", f"/host/=local:{host}")
    (native.mp / "d").mkdir()
    (native.mp / "d/a").write_text("content")
    (native.mp / "host/h").write_text("of the host")
    archive, out = native.base / "x.tar", native.directory("out")
    native.vfsd("export", archive)
    # Held for as long as it took, no longer; and under its name only when whole.
    assert native.json("checkpoint", "list") == []
    assert not list(native.base.glob("*.part"))
    subprocess.run(["tar", "-xf", archive, "-C", out], check=True)
    compared = filecmp.dircmp(native.mp, out, ignore=[])
    assert compared.left_only == compared.right_only == compared.diff_files == []
    assert (out / "host/h").read_text() == "of the host"
    native.vfsd("import", archive, "--into", "/copy")
    assert (native.mp / "copy/d/a").read_text() == "content"
    assert (native.mp / "copy/d/a").stat().st_mtime_ns == (native.mp / "d/a").stat().st_mtime_ns
    (native.base / "bad").write_bytes(b"no tar" * 1000)
    assert "not a tar archive that can be read" in native.refused("import", native.base / "bad")
