"""The rows of programs at work: git, tar, SQLite, pip, a C compiler and npm, on material that is made once before."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.columns import reason
from benchmarks.turns import Step

C_FILES = 40
PACKAGES = ["attrs", "click", "httpx", "jinja2", "packaging", "pydantic", "pygments", "pyyaml", "requests", "rich"]
"""What pip installs, with what these need."""
NODE_PACKAGES = ["eslint", "express", "react", "react-dom", "typescript", "webpack"]
_GIT = ("git", "-c", "gc.auto=0", "-c", "user.name=b", "-c", "user.email=b@localhost")
_MAKING_S = 600


@dataclass
class Material:
    """What the programs work on, made on the host before anything is measured, so that no network is."""

    repository: Path
    archive: Path
    wheels: Path | None = None
    node: Path | None = None
    missing: list[str] = field(default_factory=list)
    """Which rows there can't be, and why."""


def material(base: Path) -> Material:
    """The material below ``base``; rows whose packages can't be had are told as missing."""
    repository, archive = _repository(base)
    made = Material(repository, archive)
    wanted: dict[str, tuple[str, Callable[[Path], None]]] = {
        "wheels": ("pip install", _wheels),
        "node": ("npm install", _node_packages),
    }
    for name, (row, make) in wanted.items():
        directory = base / name
        directory.mkdir()
        try:
            make(directory)
        except (OSError, subprocess.SubprocessError) as error:
            made.missing.append(f"no row {row}: {reason(error)}")
        else:
            setattr(made, name, directory)
    if not (shutil.which("make") and shutil.which("cc")):
        made.missing.append("no row make: make and cc are not both installed")
    return made


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    words = [str(word) for word in command]
    subprocess.run(words, cwd=cwd, check=True, timeout=_MAKING_S, capture_output=True)


def _repository(base: Path) -> tuple[Path, Path]:
    """A repository to clone: ten times this one's files, committed once; and its tree as an archive."""
    source, target, archive = Path(__file__).parent.parent, base / "repository", base / "tree.tar"
    for copy in range(10):
        for package in ("vfsd", "agenttools", "tests", "docs"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / package, target / f"{package}{copy}", ignore=ignored)
    _run("tar", "-cf", archive, "-C", target, ".")
    _commit_all(target)
    return target, archive


def _commit_all(directory: Path) -> None:
    _run(*_GIT, "init", "-q", cwd=directory)
    _run(*_GIT, "add", "-A", cwd=directory)
    _run(*_GIT, "commit", "-qm", "all", cwd=directory)


def _wheels(directory: Path) -> None:
    environment = directory / "environment"
    _run(sys.executable, "-m", "venv", environment)
    _run(environment / "bin/pip", "download", "-q", "--only-binary", ":all:", "-d", directory, *PACKAGES)
    shutil.rmtree(environment)


def _node_packages(directory: Path) -> None:
    """npm's cache, and a project with a lock file."""
    project = directory / "project"
    project.mkdir()
    (project / "package.json").write_text(json.dumps({"name": "project", "version": "1.0.0", "private": True}))
    _run(*_npm(directory), "--save", *NODE_PACKAGES, cwd=project)
    shutil.rmtree(project / "node_modules")


def _npm(directory: Path) -> list[str | Path]:
    options = ["--prefer-offline", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    return ["npm", "install", *options, "--cache", directory / "cache"]


def programs(made: Material, directory: Path) -> Iterator[Step]:
    """Each program on what it usually finds there."""
    clone, tree, environment = directory / "clone", directory / "tree", directory / "environment"
    yield "git clone", partial(_run, *_GIT, "clone", "-q", "--no-hardlinks", made.repository, clone)
    status = partial(_run, *_GIT, "status", "--porcelain", cwd=clone)
    yield "git status, the first", status
    yield "git status, warm", status
    tree.mkdir()
    yield "tar x", partial(_run, "tar", "-xf", made.archive, "-C", tree)
    yield "git init + add + commit", partial(_commit_all, tree)
    for mode in ("delete", "wal"):
        yield f"SQLite, 500 transactions, {mode}", partial(_transactions, directory, mode)
    yield "python -m venv", partial(_run, sys.executable, "-m", "venv", environment)
    if made.wheels is not None:
        pip = (environment / "bin/pip", "install", "-q", "--no-index", "--find-links", made.wheels)
        yield f"pip install of {len(PACKAGES)} packages", partial(_run, *pip, *PACKAGES)
    if shutil.which("make") and shutil.which("cc"):
        sources = directory / "sources"
        _c_project(sources)
        yield f"make -j2, {C_FILES} C files", partial(_run, "make", "-s", "-j2", cwd=sources)
    if made.node is not None:
        project = directory / "project"
        shutil.copytree(made.node / "project", project)
        yield "npm install", partial(_run, *_npm(made.node), cwd=project)


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
    try:
        db.execute(f"PRAGMA journal_mode={mode}")
        db.execute("PRAGMA synchronous=OFF")
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v BLOB)")
        for _ in range(500):
            db.execute("INSERT INTO t (v) VALUES (?)", (b"x" * 500,))
    finally:
        db.close()
