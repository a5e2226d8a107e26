"""What a tree of many files costs: time to mount, memory of the daemon, and each operation at that size.

    python -m benchmarks.scale [--files 1000,100000] [--per 500 | --flat] [--engine native] [--dir DIR]

For each size a tree of small files is made: the first and the last thousand through the mount, the others without a
daemon; then it is mounted, walked, searched and removed. In a mount namespace of its own (``unshare -m python -m ...``)
no container started meanwhile keeps the mount. ``cpu`` is processor
time of the daemon, which other work on the machine does not change much; ``wall`` is what the program waits. ``held``
is the daemon's own memory (RssAnon) beyond that of an empty mount, in bytes a file. ``stall`` is the longest that the
daemon worked before it answered a statfs(2), one of which is asked every few milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import trio

from agenttools import checkpoints, tools
from agenttools.client import Client
from vfsd.backends.sqlite import SqliteBackend
from vfsd.core.types import Caller
from vfsd.feed import Feed
from vfsd.statevolume import StateVolume

PAGE = b"one line of text, of which there are many\n" * 3
SAMPLE = 1000
BEAT_S = 0.003


class Mount:
    """One mount that can be taken down and put up again."""

    def __init__(self, base: Path, engine: str) -> None:
        self.base = base
        self.point = base / "mnt"
        self.point.mkdir()
        self._vfsd = [sys.executable, "-m", "vfsd"]
        self._engine = engine
        self.pid = 0
        self.took = 0.0

    def up(self) -> None:
        """Return once it answers."""
        began = time.perf_counter()
        command = [*self._vfsd, "mount", "--engine", self._engine, str(self.point)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.took = time.perf_counter() - began
        status = subprocess.run([*self._vfsd, "status", "default", "--json"], check=True, capture_output=True)
        self.pid = int(json.loads(status.stdout)[0]["pid"])

    def down(self) -> None:
        """Return once everything is written."""
        subprocess.run([*self._vfsd, "umount", "default"], check=True, stdout=subprocess.DEVNULL)
        self.pid = 0

    def processor(self) -> float:
        """Seconds of processor time that the daemon has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def loop_processor(self) -> float:
        """The same of the thread that serves, to the nanosecond."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def memory(self) -> int:
        """Bytes of memory that are the daemon's alone."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class Heart:
    """Asks the mount for a statfs(2) every few milliseconds; ``waits``: how long the daemon worked before it answered.

    In seconds of its processor time: what other programs take meanwhile is not its doing.
    """

    def __init__(self, mount: Mount) -> None:
        self.waits: list[float] = []
        self._mount = mount
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        point = str(self._mount.point)
        while not self._stop.wait(BEAT_S):
            had = self._mount.loop_processor()
            os.statvfs(point)
            self.waits.append(self._mount.loop_processor() - had)

    @property
    def worst(self) -> float:
        """The longest wait, seconds."""
        return max(self.waits, default=0.0)

    def percentile(self, part: float) -> float:
        """What that part of the waits were no longer than."""
        return sorted(self.waits)[int(len(self.waits) * part)] if self.waits else 0.0

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


class Report:
    """Prints a line for each thing measured."""

    def __init__(self, mount: Mount, files: int) -> None:
        self.mount = mount
        self.files = files
        self.empty = 0
        print(f"{files} files", flush=True)
        print(f"  {'':34}{'wall s':>9}{'cpu s':>9}{'cpu us/op':>11}{'held B/file':>13}{'stall ms':>10}")

    def line(self, what: str, wall: float, cpu: float, count: int, stall: float | None = None) -> None:
        """One line; ``count``: operations, 0 for none to speak of."""
        each = f"{cpu / count * 1e6:11.1f}" if count else " " * 11
        held = (self.mount.memory() - self.empty) / self.files if self.mount.pid else 0
        stalled = "" if stall is None else f"{stall * 1e3:10.1f}"
        print(f"  {what:34}{wall:9.2f}{cpu:9.2f}{each}{held:13.0f}{stalled}", flush=True)

    def umount(self) -> None:
        """Measure that too."""
        began = time.perf_counter()
        self.mount.down()
        print(f"  {'umount':34}{time.perf_counter() - began:9.2f}", flush=True)

    def take(self, what: str, count: int, work: Callable[[], object]) -> None:
        """Measure ``work``, while a heart beats."""
        with Heart(self.mount) as heart:
            began, had = time.perf_counter(), self.mount.processor()
            work()
            wall, cpu = time.perf_counter() - began, self.mount.processor() - had
        self.line(what, wall, cpu, count, heart.worst)


