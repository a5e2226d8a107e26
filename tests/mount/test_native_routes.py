"""``native = true``: commands work in the host directory itself, and only where that keeps nothing from anybody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import World

from agenttools import shell, tools
from agenttools.client import Client
from agenttools.views import Profile

pytestmark = pytest.mark.mount

KIND = "stat -f -c %T /project"
"""What file system a command finds at the route."""


class Place:
    """A mount with a local route ``/project/`` that is to be native."""

    def __init__(self, base: Path) -> None:
        self.world = World(base)
        self.host = base / "host"
        self.host.mkdir()
        self.said = ""
        (base / "hooking.py").write_text("def make():\n    return lambda mutation: None\n")
        self.world.env["PYTHONPATH"] = str(base)

    def mount(self, config: str = "", route: str = "", **options: str) -> Client:
        """With more of the file, more of the route, and options of the command line; connected."""
        text = f'[routes."/"]\nkind = "memory"\n[routes."/project/"]\nkind = "local"\nlocation = "{self.host}"\n'
        file = self.world.base / "vfsd.toml"
        file.write_text(f"{text}native = true\n{route}\n{config}\n")
        args = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value) if word]
        self.said = self.world.vfsd("mount", "--config", file, *args, self.world.mp).stderr
        return Client(socket=self.world.run_dir / "vfsd/default.sock")

    def route(self) -> dict[str, Any]:
        (found,) = [r for r in self.world.status()["routes"] if r["prefix"] == "/project/"]
        assert isinstance(found, dict)
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = Place(tmp_path)
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, place.world.env[name])
    yield place
    place.world.clean()


def run(client: Client, command: str, profile: Profile = "tree") -> str:
    result = shell.execute(client, command, view="root", timeout=20, profile=profile)
    assert result.exit_code == 0, result.output
    return result.output


def is_native(client: Client, profile: Profile = "tree") -> bool:
    return "fuse" not in run(client, KIND, profile)


@pytest.mark.parametrize("profile", ["tree", "offline"])
def test_commands_have_the_host_directory(place: Place, profile: Profile) -> None:
    (place.host / "there").write_text("before\n")
    with place.mount() as client:
        assert "not in the audit log" in place.said
        assert place.route()["native"] is True
        mounted = place.world.mp / "project/there"
        assert mounted.read_text() == "before\n"
        assert is_native(client, profile)
        command = "cd /project && cat there && echo after, and longer > there && mkdir d && echo x > d/f && pwd"
        out = run(client, command, profile)
        assert out == "before\n/project\n"
        assert tools.read(client, "/project/there").content == "after, and longer\n"
        assert tools.read(client, "/project/d/f").content == "x\n"
        place.world.wait(lambda: mounted.read_text() == "after, and longer\n", 5)
        place.world.wait(lambda: sorted(os.listdir(place.world.mp / "project")) == ["d", "there"], 5)
        assert tools.write(client, "/project/d/f", "by a tool\n").error is None
        assert run(client, "cat /project/d/f", profile) == "by a tool\n"
        assert sorted(os.listdir(place.host)) == ["d", "there"]


def test_vfsd_run_has_it_too(place: Place) -> None:
    place.mount()
    done = place.world.vfsd("run", "--", "sh", "-c", KIND)
    assert "fuse" not in done.stdout
    assert "native" in place.world.vfsd("status").stdout
    assert "native" in place.world.vfsd("route", "list").stdout


RULE = '[[rules]]\noperations = ["write"]\npaths = ["%s"]\nmode = "%s"'


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (RULE % ("/project/keep/**", "deny"), "the rule [deny write /project/keep/**"),
        (RULE % ("/**/.env", "interrupt"), "the rule [interrupt write /**/.env"),
        ('[[hooks]]\ncall = "factory:hooking:make"', "the hook factory:hooking:make"),
        ("[audit]\nenabled = true", "[audit] asks"),
        ('[routes."/project/inner/"]\nkind = "memory"', "the route /project/inner/ is mounted in it"),
    ],
    ids=["rule-below", "rule-anywhere", "hook", "audit", "nested"],
)
def test_not_where_something_would_be_missed(place: Place, config: str, why: str) -> None:
    with place.mount(config) as client:
        for told in (place.said, place.route()["notice"], place.world.vfsd("status").stdout):
            assert f"not native: {why}" in told
        assert place.route()["native"] is False
        assert not is_native(client)


def test_a_rule_elsewhere_is_no_hindrance(place: Place) -> None:
    with place.mount(RULE % ("/policies/**", "deny")) as client:
        assert is_native(client)


def test_not_on_a_read_only_mount(place: Place) -> None:
    with place.mount(read_only="") as client:
        assert "the mount is read-only" in place.said
        assert place.route()["native"] is False
        assert tools.write(client, "/project/f", "x").error


def test_not_where_ids_are_others_than_on_the_host(place: Place) -> None:
    with place.mount(map_uid=f"{os.geteuid()}:0"):
        assert "ids on the host are others than in the mount" in place.said
        assert place.route()["native"] is False


def test_not_with_vfsds_own_files_in_it(place: Place) -> None:
    place.host.rmdir()
    place.host.symlink_to(place.world.base / "state")
    with place.mount() as client:
        assert "it holds vfsd's own files" in place.said
        assert not is_native(client)


def test_a_rule_that_a_client_sets_counts_from_the_next_command(place: Place) -> None:
    with place.mount() as client:
        assert is_native(client)
        rule = {"operations": ["write"], "paths": ["/project/keep"], "mode": "deny"}
        client.call("rules_set", owner="agent", rules=[rule], hide=False, waits=False)
        assert not is_native(client)
        assert "Permission denied" in shell.execute(client, "echo x > /project/keep", view="root").output
        assert not (place.host / "keep").exists()
        client.call("rules_set", owner="agent", rules=[], hide=False, waits=False)
        assert is_native(client)


def test_not_a_directory_that_is_another_one_here(place: Place) -> None:
    """A client in a container has its own files at the daemon's path."""
    with place.mount() as client:

        class Elsewhere:
            hello = client.hello
            socket = client.socket

            def call(self, op: str, /, **params: Any) -> Any:
                reply = client.call(op, **params)
                for bind in reply.get("binds", ()) if op == "stub" else ():
                    bind["ino"] += 1
                return reply

        result = shell.execute(Elsewhere(), KIND, view="root", timeout=20)
        assert "fuse" in result.output


