"""What comes before and after the requests of one call of the backend inside a graph.

Before: the tree is brought where the graph's state says (``timetravel``). After: a change is recorded there. Between:
what a rule wants a person to approve becomes LangGraph's human-in-the-loop, and comes again with the answer. Owns the
order of these. Must not know tools. A call is told where it is when it begins: a command runs in a thread that has no
context of LangChain's.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any

from langgraph.types import interrupt

from agenttools import runs
from agenttools.deepagents.timetravel import TimeTravel, place
from agenttools.wire import Message, NeedsApproval

if TYPE_CHECKING:
    from agenttools.client import Client

_CHANGES = frozenset({"write", "upload_commit", "delete", "execute_end"})
"""The operations after which the tree is another one; so it is after an ``edit`` that found its text."""

_UNASKED = frozenset({"glob"})
"""Deep Agents' glob tool takes every exception for a failure, that of an interrupt too."""

_DECISIONS = ["approve", "reject"]


class Door:
    """A client for one call of the backend. ``travel`` is the backend's, if it has one."""

    def __init__(self, client: Client, travel: TimeTravel | None) -> None:
        self._client = client
        here = None if travel is None else place()
        self._travel = None if here is None else travel
        self._here = here
        self._records = here is not None and not TimeTravel.recording()

    @property
    def hello(self) -> Message:
        self._before()
        return self._client.hello

    def call(self, op: str, /, **params: Any) -> Message:
        self._before()
        try:
            reply = self._client.call(op, **params, approved=False)
        except NeedsApproval as exc:
            _ask(exc, op)
            reply = self._client.call(op, **params, approved=True)
        if self._records and (op in _CHANGES or "count" in reply):
            self._record()
        return reply

    async def ahello(self) -> Message:
        await self._abefore()
        return await self._client.ahello()

    async def acall(self, op: str, /, **params: Any) -> Message:
        await self._abefore()
        try:
            reply = await self._client.acall(op, **params, approved=False)
        except NeedsApproval as exc:
            _ask(exc, op)
            reply = await self._client.acall(op, **params, approved=True)
        if self._records and (op in _CHANGES or "count" in reply):
            await asyncio.to_thread(self._record)
        return reply

    def _before(self) -> None:
        if self._travel is not None and self._here is not None:
            self._travel.bring(self._here)

    async def _abefore(self) -> None:
        if self._travel is not None and self._here is not None and not self._travel.is_at(self._here):
            await asyncio.to_thread(self._before)

    def _record(self) -> None:
        if self._travel is not None and self._here is not None:
            self._travel.record(self._here)


def _ask(refusal: NeedsApproval, op: str) -> None:
    """Return when a person has said yes. Raises PermissionError for a no; GraphInterrupt until there is an answer.

    The question and the answer look like those of LangChain's HumanInTheLoopMiddleware.
    """
    if op in _UNASKED:
        raise refusal
    path = str(refusal.filename or "")
    name, given = runs.tool_name() or op, runs.tool_arguments() or {"path": path}
    request = {
        "action_requests": [{"name": name, "args": given, "description": str(refusal.strerror)}],
        "review_configs": [{"action_name": name, "allowed_decisions": _DECISIONS}],
    }
    answer = interrupt(request)
    decisions = answer.get("decisions", [answer]) if isinstance(answer, dict) else [{}]
    decision = decisions[0] if len(decisions) == 1 and isinstance(decisions[0], dict) else {}
    if decision.get("type") not in _DECISIONS:
        raise ValueError(f"the answer must be {{'decisions': [{{'type': 'approve' or 'reject'}}]}}, not {answer!r}")
    if decision["type"] == "reject":
        said = decision.get("message")
        raise PermissionError(errno.EACCES, f"{refusal.strerror}: rejected{f': {said}' if said else ''}", path)
