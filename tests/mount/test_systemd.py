"""The units under a real systemd: ready, reload, restart, socket activation, and what the system's unit takes away."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from user_manager import SYSTEMD, UserManager

import agenttools

if os.geteuid() != 0 or not Path(SYSTEMD).exists():
    pytest.skip("needs root, and systemd installed: apt-get install systemd", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

UNITS = Path(__file__).resolve().parents[2] / "vfsd/systemd"
VFSD = [sys.executable, "-m", "vfsd"]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UserManager]:
    made = UserManager(tmp_path_factory.mktemp("manager"))
    try:
        made.run(*VFSD, "service", "install")
        made.systemctl("daemon-reload")
        yield made
    finally:
        made.stop()


class Instance:
    """One mount of the manager's, called ``name``."""

    def __init__(self, manager: UserManager, name: str) -> None:
        self.manager, self.name, self.unit = manager, name, f"vfsd@{name}.service"
        self.config = manager.home / f".config/vfsd/{name}.toml"
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text('[routes."/"]\nkind = "state"\n')
        self.point = manager.home / "vfs" / name
        self.tree = manager.root / str(self.point).lstrip("/")
        self.socket = Path(manager.env["XDG_RUNTIME_DIR"]) / f"vfsd/{name}.sock"

    def show(self, what: str) -> str:
        return self.manager.show(self.unit, what)

    def wait(self, what: str, value: str) -> None:
        self.manager.wait(lambda: self.show(what) == value)

    def start(self) -> int:
        self.manager.systemctl("start", self.unit)
        return int(self.show("MainPID"))

    def stop(self) -> None:
        self.manager.systemctl("stop", self.unit)
        assert self.show("Result") == "success"
        assert os.listdir(self.tree) == []


def test_a_service_is_ready_restarts_and_ends(manager: UserManager) -> None:
    agent = Instance(manager, "agent")
    pid = agent.start()
    (agent.tree / "kept").write_text("x")
    assert agent.show("StatusText") == f"1 routes on {agent.point}"
    assert agent.show("WatchdogUSec") == "1min"

    os.kill(pid, signal.SIGKILL)
    agent.wait("NRestarts", "1")
    agent.wait("ActiveState", "active")
    assert agent.show("MainPID") != str(pid)
    assert (agent.tree / "kept").read_text() == "x"
    agent.stop()


def test_a_reload_is_the_managers_to_see(manager: UserManager) -> None:
    agent = Instance(manager, "reloaded")
    agent.start()
    agent.config.write_text(agent.config.read_text() + '[routes."/more/"]\nkind = "memory"\n')
    manager.systemctl("reload", agent.unit)
    assert os.listdir(agent.tree) == ["more"]
    agent.config.write_text("colour = 1\n")
    assert "Job for vfsd@reloaded.service failed" in manager.systemctl("reload", agent.unit, code=1).stderr
    assert agent.show("ActiveState") == "active" and os.listdir(agent.tree) == ["more"]
    agent.stop()


def test_a_loop_that_hangs_is_ended_and_the_mount_is_back(manager: UserManager) -> None:
    agent = Instance(manager, "hanging")
    drop_in = manager.home / f".config/systemd/user/{agent.unit}.d"
    drop_in.mkdir()
    (drop_in / "quick.conf").write_text("[Service]\nWatchdogSec=2\n")
    manager.systemctl("daemon-reload")
    os.kill(agent.start(), signal.SIGSTOP)
    agent.wait("NRestarts", "1")
    agent.wait("ActiveState", "active")
    (agent.tree / "there").write_text("again")
    agent.stop()


def test_the_first_tool_that_connects_has_the_mount_made(manager: UserManager) -> None:
    agent = Instance(manager, "sock")
    manager.systemctl("start", "vfsd@sock.socket")
    assert agent.show("ActiveState") == "inactive"
    assert oct(agent.socket.stat().st_mode & 0o777) == "0o600"
    with agenttools.Client(socket=agent.socket) as client:
        agenttools.write(client, "/by-tool", "x")
    agent.wait("ActiveState", "active")
    assert (agent.tree / "by-tool").read_text() == "x"
    (row,) = json.loads(manager.run(*VFSD, "status", "sock", "--json").stdout)
    assert row["socket"] == str(agent.socket) and row["activated"] is True

    # It ends, the manager goes on to listen, and the next tool has it back.
    manager.run(*VFSD, "umount", "sock")
    agent.wait("ActiveState", "inactive")
    with agenttools.Client(socket=agent.socket) as client:
        assert agenttools.read(client, "/by-tool").text.endswith("x")
    manager.systemctl("stop", "vfsd@sock.socket")
    agent.stop()
    assert not agent.socket.exists()


def test_the_systems_unit_runs_with_what_it_leaves(manager: UserManager) -> None:
    """As root's own manager would run it, but for the places, which are this test's."""
    text = (UNITS / "system/vfsd@.service").read_text()
    text = text.replace("/usr/bin/vfsd --system", " ".join(VFSD)).replace("/srv/vfs/%i", "%h/vfs/%i")
    agent = Instance(manager, "hard")
    agent.unit = "vfsd-system@hard.service"
    (manager.home / ".config/systemd/user/vfsd-system@.service").write_text(text)
    manager.systemctl("daemon-reload")
    host = manager.home / "host"
    host.mkdir()
    with open(agent.config, "a") as file:
        file.write(f'[routes."/host/"]\nkind = "local"\nlocation = "{host}"\n[routes."/notes/"]\nkind = "store"\n')
    pid = agent.start()
    (agent.tree / "a").write_text("x")
    file = agent.tree / "host/suid"
    file.write_text("x")
    os.chown(file, 1, 1)
    file.chmod(0o4755)
    os.setxattr(file, "user.kept", b"x")
    os.mknod(agent.tree / "host/fifo", 0o010644)
    for place in (agent.tree / "big", agent.tree / "host/big", agent.tree / "notes/big"):
        place.write_bytes(b"x" * 200_000)
        with open(place, "r+b") as big, open(f"{place}.copy", "w+b") as copy:
            os.copy_file_range(big.fileno(), copy.fileno(), 100_000)
            os.fsync(copy.fileno())
        place.unlink()
    manager.run(*VFSD, "checkpoint", "create", "--name", "hard")
    assert ((host / "suid").stat().st_uid, (host / "suid").stat().st_mode) == (1, 0o104755)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert f"{int(status['CapEff'], 16):x}" == "8828001f"
    assert os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink(f"{manager.root.parent}/ns/mnt")
    agent.stop()