@pytest.mark.parametrize("profile", ["tree", "offline"])
def test_the_profile_holds(place: Place, profile: Profile) -> None:
    secret = place.world.base / "home" / "secret"
    secret.write_text("the key\n")
    (place.host / "out").symlink_to(secret)
    (place.host / "up").symlink_to(place.world.base)
    with place.mount() as client:
        assert is_native(client, profile)
        command = f"cd /project; cat out {secret} up/home/secret ../home/secret ../..{secret} 2>&1; ls -A up ~; true"
        assert "the key" not in run(client, command, profile)
        for command in ("mount -t tmpfs x /project", "umount /project", "chroot /project"):
            assert shell.execute(client, command, view="root", timeout=20, profile=profile).exit_code != 0
        sockets = "python3 -c 'import socket; print(len(socket.if_nameindex()))'"
        assert (run(client, sockets, profile) == "1\n") is (profile == "offline")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[routes."/m/"]\nkind = "memory"\nnative = true', "vfsd.toml:1: route /m/: only a local route can be native"),
        ('[routes."/m/"]\nkind = "local"\nlocation = "/"\nnative = "yes"', "vfsd.toml:4: native must be true or false"),
    ],
)
def test_refused_configurations(place: Place, text: str, why: str) -> None:
    file = place.world.base / "vfsd.toml"
    file.write_text(text)
    assert why in place.world.refused("mount", "--config", file, place.world.mp)