def _create(names: list[str]) -> None:
    for name in names:
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(fd, PAGE)
        os.close(fd)


async def fill(place: Path, paths: list[str]) -> None:
    """Make files, by their paths in the tree, and their directories in a volume that is not mounted."""
    caller = Caller(os.geteuid(), os.getegid(), 0, "rpc")
    volume = StateVolume(0, SqliteBackend(place), Feed(), time.time_ns)
    directories = {"": volume.root_ino}

    def directory(path: str) -> int:
        if path not in directories:
            above, _, name = path.rpartition("/")
            at = directory(above)
            try:
                directories[path] = volume.lookup(at, name.encode()).ino
            except FileNotFoundError:
                directories[path] = volume.mkdir(at, name.encode(), 0o755, caller).ino
        return directories[path]

    for i, path in enumerate(paths, 1):
        above, _, name = path.rpartition("/")
        volume.create_file(directory(above), name.encode(), 0o644, PAGE, caller)
        if i % 25_000 == 0:
            await volume.maintain()
            while volume.evict():
                pass
    volume.close()


def _measure(base: Path, files: int, per: int, engine: str) -> None:
    os.environ["XDG_RUNTIME_DIR"], os.environ["XDG_STATE_HOME"] = str(base / "run"), str(base / "state")
    (base / "run").mkdir(mode=0o700)
    mount = Mount(base, engine)
    mount.up()
    try:
        report = Report(mount, files)
        report.empty = mount.memory()
        report.line("mount, empty", mount.took, mount.processor(), 0)
        top = mount.point / "tree"
        top.mkdir()
        paths = [f"{top}/d{i // per}/f{i:07}" for i in range(files)]
        for number in range((files - 1) // per + 1):
            os.mkdir(f"{top}/d{number}")
        sample = min(SAMPLE, files // 2)
        report.take("create, the first", sample, lambda: _create(paths[:sample]))
        report.umount()
        began, had = time.perf_counter(), time.process_time()
        (volume,) = base.glob("state/vfsd/default/threads/*/root")
        inside = [os.path.relpath(path, mount.point) for path in paths[sample : files - sample]]
        trio.run(fill, volume, inside)
        report.line("create without a daemon", time.perf_counter() - began, time.process_time() - had, files)
        mount.up()
        report.line("mount", mount.took, mount.processor(), 0)
        report.take("create, the last", sample, lambda: _create(paths[files - sample :]))
        report.umount()
        mount.up()
        report.line("mount", mount.took, mount.processor(), 0)
        _used(report, top, paths)
        report.umount()
    except BaseException:
        if mount.pid:
            mount.down()
        raise


def _used(report: Report, top: Path, paths: list[str]) -> None:
    """What is done with a tree that is there."""
    files = len(paths)
    quiet = {"stdout": subprocess.DEVNULL, "check": True}
    sample = paths[:: max(1, files // SAMPLE)]
    shown = "/" + top.name
    report.take("stat, a thousand here and there", len(sample), lambda: [os.stat(path) for path in sample])
    report.take("find", files, lambda: subprocess.run(["find", str(top)], **quiet))  # type: ignore[call-overload]
    report.take("ls -lR", files, lambda: subprocess.run(["ls", "-lR", str(top)], **quiet))  # type: ignore[call-overload]
    with Client(name="default", timeout=None) as client:
        report.take("glob, all", files, lambda: tools.glob(client, "**/*", shown))
        report.take("grep, all, no hit", files, lambda: tools.grep(client, "nowhere to be found", shown))
        report.take("checkpoint", 0, lambda: checkpoints.create(client))
    new = [path + "+" for path in sample]
    report.take("create, here and there", len(new), lambda: _create(new))
    report.take("rename, here and there", len(new), lambda: [os.rename(path, path + "+") for path in new])
    report.take("unlink, here and there", len(new), lambda: [os.unlink(path + "+") for path in new])
    report.take("rm -r", files, lambda: subprocess.run(["rm", "-r", str(top)], check=True))
    time.sleep(12)
    report.line("after a rest of 12 s", 0, 0, 0)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--files", default="1000,100000")
    parser.add_argument("--per", type=int, default=500, help="files in one directory")
    parser.add_argument("--flat", action="store_true", help="all in one directory")
    parser.add_argument("--engine", default="native")
    parser.add_argument("--dir", help="where to make the volume")
    options = parser.parse_args()
    for count in map(int, options.files.split(",")):
        with tempfile.TemporaryDirectory(prefix="vfsd-bench-", dir=options.dir) as scratch:
            _measure(Path(scratch), count, count if options.flat else options.per, options.engine)


if __name__ == "__main__":
    main()
