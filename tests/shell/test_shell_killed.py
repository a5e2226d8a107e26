"""A caller that is killed inside execute takes along all that its commands started, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shell_world import STUBBORN, Daemon, alive, pids

from agenttools.shell import ExecuteResult

NAMES = ["plain", "deaf", "own", "orphan"]

CALLER = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from shell_world import Attached
from agenttools import shell
view, profile = sys.argv[3].split("-")

def run(command):
    return shell.execute(Attached(sys.argv[2]), command, view=view, profile=profile)
"""

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def where(run: Callable[..., ExecuteResult]) -> str:
    """The view and profile of ``run``, which skips when they can't be had."""
    result = run("true")
    return f"{result.view}-{result.profile}"


@pytest.fixture
def start(daemon: Daemon, where: str) -> Iterator[Start]:
    """Starts a program that has ``run(command)``."""
    started: list[subprocess.Popen[bytes]] = []

    def call(code: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", CALLER + code, str(Path(__file__).parent), str(daemon.root), where]
        started.append(subprocess.Popen(argv, start_new_session=True))
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.wait()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)


def gone(processes: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, processes))


def end(processes: list[int]) -> None:
    for pid in filter(alive, processes):
        os.kill(pid, signal.SIGKILL)


def test_killed_caller(run: Callable[..., ExecuteResult], daemon: Daemon, where: str, start: Start) -> None:
    caller = start(f"run({STUBBORN + 'sleep 331 & echo $! > last; wait; true'!r})")
    wait_for(daemon.root / "last")
    started = pids(run, daemon.root, *NAMES, "last", *(["unmarked"] if where.startswith("root") else []))
    unmarked = pids(run, daemon.root, "unmarked")
    try:
        assert all(map(alive, started))
        os.killpg(caller.pid, signal.SIGKILL)  # its whole group, as who cleans up after a job does
        assert gone(started)
    finally:
        end([*started, *unmarked])


def test_background_children_of_earlier_calls_live_on(
    run: Callable[..., ExecuteResult], daemon: Daemon, start: Start
) -> None:
    caller = start("run('sleep 332 & echo $! > kept'); run('(sleep 333; true) & echo $! > ended; wait; true')")
    wait_for(daemon.root / "ended")
    kept, ended = pids(run, daemon.root, "kept", "ended")
    try:
        caller.kill()
        assert gone([ended])
        assert alive(kept)
    finally:
        end([kept, ended])


def test_several_commands_and_a_fork_of_the_caller(
    run: Callable[..., ExecuteResult], daemon: Daemon, start: Start
) -> None:
    """A worker made by fork holds what its parent held: it must not keep the parent's death from being noticed."""
    caller = start("""
for name in "abc":
    command = f"sleep 334 & echo $! > {name}; wait; true"
    threading.Thread(target=run, args=(command,)).start()
while not all(os.path.exists(f"{sys.argv[2]}/{name}") for name in "abc"):
    time.sleep(0.01)
import warnings
warnings.simplefilter("ignore")
if worker := os.fork():
    open(f"{sys.argv[2]}/worker", "w").write(f"{worker}\\n")
    os.waitpid(worker, 0)
run("sleep 335 & echo $! > child; wait; true")
""")
    for name in ("a", "b", "c", "worker", "child"):
        wait_for(daemon.root / name)
    several = pids(run, daemon.root, "a", "b", "c")
    (child,) = pids(run, daemon.root, "child")
    worker = int((daemon.root / "worker").read_text())
    try:
        caller.kill()
        assert gone(several)
        assert alive(worker)
        assert alive(child)
        os.kill(worker, signal.SIGKILL)
        assert gone([child])
    finally:
        end([*several, child, worker])


def wardens(caller: subprocess.Popen[bytes]) -> list[int]:
    """The shells that are children of ``caller``; none is a command's while none runs."""
    found = subprocess.run(["pgrep", "-P", str(caller.pid), "-x", "sh"], stdout=subprocess.PIPE, text=True)
    return [int(pid) for pid in found.stdout.split()]


def test_the_warden_may_be_killed(run: Callable[..., ExecuteResult], daemon: Daemon, start: Start) -> None:
    caller = start("""
run("echo > ready")
while not os.path.exists(f"{sys.argv[2]}/on"):
    time.sleep(0.01)
threading.Thread(target=run, args=("sleep 336 & echo $! > before; wait; true",)).start()
while not os.path.exists(f"{sys.argv[2]}/on2"):
    time.sleep(0.01)
run("sleep 337 & echo $! > after; wait; true")
""")
    wait_for(daemon.root / "ready")
    (warden,) = wardens(caller)
    (daemon.root / "on").touch()
    wait_for(daemon.root / "before")
    os.kill(warden, signal.SIGKILL)
    (daemon.root / "on2").touch()
    wait_for(daemon.root / "after")
    both = pids(run, daemon.root, "before", "after")
    try:
        caller.kill()
        assert gone(both)
    finally:
        end(both)


def test_the_warden_ends_with_the_caller(daemon: Daemon, start: Start) -> None:
    caller = start("""
run("echo > ready")
while not os.path.exists(f"{sys.argv[2]}/on"):
    time.sleep(0.01)
""")
    wait_for(daemon.root / "ready")
    (warden,) = wardens(caller)
    (daemon.root / "on").touch()
    assert caller.wait(20) == 0
    assert gone([warden])
