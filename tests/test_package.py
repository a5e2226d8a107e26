"""What is installed: two typed packages, two commands, pinned dependencies, a client that is quick to import."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORT_MS = 100


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")


@pytest.mark.parametrize(
    ("file", "extras"), [("requirements.lock", ["dev"]), ("requirements-adapters.lock", ["dev", "adapters"])]
)
def test_lock_pins_with_hashes_and_names_no_index(file: str, extras: list[str]) -> None:
    lock = (ROOT / file).read_text()
    assert not re.search(r"https?:|file:|--(extra-)?index-url|--find-links|--trusted-host", lock)
    blocks = re.findall(r"^([a-z0-9-]+)==\S+ \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", lock, re.MULTILINE)
    pinned = {name for name, _ in blocks}
    lines = [line for line in lock.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(lines) == len(blocks)
    wanted = PROJECT["dependencies"] + [one for extra in extras for one in PROJECT["optional-dependencies"][extra]]
    assert {_name(requirement) for requirement in wanted} <= pinned


def test_commands_exist() -> None:
    assert set(PROJECT["scripts"]) == {"vfsd", "agenttools"}
    for target in PROJECT["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_wheel_has_both_packages_typed(tmp_path: Path) -> None:
    # A copy, because building writes beside the sources; and only what git would hand out.
    copy = tmp_path / "source"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in names.split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    code = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], cwd=copy, check=True, capture_output=True
    )
    wheel = next(iter(tmp_path.glob("*.whl")))
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)], check=True, capture_output=True, text=True
    )
    inside = {line.split()[0] for line in listed.stdout.splitlines()[1:]}
    assert {"vfsd/py.typed", "agenttools/py.typed", "vfsd/cli.py", "agenttools/cli.py"} <= inside
    modules = {str(p.relative_to(ROOT)) for top in ("vfsd", "agenttools") for p in (ROOT / top).rglob("*.py")}
    assert modules <= inside
    assert {name.partition("/")[0] for name in inside if ".dist-info/" not in name} == {"vfsd", "agenttools"}


def test_importing_the_client_is_quick_and_light() -> None:
    code = (
        "import sys, time; t = time.process_time(); import agenttools, agenttools.tools, agenttools.client;"
        "print((time.process_time() - t) * 1000, *sorted({'trio', 'asyncio', 'vfsd', 'pyfuse3'} & set(sys.modules)))"
    )
    best = float("inf")
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
        took, *heavy = out.split()
        assert heavy == []
        best = min(best, float(took))
    assert best < IMPORT_MS
