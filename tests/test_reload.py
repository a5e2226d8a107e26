"""``vfsd reload``, SIGHUP, ``vfsd log-level``: a file is put in force as a whole, or not at all and with the reason."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import SECONDS, World

import agenttools

BASE = '[routes."/"]\nkind = "memory"\n'


class File:
    """The configuration of a mount called default."""

    def __init__(self, world: World) -> None:
        self.world, self.path = world, world.base / "vfsd.toml"

    def write(self, *more: str) -> None:
        self.path.write_text(BASE + "".join(more))

    def mount(self, *args: str) -> None:
        self.world.vfsd("mount", "--config", self.path, *args, self.world.mp)

    @contextlib.contextmanager
    def client(self) -> Iterator[agenttools.Client]:
        with agenttools.Client(socket=self.world.run_dir / "vfsd/default.sock") as client:
            yield client


def state(client: agenttools.Client) -> tuple[list[str], list[str]]:
    """The prefixes of the routes, and the rules' patterns."""
    routes = [r["prefix"] for r in client.call("status")["routes"] if r["kind"] != "system"]
    return routes, [
        path for layer in client.call("rules")["layers"] for rule in layer["rules"] for path in rule["paths"]
    ]


def route(prefix: str, kind: str = "memory", location: Path | None = None) -> str:
    return f'[routes."{prefix}"]\nkind = "{kind}"\n' + (f'location = "{location}"\n' if location else "")


def deny(pattern: str) -> str:
    return f'[[rules]]\noperations = ["write"]\npaths = ["{pattern}"]\nmode = "deny"\n'


@pytest.fixture
def file(world: World) -> File:
    return File(world)


def test_routes_and_rules_of_the_file_are_put_in_force(world: World, file: File) -> None:
    file.write(route("/old/"), deny("/a"))
    file.mount("--route", "/given/=memory")
    (world.mp / "b").write_text("x")
    with file.client() as client:
        assert "/old/" in [r["prefix"] for r in client.hello["routes"]]
    host = world.directory("host")
    (host / "there").write_text("x")
    file.write(route("/new/", "local", host), deny("/b"), '[quotas."/"]\nfiles = 3\n')

    done = world.vfsd("reload")
    assert done.stdout == f"{file.path}: rules changed, added /new/, removed /old/; rules in force: 1\n"
    with file.client() as client:
        assert state(client) == (["/", "/given/", "/new/"], ["/b"])
        assert "/new/" in [r["prefix"] for r in client.hello["routes"]]
    assert sorted(os.listdir(world.mp)) == ["b", "given", "new"]
    assert (world.mp / "new/there").read_text() == "x"
    (world.mp / "a").write_text("x")
    with pytest.raises(PermissionError):
        (world.mp / "b").write_text("y")
    with pytest.raises(OSError, match="quota"):
        (world.mp / "c").write_text("x")
    assert world.vfsd("reload").stdout == f"{file.path}: nothing changed; rules in force: 1\n"
    assert world.vfsd("rules", "reload").stdout == "rules in force, as the configuration file has them now: 1\n"


BAD = {
    "malformed": ("[routes\n", "vfsd.toml:5: "),
    "unknown key": ("colour = 1\n", "unknown key 'colour' in route '/kept/'"),
    "a bad rule": (deny("/b/../c"), "rule 1: pattern '/b/../c'"),
    "a hook that can't be built": (
        deny("/b") + '[[hooks]]\ncall = "factory:no_such:make"\n',
        "hook factory:no_such:make",
    ),
    "a quota of no route": (route("/new/") + '[quotas."/none/"]\nfiles = 1\n', "quota for /none/: no such route"),
    "no such location": (
        route("/new/") + route("/l/", "local", Path("/nowhere/at/all")),
        "/nowhere/at/all does not exist",
    ),
    "in the way": (route("/new/") + route("/file/x/"), "/file is a file in the tree"),
    "inside itself": (route("/new/") + route("/l/", "local", Path("MNT/d")), "is inside the mountpoint"),
    "another location": (
        route("/kept/", "state"),
        "route /kept/ can't change while mounted: vfsd umount default, then",
    ),
    "fixed": (
        "[audit]\nreads = true\n" + route("/new/"),
        "audit can't change while mounted: vfsd umount default, then",
    ),
}


