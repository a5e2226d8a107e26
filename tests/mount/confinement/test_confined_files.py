"""Attempts to reach files and sockets that are not the tree's."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import Place
from daemons import Daemon

from agenttools import launcher
from agenttools.client import Client
from agenttools.shell import execute

# ------------------------------------------------------------------ files


def test_only_the_tree_can_be_written_to(place: Place) -> None:
    tops = place.run("for d in /usr /etc /bin /lib /dev /sys /proc; do touch $d/vfsd-was-here && echo $d; done")
    assert not [line for line in tops.output.splitlines() if line.startswith("/")]
    assert not list(Path("/etc").glob("vfsd-was-here"))


def test_home_and_keys_are_not_there(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "somebody"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh/id_ed25519").write_text("PRIVATE KEY\n")
    if not place.nobody:
        monkeypatch.setenv("HOME", str(home))
    real = os.path.expanduser("~root")
    result = place.run(
        f"cat {home}/.ssh/id_ed25519; cat ~/.ssh/*; ls -A {real}/.ssh; cat /etc/shadow; cat /etc/ssh/ssh_host_*_key;"
        " ls -A /var/run/docker.sock /run/docker.sock /root/.bashrc"
    )
    assert "PRIVATE KEY" not in result.output
    assert "root:" not in result.output
    assert "docker.sock\n" not in result.output.replace("No such file or directory\n", "")


def test_what_is_hidden_is_not_found_by_the_mountpoint(place: Place) -> None:
    if os.path.exists("/etc/shadow"):
        assert "root:" not in place.run(f"cat {place.root}/etc/shadow /proc/self/root/etc/shadow").output


def test_private_directories_in_a_toolchain(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for directory in ("bin", "lib", "state", "home"):
        (tmp_path / "kit" / directory).mkdir(parents=True)
    (tmp_path / "kit/bin/tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "kit/bin/tool").chmod(0o755)
    (tmp_path / "kit/state/secret").write_text("secret\n")
    (tmp_path / "kit/socket").write_text("secret\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/kit/bin:{os.environ['PATH']}")

    class Told:
        def __init__(self, client: Client) -> None:
            self.call, self.socket = client.call, str(tmp_path / "kit/socket")
            private = [os.fsencode(tmp_path / "kit/state")]
            self.hello = client.hello | {"execute": {"private": private}}

    result = execute(Told(daemon.client), f"tool; cat {tmp_path}/kit/state/secret {tmp_path}/kit/socket", timeout=20)  # type: ignore[arg-type]
    assert result.output.startswith("tool\n")
    assert "secret\n" not in result.output.replace("/secret", "")


def test_the_daemons_files_are_not_there(place: Place, daemon: Daemon) -> None:
    runtime = os.environ["XDG_RUNTIME_DIR"]
    result = place.run(f"ls -A {daemon.base} {daemon.volume} {daemon.base}/run {runtime} {daemon.socket}")
    assert "test.sock\n" not in result.output.replace("No such file or directory\n", "")
    assert "journal" not in result.output


def test_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent")
    monkeypatch.setenv("PASSED_ON", "by the caller")
    everything = place.run("cat /proc/*/environ | tr '\\0' '\\n'").output
    assert "hunter2" not in everything
    assert "SSH_AUTH_SOCK" not in everything
    assert "VFSD_SOCKET" not in everything
    if not place.nobody:
        assert "GIVEN=by the configuration" in everything
        assert "PASSED_ON=by the caller" in everything


def test_descriptors(place: Place) -> None:
    with open("/etc/passwd") as held:
        os.set_inheritable(held.fileno(), True)
        targets = place.run("for f in /proc/self/fd/*; do readlink $f; done").output.split()
    allowed = ("/dev/null", "pipe:", "user:", "pid:", "/proc/")
    assert [target for target in targets if not target.startswith(allowed)] == []


# ------------------------------------------------------------------ what the caller does for the command


def test_the_callers_own_writes_follow_no_link(place: Place, tmp_path: Path) -> None:
    """A command that puts a link where the caller is about to keep its output must not choose where that goes."""
    target = Path(tempfile.mkdtemp(dir="/var/tmp"))
    target.chmod(0o777)
    (target / "file").write_text("before\n")
    (target / "file").chmod(0o666)
    try:
        command = (
            f"mkdir -p /large_tool_results && ln -sfn {target}/file /large_tool_results/$VFSD_CALL_ID;"
            " head -c 200000 /dev/zero"
        )
        result = place.run(command, call_id="chosen")
        assert result.truncated
        assert result.output_file is None
        place.run(f"rm -rf /large_tool_results && ln -s {target} /large_tool_results")
        result = place.run("head -c 200000 /dev/zero", call_id="file")
        assert result.output_file is None
        place.run("rm /large_tool_results; mkdir /large_tool_results; mkfifo /large_tool_results/fifo")
        assert place.run("head -c 200000 /dev/zero", call_id="fifo").output_file is None
        place.run(f"rm -rf /large_tool_results /home /tmp; ln -s {target} /home; ln -s {target}/tmp /tmp")
        place.run("true")
        assert sorted(path.name for path in target.iterdir()) == ["file"]
        assert (target / "file").read_text() == "before\n"
    finally:
        place.run("rm -rf /home /tmp")
        shutil.rmtree(target)


# ------------------------------------------------------------------ sockets


@contextlib.contextmanager
def listening(family: int, address: Any) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen()
        server.settimeout(5)
        yield server


def connects(place: Place, family: str, address: object, profile: str) -> bool:
    result = place.code(
        f"import socket\nsocket.socket(socket.{family}).connect({address!r})\nprint('connected')", profile=profile
    )
    return result.output == "connected\n"


def test_network(place: Place) -> None:
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert connects(place, "AF_INET", address, "tree")
        assert not connects(place, "AF_INET", address, "offline")
    assert place.run("cat /proc/net/dev | grep -vc 'lo:'", profile="offline").output == "2\n"  # the table's head


@pytest.mark.parametrize("profile", ["tree", "offline"])
def test_abstract_sockets(place: Place, profile: str) -> None:
    if profile == "tree" and not launcher.scoped():
        pytest.skip(f"Landlock ABI {launcher.abi()} has no scopes: tree does not keep commands from abstract sockets")
    name = f"\0vfsd-test-{os.getpid()}"
    with listening(socket.AF_UNIX, name):
        assert not connects(place, "AF_UNIX", name, profile)


def test_sockets_among_commands_work(place: Place) -> None:
    code = (
        "import socket\n"
        "for name in ('\\0among', '/among'):\n"
        "    server = socket.socket(socket.AF_UNIX); server.bind(name); server.listen()\n"
        "    socket.socket(socket.AF_UNIX).connect(name); print('ok')\n"
    )
    for profile in ("tree", "offline"):
        assert place.code(code, profile=profile).output == "ok\nok\n"
        place.run("rm /among")


def test_the_daemons_socket_from_inside(place: Place, daemon: Daemon) -> None:
    assert not connects(place, "AF_UNIX", str(daemon.socket), "tree")
    found = place.run(f"find / -xdev -name '*.sock' 2>/dev/null; find {place.root} -type s 2>/dev/null").output
    assert "test.sock" not in found
