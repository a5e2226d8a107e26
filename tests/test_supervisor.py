"""What a service manager is told and hands over, and where its files go: all but a real one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import SECONDS, World

import agenttools
from vfsd.cli import main
from vfsd.process.supervisor import Supervisor, take

UNITS = Path(__file__).resolve().parent.parent / "vfsd/systemd"
VFSD = [sys.executable, "-m", "vfsd"]


class Manager:
    """A service manager's end of the notification socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(SECONDS)

    def hear(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines())

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.close()


def serve(world: World, *args: str, **env: str) -> subprocess.Popen[str]:
    """A daemon in the foreground, as a service manager starts it."""
    return subprocess.Popen(
        [*VFSD, "mount", "--foreground", *args, str(world.mp)],
        env=world.env | env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ready_alive_and_stopping(world: World, manager: Manager) -> None:
    daemon = serve(world, NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC="300000")
    ready = manager.hear()
    assert ready == {"READY": "1", "STATUS": f"3 routes on {world.mp}"}
    assert sorted(os.listdir(world.mp)) == ["blobs", "memories"]
    assert [manager.hear()["WATCHDOG"] for _ in range(3)] == ["1"] * 3
    daemon.terminate()
    while "STOPPING" not in (last := manager.hear()):
        assert last["WATCHDOG"] == "1"
    assert last["STATUS"] == "unmounting"
    daemon.communicate(timeout=SECONDS)
    assert daemon.returncode == 0


def test_no_sign_of_life_from_a_loop_that_hangs(world: World, manager: Manager) -> None:
    # A hook is built in the loop, when rules are put in force.
    (world.base / "stuck.py").write_text("import time\n\n\ndef make():\n    time.sleep(1e9)\n")
    config = world.base / "vfsd.toml"
    config.write_text("")
    daemon = serve(world, "--config", str(config), NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC="300000")
    assert "READY" in manager.hear()
    config.write_text('[[hooks]]\ncall = "factory:stuck:make"\n')
    asked = subprocess.Popen([*VFSD, "rules", "reload"], env=world.env, stderr=subprocess.DEVNULL)
    manager._socket.settimeout(2)
    with pytest.raises(TimeoutError):
        while True:
            assert "WATCHDOG" in manager.hear()
    for process in (asked, daemon):
        process.kill()
        process.wait(SECONDS)
    assert daemon.stdout is not None and daemon.stderr is not None
    daemon.stdout.close()
    daemon.stderr.close()


def test_a_daemon_in_the_background_speaks_for_nobody(world: World, manager: Manager) -> None:
    world.env["NOTIFY_SOCKET"] = str(manager.path)
    world.vfsd("mount", world.mp)
    manager._socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        manager.hear()


def test_the_environment_is_the_managers_word_to_us_alone(tmp_path: Path) -> None:
    me = str(os.getpid())
    env = {"NOTIFY_SOCKET": "@abstract", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": me, "LISTEN_FDS": "1", "HOME": "/"}
    assert take(env | {"LISTEN_PID": "1"}) == Supervisor("@abstract", 2.0, None)
    assert take(env | {"WATCHDOG_PID": "1"}).watchdog == 0.0
    assert take({"WATCHDOG_USEC": "no number"}) == Supervisor()
    take(env)
    assert env == {"HOME": "/"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(f"\0vfsd-test-{me}")
        Supervisor(f"@vfsd-test-{me}").tell("READY=1", "STATUS=x")
        assert there.recv(100) == b"READY=1\nSTATUS=x"
    Supervisor(str(tmp_path / "nobody")).tell("READY=1")


def activated(world: World, command: list[str], *sockets: str) -> subprocess.Popen[str]:
    listen = [word for path in sockets for word in ("--listen", path)]
    return subprocess.Popen(
        ["systemd-socket-activate", *(f"-E{k}={v}" for k, v in world.env.items()), *listen, *command],
        env=world.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="needs systemd: apt-get install systemd")
def test_a_socket_that_is_passed_is_served_and_left(world: World) -> None:
    path = world.run_dir / "tools.sock"
    daemon = activated(world, [*VFSD, "mount", "--foreground", str(world.mp)], str(path))
    world.wait(path.exists)
    with agenttools.Client(socket=path) as client:
        agenttools.write(client, "/a", "x")
        assert (world.mp / "a").read_text() == "x"
        row = world.status()
        assert (row["socket"], row["activated"], row["state"]) == (str(path), True, "running")
        assert not (world.run_dir / "vfsd/default.sock").exists()
    world.vfsd("umount", "default")
    assert daemon.communicate(timeout=SECONDS) and daemon.returncode == 0
    assert path.exists(), "it is the manager's"
    path.unlink()


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="needs systemd: apt-get install systemd")
@pytest.mark.parametrize(
    ("sockets", "sentence"),
    [
        (
            ["{run}/a", "{run}/b"],
            "2 sockets were passed to this daemon: its .socket unit needs exactly one ListenStream=",
        ),
        (["127.0.0.1:0"], "the socket passed to this daemon is no Unix stream socket with a path that listens"),
    ],
)
def test_sockets_that_will_not_do(world: World, sockets: list[str], sentence: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = [text.format(run=world.run_dir).replace(":0", f":{port}") for text in sockets]
    daemon = activated(world, [*VFSD, "mount", "--foreground", str(world.mp)], *where)

    def connected() -> bool:
        host, _, number = where[0].rpartition(":")
        probe = socket.socket(socket.AF_INET if host else socket.AF_UNIX)
        with probe:
            try:
                probe.connect((host, int(number)) if host else where[0])
            except OSError:
                return False
        return True

    world.wait(connected)
    errors = daemon.communicate(timeout=SECONDS)[1]
    assert daemon.returncode == 1
    assert f"vfsd: {sentence}" in errors and "Traceback" not in errors


# -- the files


def test_units_are_written_with_this_program(world: World) -> None:
    world.env["XDG_CONFIG_HOME"] = str(world.base / "config")
    said = world.vfsd("service", "install").stdout
    places = sorted((world.base / "config/systemd/user").iterdir())
    assert [path.name for path in places] == ["vfsd@.service", "vfsd@.socket"]
    assert all(f"wrote {path}" in said for path in places)
    program = Path(sys.executable).with_name("vfsd")
    assert f"ExecStart={program} mount --foreground --name %i" in places[0].read_text()
    assert "/usr/bin/vfsd" not in places[0].read_text()
    named = [line.split("=")[0] for line in places[0].read_text().splitlines() if str(program) in line]
    assert named == ["ExecStart", "ExecReload"]  # and no comment
    assert f"a mount for {world.base}/config/vfsd/NAME.toml: systemctl --user daemon-reload" in said


def test_a_path_with_blanks_is_quoted(world: World) -> None:
    place = world.directory("my programs")
    (place / "vfsd").symlink_to(Path(sys.executable).with_name("vfsd"))
    world.env["XDG_CONFIG_HOME"] = str(world.base / "config")
    subprocess.run([place / "vfsd", "service", "install"], env=world.env, check=True, capture_output=True)
    unit = (world.base / "config/systemd/user/vfsd@.service").read_text()
    assert f'ExecStart="{place}/vfsd" mount --foreground' in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd: apt-get install systemd")
@pytest.mark.parametrize("whose", ["user", "system"])
def test_systemd_finds_nothing_to_say_of_the_units(world: World, whose: str) -> None:
    units = world.directory("units")
    for unit in (UNITS / whose).glob("vfsd@.*"):
        program = Path(sys.executable).with_name("vfsd")
        (units / unit.name).write_text(unit.read_text().replace("/usr/bin/vfsd", str(program)))
    done = subprocess.run(
        ["systemd-analyze", f"--{whose}", "verify", *(f"{units}/vfsd@agent.{kind}" for kind in ("service", "socket"))],
        env=world.env, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_systems_files(world: World) -> None:
    root = world.directory("root")
    said = world.vfsd("service", "install", "--system", "--root", root).stdout
    assert "a mount for /etc/vfsd/NAME.toml: systemctl daemon-reload && systemctl enable --now vfsd@NAME" in said
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    assert set(found) == {
        "etc/systemd/system/vfsd@.service",
        "etc/systemd/system/vfsd@.socket",
        "etc/tmpfiles.d/vfsd.conf",
        "sbin/mount.fuse.vfsd",
    }
    assert os.access(found["sbin/mount.fuse.vfsd"], os.X_OK)
    if shutil.which("systemd-tmpfiles") and os.geteuid() == 0:
        subprocess.run(["systemd-tmpfiles", f"--root={root}", "--create", "vfsd.conf"], check=True, timeout=SECONDS)
        assert oct((root / "run/vfsd").stat().st_mode) == "0o40700"


def test_the_system_is_roots(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--system", "status"]) == 2
    assert capsys.readouterr().err == "vfsd: --system is for root: the mounts that root's services made\n"
