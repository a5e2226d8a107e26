"""The operations of the tool door by which a running mount is looked after: ``reload`` and ``log_level``.

Registered by ``serve`` when there is a daemon that can do that. Must not know files or logging.
"""

from __future__ import annotations

from typing import Any, Protocol

from vfsd.core.types import Caller
from vfsd.doors.rpcops import OPS, Message, Session, want


class Controlled(Protocol):
    """What the operations need of the daemon."""

    async def reload(self) -> dict[str, Any]: ...
    def log_level(self, level: str) -> str: ...


def serve(daemon: Controlled) -> None:
    """Offer the operations."""

    async def reload(s: Session, m: Message, caller: Caller) -> Message:
        """{} -> {source: path of the file, added, removed: [prefix...], changed: other settings in words, rules: count,
        warnings: [text...]}; or an error, and all is as before"""
        return await daemon.reload()

    async def log_level(s: Session, m: Message, caller: Caller) -> Message:
        """{level=""} -> {level}: the one in force from now on; EINVAL"""
        return {"level": daemon.log_level(want(m, "level", str, ""))}

    OPS["reload"] = reload
    OPS["log_level"] = log_level
