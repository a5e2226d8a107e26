from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mounted import Mounted
from trees import Mounts


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


@pytest.fixture(scope="session")
def open_to_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    """Real daemons whose mounts other users may enter, shared as ``mounts`` are."""
    mounts = Mounts(tmp_path_factory, "--allow-other")
    yield mounts
    mounts.stop()


@pytest.fixture(params=["mount-native-state", "mount-native-local", "mount-pyfuse3-memory"])
def where(request: pytest.FixtureRequest, open_to_all: Mounts) -> Iterator[str]:
    """A new directory of a tree that other users may enter."""
    with open_to_all.directory(request.param) as (daemon, path):
        yield f"{daemon.point}{path}"


@pytest.fixture
def host() -> Iterator[str]:
    """A directory of the host's file system, to compare with."""
    place = tempfile.mkdtemp(prefix="vfsd-host-")
    os.chmod(place, 0o755)
    yield place
    shutil.rmtree(place)
