"""The tools' two names: both do and say the same, in asyncio and in trio."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from tool_server import serving

from agenttools import tools
from agenttools.client import Client

NAMES = ("ls", "read", "write", "edit", "delete", "glob", "grep", "execute")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(tmp_path / "s"), Client(socket=tmp_path / "s") as client:
        yield client


@pytest.fixture(params=["asyncio", "trio"])
def go(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``go(function, *args)``: the result of a coroutine function."""

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        async def main() -> Any:
            return await function(*args, **kwargs)

        return asyncio.run(main()) if request.param == "asyncio" else trio.run(main)

    return run


@pytest.mark.parametrize("name", NAMES)
def test_one_tool_two_names(name: str) -> None:
    plain, concurrent = getattr(tools, name), getattr(tools, f"a{name}")
    assert inspect.iscoroutinefunction(concurrent) and not inspect.iscoroutinefunction(plain)
    assert (plain.__name__, concurrent.__name__) == (name, f"a{name}")
    parameters = list(inspect.signature(plain).parameters)
    assert parameters == list(inspect.signature(concurrent).parameters) and parameters[0] == "client"
    assert plain.__doc__ and concurrent.__doc__


def test_a_session(client: Client, go: Callable[..., Any]) -> None:
    large = "line\n" * 500_000
    assert go(tools.awrite, client, "/d/f", large, call_id="1").created
    assert go(tools.aread, client, "/d/f", 400_000, 1) == tools.read(client, "/d/f", 400_000, 1)
    assert go(tools.aedit, client, "/d/f", "line\n", "x\n", True).occurrences == 500_000
    assert go(tools.als, client, "/mnt/tree/d") == tools.ls(client, "/mnt/tree/d")
    assert go(tools.aglob, client, "f", "/d") == tools.glob(client, "f", "/d")
    assert go(tools.agrep, client, "x", "/d", max_count=3) == tools.grep(client, "x", "/d", max_count=3)
    assert go(tools.adelete, client, "/d").error is None
    for name, args in (("read", ("/d/f",)), ("delete", ("/d",)), ("ls", ("/../",)), ("edit", ("/d", "a", "b"))):
        plain, concurrent = getattr(tools, name)(client, *args), go(getattr(tools, f"a{name}"), client, *args)
        assert plain == concurrent and plain.error is not None
    assert go(tools.aexecute, client, "true", -1).error.startswith("Error: Invalid parameter.")
    assert "mount" in go(tools.aexecute, client, "true").error


def test_no_daemon(tmp_path: Path, go: Callable[..., Any]) -> None:
    client = Client(socket=tmp_path / "none")
    assert "start one with: vfsd mount" in go(tools.aread, client, "/f").error


def test_hello_is_asked_for_once(client: Client, go: Callable[..., Any]) -> None:
    assert go(client.ahello)["mountpoint"] == b"/mnt/tree" == client.hello["mountpoint"]
