"""execute and time: what it ends, what it leaves, what it waits for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shell_world import STUBBORN, Daemon, alive, pids

from agenttools.processes import end_all
from agenttools.shell import ExecuteResult, execute

# ------------------------------------------------------------------ time limit and processes


def test_timeout_ends_every_process(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    names = ["plain", "deaf", "own", "orphan"]
    started = time.monotonic()
    result = run(f"echo before; {STUBBORN} sleep 316", timeout=1)
    assert time.monotonic() - started < 5
    assert (result.exit_code, result.timed_out, result.output) == (124, True, "before\n")
    assert result.notices == ("Command timed out after 1 seconds",)
    if result.view == "root":  # without a namespace, one that sheds session, parent and environment is lost sight of
        names.append("unmarked")
    left = [pid for pid in pids(run, daemon.root, *names) if alive(pid)]
    for pid in pids(run, daemon.root, "unmarked"):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    assert not left


def test_timeout_ends_a_shell_that_forks_all_the_time(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    result = run("while :; do (sleep 0.05; sleep 317) & sleep 0.002; done", timeout=0.5)
    assert result.timed_out
    assert subprocess.run(["pgrep", "-xf", "sleep 317"], stdout=subprocess.PIPE).stdout == b""


def test_timeout_counts_while_the_command_prints(run: Callable[..., ExecuteResult]) -> None:
    result = run("yes", timeout=0.5)
    assert (result.timed_out, result.truncated) == (True, True)
    assert result.duration < 4


def test_no_timeout(run: Callable[..., ExecuteResult]) -> None:
    assert run("sleep 0.3; echo done", timeout=0).output == "done\n"


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_bad_timeout(daemon: Daemon, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        execute(daemon, "true", timeout=timeout)


@pytest.mark.parametrize("child", ["sleep 40", "while :; do echo tick; sleep 0.05; done", "yes"])
def test_background_child_does_not_hold_the_call_and_lives_on(
    run: Callable[..., ExecuteResult], daemon: Daemon, child: str
) -> None:
    result = run(f"({child}) & echo $! > pid; echo done", timeout=30)
    (pid,) = pids(run, daemon.root, "pid")
    try:
        assert (result.exit_code, result.timed_out) == (0, False)
        assert "done\n" in result.output
        assert result.duration < 3
        time.sleep(0.3)
        assert alive(pid)  # it did not die of SIGPIPE
        assert run("kill -9 $(cat pid)").exit_code == 0  # and its pid is the one that any command sees
        time.sleep(0.1)
        assert not alive(pid)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_late_output_of_a_child_is_there(run: Callable[..., ExecuteResult]) -> None:
    assert run("(sleep 0.03; echo late) & echo soon").output == "soon\nlate\n"


def test_next_call_after_a_timeout(run: Callable[..., ExecuteResult]) -> None:
    run("sleep 60", timeout=0.2)
    assert run("echo fine").output == "fine\n"


def test_end_all_leaves_others_alone(daemon: Daemon) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    victim = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        end_all([victim.pid], "no-such-marker", None)
        assert victim.wait(5) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_no_keeper_is_left(daemon: Daemon) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from shell_world import Attached; from agenttools import shell\n"
        "print(shell.execute(Attached(sys.argv[2]), sys.argv[3]).output)"
    )

    def once(command: str) -> str:
        argv = [sys.executable, "-c", code, str(Path(__file__).parent), str(daemon.root), command]
        return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    first = once("sleep 322 & echo $! > pid; readlink /proc/self/ns/pid")
    assert once("kill -0 $(cat pid) && readlink /proc/self/ns/pid") == first  # what runs on holds the namespaces
    assert once("kill -9 $(cat pid); readlink /proc/self/ns/pid") == first
    ended = time.monotonic() + 8  # the keeper looks every few seconds while something runs and nobody holds it
    while first in namespaces() and time.monotonic() < ended:
        time.sleep(0.1)
    assert first not in namespaces()


def namespaces() -> set[str]:
    """The pid namespaces that processes are in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(process))
    return found
