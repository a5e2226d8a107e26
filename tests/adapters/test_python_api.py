"""``agenttools`` as one imports it: what is named there, lazily, and with words on each."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from tool_server import serving

import agenttools
from agenttools.schema import TOOLS

ROOT = Path(__file__).resolve().parents[2]
NAMES = [tool["name"] for tool in TOOLS]


def fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    return done.stdout.strip()


def test_importing_it_loads_nothing() -> None:
    code = "import sys; before = set(sys.modules); import agenttools; "
    assert fresh(f"{code} print(sorted(m for m in set(sys.modules) - before if 'agenttools' in m))") == "['agenttools']"
    timed = "import time; t = time.process_time(); import agenttools; agenttools.Client; agenttools.read; "
    assert min(float(fresh(f"{timed} print(time.process_time() - t)")) for _ in range(3)) < 0.1


def test_every_name_is_there_and_has_words() -> None:
    for name in agenttools.__all__:
        value = getattr(agenttools, name)
        assert name == "TOOLS" or inspect.getdoc(value), name
    assert set(agenttools.__all__) <= set(dir(agenttools))
    with pytest.raises(AttributeError, match="'agenttools' has no attribute 'nothing'"):
        _ = agenttools.nothing  # type: ignore[attr-defined]
    assert fresh("from agenttools import *; print(Client.__name__, aread.__name__, tools.read is read)") == (
        "Client aread True"
    )


def test_each_tool_is_there_twice_and_alike() -> None:
    for name in NAMES:
        sync, concurrent = getattr(agenttools, name), getattr(agenttools, f"a{name}")
        assert inspect.iscoroutinefunction(concurrent) and not inspect.iscoroutinefunction(sync)
        assert list(inspect.signature(sync).parameters) == list(inspect.signature(concurrent).parameters)


def test_the_examples_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of docs/python-api.md that is a whole program runs, against a tree that is not mounted."""
    text = (ROOT / "docs/python-api.md").read_text()
    blocks = re.findall(r"((?:^    .*\n|^\n)+)", text, re.MULTILINE)
    programs = [
        inspect.cleandoc("\n" + block) for block in blocks if "import agenttools" in block or "import fsspec" in block
    ]
    assert len(programs) == 5
    with serving(tmp_path / "s"):
        monkeypatch.setenv("VFSD_SOCKET", str(tmp_path / "s"))
        for program in programs:
            if "pandas" in program:
                pytest.importorskip("pandas")
            command = [sys.executable, "-c", program]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, f"{program}\n{done.stderr}"


@pytest.mark.parametrize("loop", [asyncio.run, trio.run])
def test_the_id_of_a_tool_call_is_known_below(tmp_path: Path, loop: Any) -> None:
    asked: list[tuple[str, Any]] = []

    class Noting(agenttools.Client):
        def call(self, op: str, /, **params: Any) -> Any:
            asked.append((op, params.get("call_id")))
            return super().call(op, **params)

        async def acall(self, op: str, /, **params: Any) -> Any:
            asked.append((op, params.get("call_id")))
            return await super().acall(op, **params)

    with serving(tmp_path / "s"), Noting(socket=tmp_path / "s") as client:

        async def work() -> None:
            with agenttools.tool_call("c1"):
                assert (await agenttools.awrite(client, "/f", "x")).error is None
                assert agenttools.edit(client, "/f", "x", "y").error is None
                assert agenttools.write(client, "/f", "x", call_id="c2").error is None
            assert agenttools.delete(client, "/f").error is None

        _ = client.hello
        loop(work if loop is trio.run else work())
    wrote = [(op, call_id) for op, call_id in asked if op in ("write", "edit", "delete")]
    assert wrote == [("write", "c1"), ("edit", "c1"), ("write", "c2"), ("delete", None)]
