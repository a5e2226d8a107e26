"""The eight tools for any MCP client, over stdio or streamable HTTP: ``agenttools mcp``.

    server = agenttools.mcp.tool_server(Client())         # an ``mcp.server.Server``, to be run by who embeds it

Owns what MCP has beyond a function call: annotations, output schemas, progress, cancellation, transports and the token.
What the tools do, and the words a model reads, are those of ``agenttools.tools`` and ``schema``.

A tool's ``content`` is the result's ``text``, its ``structuredContent`` the typed result; what the tool could not do is
an error result. The id of a call is what the client's ``_meta`` says it is (``CALL_IDS``), else one made up for it.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import ipaddress
import mimetypes
import os
import secrets
import signal
import socket as sockets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from importlib import metadata
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

try:
    import anyio
    import mcp_types as types
    import uvicorn
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from mcp.server import Server, ServerRequestContext
    from mcp.server.stdio import stdio_server
except ImportError as exc:
    raise ImportError(f"agenttools.mcp needs the MCP SDK, 2 or later ({exc}): pip install 'vfsd[mcp]'") from None

from agenttools import results, tools
from agenttools.client import Client
from agenttools.results import ReadResult, Result
from agenttools.schema import TOOLS
from agenttools.text import printable
from agenttools.views import Profile, View, check_choice

PROGRESS_S = 1.0
"""Seconds between two reports of a command that runs."""

CALL_IDS = ("claudecode/toolUseId", "toolUseId", "toolCallId", "tool_call_id", "call_id")
"""Where clients put the id of the model's tool call in a request's ``_meta``; MCP itself has no place for it."""

TOKEN_VARIABLE = "AGENTTOOLS_MCP_TOKEN"

MAX_BODY = 64 << 20
"""Bytes of one HTTP request: the largest file that write takes at once, about."""

_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_LAST_LINE = 200

_INSTRUCTIONS = (
    "The tools share one file tree. A path starts with / and means the same file in all of them; execute runs shell "
    "commands in the same tree, which see at once what the other tools wrote, and the other way round."
)

_READS = types.ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
_ANNOTATIONS = {
    "write": types.ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
    ),
    "edit": types.ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=False
    ),
    "delete": types.ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
    ),
    "execute": types.ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
    ),
}
_TITLES = {
    "ls": "List a directory",
    "read": "Read a file",
    "write": "Write a file",
    "edit": "Edit a file",
    "delete": "Delete a file or directory",
    "glob": "Find files by name",
    "grep": "Find text in files",
    "execute": "Run a shell command",
}


def tool_server(
    client: Client, *, view: View = "auto", profile: Profile | None = None, structured: bool = True
) -> Server[Any]:
    """An MCP server of the tools ls, read, write, edit, delete, glob, grep and execute on one daemon's tree.

    ``view``: what ``/`` is for commands, ``profile``: what they are kept from. ``structured``: give output schemas and
    structured results; without, a result is its text only, for clients that would show a model the same twice.
    """
    check_choice(view, profile)
    listed = types.ListToolsResult(tools=[_described(tool, structured) for tool in TOOLS])
    checks = {tool["name"]: Draft202012Validator(tool["parameters"]) for tool in TOOLS}

    async def list_tools(
        context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return listed

    async def call_tool(
        context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        check = checks.get(params.name)
        if check is None:
            return _failed(f"Error: There is no tool '{params.name}'. There are: {', '.join(checks)}.")
        given = {
            key: int(value) if isinstance(value, float) and value.is_integer() and key != "timeout" else value
            for key, value in (params.arguments or {}).items()
        }
        wrong = best_match(check.iter_errors(given))
        if wrong is not None:
            where = f"{'.'.join(map(str, wrong.path))}: " if wrong.path else ""
            return _failed(f"Error: Invalid arguments for {params.name}. {where}{wrong.message}")
        given["call_id"] = _call_id(context)
        if params.name == "execute":
            return _answer(await _execute(context, client, given | {"view": view, "profile": profile}), structured)
        return _answer(await getattr(tools, f"a{params.name}")(client, **given), structured)

    return Server(
        "vfsd",
        version=_version(),
        title="vfsd file tree",
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _version() -> str:
    try:
        return metadata.version("vfsd")
    except metadata.PackageNotFoundError:
        return ""


def _call_id(context: ServerRequestContext[Any]) -> str:
    """The id of the model's tool call if the client says it. Else one that is not used twice: it names a file too."""
    told = dict(context.meta or {})
    for key in CALL_IDS:
        if isinstance(told.get(key), str) and told[key]:
            return str(told[key])
    return f"mcp-{context.request_id}-{secrets.token_hex(4)}"


