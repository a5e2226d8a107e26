"""The rows of system calls on small files and on a large one: each times one kind of work, in a directory."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.turns import Step, cold

SMALL = b"x" * 4096
_PICKS = 2000


def _create(names: list[str]) -> None:
    for name in names:
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(fd, SMALL)
        os.close(fd)


def _stat(names: list[str]) -> None:
    for name in names:
        os.stat(name)


def _read(names: list[str]) -> None:
    for name in names:
        fd = os.open(name, os.O_RDONLY)
        os.read(fd, 8192)
        os.close(fd)


def _rename(names: list[str]) -> None:
    for name in names:
        os.rename(name, f"{name}~")


def _unlink(names: list[str]) -> None:
    for name in names:
        os.unlink(f"{name}~")


def _quietly(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def small_files(count: int, directory: Path) -> Iterator[Step]:
    """Create, stat, read, list, search, rename and unlink ``count`` files of 4 KiB in directories of 1,000."""
    names = [f"{directory}/d{i // 1000}/f{i}" for i in range(count)]
    for parent in sorted({os.path.dirname(name) for name in names}):
        os.makedirs(parent)
    many = f"{count:,} files:"
    yield f"{many} create + write 4 KiB + close", partial(_create, names)
    cold()
    yield f"{many} stat, cold", partial(_stat, names)
    yield f"{many} stat, warm", partial(_stat, names)
    cold()
    yield f"{many} open + read + close, cold", partial(_read, names)
    yield f"{many} open + read + close, warm", partial(_read, names)
    for temperature in ("cold", "warm"):
        if temperature == "cold":
            cold()
        yield f"{many} list (ls -lR), {temperature}", partial(_quietly, "ls", "-lR", directory)
    for temperature in ("cold", "warm"):
        if temperature == "cold":
            cold()
        yield f"{many} find, {temperature}", partial(_quietly, "find", directory)
    if shutil.which("rg"):
        yield f"{many} rg, warm", partial(_quietly, "rg", "-c", "xxxx", directory)
    yield f"{many} rename", partial(_rename, names)
    yield f"{many} unlink", partial(_unlink, names)


def _write_whole(name: Path, mib: int) -> None:
    piece = os.urandom(1 << 20)
    fd = os.open(name, os.O_CREAT | os.O_WRONLY, 0o644)
    for _ in range(mib):
        os.write(fd, piece)
    os.fsync(fd)
    os.close(fd)


def _read_whole(name: Path) -> None:
    fd = os.open(name, os.O_RDONLY)
    while os.read(fd, 1 << 20):
        pass
    os.close(fd)


def _read_mapped(name: Path) -> None:
    with open(name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        for at in range(0, len(pages), 4096):
            pages[at]


def _read_here_and_there(name: Path, picks: list[int]) -> None:
    fd = os.open(name, os.O_RDONLY)
    for block in picks:
        os.pread(fd, 4096, block * 4096)
    os.close(fd)


def _write_here_and_there(name: Path, picks: list[int]) -> None:
    fd = os.open(name, os.O_WRONLY)
    for block in picks:
        os.pwrite(fd, SMALL, block * 4096)
    os.close(fd)


def large_file(mib: int, directory: Path) -> Iterator[Step]:
    """One file of ``mib`` MiB: from end to end, as a map, and here and there."""
    name = directory / "large"
    blocks = range(mib * 256)
    picks = random.Random(1).sample(blocks, min(_PICKS, len(blocks)))
    yield f"{mib:,} MiB: sequential write + fsync", partial(_write_whole, name, mib)
    cold()
    yield f"{mib:,} MiB: sequential read, cold", partial(_read_whole, name)
    yield f"{mib:,} MiB: sequential read, warm", partial(_read_whole, name)
    cold()
    yield f"{mib:,} MiB: mmap read, cold", partial(_read_mapped, name)
    cold()
    yield f"{len(picks):,} random 4 KiB reads, cold", partial(_read_here_and_there, name, picks)
    yield f"{len(picks):,} random 4 KiB writes", partial(_write_here_and_there, name, picks)
