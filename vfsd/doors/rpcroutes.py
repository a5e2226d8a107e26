"""The operation ``route`` of the tool door: routes added to and removed from a running mount.

Registered by ``serve`` when there is a mount that can do that. Must not know how a route is opened.
"""

from __future__ import annotations

import errno
from typing import Any, Protocol

from vfsd.core.types import Caller
from vfsd.doors.rpcops import OPS, Message, Session, want


class Live(Protocol):
    """What the operation needs of the mount."""

    async def add(self, text: str, cwd: str, values: dict[str, str]) -> dict[str, Any]: ...
    async def remove(self, prefix: str) -> None: ...


def serve(live: Live) -> None:
    """Offer ``route``."""

    async def route(s: Session, m: Message, caller: Caller) -> Message:
        """{action: add, route, cwd, values={}} -> {route}; {action: remove, prefix} -> {}"""
        action = want(m, "action", str)
        if action == "add":
            values = want(m, "values", dict, {})
            if not all(type(value) is str for value in values.values()):
                raise OSError(errno.EINVAL, "'route' needs 'values' as a map of text")
            return {"route": await live.add(want(m, "route", str), want(m, "cwd", str, "/"), values)}
        if action == "remove":
            await live.remove(want(m, "prefix", str))
            return {}
        raise OSError(errno.EINVAL, f"'route' has no action {action!r}: use add, remove")

    OPS["route"] = route
