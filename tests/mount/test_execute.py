"""execute on a real mount: what the stand-in of ``test_shell`` cannot show, the daemon's stubs and both doors."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agenttools.client import Client
from agenttools.shell import ExecuteResult, Profile, View, execute

pytestmark = pytest.mark.mount

VFSD = [sys.executable, "-m", "vfsd"]


class Mount:
    """A daemon of its own on a directory of its own."""

    def __init__(self, base: Path) -> None:
        self.path = base / "mnt"
        self.path.mkdir()
        (base / "run").mkdir(mode=0o700)
        self.environ = {**os.environ, "XDG_STATE_HOME": str(base / "state"), "XDG_RUNTIME_DIR": str(base / "run")}
        self.client = Client(socket=base / "run/vfsd/execute.sock")

    def vfsd(self, *args: str, timeout: float = 30) -> None:
        done = subprocess.run([*VFSD, *args], env=self.environ, timeout=timeout, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        self.vfsd("mount", "--name", "execute", str(self.path))

    def stop(self) -> None:
        self.vfsd("umount", "execute")

    def run(
        self, command: str, timeout: float | None = 20, view: View = "root", profile: Profile | None = None
    ) -> ExecuteResult:
        return execute(self.client, command, timeout=timeout, view=view, profile=profile)

    def abort(self) -> None:
        """Whatever happened, leave no mount behind that a process could hang on."""
        if os.path.ismount(self.path):
            number = os.minor(os.stat(self.path).st_dev)
            Path(f"/sys/fs/fuse/connections/{number}/abort").write_text("1")
            subprocess.run(["umount", "-l", self.path], timeout=10)


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    mount = Mount(tmp_path_factory.mktemp("execute"))
    try:
        mount.start()
        yield mount
        mount.stop()
    finally:
        mount.client.close()
        mount.abort()


def listed(mount: Mount) -> set[bytes]:
    return {entry[0] for entry in mount.client.call("list", path=b"/")["entries"]}


def test_one_tree_by_both_doors(mount: Mount) -> None:
    mount.client.call("write", path=b"/in", data=b"from a tool\n")
    result = mount.run("cat /in && echo from a command > /out && pwd")
    assert (result.output, result.exit_code) == ("from a tool\n/\n", 0)
    assert mount.client.call("read", path=b"/out", offset=0, length=99)["data"] == b"from a command\n"
    assert (mount.path / "out").read_text() == "from a command\n"
    assert mount.run(f"cat {mount.path}/out").output == "from a command\n"


def test_stubs_are_hidden_in_each_listing(mount: Mount) -> None:
    assert mount.run(f"{sys.executable} -c 'print(1)'; git --version | cut -c1-3").output == "1\ngit\n"
    ours = {b"memories", b"blobs", b"tmp", b"home", b"in", b"out"}
    assert listed(mount) <= ours
    assert set(mount.run("ls -A /").output.split()) <= {name.decode() for name in ours}
    assert set(os.listdir(mount.path)) <= {name.decode() for name in ours}


def test_system_directories_are_the_hosts_and_read_only(mount: Mount) -> None:
    result = mount.run("cat /etc/hostname; touch /usr/x /etc/x")
    assert result.output.startswith(Path("/etc/hostname").read_text())
    assert result.output.count("Read-only file system") == 2


def test_mount_view(mount: Mount) -> None:
    result = mount.run("pwd; echo x > seen", view="mount", profile="open")
    assert result.output == f"{mount.path}\n"
    assert mount.run("cat /seen && rm /seen").output == "x\n"


def test_large_output_is_in_the_tree_before_the_call_returns(mount: Mount) -> None:
    result = mount.run("seq 1 200000")
    assert result.output_file is not None
    assert mount.client.call("stat", path=result.output_file.encode())["attr"]["size"] == 1288895
    assert mount.run(f"tail -1 {result.output_file}").output == "200000\n"
    mount.client.call("delete", path=b"/large_tool_results")


def test_timeout_in_the_tree(mount: Mount) -> None:
    result = mount.run("(trap '' TERM; setsid sleep 411) & while :; do date > /tmp/spin; done", timeout=1)
    assert result.timed_out
    assert result.duration < 4
    assert subprocess.run(["pgrep", "-xf", "sleep 411"]).returncode == 1


def test_a_pid_that_a_command_leaves_in_a_file_names_no_process_of_the_host(mount: Mount) -> None:
    assert mount.run("sleep 0.1 & echo $! > /child").exit_code == 0
    pid = int((mount.path / "child").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_many_at_once(mount: Mount) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: mount.run(f"echo {n} > /tmp/f{n} && cat /tmp/f{n}"), range(32)))
    assert [result.output for result in results] == [f"{n}\n" for n in range(32)]


def test_a_new_directory_may_take_the_place_of_a_stub(mount: Mount) -> None:
    """The toolchain's stubs take no name from the tree: what is really made there is listed, and can be used."""
    top = Path(sys.prefix).parts[1]
    if top in ("usr", "tmp"):
        pytest.skip("the caller's Python is in a system directory")
    mount.run("true")
    mount.client.call("write", path=f"/{top}/note".encode(), data=b"kept\n")
    try:
        assert top.encode() in listed(mount)
        result = mount.run(f"cat /{top}/note && {sys.executable} -c 'print(1)' && echo more >> /{top}/note")
        assert result.output == "kept\n1\n"
        assert (mount.path / top / "note").read_text() == "kept\nmore\n"
    finally:
        mount.client.call("delete", path=f"/{top}".encode())
    mount.client.call("write", path=f"/{top}".encode(), data=b"a file in the way\n")
    try:
        assert mount.run(f"cat /{top}").output == "a file in the way\n"
    finally:
        mount.client.call("delete", path=f"/{top}".encode())


def test_tmp_and_home_come_back(mount: Mount) -> None:
    mount.run("rm -rf /tmp /home")
    assert mount.run('echo x > "$TMPDIR/x" && echo y > "$HOME/y" && stat -c %a /tmp').output == "1777\n"


def test_restart_of_the_daemon(mount: Mount) -> None:
    """It has forgotten the stubs: they are asked for again, and bubblewrap makes no directories in their place."""
    mount.run("true")
    before = listed(mount)
    mount.stop()
    mount.start()
    assert mount.run(f"{sys.executable} -c 'print(1)'").output == "1\n"
    assert listed(mount) == before


def test_a_background_child_does_not_hold_the_daemon(mount: Mount) -> None:
    assert mount.run("sleep 412 & echo $! > /pid", profile="open").exit_code == 0
    pid = int(mount.client.call("read", path=b"/pid", offset=0, length=20)["data"])
    try:
        assert b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
        mount.vfsd("umount", "--force", "execute", timeout=8)
    finally:
        os.kill(pid, signal.SIGKILL)
        gone = time.monotonic() + 5
        while os.path.exists(mount.client.socket) and time.monotonic() < gone:
            time.sleep(0.05)
        mount.start()
