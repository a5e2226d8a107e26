"""Daemons for the adapters' tests; coroutine tests are run to their end in a new event loop each."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import Mount, World


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Coroutine tests, as the packaged suite has them, need no plugin."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.fixture(scope="session", autouse=True)
def programs() -> Iterator[None]:
    """Commands find this Python as ``python``, as in an activated environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """State and runtime directories of the tests' own, also for what the code under test starts."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    world = World(tmp_path_factory.mktemp("w"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.environ.items():
            patch.setenv(name, value)
        patch.delenv("VFSD_SOCKET", raising=False)
        try:
            yield world
        finally:
            world.clean()


@pytest.fixture(autouse=True)
def _directories_of_world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when tests of elsewhere, with other directories, ran in between."""
    if "world" in request.fixturenames:
        for name, value in request.getfixturevalue("world").environ.items():
            monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def mount(world: World, request: pytest.FixtureRequest) -> Iterator[Mount]:
    """A tree of its own for a module: memory, which is fastest."""
    mount = world.mount(request.module.__name__.rpartition(".")[2], "--route", "/=memory")
    yield mount
    mount.stop()
