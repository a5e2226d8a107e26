"""The tool rows: each tool over the socket beside Deep Agents' own backends in process, on the same 2,000 files."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agenttools import tools
from agenttools.client import Client

FILES = 2000
TEXT = "".join(f"line {i} of a file, of no great length\n" for i in range(28))


def _median(work: Callable[[int], object], times: int) -> float:
    """Seconds a call takes, the median."""
    taken = []
    for i in range(times):
        start = time.perf_counter()
        work(i)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _fill(directory: Path) -> None:
    for i in range(FILES):
        sub = directory / f"d{i // 50}"
        sub.mkdir(exist_ok=True)
        (sub / f"f{i}.py").write_text(TEXT + ("needle\n" if i % 100 == 0 else ""))


def rows(client: Client, mount: Path, host: Path) -> Iterator[tuple[str, float, float]]:
    """(row, seconds of ours, seconds of Deep Agents')."""
    from deepagents.backends import FilesystemBackend, LocalShellBackend

    for directory in (mount, host):
        _fill(directory)
    theirs = FilesystemBackend(root_dir=host, virtual_mode=True)
    shell = LocalShellBackend(root_dir=host, virtual_mode=True, inherit_env=True)
    name = [f"/d{i // 50}/f{i}.py" for i in range(FILES)]
    pairs: list[tuple[str, Callable[[int], object], Callable[[int], object], int]] = [
        ("read", lambda i: tools.read(client, name[i]), lambda i: theirs.read(name[i]), 1000),
        ("write", lambda i: tools.write(client, name[i], TEXT), lambda i: theirs.write(name[i], TEXT), 1000),
        (
            "edit",
            lambda i: tools.edit(client, name[i], "line 7 of", "line seven of"),
            lambda i: theirs.edit(name[i], "line 7 of", "line seven of"),
            1000,
        ),
        ("ls, 50 files", lambda i: tools.ls(client, f"/d{i}"), lambda i: theirs.ls(f"/d{i}"), 40),
        ("glob, all", lambda i: tools.glob(client, "*.py"), lambda i: theirs.glob("*.py"), 10),
        ("grep, all", lambda i: tools.grep(client, "needle"), lambda i: theirs.grep("needle"), 10),
        ("execute true", lambda i: tools.execute(client, "true"), lambda i: shell.execute("true"), 20),
    ]
    for row, ours, other, times in pairs:
        failed = getattr(ours(0), "error", None) or getattr(other(0), "error", None)
        if failed:
            raise RuntimeError(f"{row}: {failed}")
        yield row, _median(ours, times), _median(other, times)
