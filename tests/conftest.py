"""For every test: helper modules are imported from this directory; what needs a mount is marked so."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpointed import Mount
from cli_world import World
from hypothesis import HealthCheck, settings
from trees import Mounts

from vfsd.check import check_volume

MOUNT_TESTS = Path(__file__).parent / "mount"
DAEMONS = {"world"}
"""Fixtures in which the command starts daemons that mount."""

# Without what was compiled the thousands of commands that the tests start take twice as long each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# An example takes as long as it takes: a busy machine is no fault of the code.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes that run tests side by side have sockets, names of mounts and state of their own.
    _own = tempfile.mkdtemp(prefix="vfsd-")
    atexit.register(shutil.rmtree, _own, ignore_errors=True)
    for _name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        os.environ[_name] = os.path.join(_own, _name)
        os.mkdir(os.environ[_name], 0o700)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MOUNT_TESTS in item.path.parents or DAEMONS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.mount)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Each takes one file after the other: the longest first, so that at the end none has a long one for itself.
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        tests = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


@pytest.fixture(scope="session")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    """Real daemons, shared by all tests that need no mount of their own."""
    mounts = Mounts(tmp_path_factory)
    yield mounts
    mounts.stop()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Directories for the command and the daemons that it starts; afterwards nothing is mounted below them."""
    made = World(tmp_path)
    yield made
    made.clean()
    assert made.mounts() == []


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A mount without a kernel that keeps checkpoints; its volume is sound at the end."""
    mount = Mount(tmp_path)
    yield mount
    mount.close()
    assert check_volume(mount.place("/")) == []
