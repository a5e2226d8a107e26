"""The client side of vfsd: an agent's tools on a mounted tree, as plain Python.

    import agenttools

    with agenttools.Client() as client:                       # $VFSD_SOCKET, or the mount called "default"
        print(agenttools.read(client, "/plan.md").text)
        print((await agenttools.aexecute(client, "make test")).text)     # each also for asyncio and trio, with an "a"

What is named here is loaded when it is first used, so that importing this costs nothing. Never imports vfsd.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agenttools import checkpoints, shell, tools
    from agenttools.calls import tool_call
    from agenttools.client import Client, VfsdInterrupted, VfsdUnavailable
    from agenttools.daemons import ThreadClient
    from agenttools.results import (
        DeleteResult,
        EditResult,
        Entry,
        ExecuteResult,
        GlobResult,
        GrepResult,
        LsResult,
        Match,
        ReadResult,
        WriteResult,
    )
    from agenttools.schema import TOOLS
    from agenttools.tools import (
        adelete,
        aedit,
        aexecute,
        aglob,
        agrep,
        als,
        aread,
        awrite,
        delete,
        edit,
        execute,
        glob,
        grep,
        ls,
        read,
        write,
    )

__all__ = [
    "TOOLS",
    "Client",
    "DeleteResult",
    "EditResult",
    "Entry",
    "ExecuteResult",
    "GlobResult",
    "GrepResult",
    "LsResult",
    "Match",
    "ReadResult",
    "ThreadClient",
    "VfsdInterrupted",
    "VfsdUnavailable",
    "WriteResult",
    "adelete",
    "aedit",
    "aexecute",
    "aglob",
    "agrep",
    "als",
    "aread",
    "awrite",
    "checkpoints",
    "delete",
    "edit",
    "execute",
    "glob",
    "grep",
    "ls",
    "read",
    "shell",
    "tool_call",
    "tools",
    "write",
]

_HOMES = {
    "TOOLS": "schema",
    "Client": "client",
    "ThreadClient": "daemons",
    "VfsdInterrupted": "client",
    "VfsdUnavailable": "client",
    "tool_call": "calls",
    "Entry": "results",
    "Match": "results",
}
_MODULES = frozenset({"checkpoints", "shell", "tools"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'agenttools' has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f"agenttools.{name}")
    home = _HOMES.get(name) or ("results" if name.endswith("Result") else "tools")
    value = getattr(importlib.import_module(f"agenttools.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
