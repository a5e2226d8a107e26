"""The eight tools as LangChain tools, for any agent that takes such.

    from agenttools.langchain import vfs_tools
    agent = create_agent(model, tools=vfs_tools())

Owns the wrapping. What the tools do, and the words a model reads, are those of ``agenttools.tools`` and ``schema``.
A tool message's content is the result's ``text`` and its artifact the result; an error has status "error".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from langchain_core.tools import BaseTool, StructuredTool, ToolException
from pydantic import BaseModel, Field, create_model

from agenttools import tools
from agenttools.client import Client
from agenttools.results import Result
from agenttools.runs import call_id
from agenttools.schema import TOOLS
from agenttools.views import Profile, View, check_choice

_TYPES: dict[str, Any] = {"string": str, "integer": int, "boolean": bool, "number": float}

_Answer = tuple[str, Result]


def vfs_tools(
    client: Client | None = None,
    *,
    name: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    view: View = "auto",
    profile: Profile | None = None,
) -> list[BaseTool]:
    """The tools ls, read, write, edit, delete, glob, grep and execute on one daemon's tree.

    ``client``, or the daemon on ``socket``, or the mount called ``name``: by default ``VFSD_SOCKET``, else "default".
    ``view``: what ``/`` is for commands (``agenttools.shell``), ``profile``: what they are kept from. The ids of tool
    calls go with what they ask for.
    """
    check_choice(view, profile)
    if client is None:
        client = Client(socket=socket, name=name, client="langchain")
    elif name is not None or socket is not None:
        raise ValueError("client= is one daemon's already; name= and socket= choose one")
    return [_tool(described, client, {"view": view, "profile": profile}) for described in TOOLS]


def _tool(described: dict[str, Any], client: Client, run: dict[str, Any]) -> BaseTool:
    name: str = described["name"]
    function: Callable[..., Result] = getattr(tools, name)
    coroutine: Callable[..., Coroutine[Any, Any, Result]] = getattr(tools, f"a{name}")
    fixed = run if name == "execute" else {}

    def options(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, **fixed, "call_id": call_id()}

    def sync(**given: Any) -> _Answer:
        return _answer(function(client, **options(given)))

    async def concurrent(**given: Any) -> _Answer:
        return _answer(await coroutine(client, **options(given)))

    return StructuredTool(
        name=name,
        description=described["description"],
        args_schema=_model(name, described["parameters"]),
        func=sync,
        coroutine=concurrent,
        response_format="content_and_artifact",
        handle_tool_error=True,
    )


def _answer(result: Result) -> _Answer:
    if result.error is not None:
        raise ToolException(result.text)
    return result.text, result


def _model(name: str, schema: dict[str, Any]) -> type[BaseModel]:
    """A pydantic model of a tool's JSON schema: LangChain checks what a model sends against such only."""
    fields: dict[str, Any] = {}
    for key, described in schema["properties"].items():
        kind = Literal[tuple(described["enum"])] if "enum" in described else _TYPES[described["type"]]
        limits = {"ge": described.get("minimum"), "min_length": described.get("minLength")}
        default = ... if key in schema["required"] else described.get("default")
        if default is None:
            kind = kind | None
        fields[key] = (kind, Field(default, description=described["description"], **limits))
    model: type[BaseModel] = create_model(name, **fields)
    return model
