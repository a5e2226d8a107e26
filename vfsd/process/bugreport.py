"""``vfsd bugreport``: what helps to understand a fault, in one file that may be given to others.

Owns what is in it; ``redacted`` what is left of it. No part may keep the others from being written.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import resource
import shutil
import sqlite3
import subprocess
import tarfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from vfsd import __version__
from vfsd.process import doctor, redacted

LINES = 500
"""Of the log's end."""

_TAIL = 1 << 20
_SECONDS = 10.0
_LIBRARIES = (
    "trio", "msgpack", "xxhash", "wcmatch", "sortedcontainers", "pyfuse3", "prometheus-client", "deepagents",
    "langchain-core", "langgraph", "langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres", "psycopg",
    "obstore", "mcp", "fsspec"
)  # fmt: skip
_PROGRAMS = ("fusermount3 --version", "bwrap --version", "systemctl --version", "podman --version", "docker --version")

PARTS = {
    "versions.json": "versions of vfsd, Python, its libraries, and programs",
    "machine.json": "kernel, distribution, processors, memory, limits; neither host name nor user",
    "doctor.txt": "what vfsd doctor says, a trial mount included",
    "status.json": "status and counters of the mount, its name, thread and prefixes of routes",
    "config.json": "its configuration: numbers and switches; texts, patterns, locations and variables are left out",
    "log.txt": f"of the last {LINES} lines of its log the time, the level, and the line of source that wrote it",
}
"""Each file and what is in it."""


def write(out: BinaryIO, row: dict[str, Any] | None) -> int:
    """Write the report on a mount with status ``row`` (None: there is none) to ``out``; its size in bytes. OSError."""
    parts: dict[str, Callable[[], str]] = {
        "versions.json": lambda: _json(versions()),
        "machine.json": lambda: _json(machine()),
        "doctor.txt": lambda: "".join(f"{finding.what}: {finding.sentence()}\n" for finding in doctor.examine()),
        "status.json": lambda: _json(None if row is None else redacted.status(row)),
        "config.json": lambda: _json(_config(row)),
        "log.txt": lambda: "\n".join([*redacted.log(_log(row)), ""]),
    }
    home = os.path.expanduser("~")
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, make in parts.items():
            try:
                text = make()
            except Exception as exc:
                text = f"could not be had: {type(exc).__name__}\n"
            data = (text if home == "/" else text.replace(home, "~")).encode(errors="backslashreplace")
            member = tarfile.TarInfo(f"vfsd-bugreport/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            tar.addfile(member, io.BytesIO(data))
    return out.tell()


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def versions() -> dict[str, Any]:
    """By program and library; those that are not there are left out."""
    libraries = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    programs = {words.split()[0]: said for words in _PROGRAMS if (said := _said(words.split()))}
    own = {"vfsd": __version__, "python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    return own | {"libraries": libraries, "programs": programs}


def _said(command: list[str]) -> str | None:
    """The first line that a program prints; None when it is not there or is slow."""
    if shutil.which(command[0]) is None:
        return None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        return (run.stdout or run.stderr).partition("\n")[0]
    return None


def machine() -> dict[str, Any]:
    """What vfsd runs on."""
    system = os.uname()
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    return {
        "kernel": f"{system.sysname} {system.release} {system.version} {system.machine}",
        "distribution": release.get("PRETTY_NAME", ""),
        "processors": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "container": doctor.in_container(),
        "root": os.geteuid() == 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "fuse": "\tfuse\n" in Path("/proc/filesystems").read_text(),
    }


def _config(row: dict[str, Any] | None) -> Any:
    source = None if row is None else row.get("config")
    if not source:
        return "no configuration file"
    try:
        return redacted.config(tomllib.loads(Path(source).read_text()))
    except tomllib.TOMLDecodeError:
        return "the configuration file is no TOML"


def _log(row: dict[str, Any] | None) -> list[str]:
    """The last lines of a mount's log, from its file or the journal."""
    if row is None:
        return []
    if row.get("log"):
        with open(row["log"], "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read().decode(errors="replace").splitlines()[-LINES:]
    if shutil.which("journalctl") is None:
        return []
    run = subprocess.run(
        ["journalctl", "--quiet", "--output=cat", f"--lines={LINES}", f"_PID={row['pid']}"],
        capture_output=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    return run.stdout.decode(errors="replace").splitlines()
