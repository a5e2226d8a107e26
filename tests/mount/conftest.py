from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mounted import Mounted


@pytest.fixture(params=["native", "pyfuse3"])
def engine(request: pytest.FixtureRequest) -> str:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    return str(request.param)


@pytest.fixture
def mount(engine: str) -> Iterator[Callable[..., Mounted]]:
    """``mount(...)`` mounts with the engine of this run, where other users can get at; all is unmounted at the end."""
    made: list[Mounted] = []
    point = Path(tempfile.mkdtemp(prefix="vfsd-"))
    point.chmod(0o755)

    def make(**options: Any) -> Mounted:
        if options.get("user"):
            os.chown(point, options["user"], options["user"])
        made.append(Mounted(point, engine, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()
    point.rmdir()


@pytest.fixture
def tree(mount: Callable[..., Mounted]) -> Mounted:
    """A mounted tree in memory."""
    return mount()
