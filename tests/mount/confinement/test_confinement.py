"""Attempts to get out of ``execute``, on a real mount, with the rights of whoever runs the tests and, when that is
root, once more as an ordinary user (on a plain directory, since the daemon answers its own user only).

An attempt that would succeed must do no harm to the machine: what is written anywhere is what was there before.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from attempts import NOBODY, Place
from daemons import Daemon

from agenttools import limits
from agenttools.shell import Limits, ViewUnavailable

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


# ------------------------------------------------------------------ limits


def test_memory(place: Place) -> None:
    source = "try:\n    x = bytearray(1 << 30)\n    print('had it')\nexcept MemoryError:\n    print('refused')"
    assert "had it" not in place.code(source, limits=Limits(memory=256 << 20)).output


def test_memory_by_files(place: Place) -> None:
    code = "import os\nfor p in ('/dev/shm', '/run'):\n    s = os.statvfs(p)\n    print(s.f_blocks * s.f_frsize >> 20)"
    assert place.code(code).output == "256\n16\n"


def test_cpu_time_and_open_files(place: Place) -> None:
    few = Limits(cpu_seconds=1, open_files=20)
    ended = place.run("while :; do :; done", limits=few)
    assert ended.exit_code == 128 + signal.SIGXCPU
    assert ended.notices == ("Ended by the limit of 1 seconds of processor time",)
    assert place.run("trap '' XCPU; while :; do :; done", limits=few).exit_code == 128 + signal.SIGKILL
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
