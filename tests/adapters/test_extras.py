"""What importing the packages costs and needs, and what they say when it is missing or too old."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

FRAMEWORKS = ("langchain", "langchain_core", "langgraph", "deepagents", "pydantic", "asyncio", "trio")


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["agenttools", "agenttools.client", "agenttools.tools", "agenttools.cli"])
def test_no_framework_is_imported(module: str) -> None:
    done = run(f"import {module}; print([m for m in {FRAMEWORKS!r} if m in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


def test_import_is_quick() -> None:
    """Processor time, which what else the machine does has no part in."""
    code = "import time; t = time.process_time(); import agenttools, agenttools.tools, agenttools.client; "
    code += "print(time.process_time() - t)"
    assert min(float(run(code).stdout) for _ in range(3)) < 0.1


def pretend(base: Path, version: str) -> Path:
    """A directory in which deepagents is installed, in name, in ``version``."""
    info = base / f"deepagents-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepagents\nVersion: {version}\n")
    return base


@pytest.mark.parametrize("version", ["0.7.20", "0.6.12", "0.7.9rc1"])
def test_deepagents_too_old(tmp_path: Path, version: str) -> None:
    done = run("import agenttools.deepagents", pretend(tmp_path, version))
    said = f"agenttools.deepagents needs deepagents 0.7.21 or later; this is {version}: pip install -U deepagents"
    assert done.stderr.splitlines()[-1] == f"ImportError: {said}"


def test_deepagents_missing(tmp_path: Path) -> None:
    code = "import importlib.metadata as m\ndef version(n): raise m.PackageNotFoundError(n)\nm.version = version\n"
    done = run(f"{code}import agenttools.deepagents")
    assert "which is not installed: pip install 'vfsd[deepagents]'" in done.stderr.splitlines()[-1]


def test_this_deepagents_is_new_enough() -> None:
    pytest.importorskip("deepagents")
    assert run("from agenttools.deepagents import VfsBackend").returncode == 0, metadata.version("deepagents")
