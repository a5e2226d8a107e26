"""The audit of routes that wait: each change has one line that says who, each denial one with the reason."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import World

from agenttools import tools
from agenttools.client import Client

pytestmark = pytest.mark.mount
pytest.importorskip("deepagents")

CONFIG = """
[routes."/"]
kind = "state"
[routes."/m/"]
kind = "store"
location = "sqlite:{base}/m.db"
[routes."/b/"]
kind = "blob"
location = "{base}/blobs"
[routes."/x/"]
kind = "backend"
factory = "factories:filesystem"
"""

RULES = """
[[rules]]
operations = ["write"]
paths = ["/m/kept/**", "/x/kept/**", "/kept/**"]
mode = "deny"
[[hooks]]
call = "factory:auditing_hook:scan"
[quotas."/"]
bytes = "100K"
files = 20
"""

HOOK = """
def scan():
    return lambda m: "it has a key in it" if m.data and b"AKIA" in m.data else None
"""


class Tree:
    """A mount with a route of each kind."""

    def __init__(self, world: World, config: str, *options: str) -> None:
        (world.home / "theirs").mkdir()
        world.env["VFSD_TEST_DIRECTORY"] = str(world.home / "theirs")
        (world.home / "vfsd.toml").write_text(config.format(base=world.home))
        (world.home / "auditing_hook.py").write_text(HOOK)
        self.mp = world.home / "mnt-one"
        self.mp.mkdir()
        world.vfsd("mount", self.mp, "--name", "one", "--config", world.home / "vfsd.toml", *options)
        world._names.append("one")
        self.client = Client(socket=world.socket())
        self._seen = {"log": 0, "errors": 0}

    def new(self, name: str = "log") -> list[dict[str, Any]]:
        """The records since the last call."""
        found = [json.loads(line) for line in (self.mp / f".vfsd/{name}.ndjson").read_bytes().splitlines()]
        seen, self._seen[name] = self._seen[name], len(found)
        return found[seen:]

    def told(self, *keys: str) -> list[tuple[Any, ...]]:
        return [tuple(record.get(key) for key in keys) for record in self.new()]


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    world = World(tmp_path_factory.mktemp("audited"))
    try:
        made = Tree(world, CONFIG + RULES)
        yield made
        made.client.close()
    finally:
        world.close()


@pytest.fixture
def tree(mounted: Tree) -> Tree:
    mounted.new()
    mounted.new("errors")
    return mounted


@pytest.mark.parametrize("route", ["/", "/m/", "/x/"])
def test_each_change_by_a_tool_has_one_line(tree: Tree, route: str) -> None:
    client = tree.client
    client.call("mkdir", path=f"{route}d".encode(), parents=True)
    tree.new()
    assert tools.write(client, f"{route}d/f", "one\n", call_id="c1").error is None
    assert tools.edit(client, f"{route}d/f", "one", "three", call_id="c2").error is None
    client.call("rename", old=f"{route}d/f".encode(), new=f"{route}d/g".encode(), tool="mv", call_id="c3")
    assert tools.delete(client, f"{route}d/g", call_id="c4").error is None
    me = os.getpid()
    assert tree.told("op", "path", "path2", "result", "door", "tool", "call", "pid") == [
        ("create", f"{route}d/f", None, "ok", "rpc", "write", "c1", me),
        ("write", f"{route}d/f", None, "ok", "rpc", "edit", "c2", me),
        ("rename", f"{route}d/f", f"{route}d/g", "ok", "rpc", "mv", "c3", me),
        ("unlink", f"{route}d/g", None, "ok", "rpc", "delete", "c4", me),
    ]


@pytest.mark.parametrize("route", ["/", "/m/", "/x/"])
def test_each_change_by_a_program_has_one_line(tree: Tree, route: str) -> None:
    script = "mkdir e; echo one > e/f; echo more >> e/f; : > e/f; mv e/f e/g; rm e/g; rmdir e"
    done = subprocess.Popen(["/bin/sh", "-c", script], cwd=f"{tree.mp}{route}")
    assert done.wait(30) == 0
    found = [record for record in tree.new() if record["door"] == "fuse"]
    assert [record["op"] for record in found] == [
        *("mkdir", "create", "write", "write", "truncate", "rename", "unlink", "rmdir"),
    ]
    assert {record["result"] for record in found} == {"ok"}
    assert {record["uid"] for record in found} == {os.getuid()}
    assert {record["pid"] for record in found if record["op"] in ("write", "truncate")} == {done.pid}
    assert [record["command"] for record in found if record["op"] == "rename"] == ["mv e/f e/g"]


def test_blobs(tree: Tree) -> None:
    content = b"a content\n"
    name = hashlib.sha256(content).hexdigest()
    assert tools.write(tree.client, f"/b/{name}", content.decode(), call_id="c1").error is None
    assert tree.told("op", "path", "result", "tool", "call", "pid") == [
        ("create", f"/b/{name}", "ok", "write", "c1", os.getpid())
    ]
    assert tools.delete(tree.client, f"/b/{name}", call_id="c2").error is None
    other = hashlib.sha256(b"other\n").hexdigest()
    (tree.mp / "b" / other).write_bytes(b"other\n")
    (tree.mp / "b" / other).unlink()
    found = [one for one in tree.told("op", "path", "result", "call", "pid") if one[0] != "write"]
    assert found == [
        ("unlink", f"/b/{name}", "ok", "c2", os.getpid()),
        ("create", f"/b/{other}", "ok", None, os.getpid()),
        ("unlink", f"/b/{other}", "ok", None, os.getpid()),
    ]
    tree.new("errors")
    with pytest.raises(OSError):
        (tree.mp / "b" / name).write_bytes(b"not that\n")
    (refused,) = tree.new("errors")
    assert (refused["path"], refused["result"]) == (f"/b/{name}", "EBADMSG")
    assert "sha256" in refused["error"]


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(OSError):
        call()


@pytest.mark.parametrize("route", ["/", "/m/", "/x/"])
def test_denials_have_the_reason(tree: Tree, route: str) -> None:
    where = Path(f"{tree.mp}{route}")
    refused(lambda: (where / "kept").mkdir() or (where / "kept/f").write_text("x"))
    assert tools.write(tree.client, f"{route}kept/g", "x", call_id="c1").error
    assert tools.write(tree.client, f"{route}k", "AKIA", call_id="c2").error
    refused(lambda: (where / "shell").write_text("AKIA"))
    found = tree.new("errors")
    by = [(one["path"], one["result"], one["door"], one.get("call"), one["pid"]) for one in found]
    me = os.getpid()
    assert (f"{route}kept/g", "EACCES", "rpc", "c1", me) in by
    assert (f"{route}k", "EACCES", "rpc", "c2", me) in by
    assert any(one[:3] == (f"{route}shell", "EACCES", "fuse") for one in by)
    assert any(one[2] == "fuse" and one[0].startswith(f"{route}kept") for one in by)
    for record in found:
        assert ("rule" if "kept" in record["path"] else "it has a key in it") in record["error"], record


def test_quotas_have_the_reason(tree: Tree) -> None:
    assert tools.write(tree.client, "/large", "x" * 200_000, call_id="c1").error
    refused(lambda: (tree.mp / "shell").write_text("x" * 200_000))
    with pytest.raises(OSError):
        for i in range(30):
            tree.client.call("write", path=b"/many/%d" % i, data=b"", tool="write", call_id="c2")
    found = tree.new("errors")
    assert {one["result"] for one in found} == {"EDQUOT"}
    by = [(one["path"].strip("0123456789"), one["door"], one.get("call")) for one in found]
    assert by[0] == ("/large", "rpc", "c1")
    assert set(by[1:-1]) == {("/shell", "fuse", None)}
    assert by[-1] == ("/many/", "rpc", "c2")
    assert all("quota" in one["error"] for one in found), found
    assert [one["seq"] for one in found] == [one["seq"] for one in tree.new() if one["result"] != "ok"]
    assert tools.delete(tree.client, "/many").error is None


def test_read_only(world: World) -> None:
    tree = Tree(world, CONFIG, "--read-only")
    try:
        for path in ("/f", "/m/f", "/x/f", "/b/f"):
            assert tools.write(tree.client, path, "x", call_id="c1").error
        found = tree.new("errors")
        assert [(one["path"], one["result"], one["call"]) for one in found] == [
            (path, "EROFS", "c1") for path in ("/f", "/m/f", "/x/f", "/b/f")
        ]
        assert {one["error"] for one in found} == {"Read-only file system"}
    finally:
        tree.client.close()


NAMESPACES = {
    "unshare": "unshare -pf /bin/sh -c 'echo > {0}; (echo > {0}2)'",
    "bwrap": "bwrap --bind / / --dev /dev --proc /proc --unshare-pid /bin/sh -c 'echo > {0}; (echo > {0}2)'",
    "cleared": "env -i unshare -pf /bin/sh -c 'echo > {0}; (echo > {0}2)'",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("how", NAMESPACES)
@pytest.mark.parametrize("route", ["", "m/"])
def test_another_pid_namespace_leads_to_the_call(tree: Tree, how: str, route: str) -> None:
    """In the view mount: bubblewrap in the root view is not let make namespaces by what confines commands."""
    command = NAMESPACES[how].format(f"{tree.mp}/{route}f")
    ran = tools.execute(tree.client, command, view="mount", profile="open", call_id="call_7")
    assert ran.exit_code == 0, ran
    made = [one for one in tree.new() if one["op"] == "create"]
    assert tools.delete(tree.client, f"/{route}f").error is None
    assert tools.delete(tree.client, f"/{route}f2").error is None
    assert [one["path"] for one in made] == [f"/{route}f", f"/{route}f2"]
    assert {one.get("call") for one in made} == {"call_7"}
    assert len({one.get("execute") for one in made}) == 1
