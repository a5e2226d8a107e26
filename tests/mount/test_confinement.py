"""Attempts to get out of ``execute``, on a real mount, with the rights of whoever runs the tests and, when that is
root, once more as an ordinary user (on a plain directory, since the daemon answers its own user only).

An attempt that would succeed must do no harm to the machine: what is written anywhere is what was there before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon

from agenttools import launcher, limits
from agenttools.client import Client
from agenttools.shell import ExecuteResult, Limits, ViewUnavailable, execute

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shell"))

from shell_world import Attached
from shell_world import Daemon as Directory

pytestmark = pytest.mark.mount

NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"

Run = Callable[..., ExecuteResult]

CALLS = {
    "mount": (165, 40),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "finit_module": (313, 273),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "pidfd_getfd": (438, 438),
}
"""With arguments of zero none of these does anything, refused or not."""


def as_nobody(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, or raises, in a process of an ordinary user."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.chdir("/")
            answer = work()
        except BaseException as error:
            answer = error
        finally:
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(answer, pipe)
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pickle.load(pipe)
    os.waitpid(child, 0)
    if isinstance(answer, BaseException):
        raise answer
    return answer


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    base = tmp_path_factory.mktemp("confined")
    config = base / "vfsd.toml"
    config.write_text('[execute]\npass_env = ["PASSED_ON"]\n[execute.env]\nGIVEN = "by the configuration"\n')
    daemon = Daemon(base, extra=("--config", str(config)))
    daemon.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", daemon.environ["XDG_RUNTIME_DIR"])
        patch.setenv("XDG_STATE_HOME", daemon.environ["XDG_STATE_HOME"])
        yield daemon
    daemon.stop()


class Place:
    """Where attempts are made. ``root``: the tree as the host sees it."""

    def __init__(self, client: Any, root: Path, python: str, nobody: bool) -> None:
        self.client, self.root, self.python, self.nobody = client, root, python, nobody

    def run(self, command: str, **options: Any) -> ExecuteResult:
        options = {"timeout": 20} | options
        if not self.nobody:
            return execute(self.client, command, **options)
        result: ExecuteResult = as_nobody(lambda: execute(self.client, command, **options))
        return result

    def code(self, source: str, **options: Any) -> ExecuteResult:
        """Run a Python program."""
        (self.root / "attempt.py").write_text(source)
        return self.run(f"{self.python} /attempt.py", **options)


@pytest.fixture(params=["caller", "nobody"])
def place(request: pytest.FixtureRequest, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "caller":
        yield Place(daemon.client, daemon.point, sys.executable, False)
        return
    if os.geteuid() != 0:
        pytest.skip("the caller is an ordinary user already")
    if not os.path.exists(SYSTEM_PYTHON):
        pytest.skip(f"an ordinary user needs {SYSTEM_PYTHON}")
    base = Path(tempfile.mkdtemp(prefix="vfsd-nobody-", dir="/var/tmp"))
    base.chmod(0o755)
    for name in ("tree", "run", "home"):
        (base / name).mkdir()
        (base / name).chmod(0o700 if name != "tree" else 0o755)
    Directory(base / "tree")
    for path in (base / "tree", *base.glob("*"), *(base / "tree").iterdir()):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "run"))
    monkeypatch.setenv("HOME", str(base / "home"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    try:
        yield Place(Attached(str(base / "tree")), base / "tree", SYSTEM_PYTHON, True)
    finally:
        shutil.rmtree(base, ignore_errors=True)


# ------------------------------------------------------------------ the kernel


@pytest.mark.parametrize("name", CALLS)
def test_system_calls_that_no_command_needs(place: Place, name: str) -> None:
    number = CALLS[name][os.uname().machine == "aarch64"]
    result = place.code(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(libc.syscall({number}, 0, 0, 0, 0, 0, 0), ctypes.get_errno())"
    )
    assert result.output == f"-1 {errno.EPERM}\n"


def test_no_namespace_of_its_own(place: Place) -> None:
    result = place.code(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):\n"
        "    print(libc.unshare(flag), ctypes.get_errno())\n"
        f"print(libc.syscall({(56, 220)[os.uname().machine == 'aarch64']}, 0x10000000 | 17, 0, 0, 0, 0))\n"
        "print(libc.syscall(435, 0, 0), ctypes.get_errno())"
    )
    assert result.output == f"-1 {errno.EPERM}\n" * 4 + "-1\n" + f"-1 {errno.ENOSYS}\n"


def test_nothing_can_be_mounted_or_uncovered(place: Place) -> None:
    result = place.run("mount -t tmpfs x /tmp; mount --bind / /tmp; umount /etc/shadow; umount -l /proc; echo end")
    assert result.output.endswith("end\n")
    assert len(result.output.splitlines()) >= 5
    assert "root" not in place.run("grep root: /etc/shadow").output.replace("/etc/shadow", "")


def test_no_new_rights(place: Place) -> None:
    status = dict(
        line.split(":\t", 1) for line in place.run("cat /proc/self/status").output.splitlines() if ":\t" in line
    )
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    allowed = 0 if place.nobody or os.geteuid() != 0 else 0xFB
    assert int(status["CapEff"], 16) & ~allowed == 0
    assert int(status["CapPrm"], 16) & ~allowed == 0


def test_a_setuid_program_stays_what_its_user_is(place: Place) -> None:
    program = place.root / "suid"
    shutil.copy("/usr/bin/id", program)
    if os.geteuid() == 0:
        os.chown(program, 0 if place.nobody else NOBODY, 0)
    program.chmod(0o4755)
    uid = NOBODY if place.nobody else os.geteuid()
    assert place.run("/suid -u").output == f"{uid}\n"
    program.unlink()


def test_device_nodes(place: Place) -> None:
    made = place.run("rm -f /null; mknod /null c 1 3; mknod /disk b 7 0; ls /null /disk")
    assert "No such file" in made.output
    assert made.exit_code != 0
    if os.geteuid() == 0:
        os.mknod(place.root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        assert "ermission denied" in place.run("cat /null; echo x > /null").output
        (place.root / "null").unlink()
    found = place.run("find /dev -type b; ls /dev | tr '\\n' ' '").output.split()
    assert set(found) <= {
        "console",
        "core",
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    }


def test_the_terminal_is_not_typed_into(place: Place) -> None:
    result = place.code(
        "import fcntl, os\nmaster, slave = os.openpty()\n"
        "for request in (0x5412, 0x541c, 0x100005412):\n"
        "    try:\n        fcntl.ioctl(slave, request & 0xffffffff, b'x')\n        print('typed')\n"
        "    except OSError as error:\n        print(error.errno)"
    )
    assert result.output == f"{errno.EPERM}\n" * 3


@pytest.mark.parametrize("family", [17, 38, 40])
def test_seldom_tried_parts_of_the_network(place: Place, family: int) -> None:
    result = place.code(
        f"import socket\ntry:\n    socket.socket({family}, 2)\nexcept OSError as e:\n    print(e.errno)"
    )
    assert result.output == f"{errno.EAFNOSUPPORT}\n"


# ------------------------------------------------------------------ processes


def test_the_daemon_and_the_caller_cannot_be_named(place: Place, daemon: Daemon) -> None:
    assert daemon.process is not None
    for pid in (daemon.process.pid, os.getpid()):
        result = place.run(f"kill -0 {pid} && echo reached; ls -d /proc/{pid}")
        assert "reached" not in result.output
        assert "No such file" in result.output
    # All that can be named, itself included; sh has no other way to say it than to be gone.
    assert place.run("kill -9 -1; echo still").exit_code in (0, 137)
    assert daemon.process.poll() is None
    assert place.run("echo fine").output == "fine\n"


def test_only_commands_of_the_tree_are_seen(place: Place) -> None:
    processes = place.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output
    assert "vfsd" not in processes.replace("vfsd-", "")
    assert "pytest" not in processes


def test_the_keeper_gives_nothing_away(place: Place) -> None:
    result = place.run(
        "ls /proc/1/root /proc/1/root/etc /proc/1/root/home /proc/1/root/root; tr '\\0' '\\n' < /proc/1/environ;"
        " echo x > /proc/1/root/x; cat /proc/1/root/proc/1/mountinfo | grep -c ' rw[, ]';"
        " kill -9 1; kill -0 1 && echo on"
    )
    listed = set(result.output.split())
    assert not listed & {"etc", "home", "root", "work", "var"}
    assert "on" in listed
    assert "Permission denied" in result.output or "Read-only" in result.output
    assert "TOKEN" not in result.output


def test_ptrace_ends_at_what_it_started_itself(place: Place) -> None:
    result = place.code(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(libc.ptrace(16, {os.getpid()}, 0, 0), ctypes.get_errno())\n"
        "libc.ptrace(16, 1, 0, 0)"  # its own user's keeper, which is left stopped; what that gains is tried below
    )
    assert result.output == f"-1 {errno.ESRCH}\n"
    assert place.run("echo fine").output == "fine\n"


def test_the_keeper_has_no_more_rights_than_commands(place: Place) -> None:
    for profile in ("tree", "offline"):
        found = place.run("cat /proc/1/status; readlink /proc/1/ns/net; cat /proc/1/net/dev | wc -l", profile=profile)
        status = dict(line.split(":\t", 1) for line in found.output.splitlines() if ":\t" in line)
        assert (status["NoNewPrivs"], status["Seccomp"], int(status["CapEff"], 16)) == ("1", "2", 0)
        theirs, lines = found.output.splitlines()[-2:]
        assert (theirs == os.readlink("/proc/self/ns/net")) == (profile == "tree")
        assert (lines == "3") == (profile == "offline")


def test_kernel_settings_are_out_of_reach(place: Place) -> None:
    paths = ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger", "/proc/kcore"]
    result = place.code(
        f"import os\nfor path in {paths!r}:\n"
        "    try:\n        os.close(os.open(path, os.O_WRONLY))\n        print('OPENED', path)\n"
        "    except OSError as e:\n        print(e.strerror)\n"
    )
    assert "OPENED" not in result.output
    result = place.run(
        "find /sys -type f -perm -200 | while read f; do (: >> $f) 2>/dev/null && echo $f; done; ls /sys"
    )
    assert result.output == "devices\n"


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


# ------------------------------------------------------------------ limits


def test_memory(place: Place) -> None:
    source = "try:\n    x = bytearray(1 << 30)\n    print('had it')\nexcept MemoryError:\n    print('refused')"
    assert "had it" not in place.code(source, limits=Limits(memory=256 << 20)).output


def test_memory_by_files(place: Place) -> None:
    code = "import os\nfor p in ('/dev/shm', '/run'):\n    s = os.statvfs(p)\n    print(s.f_blocks * s.f_frsize >> 20)"
    assert place.code(code).output == "256\n16\n"


def test_cpu_time_and_open_files(place: Place) -> None:
    few = Limits(cpu_seconds=1, open_files=20)
    assert place.run("while :; do :; done", limits=few).exit_code == 128 + signal.SIGKILL
    result = place.code(
        "import os\ntry:\n    for n in range(100): os.dup(1)\nexcept OSError as e:\n    os.write(2, b'%d' % e.errno)",
        limits=few,
    )
    assert str(errno.EMFILE) in result.output


def test_a_fork_bomb(place: Place) -> None:
    bomb = (
        "import os, time\nmade = 0\n"
        "for _ in range(200):\n"
        "    try:\n        pid = os.fork()\n"
        "    except OSError as e:\n        print(e.errno, made < 64); break\n"
        "    if pid == 0:\n        time.sleep(20); os._exit(0)\n"
        "    made += 1\n"
        "os.kill(0, 9)\n"
    )
    (place.root / "attempt.py").write_text(bomb)
    few = Limits(processes=64)
    command = f"{place.python} -u /attempt.py"
    if not place.nobody and os.geteuid() == 0 and limits.parent_group() is None:
        with pytest.raises(ViewUnavailable, match="limit of processes for root takes a cgroup"):
            place.run(command, limits=few)
        return
    assert place.run(command, limits=few).output.startswith(f"{errno.EAGAIN} True\n")
    assert place.run("echo fine", limits=few).output == "fine\n"


# ------------------------------------------------------------------ what cannot be had


def test_it_refuses_rather_than_runs_without(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for profile in (None, "tree", "offline"):
        with pytest.raises(ViewUnavailable, match=r"profile '(tree|offline)' here: the view 'mount' has no namespaces"):
            place.run("touch /ran", view="mount", profile=profile)
    bwrap = Path(tempfile.mkdtemp(dir="/var/tmp")) / "bwrap"
    bwrap.parent.chmod(0o755)
    bwrap.write_text('#!/bin/sh\necho "bwrap: No permissions to create new namespace" >&2; exit 1\n')
    bwrap.chmod(0o755)
    monkeypatch.setattr("agenttools.views.find_bwrap", lambda: str(bwrap))
    with pytest.raises(ViewUnavailable, match=r"No permissions.*vfsd doctor.*profile 'open'"):
        place.run("touch /ran")
    monkeypatch.setattr("agenttools.views.find_bwrap", lambda: None)
    with pytest.raises(ViewUnavailable, match="apt install bubblewrap"):
        place.run("touch /ran")
    assert not (place.root / "ran").exists()
    shutil.rmtree(bwrap.parent)


def test_bad_words(place: Place) -> None:
    with pytest.raises(ValueError, match="profile must be open, tree or offline, not closed"):
        place.run("true", profile="closed")
    with pytest.raises(ValueError, match="limits need a profile"):
        place.run("true", profile="open", limits=Limits(memory=1 << 30))
    with pytest.raises(ValueError, match="no limit 'ram'"):
        Limits.of({"ram": 1})
    with pytest.raises(ValueError, match="at least 1"):
        Limits.of({"memory": 0})


def test_commands_of_one_tree_share_processes_and_others_do_not(place: Place) -> None:
    if place.nobody:
        pytest.skip("each call is made by a process of its own")
    place.run("sleep 30 & echo $! > /pid")
    assert place.run("cat /proc/$(cat /pid)/comm").output == "sleep\n"
    assert place.run("cat /proc/$(cat /pid)/comm", profile="offline").output != "sleep\n"
    other = subprocess.run(
        [sys.executable, "-m", "agenttools", "--socket", place.client.socket, "execute", "kill $(cat /pid) && echo it"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert other.stdout == "it\n", other.stderr
