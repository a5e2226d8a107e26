"""execute in each view and profile."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shell_world import Daemon

from agenttools.shell import ExecuteResult, ViewUnavailable, execute


@pytest.fixture(scope="session", autouse=True)
def runtime_directory() -> Iterator[None]:
    """The keepers of confined commands are found by files in it; its path must be short enough for nothing else."""
    directory = tempfile.mkdtemp(prefix="vfsd-run-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    root = tmp_path / "tree"
    root.mkdir()
    return Daemon(root)


@pytest.fixture(params=["root-tree", "root-open", "mount-open"])
def run(request: pytest.FixtureRequest, daemon: Daemon) -> Callable[..., ExecuteResult]:
    """execute in each view and profile, which the result confirms."""
    view, _, profile = request.param.partition("-")

    def call(command: str, **options: object) -> ExecuteResult:
        try:
            result = execute(daemon, command, **{"view": view, "profile": profile} | options)  # type: ignore[arg-type]
        except ViewUnavailable as error:
            pytest.skip(str(error))
        assert (result.view, result.profile) == (view, profile)
        return result

    return call
