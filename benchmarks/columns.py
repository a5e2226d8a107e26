"""What is measured side by side: a host directory, vfsd by engine, other FUSE file systems where they are installed.

Each column is a directory to work in; all live below one scratch directory and are taken down when the run ends,
however it ends. One that can't be mounted is left out, and the report says why.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import peers

OWN = ("native", "unaudited", "heard", "ruled", "pyfuse3")
"""Columns of vfsd itself."""
MOUNT_S = 120
"""No mount of vfsd comes up or goes down slower."""


@dataclass(frozen=True)
class Column:
    """One file system to measure. ``path`` is a directory in it."""

    name: str
    path: Path


@dataclass
class Columns:
    """Those that are there, the host directory first, and of those that could not be mounted why."""

    found: list[Column]
    failed: dict[str, str] = field(default_factory=dict)


def rules(count: int) -> str:
    """``count`` rules for a configuration, half of them for reading, that match nothing which a benchmark does."""
    lines = []
    for i in range(count):
        lines += ["[[rules]]", f'operations = ["{"read" if i % 2 else "write"}"]', 'mode = "deny"']
        lines += [f'paths = ["/policy{i}/**", "/*/kept{i}.{{txt,md}}"]']
    return "\n".join(lines)


@contextlib.contextmanager
def _vfsd(scratch: Path, engine: str, also: str = "", settings: str = "") -> Iterator[Path]:
    name = f"bench-{engine}{also}"
    point, config = scratch / name, scratch / f"{name}.toml"
    point.mkdir()
    config.write_text(f'{settings}\n[routes."/"]\nkind = "state"\nlocation = "{scratch / name}-volume"\n')
    vfsd = [sys.executable, "-m", "vfsd"]
    mount = [*vfsd, "mount", "--name", name, "--engine", engine, "--config", config, point]
    subprocess.run([str(word) for word in mount], check=True, timeout=MOUNT_S, capture_output=True, text=True)
    try:
        yield point
    finally:
        subprocess.run([*vfsd, "umount", name], check=True, timeout=MOUNT_S, capture_output=True, text=True)


def _installed(name: str) -> bool:
    return name in OWN or shutil.which(peers.COMMANDS[name]) is not None


@contextlib.contextmanager
def columns(scratch: Path, wanted: list[str]) -> Iterator[Columns]:
    """The columns asked for (none: all that are installed), mounted; the host directory first."""
    host = scratch / "host"
    host.mkdir()
    makers: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Path]]]] = {
        "native": ("vfsd native", lambda: _vfsd(scratch, "native")),
        "unaudited": ("vfsd, no audit", lambda: _vfsd(scratch, "native", "-no-audit", "[audit]\nenabled = false")),
        "heard": ("vfsd, opens heard", lambda: _vfsd(scratch, "native", "-heard", 'opens = "heard"')),
        "ruled": ("vfsd, 100 rules", lambda: _vfsd(scratch, "native", "-100-rules", rules(100))),
        "pyfuse3": ("vfsd pyfuse3", lambda: _vfsd(scratch, "pyfuse3")),
    }
    for name in peers.COMMANDS:
        makers[name] = (name, lambda name=name: peers.mounted(name, scratch))  # type: ignore[misc]
    if unknown := set(wanted) - makers.keys():
        raise SystemExit(f"unknown column {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
    columns = Columns([Column("host", host)])
    with contextlib.ExitStack() as stack:
        for key, (name, make) in makers.items():
            if key not in wanted and (wanted or not _installed(key)):
                continue
            stack.enter_context(_taken_down(name))
            try:
                columns.found.append(Column(name, stack.enter_context(make())))
            except (OSError, subprocess.SubprocessError) as error:
                columns.failed[name] = reason(error)
        yield columns


@contextlib.contextmanager
def _taken_down(name: str) -> Iterator[None]:
    """What fails when one column goes must keep no other from going."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{name} was not taken down: {reason(error)}", file=sys.stderr)


def reason(error: BaseException) -> str:
    """One line that says why, with the last of what a program printed."""
    told = getattr(error, "stderr", None) or getattr(error, "stdout", None) or ""
    lines = [line for line in os.fsdecode(told).splitlines() if line.strip()]
    if isinstance(error, subprocess.CalledProcessError):
        command = error.cmd if isinstance(error.cmd, str) else " ".join(map(str, error.cmd[:2]))
        return f"{command}: {lines[-1].strip() if lines else f'exit status {error.returncode}'}"
    return f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
