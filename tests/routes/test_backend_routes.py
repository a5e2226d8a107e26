"""Objects with Deep Agents' BackendProtocol as routes: theirs and a user's own; one that raises takes nothing down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from servers import World, wait_until

from agenttools import tools
from agenttools.client import Client
from vfsd.backends.foreign import errno_of

pytestmark = pytest.mark.mount


@pytest.fixture
def there(world: World, tmp_path: Path) -> Path:
    directory = tmp_path / "theirs"
    directory.mkdir()
    world.env["VFSD_TEST_DIRECTORY"] = str(directory)
    return directory


def test_deep_agents_filesystem(world: World, there: Path) -> None:
    pytest.importorskip("deepagents")
    (there / "a.txt").write_text("theirs\n")
    (there / "sub").mkdir()
    (there / "sub" / "b.bin").write_bytes(b"\xff\x00")
    m = world.mount("/b/=backend:factory:factories:filesystem") / "b"
    assert sorted(os.listdir(m)) == ["a.txt", "sub"]
    assert (m / "a.txt").read_text() == "theirs\n"
    assert (m / "sub" / "b.bin").read_bytes() == b"\xff\x00"
    (m / "new" / "deep").mkdir(parents=True)
    (m / "new" / "deep" / "c.txt").write_text("ours\n")
    assert (there / "new" / "deep" / "c.txt").read_text() == "ours\n"
    with open(m / "a.txt", "a") as file:
        file.write("more\n")
    assert (there / "a.txt").read_text() == "theirs\nmore\n"
    (m / "a.txt").rename(m / "sub" / "moved.txt")
    assert sorted(os.listdir(there / "sub")) == ["b.bin", "moved.txt"]
    (there / "sub" / "moved.txt").write_text("changed by them\n")
    (there / "late.txt").write_text("late\n")
    wait_until(lambda: (m / "sub" / "moved.txt").read_text() == "changed by them\n", 3)
    wait_until(lambda: (m / "late.txt").read_text() == "late\n", 3)
    subprocess.run(["rm", "-r", str(m / "sub")], check=True)
    assert not (there / "sub" / "b.bin").exists()
    with pytest.raises(OSError, match="not permitted"):
        os.symlink("x", m / "l")
    with Client(socket=world.socket()) as client:
        assert tools.edit(client, "/b/late.txt", "late", "edited", False).error is None
        assert (there / "late.txt").read_text() == "edited\n"
        assert [hit.path for hit in tools.grep(client, "ours", "/b").matches or []] == ["/b/new/deep/c.txt"]


def test_context_hub(world: World, there: Path) -> None:
    """Against a stand-in of its client that keeps the commit rules: a stale parent is refused, then tried anew."""
    pytest.importorskip("langsmith")
    state = there / "hub.json"
    state.write_text(json.dumps({"n": 1, "files": {"AGENTS.md": "be kind\n", "skills/a.md": "a\n"}}))
    m = world.mount("/hub/=backend:factory:factories:hub") / "hub"
    assert sorted(os.listdir(m)) == ["AGENTS.md", "skills"]
    assert (m / "AGENTS.md").read_text() == "be kind\n"
    (m / "new.md").write_text("ours\n")
    theirs = json.loads(state.read_text())
    assert theirs["files"]["new.md"] == "ours\n"
    theirs["n"] += 1
    theirs["files"]["beside.md"] = "theirs\n"
    state.write_text(json.dumps(theirs))
    (m / "late.md").write_text("after a conflict\n")
    files = json.loads(state.read_text())["files"]
    assert (files["beside.md"], files["late.md"]) == ("theirs\n", "after a conflict\n")
    wait_until(lambda: (m / "beside.md").read_text() == "theirs\n", 5)
    (m / "new.md").unlink()
    assert "new.md" not in json.loads(state.read_text())["files"]


def test_a_sandbox(world: World, there: Path) -> None:
    pytest.importorskip("deepagents")
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    (there / "box").mkdir()
    (there / "box" / "in.txt").write_text("inside\n")
    m = world.mount("/box/=backend:factory:factories:sandbox") / "box"
    assert (m / "in.txt").read_text() == "inside\n"
    (m / "out").mkdir()
    (m / "out" / "x.bin").write_bytes(b"\0\xff")
    assert (there / "box" / "out" / "x.bin").read_bytes() == b"\0\xff"
    (m / "in.txt").unlink()
    assert not (there / "box" / "in.txt").exists()


def test_a_policy_wrapper(world: World, there: Path) -> None:
    m = world.mount("/b/=backend:factory:factories:policy") / "b"
    (m / "open.txt").write_text("fine\n")
    (m / "secret").mkdir()
    with pytest.raises(OSError, match="Permission denied"), open(m / "secret" / "x", "w") as file:
        file.write("x")
    assert (m / "open.txt").read_text() == "fine\n"


def test_a_users_own_class(world: World, there: Path) -> None:
    m = world.mount("/b/=backend:factory:factories:custom") / "b"
    assert (m / "hello.txt").read_text() == "hello\n"
    assert os.listdir(m / "sub") == ["inner.txt"]
    (m / "sub" / "inner.txt").write_text("changed\n")
    assert (m / "sub" / "inner.txt").read_text() == "changed\n"
    with pytest.raises(OSError, match="Permission denied"), open(m / "locked.txt", "w") as file:
        file.write("x")
    wait_until(lambda: not (m / "locked.txt").exists(), 3)
    with pytest.raises(PermissionError, match="not permitted"):
        (m / "hello.txt").unlink()  # it has no delete


@pytest.mark.parametrize(
    ("how", "logged"),
    [
        ("raises", "the backend blew up"),
        ("exits", "SystemExit: the backend blew up"),
        ("says nothing", "answered NoneType, which is no listing"),
    ],
)
def test_one_that_fails_takes_nothing_down(how: str, logged: str, world: World, there: Path) -> None:
    m = world.mount("/b/=backend:factory:factories:custom")
    assert (m / "b" / "hello.txt").read_text() == "hello\n"
    (there / "broken").write_text(how)
    if how != "says nothing":  # which a write may
        with pytest.raises(OSError, match="Input/output error"), open(m / "b" / "x.txt", "w") as file:
            file.write("x")
    with Client(socket=world.socket()) as client:
        assert tools.read(client, "/b/sub/inner.txt").error is not None
    with pytest.raises(OSError, match="Input/output error"):
        os.listdir(m / "b" / "sub")
    (m / "beside").write_text("works")
    assert logged in world.log()
    (there / "broken").unlink()
    wait_until(lambda: os.listdir(m / "b" / "sub") == ["inner.txt"], 5)


def test_sentences_to_errnos() -> None:
    import errno

    for sentence, code in {
        "Error: File '/x' not found": errno.ENOENT,
        "Path '/x': path_not_found": errno.ENOENT,
        "permission_denied": errno.EACCES,
        "is_directory": errno.EISDIR,
        "Path '/x': not_a_directory": errno.ENOTDIR,
        "invalid_path": errno.EINVAL,
        "Error: Write denied by policy": errno.EACCES,
        "something else": errno.EIO,
    }.items():
        assert errno_of(sentence) == code
