"""Where metrics are served, from the configuration: ``[metrics]``.

Owns the reading of that table. Must not know how they are served.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEYS: dict[str, tuple[type, str]] = {"socket": (str, "a string"), "port": (int, "a number")}

Wrong = Callable[..., Exception]
"""Makes the error that names the file and the line of a key path."""


@dataclass(frozen=True)
class MetricsPolicy:
    """At a Unix ``socket``, or a ``port`` of the loopback address (0: any); with neither, nowhere."""

    socket: Path | None = None
    port: int | None = None

    def __bool__(self) -> bool:
        return self.socket is not None or self.port is not None


NO_METRICS = MetricsPolicy()


def read(table: dict[str, Any], wrong: Wrong, home: Path) -> MetricsPolicy:
    """The checked table ``[metrics]`` of the file in directory ``home``; raises what ``wrong`` makes."""
    if "metrics" not in table:
        return NO_METRICS
    found = table["metrics"]
    if not isinstance(found, dict):
        raise wrong("metrics must be a table: [metrics]", "metrics")
    for key, value in found.items():
        if key not in _KEYS:
            raise wrong(f"unknown key {key!r} in [metrics] (known: {', '.join(_KEYS)})", "metrics", key)
        if type(value) is not _KEYS[key][0]:
            raise wrong(f"{key} must be {_KEYS[key][1]}", "metrics", key)
    if len(found) != 1:
        raise wrong("[metrics] needs a socket (a path) or a port (of the loopback address), one of them", "metrics")
    if "port" in found and not 0 <= found["port"] <= 65535:
        raise wrong("port must be from 0 to 65535", "metrics", "port")
    socket = Path(os.path.abspath(home / Path(found["socket"]).expanduser())) if "socket" in found else None
    return MetricsPolicy(socket, found.get("port"))
