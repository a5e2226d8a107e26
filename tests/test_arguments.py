"""A value of a wrong type, wherever in Python it is handed in, is an error that names it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from tool_server import serving

from agenttools import tools
from agenttools.client import Client

WRONG: list[Any] = [3, b"/x", ["/x"], object(), Path("/x")]


def says(call: Callable[[], object], name: str) -> None:
    with pytest.raises(TypeError, match=rf"^\w+: {name} (must be|can't be sent)"):
        call()


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_tools(tmp_path: Path, value: Any) -> None:
    with serving(tmp_path / "s"), Client(socket=tmp_path / "s") as client:
        tools.write(client, "/f", "x\n")
        says(lambda: tools.ls(client, value), "path")
        says(lambda: trio.run(tools.als, client, value), "path")
        says(lambda: tools.read(client, value), "path")
        says(lambda: tools.write(client, value, "x"), "path")
        says(lambda: tools.edit(client, "/f", "x", value), "new_string")
        says(lambda: tools.write(client, "/f", {}), "content")  # type: ignore[arg-type]
        says(lambda: tools.delete(client, value), "path")
        says(lambda: tools.glob(client, "*", value), "path")
        says(lambda: tools.grep(client, value), "pattern")
        says(lambda: tools.execute(client, value), "command")
        assert tools.read(client, "/f").content == "x\n"
        if type(value) is not int:
            says(lambda: tools.read(client, "/f", value), "offset")
            says(lambda: tools.read(client, "/f", 0, value), "limit")
            says(lambda: tools.grep(client, "x", max_count=value), "max_count")
    says(lambda: Client(name=value), "name")


def test_the_client(tmp_path: Path) -> None:
    says(lambda: Client(socket=3), "socket")  # type: ignore[arg-type]
    says(lambda: Client(timeout="3"), "timeout")  # type: ignore[arg-type]
    with serving(tmp_path / "s"), Client(socket=tmp_path / "s") as client:
        says(lambda: client.call("stat", path=Path("/x")), "path")
        says(lambda: trio.run(lambda: client.acall("stat", path=Path("/x"))), "path")
        with pytest.raises(OSError, match="'write' needs 'data' as bin"):
            client.call("write", path=b"/f", data=None)
        assert client.call("stat", path=b"/")


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_the_backend_answers(tmp_path: Path, value: Any) -> None:
    """Nothing that a model or its framework hands in is raised at it."""
    backends = pytest.importorskip("agenttools.deepagents")
    with serving(tmp_path / "s"):
        backend = backends.VfsBackend(socket=tmp_path / "s")
        calls: dict[str, tuple[Any, ...]] = {
            "ls": (value,),
            "read": (value,),
            "write": (value, "x"),
            "edit": (value, "x", "y"),
            "delete": (value,),
            "glob": ("*", value),
            "grep": ("x", value),
        }
        for name, args in calls.items():
            for result in (getattr(backend, name)(*args), asyncio.run(getattr(backend, f"a{name}")(*args))):
                assert result.error.startswith("Error: VfsBackend.") and "path must be str" in result.error, name
        assert "content must be str" in backend.write("/f", {}).error
        assert backend.execute(value).exit_code == 1
        assert "command must be str" in backend.execute(value).output
        assert [one.error for one in backend.upload_files([(value, b"x"), ("/f", "x"), ("/g", b"g"), value])] == [
            "invalid_path", "invalid_path", None, "invalid_path",
        ]  # fmt: skip
        assert [one.error for one in backend.download_files([value, "/g"])] == ["invalid_path", None]
        # As Deep Agents' own backends on files.
        assert backend.grep("x", "/none").matches == [] and backend.grep("x", "/none").error is None
        backend.close()
    for option in ("name", "thread", "permissions"):
        with pytest.raises(TypeError, match=option):
            backends.VfsBackend(**{option: value})
