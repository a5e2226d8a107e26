"""The daemon on the host, its mount and its socket bound into containers."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import World
from engine import Podman
from hosts import USER, Host, toolchain
from story import log, one_path_and_who_did_it, who_did_it

from agenttools.client import Client

pytestmark = [pytest.mark.mount, pytest.mark.slow, pytest.mark.timeout(120)]


class Mount:
    """``vfsd mount`` of a user of the host, below a directory that is shared with containers."""

    def __init__(self, host: Host, user: int) -> None:
        self.host, self.user = host, user
        self.shared = host.directory(f"shared{user}", user)
        self.point = self.shared / "vfs"
        self.point.mkdir()
        host.run("chown", str(user), self.point)
        # A mount of its own, so that what is mounted below it can be seen elsewhere.
        host.run("mount", "--bind", self.shared, self.shared)
        self.sockets = Path(host.environ(user)["XDG_RUNTIME_DIR"]) / "vfsd"
        self.start()

    def start(self, *options: str) -> None:
        self.outside("vfsd", "mount", *options, str(self.point))

    def outside(self, *argv: str, stdin: str = "", **env: str) -> str:
        return self.host.run(*argv, user=self.user, stdin=stdin, env=env).stdout

    @property
    def flags(self) -> list[str]:
        """What a container needs: the mount where the daemon has it, and the directory of the socket."""
        socket = "VFSD_SOCKET=/run/vfsd/default.sock"
        return ["-v", f"{self.point}:{self.point}", "-v", f"{self.sockets}:/run/vfsd", "-e", socket]

    def stop(self) -> None:
        self.host.run("vfsd", "umount", "--force", str(self.point), user=self.user, code=None)

    def kill(self) -> None:
        (entry,) = json.loads(self.outside("vfsd", "status", "--json"))
        self.host.run("kill", "-KILL", str(entry["pid"]))
        World.wait(lambda: json.loads(self.outside("vfsd", "status", "--json"))[0]["state"] == "dead")


@pytest.fixture(scope="module")
def mount(host: Host) -> Iterator[Mount]:
    """Root's, which no test ends."""
    made = Mount(host, 0)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def users(host: Host) -> Iterator[Mount]:
    """An ordinary user's."""
    made = Mount(host, USER)
    yield made
    made.stop()


def within(podman: Podman, *flags: str | Path, **options: Any) -> Any:
    def inside(*argv: str, **env: str) -> str:
        given = [word for key, value in env.items() for word in ("-e", f"{key}={value}")]
        return podman.run(*flags, *given, argv=argv, **options).stdout

    return inside


def test_roots_container(podman: Podman, mount: Mount) -> None:
    one_path_and_who_did_it("bound", mount.outside, within(podman, *mount.flags))


@pytest.mark.parametrize("profile", ["tree", "offline"])
def test_commands_are_confined_in_a_container_whose_proc_is_whole(podman: Podman, mount: Mount, profile: str) -> None:
    inside = within(podman, *mount.flags, "--security-opt", "unmask=ALL")
    execute = ["agenttools", "execute", "--profile", profile]
    # The host's commands share namespaces, which are not the container's, though both know of them by the same files.
    mount.outside(*execute, "exec sleep 60 >/dev/null 2>&1 &")
    seen = [*execute, "cat /proc/[0-9]*/comm | grep -c sleep; :"]
    assert mount.outside(*seen) == "1\n"
    one_path_and_who_did_it(profile, mount.outside, inside, profile=profile, pidns=False)
    lasting = inside("sh", "-c", f"{shlex.join([*execute, 'exec sleep 50 >/dev/null 2>&1 &'])}; {shlex.join(seen)}")
    assert lasting == "1\n"
    assert mount.outside(*seen) == "1\n"
    mount.outside(*execute, "kill $(grep -l sleep /proc/[0-9]*/comm | cut -d/ -f3)")


def test_commands_that_cannot_be_confined_are_not_run(podman: Podman, mount: Mount) -> None:
    script = "agenttools execute 'echo > /ran'; python -m agenttools.abilities"
    done = podman.run(*mount.flags, argv=["sh", "-c", script])
    assert "nothing was run, since a command cannot be confined by the profile 'tree' here" in done.stderr
    assert "only 'open'" in done.stdout and "--security-opt unmask=ALL" in done.stdout
    assert "/ran" not in mount.outside("agenttools", "ls", "/")


