"""What doctor says about machines that are not ready, and about this one."""

from __future__ import annotations

import grp
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vfsd.process import doctor
from vfsd.process.doctor import Finding


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_missing_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_user: None) -> None:
    missing = tmp_path / "fuse"
    monkeypatch.setattr(doctor, "in_container", lambda: True)
    found = doctor.device(missing)
    assert found.fatal and found.sentence().startswith(
        f"{missing} is missing: start the container with --device /dev/fuse"
    )
    monkeypatch.setattr(doctor, "in_container", lambda: False)
    found = doctor.device(missing)
    assert found.fatal and found.fix in ("sudo modprobe fuse", f"sudo mknod -m 666 {missing} c 10 229")


def test_device_without_driver(tmp_path: Path, as_user: None) -> None:
    path = tmp_path / "fuse"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))  # open(2) of a socket is ENXIO, as of a device whose driver is not there
        assert doctor.device(path).fix == "sudo modprobe fuse"


@pytest.mark.parametrize(("code", "fix"), [(13, "sudo chmod 666 "), (1, "start the container with ")])
def test_device_not_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_user: None, code: int, fix: str
) -> None:
    path = tmp_path / "fuse"
    path.touch(0o600)

    def refuse(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(doctor, "in_container", lambda: False)
    found = doctor.device(path)
    assert found.fatal and found.fix.startswith(fix) and os.strerror(code) in found.says
    assert code == 1 or f"chmod 666 {path} until the next boot, and for good, by udev: echo " in found.fix
    monkeypatch.setattr(doctor, "in_container", lambda: True)
    assert doctor.device(path).fix.startswith("start the container with ")


def test_device_of_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_user: None) -> None:
    path = tmp_path / "fuse"
    path.touch()
    info = os.stat_result((stat.S_IFCHR | 0o660, 0, 0, 1, 0, 44, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self: info)
    monkeypatch.setattr(os, "open", lambda *args: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    monkeypatch.setattr(doctor, "in_container", lambda: False)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("fuse", "x", gid, [])))
    assert doctor.device(path).fix == "sudo usermod -aG fuse $USER, then log in again"
    monkeypatch.setattr(doctor, "in_container", lambda: True)
    assert doctor.device(path).fix.startswith("start the container with --group-add 44, ")


def test_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_user: None) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.helper() == Finding("fusermount3", "fusermount3 is missing", "sudo apt-get install -y fuse3", True)
    tool = tmp_path / "fusermount3"
    tool.touch(0o755)
    assert doctor.helper().fix == f"sudo chmod u+s {tool}"
    tool.chmod(0o4755)
    assert doctor.helper().ok


def test_other_users(tmp_path: Path, as_user: None) -> None:
    config = tmp_path / "fuse.conf"
    assert "user_allow_other" in doctor.other_users(config).fix
    config.write_text("#user_allow_other\n")
    assert not doctor.other_users(config).ok
    config.write_text("mount_max = 9\nuser_allow_other\n")
    assert doctor.other_users(config).ok


def test_no_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = doctor.sandbox()
    assert not found.ok and not found.fatal and "apt-get install -y bubblewrap" in found.fix


def test_bubblewrap_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bwrap"
    tool.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = doctor.sandbox()
    assert not found.ok and not found.fatal and "No permissions to create new namespace" in found.says


def test_confinement_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bwrap"
    tool.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    profiles, sockets, limits = doctor.confinement()
    assert profiles.says == "only 'open': bwrap: No permissions to create new namespace"
    assert not profiles.ok and not profiles.fatal and sockets.says and limits.says


def test_no_trial_when_something_fatal_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "device", lambda: Finding("FUSE device", "no", "do", True))
    monkeypatch.setattr(doctor, "trial", lambda: pytest.fail("mounted"))
    assert [finding.fatal for finding in doctor.examine()].count(True) == 1
    assert doctor.fuse_problem(allow_other=False) == "no: do"


@pytest.mark.mount
def test_this_machine() -> None:
    run = subprocess.run([sys.executable, "-m", "vfsd", "doctor"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert "ok  trial mount: mounted, wrote, read, unmounted" in run.stdout
    assert "profiles of execute: 'tree' and 'offline' can be enforced" in run.stdout
    assert "abstract sockets: " in run.stdout
    assert "limits of execute: memory and " in run.stdout
    assert run.stdout.endswith("FUSE is usable here\n")
