"""Who is behind a pid, and which execute it belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vfsd.audit import actors
from vfsd.audit.actors import Actor, Actors, Mark

PRINT_AND_WAIT = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
MARKS = {"VFSD_EXECUTE": "outer:inner", "VFSD_CALL_ID": "call_7"}


@pytest.fixture
def known() -> Iterator[Actors]:
    made = Actors(time.time_ns)
    yield made
    made.close()


@pytest.fixture
def start() -> Iterator[object]:
    """A function that starts a command which prints a pid and then waits; that pid."""
    started: list[subprocess.Popen[str]] = []

    def run(command: list[str], *, session: bool = False, **env: str) -> int:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=session,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())

    yield run
    for process in started:
        process.communicate(timeout=10)


def who(known: Actors, pid: int) -> Actor:
    return known.of(pid, time.time_ns())[0]


def waiting(script: str = PRINT_AND_WAIT) -> list[str]:
    return [sys.executable, "-c", script]


def test_a_process_by_its_command_line(known: Actors, start) -> None:  # type: ignore[no-untyped-def]
    pid = start(waiting())
    found = who(known, pid)
    assert (found.pid, found.mark) == (pid, None)
    assert found.command.startswith(f"{sys.executable} -c import os, sys;")


def test_a_thread_is_its_process(known: Actors) -> None:
    seen: list[Actor] = []
    thread = threading.Thread(target=lambda: seen.append(who(known, threading.get_native_id())))
    thread.start()
    thread.join()
    assert seen[0].pid == os.getpid()


def test_the_mark_in_the_environment(known: Actors, start) -> None:  # type: ignore[no-untyped-def]
    assert who(known, start(waiting(), **MARKS)).mark == Mark("inner", "call_7")


def test_a_cleared_environment_leads_to_the_parent(known: Actors, start) -> None:  # type: ignore[no-untyped-def]
    pid = start(["/bin/sh", "-c", f"env -i {sys.executable} -c '{PRINT_AND_WAIT}'; :"], **MARKS)
    assert who(known, pid).mark == Mark("inner", "call_7")


def test_a_cleared_environment_and_no_parent_lead_to_the_session(known: Actors, start) -> None:  # type: ignore[no-untyped-def]
    orphan = f"(exec 3<&0; env -i {sys.executable} -c '{PRINT_AND_WAIT}' <&3 &); sleep 0.3; echo $$ >&2; cat"
    pid = start(["/bin/sh", "-c", orphan], session=True, **MARKS)
    leader = os.getsid(pid)
    assert who(known, leader).mark == Mark("inner", "call_7")
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != leader
    assert who(known, pid).mark == Mark("inner", "call_7")


def test_the_session_of_a_terminal_is_not_the_executes(known: Actors, start) -> None:  # type: ignore[no-untyped-def]
    """What is run by hand in the same session as an execute on a terminal is not part of that."""
    assert who(known, start(waiting(), **MARKS)).mark == Mark("inner", "call_7")
    assert who(known, start(waiting())).mark is None


def test_another_program_in_the_same_process_is_seen(known: Actors, start) -> None:  # type: ignore[no-untyped-def]
    pid = start(["/bin/sh", "-c", "echo $$; read line; exec sleep 5"])
    assert "read line" in who(known, pid).command
    with open(f"/proc/{pid}/fd/0", "wb", buffering=0) as stdin:
        stdin.write(b"go\n")
    deadline = time.monotonic() + 10
    while who(known, pid).command != "sleep 5":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(pid, 9)


def test_who_has_ended_keeps_the_name_it_had(known: Actors) -> None:
    process = subprocess.Popen(["sleep", "60"])
    while who(known, process.pid).command != "sleep 60":
        time.sleep(0.005)
    process.kill()
    process.wait()
    time.sleep(0.3)
    assert who(known, process.pid).command == "sleep 60"


def test_nobody_is_an_answer_too(known: Actors) -> None:
    assert who(known, 0) == Actor(0)
    assert who(known, 1 << 30) == Actor(1 << 30)


def test_a_command_line_is_bounded_and_on_one_line(known: Actors, start) -> None:  # type: ignore[no-untyped-def]
    command = who(known, start([*waiting(), "a\nb", "x" * 5000])).command
    assert len(command) == actors.COMMAND_MAX and command.endswith("…") and "\n" not in command


@pytest.mark.parametrize(("flags", "threads"), [(0, 2), (0x40, 1)])
def test_a_look_that_hangs_holds_nobody_up(tmp_path: Path, flags: int, threads: int) -> None:
    """Reading of a process may wait for a lock that is only let go when a request of it is answered."""
    hangs = tmp_path / "77"
    for pid in (77, *range(100, 110)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) S 1 0 0 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 {threads} 0 0")
        (tmp_path / str(pid) / "status").write_text(f"Name:\ta\nTgid:\t{pid}\n")
        if pid != 77:
            (tmp_path / str(pid) / "cmdline").write_bytes(b"prog\0arg\0")
    os.mkfifo(hangs / "cmdline")
    known = Actors(time.time_ns, str(tmp_path))
    began = time.monotonic()
    assert who(known, 77) == Actor(77)
    for pid in range(100, 110):
        assert who(known, pid) == Actor(pid)
    assert time.monotonic() - began < 10 * actors.PATIENCE
    with open(hangs / "cmdline", "w"):
        pass  # what it waited for has come
    deadline = time.monotonic() + 10
    while who(known, 105) != Actor(105, "prog arg"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    known.close()


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    known = Actors(time.time_ns, str(tmp_path))
    for pid in range(1, 3 * actors.KNOWN_MAX):
        who(known, pid)
    assert len(known._seen) <= actors.KNOWN_MAX
    known.close()