def test_what_can_not_be_changes_nothing(world: World, file: File) -> None:
    kept = route("/kept/")
    file.write(kept, deny("/a"))
    file.mount()
    (world.mp / "file").write_text("x")
    (world.mp / "d").mkdir()
    with file.client() as client:

        def refused() -> str:
            with pytest.raises(OSError) as caught:
                client.call("reload")
            return str(caught.value.strerror)

        before = state(client)
        for what, (text, sentence) in BAD.items():
            file.write("" if "/kept/" in text else kept, text.replace("MNT", str(world.mp)))
            said = refused()
            assert sentence in said and said.endswith("; all is as it was before"), (what, said)
            assert state(client) == before, what
            assert sorted(os.listdir(world.mp)) == ["d", "file", "kept"], what
        # Two at once, in one sentence.
        file.path.write_text('thread = "t2"\nread_only = true\n' + BASE + kept)
        assert "thread and read_only can't change while mounted" in refused()
        # A route in use does not go, and then the new one does not come.
        file.write(route("/new/"))
        with open(world.mp / "kept/f", "w"):
            assert refused().startswith("route /kept/ can't go: files of it are open; all is as")
        assert state(client) == before
        assert client.call("reload")["removed"] == ["/kept/"]
        file.path.unlink()
        assert "No such file" in refused()
    assert world.refused("reload").endswith("vfsd.toml: No such file or directory; all is as it was before")


def test_a_route_with_a_quota_does_not_go(world: World, file: File) -> None:
    file.write(route("/q/"), '[quotas."/q/"]\nfiles = 3\n')
    file.mount()
    with file.client() as client:
        with pytest.raises(OSError, match="route /q/ can't go: quota for /q/: no such route; there are /, "):
            client.call("route", action="remove", prefix="/q/")
        assert state(client) == (["/", "/q/"], [])
        rule = {"operations": ["write"], "paths": ["/x"], "mode": "deny"}
        client.call("rules_set", owner="somebody", rules=[rule])
        assert state(client) == (["/", "/q/"], ["/x"])


def test_what_the_command_line_said_stays(world: World, file: File) -> None:
    file.path.write_text('thread = "t1"\n' + BASE)
    file.mount("--thread", "mine", "--route", "/x/=memory")
    file.path.write_text('thread = "t3"\n' + BASE + route("/x/", "state"))
    assert world.vfsd("reload").stdout == f"{file.path}: nothing changed; rules in force: 0\n"
    assert world.status()["thread"] == "mine"


def test_without_a_file_there_is_nothing_to_reload(world: World) -> None:
    world.vfsd("mount", world.mp, "--route", "/=memory")
    said = world.refused("reload")
    assert said.startswith("'default' was mounted without a configuration file, so there is nothing to read anew: vfsd")
    assert world.refused("rules", "reload") == said.removesuffix("; all is as it was before")
    assert " ERROR " not in (world.base / "state/vfsd/default/vfsd.log").read_text()
    assert world.refused("reload", "nobody").startswith("no mount is called 'nobody'")


def test_other_settings_that_may_change(world: World, file: File) -> None:
    file.write()
    file.mount()
    file.path.write_text('log_level = "debug"\n' + BASE + '[execute]\nprofile = "offline"\n[checkpoints]\nkeep = 7\n')
    said = world.vfsd("reload").stdout
    assert said == f"{file.path}: log_level, checkpoints and execute changed; rules in force: 0\n"
    with file.client() as client:
        assert client.call("log_level")["level"] == "debug"
        assert client.hello["execute"]["profile"] == "offline"


def test_the_level_of_the_log(world: World) -> None:
    world.vfsd("mount", world.mp, "--route", "/=memory")
    assert world.vfsd("log-level", "default").stdout == "info\n"
    assert world.vfsd("log-level", "default", "warning").stdout == "warning\n"
    assert "invalid choice: 'loud'" in world.vfsd("log-level", "default", "loud", code=2).stderr
    assert world.refused("log-level", "nobody").startswith("no mount is called 'nobody'")
    with (
        agenttools.Client(socket=world.run_dir / "vfsd/default.sock") as client,
        pytest.raises(OSError, match="log level 'loud' is unknown: use debug, info, warning, error"),
    ):
        assert client.call("log_level")["level"] == "warning"
        client.call("log_level", level="loud")


def test_by_signal(world: World, file: File) -> None:
    file.write()
    daemon = subprocess.Popen(
        [sys.executable, "-m", "vfsd", "mount", "--foreground", "--config", file.path, world.mp],
        env=world.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert daemon.stdout is not None and daemon.stdout.readline().startswith("mounted ")
    file.write(route("/new/"))
    daemon.send_signal(signal.SIGHUP)
    world.wait((world.mp / "new").exists)
    file.write("colour = 1\n")
    daemon.send_signal(signal.SIGHUP)
    assert daemon.stderr is not None
    while "not reloaded" not in (line := daemon.stderr.readline()):
        assert line
    assert " ERROR " in line and "unknown key 'colour'" in line and line.endswith("; all is as it was before\n")
    assert os.listdir(world.mp) == ["new"]
    daemon.terminate()
    daemon.communicate(timeout=SECONDS)
    assert daemon.returncode == 0
