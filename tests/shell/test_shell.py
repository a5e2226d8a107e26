"""execute through its public door: what comes back, large outputs, threads and event loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import trio
from shell_world import Daemon, alive, pids

from agenttools import capture, shell, views
from agenttools.shell import Cancellation, Cancelled, ExecuteResult, aexecute, execute

# ------------------------------------------------------------------ what comes back


def test_output_is_combined_in_order(run: Callable[..., ExecuteResult]) -> None:
    result = run("echo one; echo two >&2; echo three")
    assert (result.output, result.exit_code, result.truncated) == ("one\ntwo\nthree\n", 0, False)
    assert not result.timed_out
    assert 0 < result.duration < 5


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -9 $$", 128 + signal.SIGKILL),
        ("kill -TERM $$", 128 + signal.SIGTERM),
        ("no-such-program-here", 127),
        ("kill -9 0", 128 + signal.SIGKILL),
    ],
)
def test_exit_code(run: Callable[..., ExecuteResult], command: str, code: int) -> None:
    assert run(command).exit_code == code


def test_stdin_is_empty(run: Callable[..., ExecuteResult]) -> None:
    assert run("cat; readlink /proc/self/fd/0").output == "/dev/null\n"


def test_no_descriptor_of_the_caller_is_inherited(run: Callable[..., ExecuteResult]) -> None:
    with open("/dev/zero", "rb") as held:
        os.set_inheritable(held.fileno(), True)
        assert "/dev/zero" not in run("ls -l /proc/self/fd").output


def test_bytes_that_are_not_utf8_are_replaced(run: Callable[..., ExecuteResult]) -> None:
    assert run(r"printf 'a\377b\303'").output == "a\ufffdb\ufffd"


def test_command_and_output_hold_any_character(run: Callable[..., ExecuteResult]) -> None:
    assert run("printf '%s' 'grüße 🌍'; printf %s '\udcff' | wc -c").output == "grüße 🌍1\n"


def test_environment_is_small_and_has_no_secret(
    run: Callable[..., ExecuteResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("LC_TIME", "C")
    result = run("env", env={"GIVEN": "yes", "LANG": "POSIX"})
    found = dict(line.split("=", 1) for line in result.output.splitlines())
    assert "SECRET_TOKEN" not in found
    assert (found["GIVEN"], found["LANG"], found["LC_TIME"]) == ("yes", "POSIX", "C")
    assert set(found) - {"GIVEN"} <= {
        *views.PASSED,
        "LC_TIME",
        "LC_CTYPE",  # Python sets it where the locale is C (PEP 538)
        "HOME",
        "TMPDIR",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        views.MARKER,
    }


# ------------------------------------------------------------------ large output


def test_output_is_cut_between_characters_and_kept_whole(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    printed = "x" + "é" * 100_000
    (daemon.root / "large").write_text(printed)
    result = run("cat large", call_id="call.1/2")
    assert result.truncated
    assert result.output == printed[: (shell.MAX_OUTPUT - 1) // 2 + 1]
    assert result.output_file == "/large_tool_results/call_1_2"
    assert (daemon.root / "large_tool_results/call_1_2").read_text() == printed
    assert "/large_tool_results/call_1_2" in result.notices[0]


@pytest.mark.parametrize("size", [99_999, 100_000, 100_001])
def test_limit_is_exact(run: Callable[..., ExecuteResult], daemon: Daemon, size: int) -> None:
    result = run(f"head -c {size} /dev/zero | tr '\\0' x")
    assert len(result.output) == min(size, 100_000)
    assert result.truncated == (size > 100_000)
    assert (result.output_file is not None) == result.truncated
    assert not list(daemon.root.glob("large_tool_results/*")) or result.truncated


def test_replacement_characters_count_as_what_they_are(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    result = run(r"head -c 60000 /dev/zero | tr '\0' '\377'")
    assert result.output == "\ufffd" * 33_333
    assert result.output_file is not None
    assert (daemon.root / result.output_file[1:]).read_bytes() == b"\xff" * 60_000


def test_large_output_that_cannot_be_kept_is_told(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    (daemon.root / "large_tool_results").write_text("a file in the way")
    result = run("head -c 200000 /dev/zero; exit 3")
    assert (result.exit_code, len(result.output), result.output_file) == (3, 100_000, None)
    assert "Not a directory" in result.notices[0]


def test_a_runaway_output_does_not_fill_the_disk(
    run: Callable[..., ExecuteResult], daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_KEPT", 1 << 20)
    result = run("head -c 5000000 /dev/zero", call_id="x" * 200)
    assert result.exit_code == 0
    assert result.output_file is not None
    assert result.output_file.startswith("/large_tool_results/call-")
    assert 1 << 20 <= (daemon.root / result.output_file[1:]).stat().st_size < 2 << 20
    assert "1 MiB" in result.notices[0]


# ------------------------------------------------------------------ cancelling, threads, event loops


def test_cancel_from_another_thread(run: Callable[..., ExecuteResult], daemon: Daemon) -> None:
    cancellation = Cancellation()
    timer = threading.Timer(0.4, cancellation.cancel)
    timer.start()
    with pytest.raises(Cancelled):
        run("sleep 318 & echo $! > pid; sleep 318", cancellation=cancellation)
    timer.join()
    assert not alive(*pids(run, daemon.root, "pid"))


def test_many_at_once(daemon: Daemon) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda n: execute(daemon, f"echo {n}; exit {n}"), range(48)))
    assert [(result.output, result.exit_code) for result in results] == [(f"{n}\n", n) for n in range(48)]


def test_descriptors_are_given_back(run: Callable[..., ExecuteResult]) -> None:
    run("true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run("true")
        run("sleep 9", timeout=0.05)
    assert len(os.listdir("/proc/self/fd")) == before


def test_asyncio(daemon: Daemon) -> None:
    async def main() -> list[ExecuteResult]:
        return await asyncio.gather(*(aexecute(daemon, f"sleep 0.2; exit {n}") for n in range(12)))

    started = time.monotonic()
    assert [result.exit_code for result in asyncio.run(main())] == list(range(12))
    assert time.monotonic() - started < 2


def test_asyncio_cancel_ends_the_processes(daemon: Daemon) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aexecute(daemon, "echo $$ > pid; sleep 319"), 0.4)

    asyncio.run(main())
    assert not alive(*pids(partial(execute, daemon), daemon.root, "pid"))


def test_trio_and_its_cancel(daemon: Daemon) -> None:
    async def main() -> None:
        assert (await aexecute(daemon, "exit 5")).exit_code == 5
        with pytest.raises(ValueError, match="timeout"):
            await aexecute(daemon, "true", timeout=-1)
        with trio.move_on_after(0.4) as scope:
            await aexecute(daemon, "echo $$ > pid; sleep 320")
        assert scope.cancelled_caught

    trio.run(main)
    assert not alive(*pids(partial(execute, daemon), daemon.root, "pid"))
