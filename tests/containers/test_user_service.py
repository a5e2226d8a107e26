"""The units under the systemd of an ordinary user, who mounts through the setuid fusermount3."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import USER, Host
from user_manager import SYSTEMD, UserManager

pytestmark = [pytest.mark.mount, pytest.mark.slow, pytest.mark.timeout(120)]

VFSD = [sys.executable, "-m", "vfsd"]

if not Path(SYSTEMD).exists():
    pytest.skip("needs systemd: apt-get install systemd", allow_module_level=True)


@pytest.fixture
def manager(host: Host) -> Iterator[UserManager]:
    made = UserManager(host.directory("service"), USER, host.command([]))
    yield made
    made.stop()


def test_a_service_is_ready_restarts_and_ends(manager: UserManager) -> None:
    manager.run(*VFSD, "service", "install")
    manager.run("sh", "-c", 'mkdir -p "$HOME/.config/vfsd" && touch "$HOME/.config/vfsd/mine.toml"')
    manager.systemctl("daemon-reload")
    manager.systemctl("start", "vfsd@mine.service")
    manager.run("sh", "-c", 'echo x > "$HOME/vfs/mine/kept"')
    pid = manager.show("vfsd@mine.service", "MainPID")
    assert manager.run("stat", "-c", "%u", f"/proc/{pid}").stdout == f"{USER}\n"
    manager.run("kill", "-KILL", pid)
    manager.wait(lambda: manager.show("vfsd@mine.service", "NRestarts") == "1")
    manager.wait(lambda: manager.show("vfsd@mine.service", "ActiveState") == "active")
    assert manager.run("sh", "-c", 'cat "$HOME/vfs/mine/kept"').stdout == "x\n"
    manager.systemctl("stop", "vfsd@mine.service")
    assert manager.show("vfsd@mine.service", "Result") == "success"