# ---------------------------------------------------------------------- what a client is told


def _described(tool: dict[str, Any], structured: bool) -> types.Tool:
    name = tool["name"]
    return types.Tool(
        name=name,
        title=_TITLES[name],
        description=tool["description"],
        input_schema=tool["parameters"],
        output_schema=_result_schema(name) if structured else None,
        annotations=_ANNOTATIONS.get(name, _READS),
    )


def _result_schema(name: str) -> dict[str, Any]:
    """The JSON schema of what a tool gives back when there is no error."""
    result = getattr(results, f"{name.title()}Result")
    hints = get_type_hints(result)
    hints.pop("error")
    return _object(hints)


def _object(hints: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: _schema(kind) for name, kind in hints.items()},
        "required": list(hints),
    }


_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def _schema(kind: Any) -> dict[str, Any]:
    origin = get_origin(kind)
    if origin is Literal:
        return {"type": "string", "enum": list(get_args(kind))}
    if origin is UnionType:
        return {"anyOf": [_schema(one) for one in get_args(kind)]}
    if origin in (list, tuple):
        return {"type": "array", "items": _schema(get_args(kind)[0])}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    return _object(get_type_hints(kind))


def _answer(result: Result, structured: bool) -> types.CallToolResult:
    if result.error is not None:
        return _failed(result.text)
    content: list[types.ContentBlock] = [types.TextContent(type="text", text=printable(result.text))]
    plain = {field.name: _plain(getattr(result, field.name)) for field in fields(result) if field.name != "error"}
    if isinstance(result, ReadResult) and result.encoding == "base64":
        # To a model these are characters without a meaning, and very many of them.
        plain["content"] = ""
        kind = _image(result)
        if kind:
            content = [types.ImageContent(type="image", data=result.content, mime_type=kind)]
    return types.CallToolResult(content=content, structured_content=plain if structured else None)


def _image(result: ReadResult) -> str:
    """The media type of an image that models take, by its name; else nothing."""
    kind = mimetypes.guess_type(result.path)[0] or ""
    return kind if kind in _IMAGES and base64.b64decode(result.content[:4]) else ""


def _failed(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=printable(text))], is_error=True)


