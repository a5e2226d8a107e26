"""The daemon in a container, by the entrypoint: commands beside it, tools outside, other containers, its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import Podman
from hosts import ROOT, USER, Host
from story import log, one_path_and_who_did_it

pytestmark = [pytest.mark.mount, pytest.mark.slow, pytest.mark.timeout(120)]

ENTRYPOINT = ROOT / "scripts/entrypoint.sh"


class Inside:
    """Containers that have the daemon inside, its state and sockets in a directory of the host."""

    def __init__(self, podman: Podman, name: str) -> None:
        self.podman, self.host = podman, podman.host
        self.place = self.host.directory(name, podman.user)
        for part in ("vfsd", "state"):
            self.host.directory(f"{name}/{part}", podman.user)
        self.environ = {"XDG_RUNTIME_DIR": str(self.place), "XDG_STATE_HOME": str(self.place / "state")}

    @property
    def doors(self) -> list[str]:
        """What another container needs besides the mount."""
        return ["-v", f"{self.place}/vfsd:/run/vfsd"]

    @property
    def flags(self) -> list[str]:
        state = ["-v", f"{self.place}/state:/var/lib", "-e", "XDG_STATE_HOME=/var/lib"]
        return ["--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", *state, *self.doors]

    def outside(self, *argv: str, stdin: str = "") -> str:
        return self.host.run(*argv, user=self.podman.user, stdin=stdin, env=self.environ).stdout

    def serving(self) -> None:
        """Return when the daemon answers."""
        deadline = time.monotonic() + 60
        while self.host.run("agenttools", "ls", user=self.podman.user, env=self.environ, code=None).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def inside(podman: Podman, request: pytest.FixtureRequest) -> Iterator[Inside]:
    yield Inside(podman, request.node.name)
    podman.close()


def test_commands_beside_it_and_tools_outside(podman: Podman, inside: Inside) -> None:
    podman.start("main", *inside.flags, argv=[ENTRYPOINT, "sleep", "1000"])
    inside.serving()
    one_path_and_who_did_it("beside", inside.outside, lambda *a, **env: podman.inside("main", *a, **env).stdout)
    # As pid 13 there is another process here, the daemon is not ended from here.
    refused = inside.host.run("vfsd", "umount", "--force", "default", env=inside.environ, code=1)
    assert "runs in a container, as pid" in refused.stderr
    confined = ["agenttools", "execute", "--profile", "tree", "cat /beside/inside"]
    assert podman.inside("main", *confined).stdout == "from inside\n"


def test_the_entrypoint_runs_a_command_whose_root_is_the_tree(podman: Podman, inside: Inside) -> None:
    flags = [*inside.flags, "-e", "VFSD_MOUNT_OPTIONS=--thread t7"]
    script = "cat > /made; echo $(ls /) $(cat /made); exit 7"
    done = podman.run(*flags, argv=[ENTRYPOINT, "sh", "-c", script], code=7, stdin="from outside")
    assert done.stdout == "blobs home made memories tmp from outside\n"
    assert "unmounted /vfs" in done.stderr
    assert (inside.place / "state/vfsd/default/threads/t7").is_dir()
    # The command is told to end, and may take its time.
    trap = "trap 'echo told > /told; exit 5' TERM; echo ready > /ready; while :; do sleep 0.1; done"
    podman.start("ends", *inside.flags, argv=[ENTRYPOINT, "sh", "-c", trap])
    inside.serving()
    while "ready" not in inside.outside("agenttools", "ls"):
        time.sleep(0.05)
    podman.podman("stop", "--time", "20", "ends")
    assert podman.podman("inspect", "--format", "{{.State.ExitCode}}", "ends").stdout == "5\n"
    assert podman.run(*inside.flags, argv=[ENTRYPOINT, "cat", "/told"]).stdout == "told\n"
    done = podman.run(*inside.flags[:2], argv=[ENTRYPOINT, "true"], code=1)
    assert "start the container with --device /dev/fuse --cap-add SYS_ADMIN" in done.stderr


@pytest.fixture
def shared(host: Host, inside: Inside) -> Path:
    """A directory whose mounts are seen by the host and by other containers."""
    path = inside.place / "shared"
    path.mkdir()
    host.run("mount", "--bind", path, path)
    return path


def test_a_sidecar(podman: Podman, inside: Inside, shared: Path) -> None:
    where = ["-e", "VFSD_MOUNTPOINT=/shared/vfs"]
    podman.start("sidecar", *inside.flags, *where, "-v", f"{shared}:/shared:rshared", argv=[ENTRYPOINT])
    inside.serving()
    has = ["-v", f"{shared}:/shared:rslave", *inside.doors]
    podman.start("agent", *has, "--pid", "container:sidecar", argv=["sleep", "1000"])
    one_path_and_who_did_it("sidecar", inside.outside, lambda *a, **env: podman.inside("agent", *a, **env).stdout)
    assert inside.outside("cat", f"{shared}/vfs/sidecar/inside") == "from inside\n"


UNSEEN = """
agenttools execute --profile open 'echo > /made'
agenttools execute --profile open 'echo > /killed; sleep 60' &
until [ -e /shared/vfs/killed ]; do sleep 0.1; done
kill -KILL $!
sleep 1
echo > /shared/vfs/after
"""


def test_a_sidecar_that_does_not_see_the_processes_of_others(podman: Podman, inside: Inside, shared: Path) -> None:
    """Of what commands change it is known which ran at that time, and the daemon says so."""
    where = ["-e", "VFSD_MOUNTPOINT=/shared/vfs"]
    podman.start("sidecar", *inside.flags, *where, "-v", f"{shared}:/shared:rshared", argv=[ENTRYPOINT])
    inside.serving()
    has = ["-v", f"{shared}:/shared:rslave", *inside.doors, "-e", "VFSD_CALL_ID=call_3"]
    podman.run(*has, argv=["sh", "-c", UNSEEN])
    made, _ = [record for record in log(inside.outside, "--call", "call_3") if record["op"] == "create"]
    assert (made["path"], made["pid"], "call" in made) == ("/made", 0, False)
    assert [one["call"] for one in made["among"]] == ["call_3"]
    assert "while call call_3 execute" in inside.outside("vfsd", "blame", "/made")
    (after,) = [record for record in log(inside.outside, "--path", "/after") if record["op"] == "create"]
    assert after["pid"] == 0 and "among" not in after
    assert "pid namespace that this daemon does not see" in podman.podman("logs", "sidecar").stderr


def test_rootless(rootless: Podman) -> None:
    inside = Inside(rootless, "insiderootless")
    rootless.start("main", *inside.flags, argv=[ENTRYPOINT, "sleep", "1000"])
    inside.serving()
    one_path_and_who_did_it("rootless", inside.outside, lambda *a, **env: rootless.inside("main", *a, **env).stdout)
    assert inside.host.run("find", inside.place, "-not", "-user", str(USER)).stdout == ""
