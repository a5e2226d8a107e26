"""How commands are to be run, from the configuration: ``[execute]`` and its limits and environment.

Owns the reading of that table. The daemon runs no command: it tells its clients, who do. Must not know how.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

PROFILES = ("open", "tree", "offline")
"""As agenttools has them: with the caller's rights; only the tree can be changed; the same with no network."""

LIMITS = ("memory", "processes", "cpu_seconds", "open_files")

_KEYS = ("profile", "limits", "env", "pass_env")
_SIZE = re.compile(r"(\d+)([KMGT]?)", re.ASCII)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

Wrong = Callable[..., Exception]
"""Makes the error that names the file and the line of a key path."""


@dataclass(frozen=True)
class ExecutePolicy:
    """``limits`` by name, ``memory`` in bytes. ``env``: variables every command gets; ``pass_env``: names of those it
    gets from who runs it."""

    profile: str = "tree"
    limits: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()

    def told(self) -> dict[str, Any]:
        """What clients are told in hello."""
        return {
            "profile": self.profile,
            "limits": dict(self.limits),
            "env": dict(self.env),
            "pass_env": list(self.pass_env),
        }


DEFAULT_EXECUTE = ExecutePolicy()


def read(table: Any, wrong: Wrong) -> ExecutePolicy:
    """The checked table ``[execute]``; raises what ``wrong`` makes."""
    if not isinstance(table, dict):
        raise wrong("execute must be a table: [execute]", "execute")
    for key in table:
        if key not in _KEYS:
            raise wrong(f"unknown key {key!r} in [execute] (known: {', '.join(_KEYS)})", "execute", key)
    profile = table.get("profile", "tree")
    if profile not in PROFILES:
        raise wrong(f"profile {profile!r} is unknown: use {', '.join(PROFILES)}", "execute", "profile")
    limits = {key: _limit(key, value, wrong) for key, value in _table(table, "limits", wrong).items()}
    if limits and profile == "open":
        raise wrong("limits need a profile that confines: tree or offline", "execute", "limits")
    env = _table(table, "env", wrong)
    for name, value in env.items():
        _variable(name, wrong, "env", name)
        if not isinstance(value, str) or "\0" in value:
            raise wrong(f"the variable {name} must be a string", "execute", "env", name)
    names = table.get("pass_env", [])
    if not isinstance(names, list):
        raise wrong("pass_env must be a list of names", "execute", "pass_env")
    for name in names:
        _variable(name, wrong, "pass_env")
    return ExecutePolicy(profile, limits, env, tuple(names))


def _table(table: dict[str, Any], key: str, wrong: Wrong) -> dict[str, Any]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise wrong(f"{key} must be a table: [execute.{key}]", "execute", key)
    return found


def _limit(key: str, value: Any, wrong: Wrong) -> int:
    if key not in LIMITS:
        raise wrong(f"unknown key {key!r} in [execute.limits] (known: {', '.join(LIMITS)})", "execute", "limits", key)
    size = _SIZE.fullmatch(str(value)) if type(value) in (int, str) else None
    if size is None or (size[2] and key != "memory") or not int(size[1]):
        kind = "a number of bytes above 0, or one with K, M, G or T" if key == "memory" else "a number above 0"
        raise wrong(f"{key} must be {kind}", "execute", "limits", key)
    return int(size[1]) << _UNITS[size[2]]


def _variable(name: Any, wrong: Wrong, *keys: str) -> None:
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        raise wrong(f"{name!r} is not the name of a variable", "execute", *keys)
