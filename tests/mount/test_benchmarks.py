"""``make bench``: it measures what it names, leaves nothing behind, and no file system that fails ends the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

TURNS = """
import sys, time
from pathlib import Path
from benchmarks.columns import Column
from benchmarks.turns import take

def group(directory):
    (directory / "left").write_text("behind")
    yield "good", lambda: (directory / "a").write_text("b")
    yield "bad", lambda: (directory / "none").read_text()
    yield "good again", lambda: None
    yield "slow", lambda: time.sleep(60)
    yield "never", lambda: None

for row, cell in take(Column("host", Path(sys.argv[1])), group, 2.0):
    print(row, cell if isinstance(cell, str) else "measured", sep=": ")
"""


def _python(*args: str | Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"PATH": path} if path else {})
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)


def test_a_row_that_fails_is_told_and_one_that_hangs_ends_its_group(tmp_path: Path) -> None:
    done = _python("-c", TURNS, tmp_path)
    assert done.stdout.splitlines() == [
        "good: measured",
        f"bad: [Errno 2] No such file or directory: '{tmp_path}/work/none'",
        "good again: measured",
        "slow: not done within 2 s",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mount
def test_a_peer_that_does_not_come_up_is_named_below_the_table(tmp_path: Path) -> None:
    commands, scratch = tmp_path / "bin", tmp_path / "scratch"
    commands.mkdir()
    scratch.mkdir()
    bindfs = commands / "bindfs"
    bindfs.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    bindfs.chmod(0o755)
    options = ["--rounds", "1", "--files", "10", "--mib", "1", "--only", "small,large", "--dir", scratch]
    done = _python("-m", "benchmarks", *options, "native", "bindfs", path=f"{commands}:{os.environ['PATH']}")
    head, _, *rows = done.stdout.splitlines()
    assert head.endswith("| vfsd native |")
    assert any(row.startswith("| 10 files: rename | ") for row in rows)
    assert any(row.startswith("| 1 MiB: mmap read, cold | ") for row in rows)
    assert "failed" not in done.stdout
    assert "- bindfs is not there: bindfs -f: out of order" in rows
    assert list(scratch.iterdir()) == []
    assert str(scratch) not in Path("/proc/self/mounts").read_text()
