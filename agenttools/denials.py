"""Why the tree denied something to a command: a program is only told EACCES, the daemon's record has the sentence.

Owns the look into ``/.vfsd/errors.ndjson`` (``docs/audit.md``). Raises nothing: without a record there is nothing said.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from typing import Any, Protocol

_RECORD = b"/.vfsd/errors.ndjson"
_LOOKED_AT = 64 << 10
"""Bytes of the record's end, where the lines of a command that has just ended are."""

_MOST = 5


class _Client(Protocol):
    def call(self, op: str, /, **params: Any) -> Mapping[str, Any]: ...


def denials(client: _Client, execute: str) -> list[str]:
    """The sentences of rules, hooks and quotas about what the command marked ``execute`` did; a few, each once."""
    try:
        size = client.call("stat", path=_RECORD)["attr"]["size"]
        data = client.call("read", path=_RECORD, offset=max(0, size - _LOOKED_AT), length=_LOOKED_AT)["data"]
    except OSError:
        return []
    found: dict[str, None] = {}
    for line in bytes(data).split(b"\n"):
        if execute.encode() not in line:
            continue
        try:
            entry = json.loads(line)
            number = getattr(errno, str(entry["result"]), 0)
        except (ValueError, KeyError, TypeError):  # half a line
            continue
        said = entry.get("error")
        if entry.get("execute") == execute and isinstance(said, str) and said != os.strerror(number):
            found[said] = None
    return list(found)[:_MOST]
