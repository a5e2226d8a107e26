"""The directions in which modules may import one another, and how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500

LAYERS = {
    "vfsd.core": 0,
    "vfsd.feed": 1,
    "vfsd.backends": 1,
    "vfsd.residency": 2,
    "vfsd.volume": 2,
    "vfsd.statevolume": 2,
    "vfsd.readonly": 2,
    "vfsd.past.rewind": 2,
    "vfsd.past.slots": 2,
    "vfsd.past.volume": 2,
    "vfsd.past.difference": 2,
    "vfsd.past.spans": 2,
    "vfsd.past.marks": 2,
    "vfsd.past.fork": 2,
    "vfsd.archive.tarstream": 0,
    "vfsd.routes": 3,
    "vfsd.system": 3,
    "vfsd.check": 3,
    "vfsd.vfs": 4,
    "vfsd.mapped": 4,
    "vfsd.paths": 5,
    "vfsd.search": 5,
    "vfsd.listing": 5,
    "vfsd.doors": 6,
    "vfsd.daemon": 8,
    "vfsd.process.launch": 8,
    "vfsd.cli": 9,
}
"""A module may import modules of its own layer and of lower ones; what is not named is between doors and daemon."""

BETWEEN = 7

IMPURE = {"trio", "time", "asyncio", "threading", "socket", "random", "datetime", "subprocess", "pathlib", "io"}
"""What vfsd.core must not import: it has no loop, no operating system and no clock."""

PURE_OS = {"strerror", "fsdecode", "fsencode"}
"""What vfsd.core may use of ``os`` besides its O_ constants: functions of their arguments alone."""


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = [*modules("vfsd"), *modules("agenttools")]


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports when it runs, wherever in it; not what only a type checker sees."""
    for node in _running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _running(child)


def layer(module: str) -> int:
    for name, number in LAYERS.items():
        if module == name or module.startswith(name + "."):
            return number
    return BETWEEN


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_imports(module: str, path: Path) -> None:
    names = set(imports(path))
    for name in names:
        top = name.partition(".")[0]
        if module.startswith("vfsd.core"):
            assert top not in IMPURE, f"{module} is pure and must not import {name}"
        if top == "pyfuse3":
            assert module == "vfsd.doors.engines.pyfuse3", f"{module} imports pyfuse3"
        if top == "agenttools" and module.startswith("vfsd"):
            assert module == "vfsd.doors.rpc", f"{module} imports {name}"
            assert name == "agenttools.wire" or name.startswith("agenttools.wire."), f"{module} imports {name}"
        if top == "vfsd":
            assert not module.startswith("agenttools"), f"{module} imports {name}"
            if module not in ("vfsd", "vfsd.__main__"):
                assert name == "vfsd" or layer(name) <= layer(module), f"{module} imports {name}, which is above it"


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if m[0].startswith("vfsd.core")])
def test_core_has_no_coroutines(module: str, path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    assert not [node for node in nodes if isinstance(node, (ast.AsyncFunctionDef, ast.Await))]


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if m[0].startswith("vfsd.core")])
def test_core_asks_no_operating_system(module: str, path: Path) -> None:
    assert not any(name.startswith("os.") for name in imports(path))
    used = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    names = {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "os"}
    assert not {name for name in names if not name.startswith("O_")} - PURE_OS


def test_files_are_short() -> None:
    sources = [path for folder in ("vfsd", "agenttools", "tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    long = {str(p.relative_to(ROOT)): n for p in sources if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_modules_say_what_they_are() -> None:
    texts = {name: path.read_text() for name, path in MODULES}
    assert [name for name, text in texts.items() if text and not ast.get_docstring(ast.parse(text))] == []