def _plain(value: Any) -> Any:
    """``value`` as JSON has it. A name that is no UTF-8 is written as in texts: JSON cannot carry it."""
    if isinstance(value, str):
        return printable(value)
    if hasattr(value, "_asdict"):
        return {key: _plain(item) for key, item in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


# ---------------------------------------------------------------------- commands


class _Seen:
    """What a command has printed so far: fed in the thread that waits for it, read in the loop's."""

    def __init__(self) -> None:
        self.lines = 0
        self._last = self._rest = b""

    def feed(self, data: bytes) -> None:
        self.lines += data.count(b"\n")
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            self._last = (self._rest + whole).rpartition(b"\n")[2][-_LAST_LINE:]
            self._rest = b""
        self._rest = (self._rest + rest)[-_LAST_LINE:]

    def __str__(self) -> str:
        line = (self._rest or self._last).decode(errors="replace").strip()
        return f"{self.lines} lines of output" + (f": {line}" if line else "")


async def _execute(context: ServerRequestContext[Any], client: Client, given: dict[str, Any]) -> Result:
    """Run a command, and report while it does. Cancelling ends the command and all it started."""
    seen, begun = _Seen(), time.monotonic()

    async def report() -> None:
        while True:
            await anyio.sleep(PROGRESS_S)
            past = time.monotonic() - begun
            await context.session.report_progress(round(past, 1), message=f"{past:.0f} s, {seen}")

    async with anyio.create_task_group() as group:
        group.start_soon(report)
        result = await tools.aexecute(client, **given, on_output=seen.feed)
        group.cancel_scope.cancel()
    return result


# ---------------------------------------------------------------------- transports


@dataclass(frozen=True, slots=True)
class Address:
    """Where HTTP is served: a loopback host, and a port, 0 for any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """``PORT``, ``HOST:PORT`` or ``[HOST]:PORT``. ValueError, with a sentence."""
        host, _, port = text.rpartition(":")
        host = host.strip("[]") or "127.0.0.1"
        if not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{text!r} is no [HOST:]PORT, such as 8000 or 127.0.0.1:8000")
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_loopback:
                return cls(host, int(port))
        if host != "localhost":
            raise ValueError(f"only this machine is served, at 127.0.0.1, ::1 or localhost, and not {host!r}")
        return cls("127.0.0.1", int(port))


def find_token(file: str | None) -> tuple[str, bool]:
    """The bearer token from ``file`` (made, for the owner alone, when it is not there), else from the environment,
    else a new one; and whether it is new and kept nowhere. Raises OSError, ValueError."""
    new = secrets.token_urlsafe(32)
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        return (token, False) if token else (new, True)
    try:
        made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        with open(file, encoding="ascii") as held:
            if os.fstat(held.fileno()).st_mode & 0o077:
                raise ValueError(f"{file}: others can read the token; chmod 600 {file}") from None
            token = held.read().strip()
        if not token:
            raise ValueError(f"{file}: there is no token in it") from None
        return token, False
    with os.fdopen(made, "w") as file_made:
        file_made.write(new + "\n")
    return new, False


class _Guard:
    """Lets requests with the bearer token through to ``app``."""

    def __init__(self, app: Callable[..., Awaitable[None]], token: str) -> None:
        self._app = app
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = [value for key, value in scope["headers"] if key == b"authorization"]
            if len(given) != 1 or not hmac.compare_digest(given[0], self._wanted):
                headers = [(b"www-authenticate", b"Bearer"), (b"content-length", b"0")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b""})
                return
        await self._app(scope, receive, send)


def serve_stdio(server: Server[Any]) -> None:
    """Serve the client at standard input and output until it closes. SIGTERM ends its commands, then the process."""
    anyio.run(_stdio, server)


async def _stdio(server: Server[Any]) -> None:
    async with anyio.create_task_group() as group:
        running = _track(server)
        group.start_soon(_end_on_signal, running)
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())
        group.cancel_scope.cancel()


def _track(server: Server[Any]) -> set[anyio.CancelScope]:
    """The scopes of the requests that ``server`` is carrying out, from now on."""
    running: set[anyio.CancelScope] = set()

    async def within(ctx: ServerRequestContext[Any, Any], call_next: Any) -> Any:
        with anyio.CancelScope() as scope:
            running.add(scope)
            try:
                return await call_next(ctx)
            finally:
                running.discard(scope)

    server.middleware.append(within)
    return running


async def _end_on_signal(running: set[anyio.CancelScope]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            for scope in list(running):
                scope.cancel()
            with anyio.move_on_after(5):
                while running:
                    await anyio.sleep(0.01)
            # Not sys.exit: a thread waits for the client's next line, and nothing but that line ends it.
            os._exit(128 + number)


def serve_http(server: Server[Any], address: Address, token: str, started: Callable[[str], object]) -> None:
    """Serve clients that have the ``token``, until SIGTERM or SIGINT. ``started`` gets the URL once it can be used."""
    family = sockets.AF_INET6 if ":" in address.host else sockets.AF_INET
    listening = sockets.create_server((address.host, address.port), family=family)
    app = server.streamable_http_app(host="127.0.0.1", max_request_body_size=MAX_BODY)
    config = uvicorn.Config(
        _Guard(app, token), log_level="warning", ws="none", access_log=False, timeout_graceful_shutdown=3
    )
    host = f"[{address.host}]" if family == sockets.AF_INET6 else address.host
    started(f"http://{host}:{listening.getsockname()[1]}/mcp")
    anyio.run(uvicorn.Server(config).serve, [listening])


def run(
    client: Client,
    address: Address | None,
    token_file: str | None,
    view: View,
    structured: bool,
    profile: Profile | None = None,
) -> None:
    """The command: serve over stdio, or at ``address``. Raises ValueError and OSError with a sentence for the user."""
    server = tool_server(client, view=view, profile=profile, structured=structured)
    if address is None:
        serve_stdio(server)
        return
    token, new = find_token(token_file)

    def started(url: str) -> None:
        print(f"MCP at {url}", file=sys.stderr)
        if new:
            print(f"Authorization: Bearer {token}", file=sys.stderr, flush=True)

    serve_http(server, address, token, started)
