"""The MCP server with the official client: as a subprocess on stdio and over HTTP, in both eras of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import httpx2
from mcp import Client as McpClient
from mcp import StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from tool_server import serving
from worlds import Mount

from agenttools.cli import _parser, main
from agenttools.client import Client
from agenttools.mcp import Address, find_token, tool_server
from agenttools.schema import TOOLS

SECONDS = 20
NAMES = [tool["name"] for tool in TOOLS]
SERVER = [sys.executable, "-m", "agenttools"]


@contextlib.contextmanager
def http(mount: Mount, *options: str, warned: str = "") -> Iterator[tuple[str, str]]:
    """A server on a free port: its URL and its token, if that is new. What else it says must be ``warned``."""
    command = [*SERVER, "--socket", mount.socket, "mcp", "--http", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        token = "" if options else process.stderr.readline().split()[-1]
        yield url, token
    finally:
        process.terminate()
        _, said = process.communicate(timeout=SECONDS)
        assert said == warned


@contextlib.asynccontextmanager
async def connected(kind: str, mount: Mount, mode: str = "auto") -> AsyncIterator[McpClient]:
    if kind == "stdio":
        command = [*SERVER, "--socket", mount.socket, "mcp"]
        server = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
        async with McpClient(stdio_client(server), mode=mode) as client:
            yield client
        return
    with http(mount) as (url, token):
        web = httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=SECONDS)
        async with web, McpClient(streamable_http_client(url, http_client=web), mode=mode) as client:
            yield client


@contextlib.asynccontextmanager
async def within(socket: Path, **options: Any) -> AsyncIterator[McpClient]:
    """A server in this process, over a tree that is not mounted."""
    with serving(socket), Client(socket=socket) as client:
        async with McpClient(tool_server(client, **options)) as mcp:
            yield mcp


def text(result: Any) -> str:
    return str(result.content[0].text)


def gone(marker: str) -> bool:
    """No process has ``marker`` in its command line, now or soon."""
    for _ in range(100):
        lines = []
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.append(process.read_bytes())
        if not any(marker.encode() in line for line in lines):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_a_session(kind: str, mode: str, mount: Mount) -> None:
    top = f"/{kind}-{mode}"
    async with connected(kind, mount, mode) as client:
        listed = (await client.list_tools()).tools
        assert [tool.name for tool in listed] == NAMES
        wrote = await client.call_tool("write", {"path": f"{top}/a.txt", "content": "one\ntwo\n"})
        assert wrote.structured_content == {"path": f"{top}/a.txt", "created": True, "size": 8}
        assert Path(f"{mount.point}{top}/a.txt").read_text() == "one\ntwo\n"
        await client.call_tool("edit", {"path": f"{top}/a.txt", "old_string": "two", "new_string": "2"})
        page = await client.call_tool("read", {"path": f"{top}/a.txt", "limit": 1})
        assert text(page) == "@@ lines 1-1 of 2 | next offset 1 @@\none"
        assert page.structured_content["next_offset"] == 1
        ran = await client.call_tool("execute", {"command": f"cat {top}/a.txt; exit 3"})
        assert (ran.is_error, ran.structured_content["exit_code"]) == (False, 3)
        assert ran.structured_content["output"] == "one\n2\n"
        found = await client.call_tool("grep", {"pattern": "2", "path": top, "output_mode": "content"})
        assert found.structured_content["matches"] == [{"path": f"{top}/a.txt", "line": 2, "text": "2"}]
        entries = (await client.call_tool("ls", {"path": top})).structured_content["entries"]
        assert [(entry["path"], entry["size"]) for entry in entries] == [(f"{top}/a.txt", 6)]
        assert text(await client.call_tool("glob", {"pattern": "*.txt", "path": top})) == f"['{top}/a.txt']"
        assert not (await client.call_tool("delete", {"path": top})).is_error
        assert not os.path.exists(mount.point + top)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_progress_of_a_long_command(kind: str, mode: str, mount: Mount) -> None:
    told: list[tuple[float, float | None, str | None]] = []

    async def progress(now: float, total: float | None, message: str | None) -> None:
        told.append((now, total, message))

    async with connected(kind, mount, mode) as client:
        command = "echo first; echo second; printf part; sleep 2.6; echo"
        ran = await client.call_tool("execute", {"command": command}, progress_callback=progress)
        assert ran.structured_content["exit_code"] == 0
    # Once a second; there are more of them when its end is late.
    assert 2 <= len(told) <= told[-1][0] and told[0][0] < told[1][0]
    assert told[0][2] == "1 s, 2 lines of output: part"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_cancelling_ends_the_command(kind: str, mode: str, mount: Mount) -> None:
    marker = f"60.{os.getpid()}{abs(hash((kind, mode))) % 10**6}"
    async with connected(kind, mount, mode) as client:
        call = asyncio.create_task(
            client.call_tool("execute", {"command": f"touch /begun; sleep {marker} & sleep {marker}"})
        )
        while not os.path.exists(f"{mount.point}/begun"):
            await asyncio.sleep(0.02)
        os.unlink(f"{mount.point}/begun")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(gone, marker)
        assert text(await client.call_tool("execute", {"command": "echo on"})).startswith("on\n")


@pytest.mark.parametrize("options", [[], ["--view", "mount", "--profile", "open"]])
@pytest.mark.parametrize("how", ["SIGTERM", "EOF"])
def test_no_command_outlives_a_stdio_server(how: str, options: list[str], mount: Mount) -> None:
    marker = f"61.{os.getpid()}{len(how)}{len(options)}"
    server = subprocess.Popen(
        [*SERVER, "--socket", mount.socket, "mcp", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin is not None and server.stdout is not None

    def say(method: str, number: int | None = None, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params} | ({} if number is None else {"id": number})
        server.stdin.write(json.dumps(message).encode() + b"\n")
        server.stdin.flush()

    try:
        client = {"name": "test", "version": "1"}
        say("initialize", 1, protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
        assert json.loads(server.stdout.readline())["result"]["serverInfo"]["name"] == "vfsd"
        say("notifications/initialized")
        say("tools/call", 2, name="execute", arguments={"command": f"touch begun; setsid sleep {marker}"})
        while not os.path.exists(f"{mount.point}/begun"):
            time.sleep(0.02)
        os.unlink(f"{mount.point}/begun")
        if how == "EOF":
            server.stdin.close()
            assert server.wait(SECONDS) == 0
        else:
            server.send_signal(signal.SIGTERM)
            assert server.wait(SECONDS) == 128 + signal.SIGTERM
        assert gone(marker)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        with contextlib.suppress(OSError):
            server.stdin.close()


async def test_a_client_must_have_the_token(mount: Mount, tmp_path: Path) -> None:
    file = tmp_path / "token"
    warned = "Invalid Host header: evil.example\nInvalid Origin header: http://evil.example\n"
    with http(mount, "--token-file", str(file), warned=warned) as (url, _):
        token = file.read_text().strip()
        assert len(token) > 40 and file.stat().st_mode & 0o777 == 0o600
        wrong: list[dict[str, str]] = [{}, {"Authorization": "Bearer"}, {"Authorization": token}]
        wrong += [{"Authorization": f"Bearer {token}x"}, {"Authorization": f"Bearer {token[:-1]}"}]
        ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        async with httpx2.AsyncClient(timeout=SECONDS) as web:
            for headers in wrong:
                answer = await web.post(url, json=ask, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            right = {"Authorization": f"Bearer {token}", "Accept": "application/json, text/event-stream"}
            # A web page that has made a name of its own point here (DNS rebinding).
            assert (await web.post(url, json=ask, headers=right | {"Host": "evil.example"})).status_code == 421
            assert (await web.post(url, json=ask, headers=right | {"Origin": "http://evil.example"})).status_code == 403
            web.headers.update(right)
            async with McpClient(streamable_http_client(url, http_client=web)) as client:
                assert len((await client.list_tools()).tools) == 8
    assert find_token(str(file)) == (token, False)


def test_where_the_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTTOOLS_MCP_TOKEN", raising=False)
    made, new = find_token(None)
    assert new and len(made) > 40 and find_token(None) != (made, True)
    monkeypatch.setenv("AGENTTOOLS_MCP_TOKEN", "from the environment")
    assert find_token(None) == ("from the environment", False)
    (tmp_path / "open").write_text("t\n")
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(ValueError, match="others can read the token; chmod 600 "):
        find_token(str(tmp_path / "open"))
    (tmp_path / "empty").touch(0o600)
    with pytest.raises(ValueError, match="no token in it"):
        find_token(str(tmp_path / "empty"))


def test_only_this_machine_is_served() -> None:
    assert Address.parse("8000") == Address("127.0.0.1", 8000) == Address.parse("localhost:8000")
    assert Address.parse("[::1]:0") == Address("::1", 0)
    for text in ("0.0.0.0:80", "[::]:80", "10.0.0.1:80", "example.org:80"):
        with pytest.raises(ValueError, match="only this machine"):
            Address.parse(text)
    for text in ("", "x", "127.0.0.1:", "127.0.0.1:70000"):
        with pytest.raises(ValueError, match="PORT"):
            Address.parse(text)


def test_a_wrong_address_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("8000x", "0.0.0.0:80"):
        with pytest.raises(SystemExit) as exited:
            main(["mcp", "--http", text])
        assert exited.value.code == 2
        assert "agenttools: mcp: --http: " in capsys.readouterr().err


async def test_what_a_client_is_told(tmp_path: Path) -> None:
    async with within(tmp_path / "s") as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    for described in TOOLS:
        tool = listed[described["name"]]
        assert (tool.description, tool.input_schema) == (described["description"], described["parameters"])
        assert tool.output_schema is not None and tool.title
    hints = {
        name: (tool.annotations.read_only_hint, tool.annotations.destructive_hint, tool.annotations.idempotent_hint)
        for name, tool in listed.items()
    }
    assert hints == dict.fromkeys(["ls", "read", "glob", "grep"], (True, False, True)) | {
        "write": (False, True, True),
        "edit": (False, True, False),
        "delete": (False, True, True),
        "execute": (False, True, False),
    }


async def test_errors_are_results(tmp_path: Path) -> None:
    async with within(tmp_path / "s") as client:
        for name, given, said in [
            ("read", {"path": "/nothing"}, "Error: File '/nothing': file_not_found"),
            ("read", {}, "Error: Invalid arguments for read. 'path' is a required property"),
            ("read", {"path": "/f", "limit": 0}, "Error: Invalid arguments for read. limit: 0 is less than"),
            ("read", {"path": "/f", "encoding": "x"}, "Error: Invalid arguments for read. Additional properties"),
            ("reed", {"path": "/f"}, "Error: There is no tool 'reed'."),
            ("execute", {"command": "true"}, "Error executing command: "),  # this tree is not mounted
        ]:
            result = await client.call_tool(name, given)
            assert result.is_error and text(result).startswith(said), text(result)
        assert not (await client.call_tool("ls", {"path": "/"})).is_error


async def test_numbers_as_javascript_may_send_them(tmp_path: Path) -> None:
    async with within(tmp_path / "s") as client:
        await client.call_tool("write", {"path": "/f", "content": "1\n2\n3\n"})
        assert text(await client.call_tool("read", {"path": "/f", "offset": 1.0, "limit": 1.0})).endswith("\n2")


async def test_names_and_contents_json_cannot_carry(tmp_path: Path) -> None:
    with serving(tmp_path / "s"), Client(socket=tmp_path / "s") as tree:
        tree.call("write", path=b"/d/\xff", data=b"\x89PNG\r\n\x1a\n")
        tree.call("write", path=b"/d/i.png", data=b"\x89PNG\r\n\x1a\n")
        tree.call("write", path=b"/d/x.bin", data=b"\0\xff")
        async with McpClient(tool_server(tree), mode="legacy") as client:
            entries = (await client.call_tool("ls", {"path": "/d"})).structured_content["entries"]
            assert "/d/\\udcff" in [entry["path"] for entry in entries]
            image = await client.call_tool("read", {"path": "/d/i.png"})
            assert (image.content[0].type, image.content[0].mime_type) == ("image", "image/png")
            other = await client.call_tool("read", {"path": "/d/x.bin"})
            assert text(other) == "'/d/x.bin' is a binary file of 2 bytes and is not shown as text."
            assert other.structured_content["content"] == "" and other.structured_content["size"] == 2


async def test_text_only(tmp_path: Path) -> None:
    async with within(tmp_path / "s", structured=False) as client:
        assert (await client.list_tools()).tools[0].output_schema is None
        result = await client.call_tool("ls", {})
        assert result.structured_content is None and text(result) == "No files found"


async def test_the_ids_of_tool_calls_go_with_the_requests(tmp_path: Path) -> None:
    noted: list[str] = []

    class Noting(Client):
        async def acall(self, op: str, /, **params: Any) -> Any:
            if "tool" in params:
                noted.append(params["call_id"])
            return await super().acall(op, **params)

    with serving(tmp_path / "s"), Noting(socket=tmp_path / "s") as tree:
        async with McpClient(tool_server(tree)) as client:
            given = {"path": "/f", "content": ""}
            await client.call_tool("write", given, meta={"claudecode/toolUseId": "toolu_01"})
            await client.call_tool("write", given, meta={"tool_call_id": "call_02"})
            await client.call_tool("read", {"path": "/f"}, meta={"tool_call_id": "call_03"})
            for _ in range(2):
                await client.call_tool("write", given)
    assert noted[:3] == ["toolu_01", "call_02", "call_03"]
    assert all(made.startswith("mcp-") for made in noted[3:]) and noted[3] != noted[4]


async def test_the_id_of_a_call_names_the_file_of_its_output(mount: Mount) -> None:
    async with connected("stdio", mount) as client:
        command = {"command": "head -c 200000 /dev/zero | tr '\\0' x"}
        ran = await client.call_tool("execute", command, meta={"claudecode/toolUseId": "toolu_03"})
    assert ran.structured_content["output_file"] == "/large_tool_results/toolu_03"
    assert Path(f"{mount.point}/large_tool_results/toolu_03").stat().st_size == 200_000


async def test_no_daemon_is_said_by_each_tool(tmp_path: Path) -> None:
    async with McpClient(tool_server(Client(socket=tmp_path / "s"))) as client:
        result = await client.call_tool("ls", {})
    assert result.is_error and f"no daemon on {tmp_path}/s; start one with: vfsd mount" in text(result)


def test_the_command_says_what_is_wrong() -> None:
    for options, said in (
        (["--http", "0.0.0.0:1"], "agenttools: mcp: --http: only this machine is served"),
        (["--http", "x"], "agenttools: mcp: --http: 'x' is no [HOST:]PORT"),
    ):
        done = subprocess.run([*SERVER, "mcp", *options], capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(said)


def test_options_that_would_do_nothing_are_refused() -> None:
    for options, said in (
        (["--token-file", "x"], "mcp: --token-file goes with --http"),
        (["--config", "x"], "mcp: --config goes with --thread"),
    ):
        done = subprocess.run([*SERVER, "mcp", *options], capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 2 and done.stderr.endswith(f"agenttools: {said}\n")


def test_a_token_file_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "none" / "token"
    command = [*SERVER, "mcp", "--http", "0", "--token-file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (1, f"agenttools: {file}: No such file or directory\n")


def test_without_the_sdk() -> None:
    code = "import sys; sys.modules['mcp_types'] = None; from agenttools.cli import main; sys.exit(main(['mcp']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1 and done.stderr.startswith("agenttools: agenttools.mcp needs the MCP SDK, 2 or later")
    assert done.stderr.endswith("pip install 'vfsd[mcp]'\n")


def test_the_configurations_of_the_documentation() -> None:
    """Each example can be read, and its command is one."""
    page = (Path(__file__).resolve().parents[2] / "docs/mcp.md").read_text()
    found = 0
    for kind, block in re.findall(r"^```(json|toml)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        config = json.loads(block) if kind == "json" else tomllib.loads(block)
        (servers,) = config.values()
        entry = servers["vfsd"]
        if "url" in entry:
            continue
        command = entry["command"] if isinstance(entry["command"], list) else [entry["command"], *entry["args"]]
        assert command[0] == "agenttools" and _parser().parse_args(command[1:]).tool == "mcp"
        found += 1
    assert found == 6
