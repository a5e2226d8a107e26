"""The file system rows: each times one kind of work in a directory of a column, in seconds."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.columns import Column

SMALL = b"x" * 4096
C_FILES = 40
Row = tuple[str, float]


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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


def small_files(column: Column, count: int) -> Iterator[Row]:
    """Create, stat, read, list, rename and unlink ``count`` files of 4 KiB in directories of 1,000."""
    top = column.path / "small"
    names = [f"{top}/d{i // 1000}/f{i}" for i in range(count)]
    for directory in sorted({os.path.dirname(n) for n in names}):
        os.makedirs(directory)
    many = f"{count:,} files:"
    yield f"{many} create + write 4 KiB + close", _timed(lambda: _create(names))
    column.cold()
    yield f"{many} stat, cold", _timed(lambda: _stat(names))
    yield f"{many} stat, warm", _timed(lambda: _stat(names))
    column.cold()
    yield f"{many} open + read + close, cold", _timed(lambda: _read(names))
    yield f"{many} open + read + close, warm", _timed(lambda: _read(names))
    column.cold()
    yield f"{many} find, cold", _timed(lambda: subprocess.run(["find", top], stdout=subprocess.DEVNULL, check=True))
    yield f"{many} find, warm", _timed(lambda: subprocess.run(["find", top], stdout=subprocess.DEVNULL, check=True))
    if shutil.which("rg"):
        search = ["rg", "-c", "needle", str(top)]
        yield f"{many} rg, warm", _timed(lambda: subprocess.run(search, stdout=subprocess.DEVNULL))
    yield f"{many} rename", _timed(lambda: [os.rename(n, f"{n}~") for n in names])
    yield f"{many} unlink", _timed(lambda: [os.unlink(f"{n}~") for n in names])
    shutil.rmtree(top)


def large_file(column: Column, mib: int) -> Iterator[Row]:
    """One file of ``mib`` MiB: sequential and random."""
    name, piece = column.path / "large", os.urandom(1 << 20)

    def write() -> None:
        fd = os.open(name, os.O_CREAT | os.O_WRONLY, 0o644)
        for _ in range(mib):
            os.write(fd, piece)
        os.fsync(fd)
        os.close(fd)

    def read() -> None:
        fd = os.open(name, os.O_RDONLY)
        while os.read(fd, 1 << 20):
            pass
        os.close(fd)

    picks = random.Random(1).sample(range(mib * 256), 2000)

    def random_read() -> None:
        fd = os.open(name, os.O_RDONLY)
        for block in picks:
            os.pread(fd, 4096, block * 4096)
        os.close(fd)

    def random_write() -> None:
        fd = os.open(name, os.O_WRONLY)
        for block in picks:
            os.pwrite(fd, SMALL, block * 4096)
        os.close(fd)

    yield f"{mib} MiB: sequential write + fsync", _timed(write)
    column.cold()
    yield f"{mib} MiB: sequential read, cold", _timed(read)
    yield f"{mib} MiB: sequential read, warm", _timed(read)
    column.cold()
    yield "2,000 random 4 KiB reads, cold", _timed(random_read)
    yield "2,000 random 4 KiB writes", _timed(random_write)
    os.unlink(name)


def programs(column: Column, repository: Path) -> Iterator[Row]:
    """git, tar and SQLite at work on a repository; pip into a new environment, and a C compiler."""
    clone, tree = column.path / "clone", column.path / "tree"
    git = ["git", "-c", "gc.auto=0"]

    def run(*command: object, cwd: Path | None = None) -> float:
        words = [str(c) for c in command]
        return _timed(lambda: subprocess.run(words, cwd=cwd, check=True, stdout=subprocess.DEVNULL))

    yield "git clone", run(*git, "clone", "-q", "--no-hardlinks", repository, clone)
    run(*git, "status", "--porcelain", cwd=clone)
    yield "git status, warm", run(*git, "status", "--porcelain", cwd=clone)
    archive = column.path / "tree.tar"
    run("tar", "-cf", archive, "-C", clone, ".")
    tree.mkdir()
    yield "tar x", run("tar", "-xf", archive, "-C", tree)
    for mode in ("delete", "wal"):
        yield f"SQLite, 500 transactions, {mode}", _timed(lambda mode=mode: _transactions(column.path, mode))  # type: ignore[misc]
    shutil.rmtree(clone)
    shutil.rmtree(tree)
    archive.unlink()
    environment = column.path / "environment"
    yield "python -m venv, with its pip install", run(sys.executable, "-m", "venv", environment)
    shutil.rmtree(environment)
    if shutil.which("make") and shutil.which("cc"):
        sources = column.path / "sources"
        _c_project(sources)
        yield f"make -j2, {C_FILES} C files", run("make", "-s", "-j2", cwd=sources)
        shutil.rmtree(sources)


def _c_project(directory: Path) -> None:
    """A program of C_FILES files that share a header."""
    directory.mkdir()
    (directory / "all.h").write_text("".join(f"int f{n}(int);\n" for n in range(C_FILES)))
    for n in range(C_FILES):
        body = f'int f{n}(int x) {{ return x > {n} ? f{(n + 1) % C_FILES}(x - 1) : printf("%d\\n", x); }}'
        main = "int main(void) { return f0(1) < 0; }" if n == 0 else ""
        (directory / f"f{n}.c").write_text(f'#include <stdio.h>\n#include "all.h"\n{body}\n{main}\n')
    objects = " ".join(f"f{n}.o" for n in range(C_FILES))
    (directory / "Makefile").write_text(f"program: {objects}\n\tcc -o $@ $^\n%.o: %.c all.h\n\tcc -c -o $@ $<\n")


def _transactions(directory: Path, mode: str) -> None:
    path = directory / f"{mode}.db"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"PRAGMA journal_mode={mode}")
    db.execute("PRAGMA synchronous=OFF")
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v BLOB)")
    for _ in range(500):
        db.execute("INSERT INTO t (v) VALUES (?)", (SMALL[:500],))
    db.close()
    path.unlink()