def test_a_container_whose_root_is_the_tree(podman: Podman, mount: Mount) -> None:
    """No namespace is needed then, nor a mountpoint in the container."""
    with Client(socket=mount.sockets / "default.sock") as client:  # an image has these below /usr
        client.call("stub", paths=[os.fsencode(path) for path in toolchain()])
    flags = [*mount.flags[2:], "--tmpfs", "/run", "--cap-drop", "all"]
    inside = within(podman, *flags, rootfs=mount.point)
    one_path_and_who_did_it("rooted", mount.outside, inside, pidns=False)
    assert inside("cat", "/rooted/inside") == "from inside\n"
    refused = podman.run(*flags, rootfs=mount.point, argv=["agenttools", "execute", "true"], code=1)
    assert "the tree is the root of this container" in refused.stderr


@pytest.mark.parametrize("profile", ["open", "tree"])
def test_an_ordinary_user_without_containers(users: Mount, profile: str) -> None:
    """fusermount3 mounts for them."""
    one_path_and_who_did_it(f"user_{profile}", users.outside, users.outside, profile=profile, pidns=profile == "open")


def test_rootless(rootless: Podman, users: Mount) -> None:
    one_path_and_who_did_it("rootless", users.outside, within(rootless, *users.flags))
    assert {record["uid"] for record in log(users.outside, "--call", "rootless")} == {USER}


def test_users_of_a_container_other_than_who_mounted(rootless: Podman, users: Mount) -> None:
    """Neither the mount nor the socket is theirs; the mount can be opened to them."""
    flags = [*users.flags, "--user", "other"]
    denied = rootless.run(*flags, argv=["ls", users.point], code=None)
    assert "Permission denied" in denied.stderr
    denied = rootless.run(*flags, argv=["agenttools", "ls"], code=3)
    assert "Permission denied" in denied.stderr
    users.stop()
    users.start("--allow-other")
    users.outside("agenttools", "write", "/seen", stdin="by all")
    assert rootless.run(*flags, argv=["cat", users.point / "seen"]).stdout == "by all"


def test_a_restarted_daemon(podman: Podman, mount: Mount) -> None:
    """Its new mount is in running containers that have the directory above with rslave; one bound in itself is dead."""
    below = ["-v", f"{mount.shared}:{mount.shared}:rslave", *mount.flags[2:]]
    podman.start("follows", *below, argv=["sleep", "1000"])
    podman.start("stays", *mount.flags, argv=["sleep", "1000"])
    mount.outside("agenttools", "write", "/kept", stdin="kept")
    mount.kill()
    for name in ("follows", "stays"):
        assert "Transport endpoint is not connected" in podman.inside(name, "ls", mount.point, code=None).stderr
    mount.start()
    assert podman.inside("follows", "cat", mount.point / "kept").stdout == "kept"
    command = ["agenttools", "execute", "--profile", "open", "cat /kept"]
    assert podman.inside("follows", *command).stdout == "kept"
    assert "Transport endpoint is not connected" in podman.inside("stays", "ls", mount.point, code=None).stderr
    # The socket's directory is bound in, so the new socket is there.
    assert podman.inside("stays", "agenttools", "read", "/kept").stdout == "kept"
    assert "Transport endpoint is not connected" in podman.inside("stays", *command, code=None).stderr
    podman.end("stays")
    assert mount.outside("vfsd", "umount", "default") == f"unmounted {mount.point}\n"
    assert podman.inside("follows", "ls", mount.point).stdout == ""
    mount.start()


def test_a_container_that_an_execute_starts(podman: Podman, mount: Mount) -> None:
    """podman leaves nothing of who started it, so the marks have to be passed on."""
    mount.outside("mkdir", str(mount.point / "started"))
    script = f"cd {mount.point}/started; echo > by_podman; env -i /bin/sh -c 'echo > cleared_by_podman'"
    marks = ["-e", "VFSD_EXECUTE", "-e", "VFSD_CALL_ID"]
    command = podman.whole("--rm", *marks, *mount.flags, argv=["sh", "-c", script])
    execute = ["agenttools", "execute", "--view", "mount", "--profile", "open", shlex.join(command)]
    mount.outside(*execute, VFSD_CALL_ID="started")
    who_did_it("started", mount.outside, ["by_podman", "cleared_by_podman"])
