"""VfsBackend beside Deep Agents' own backends, in one run: median microseconds an operation, and ratios.

    python benchmarks/deepagents_latency.py [--files 2000] [--seconds 0.2] [--json]

Every backend holds the same tree; sync and async, 1 and 16 at once (then a time is the whole run's, by operation).
BaseSandbox is what it makes of a plain local shell; StoreBackend is over InMemoryStore. Needs FUSE and deepagents.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deepagents.backends import FilesystemBackend, LocalShellBackend, StoreBackend
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox
from langgraph.store.memory import InMemoryStore

from agenttools.deepagents import VfsBackend

PER_DIRECTORY = 100
LINE = "line {} of a file, of no great length, with a few words in it\n"
NEEDLE = "a needle in line 7"

Backends = dict[str, Any]


class LocalSandbox(BaseSandbox):
    """Deep Agents' shell scripts on this machine, in a directory that is the root by a prefix of each path."""

    def __init__(self, root: Path) -> None:
        self._shell = LocalShellBackend(root, virtual_mode=True, inherit_env=True)
        self._root = root

    @property
    def id(self) -> str:
        return "local"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return self._shell.execute(command, timeout=timeout)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        for path, content in files:
            Path(path).write_bytes(content)
        return [FileUploadResponse(path=path) for path, _ in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [FileDownloadResponse(path=path, content=Path(path).read_bytes()) for path in paths]


def tree(count: int) -> Iterator[tuple[str, bytes]]:
    """(path, content) of each file."""
    for n in range(count):
        lines = [LINE.format(i) for i in range(60)]
        if n % 50 == 0:
            lines[6] = f"{NEEDLE}\n"
        yield f"d{n // PER_DIRECTORY:03d}/f{n:05d}.{'py' if n % 4 else 'md'}", "".join(lines).encode()


Step = tuple[str, Callable[[Any, str, int], tuple[str, tuple[Any, ...]]]]
"""A name, and from (backend, its root, number of the call) the method and its arguments."""

STEPS: tuple[Step, ...] = (
    ("read", lambda b, root, n: ("read", (f"{root}d000/f{n % 100:05d}.{'py' if n % 4 else 'md'}", 0, 100))),
    ("write", lambda b, root, n: ("write", (f"{root}new/w{n % 64}", LINE.format(n) * 60))),
    ("edit", lambda b, root, n: ("edit", (f"{root}edit/e{n % 64}", f"mark{n // 64}\n", f"mark{n // 64 + 1}\n"))),
    ("ls", lambda b, root, n: ("ls", (f"{root}d000",))),
    ("glob", lambda b, root, n: ("glob", ("**/*.md", root))),
    ("grep", lambda b, root, n: ("grep", (NEEDLE, root))),
    ("execute", lambda b, root, n: ("execute", ("true",))),
)


def error_of(result: Any) -> Any:
    return getattr(result, "error", None) or (getattr(result, "exit_code", 0) and result.output)


def measure(backend: Any, root: str, step: Step, seconds: float, ways: int, concurrent_: bool) -> float | None:
    """Microseconds a call; None when the backend has no such operation."""
    name, make = step
    if name == "execute" and not hasattr(backend, "execute"):
        return None
    if name == "edit":
        for n in range(64):
            backend.write(f"{root}edit/e{n}", "mark0\n" + LINE.format(n) * 60)
    counter = iter(range(1 << 30))

    def check(result: Any) -> None:
        if error := error_of(result):
            raise RuntimeError(f"{type(backend).__name__} {name}: {error}")

    def once(number: int) -> None:
        method, args = make(backend, root, number)
        check(getattr(backend, method)(*args))

    async def aonce(number: int) -> None:
        method, args = make(backend, root, number)
        check(await getattr(backend, f"a{method}")(*args))

    def repeat(call: Callable[[], int]) -> float:
        """Median over rounds of microseconds a call; a round makes ``call()`` of them."""
        call()
        times, until = [], time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            started = time.perf_counter()
            made = call()
            times.append((time.perf_counter() - started) / made * 1e6)
        return statistics.median(times)

    if not concurrent_:
        if ways == 1:
            return repeat(lambda: once(next(counter)) or 1)
        with concurrent.futures.ThreadPoolExecutor(ways) as pool:
            return repeat(lambda: len(list(pool.map(once, [next(counter) for _ in range(ways)]))))
    loop = asyncio.new_event_loop()

    async def together() -> int:
        await asyncio.gather(*(aonce(next(counter)) for _ in range(ways)))
        return ways

    try:
        return repeat(lambda: loop.run_until_complete(together()))
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def backends(base: Path, count: int) -> Iterator[tuple[str, Any, str]]:
    """(name, backend, the root its paths begin with), each with the tree in it."""
    files = list(tree(count))
    for name in ("VfsBackend (state)", "VfsBackend (local)"):
        kind = name[12:-1]
        point, host = base / f"mnt-{kind}", base / f"host-{kind}"
        point.mkdir()
        host.mkdir()
        route = f"/=local:{host}" if kind == "local" else "/=state"
        vfsd("mount", "--name", kind, "--route", route, str(point))
        backend = VfsBackend(name=kind)
        for result in backend.upload_files([(f"/{path}", content) for path, content in files]):
            assert result.error is None, result
        yield name, backend, "/"
        backend.close()
        vfsd("umount", "--force", kind)
    disk = base / "disk"
    for path, content in files:
        (disk / path).parent.mkdir(parents=True, exist_ok=True)
        (disk / path).write_bytes(content)
    yield "FilesystemBackend", FilesystemBackend(disk, virtual_mode=True), "/"
    yield "LocalShellBackend", LocalShellBackend(disk, virtual_mode=True, inherit_env=True), "/"
    yield "BaseSandbox (local)", LocalSandbox(disk), f"{disk}/"
    store = StoreBackend(store=InMemoryStore(), namespace=lambda _: ("bench",))
    store.upload_files([(f"/{path}", content) for path, content in files])
    yield "StoreBackend", store, "/"


def vfsd(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "vfsd", *args], check=True, stdout=subprocess.DEVNULL, timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each figure")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="vb"))
    for name in ("run", "state"):
        (base / name).mkdir(mode=0o700)
    os.environ |= {"XDG_RUNTIME_DIR": str(base / "run"), "XDG_STATE_HOME": str(base / "state")}
    ways = [(count, concurrent_) for count in (1, 16) for concurrent_ in (False, True)]
    figures: dict[str, dict[str, dict[str, float | None]]] = {}
    try:
        for name, backend, root in backends(base, args.files):
            for count, concurrent_ in ways:
                title = f"{'async' if concurrent_ else 'sync'}, {count} at once"
                row = {step[0]: measure(backend, root, step, args.seconds, count, concurrent_) for step in STEPS}
                figures.setdefault(title, {})[name] = row
    finally:
        for kind in ("state", "local"):
            subprocess.run(
                [sys.executable, "-m", "vfsd", "umount", "--force", kind], capture_output=True, check=False, timeout=60
            )
        shutil.rmtree(base, ignore_errors=True)
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    print(f"{args.files} files; microseconds an operation (in brackets: VfsBackend (state) / this)")
    for title, rows in figures.items():
        print(f"\n| {title} | {' | '.join(step[0] for step in STEPS)} |\n|{'---|' * (len(STEPS) + 1)}")
        for name, row in rows.items():
            print(f"| {name} | {' | '.join(shown(row, rows, step[0]) for step in STEPS)} |")


def shown(row: dict[str, float | None], rows: dict[str, dict[str, float | None]], step: str) -> str:
    own, ours = row[step], rows["VfsBackend (state)"][step]
    if own is None or ours is None:
        return "-"
    return f"{own:,.0f} ({ours / own:.2f})"


if __name__ == "__main__":
    main()
