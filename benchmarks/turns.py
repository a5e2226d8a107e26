"""One group of rows on one column, in a process of its own, so that whatever hangs can be ended and the run goes on.

A group is a generator that yields ``(row, work)`` and prepares between the yields; only ``work`` is timed. Of a row
that fails the reason is kept and the next is tried; a row that takes longer than the limit ends its group. All a group
makes is in a directory of its own, which goes with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.columns import Column, reason

Step = tuple[str, Callable[[], object]]
Group = Callable[[Path], Iterator[Step]]
Cell = float | str
"""Seconds, or why there are none."""


def take(column: Column, group: Group, limit: float) -> Iterator[tuple[str, Cell]]:
    """(row, seconds or why not) as they are known; nothing of the group is left in the column."""
    directory = column.path / "work"
    yield from _ended(lambda send: _measure(directory, group, send), limit)
    for _, failed in _ended(lambda send: _clean(directory, send), limit):
        raise OSError(f"{column.name}: {directory} could not be removed: {failed}")


def _ended(work: Callable[[Callable[[str, Cell | None], None]], None], limit: float) -> Iterator[tuple[str, Cell]]:
    """What ``work`` sends from a process of its own: a row with None when it begins, then with what came of it.

    What fails in no row comes with an empty name.
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def child(pipe: Connection) -> None:
        os.setsid()
        work(lambda row, cell: pipe.send((row, cell)))

    process = fork.Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    begun = ""
    try:
        while ours.poll(limit):
            row, cell = ours.recv()
            begun = row if cell is None else ""
            if cell is not None:
                yield row, cell
        yield begun, f"not done within {limit:.0f} s"
    except EOFError:
        process.join()
        if process.exitcode:
            yield begun, f"ended by exit status {process.exitcode}"
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        ours.close()


def _measure(directory: Path, group: Group, send: Callable[[str, Cell | None], None]) -> None:
    row = "the start"
    try:
        directory.mkdir()
        for row, work in group(directory):
            send(row, None)
            start = time.perf_counter()
            try:
                work()
            except Exception as error:
                send(row, reason(error))
            else:
                send(row, time.perf_counter() - start)
    except Exception as error:
        send("", f"after {row}: {reason(error)}")


def _clean(directory: Path, send: Callable[[str, Cell | None], None]) -> None:
    for _ in range(3):  # a file system may hide a file that is open a moment longer than its program
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return
        time.sleep(0.5)
    try:
        shutil.rmtree(directory)
    except OSError as error:
        send("", reason(error))


def cold() -> None:
    """Drop the kernel's caches (as root; else what follows is warm, and the report says so)."""
    os.sync()
    with contextlib.suppress(PermissionError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
