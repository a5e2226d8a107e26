"""The tool call that is being carried out, for what is done on its behalf by code that knows nothing of it.

    with agenttools.tool_call("toolu_01A"):
        tools.write(client, "/report.md", text)
        frame.to_parquet("vfsd:///report.parquet")

Owns one context variable. The id goes with every request, into the daemon's audit log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_current: ContextVar[str | None] = ContextVar("agenttools_call_id", default=None)


@contextlib.contextmanager
def tool_call(call_id: str) -> Iterator[None]:
    """What this thread or task does inside the block is done for the tool call ``call_id``."""
    before = _current.set(call_id)
    try:
        yield
    finally:
        _current.reset(before)


def current_call() -> str | None:
    """The id of the tool call under way, or None outside of ``tool_call``."""
    return _current.get()


def tags(tool: str, call_id: str | None = None) -> dict[str, str]:
    """What a request says of where it comes from; ``call_id`` wins over the tool call under way."""
    call_id = current_call() if call_id is None else call_id
    return {"tool": tool} if call_id is None else {"tool": tool, "call_id": call_id}
