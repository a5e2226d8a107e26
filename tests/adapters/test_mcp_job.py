"""The same job as in ``test_job``, by the official MCP client: from a clone to the files as they were."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import BROKEN, GIT, MENDED, bundle_in
from worlds import Mount, World

pytest.importorskip("mcp")

from mcp import Client as McpClient
from mcp import StdioServerParameters
from mcp.client.stdio import stdio_client

from agenttools import checkpoints
from agenttools.client import Client

pytestmark = pytest.mark.mount


@pytest.fixture
def threads(world: World) -> Iterator[tuple[Mount, Mount]]:
    """Two threads: trees of their own, and memory that both have."""
    mounts = world.mount("mcp-one"), world.mount("mcp-two")
    yield mounts
    for mount in mounts:
        mount.stop()


@contextlib.asynccontextmanager
async def connected(mount: Mount) -> AsyncIterator[McpClient]:
    arguments = ["-m", "agenttools", "--socket", mount.socket, "mcp"]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
    async with McpClient(stdio_client(server)) as client:
        yield client


async def test_a_job_from_clone_to_rewind(threads: tuple[Mount, Mount], tmp_path: Path) -> None:
    one, two = threads
    tests = "cd /project && python -B -m unittest"

    async def tool(client: McpClient, name: str, **given: Any) -> str:
        return str((await client.call_tool(name, given)).content[0].text)  # type: ignore[union-attr]

    with Client(socket=one.socket) as tree:
        tree.call("write", path=b"/all.bundle", data=bundle_in(tmp_path))
        async with connected(one) as client:
            clone = f"{GIT} clone -q -b main /all.bundle /project && cd project && git log --format=%s"
            assert (await tool(client, "execute", command=clone)).startswith("first\n")
            assert BROKEN.rstrip() in await tool(client, "read", path="/project/calc.py")
            assert "FAILED (failures=1)" in await tool(client, "execute", command=tests)
            before = checkpoints.create(tree, "before the edit").data["id"]
            await tool(client, "edit", path="/project/calc.py", old_string="a - b", new_string="a + b")
            commit = f"{tests} && {GIT} commit -qam mended && git log --format=%s"
            assert "mended\nfirst\n" in await tool(client, "execute", command=commit)
            loud = await client.call_tool("execute", {"command": "seq 1000000 | head -c 5000000"})
            assert loud.structured_content is not None
            kept = loud.structured_content["output_file"]
            assert tree.call("stat", path=kept.encode())["attr"]["size"] == 5_000_000
            page = await tool(client, "read", path=kept, offset=700_000, limit=2)
            assert page.endswith("\n700001\n700002")
            await tool(client, "write", path="/memories/mcp.md", content="It subtracted.")
        async with connected(two) as client:
            assert "It subtracted." in await tool(client, "read", path="/memories/mcp.md")
            assert "project" not in await tool(client, "ls", path="/")
        assert Path(one.point, "project/calc.py").read_text() == MENDED
        assert checkpoints.restore(tree, before).error is None
        assert checkpoints.diff(tree, before).said == "Nothing changed."
        assert Path(one.point, "project/calc.py").read_text() == BROKEN
        assert not Path(one.point + kept).exists()
        assert Path(one.point, "memories/mcp.md").read_text() == "It subtracted."
