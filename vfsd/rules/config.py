"""The tables ``[[rules]]``, ``[[hooks]]`` and ``[quotas]`` of a configuration, as plain values.

Owns what may stand in them. Must not know files, mounts or how the values are used; what is wrong is told through the
reader of the file, who knows the lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vfsd.core.policy import Rule, RuleError, check_rule
from vfsd.rules.hooks import HookSpec, QuotaSpec

_RULE_KEYS = ("operations", "paths", "mode")
_HOOK_KEYS: dict[str, tuple[type, ...]] = {"call": (str,), "seconds": (int, float), "on_failure": (str,)}
_QUOTA_KEYS = ("bytes", "files")
_SIZE = re.compile(r"(\d+)([KMGT]?)")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}

Wrong = Callable[..., Exception]
"""``wrong(message, *keys)`` makes the error that names the file, and the line where the key path ``keys`` stands."""


@dataclass(frozen=True)
class RulesSpec:
    """``hide``: listings leave out what may not be read. ``approval_seconds``: how long an interrupt waits."""

    rules: tuple[Rule, ...] = ()
    hide: bool = False
    approval_seconds: int = 300
    hooks: tuple[HookSpec, ...] = ()
    quotas: tuple[QuotaSpec, ...] = ()


NO_RULES = RulesSpec()


def with_tables(spec: RulesSpec, table: dict[str, Any], wrong: Wrong, source: Path) -> RulesSpec:
    """``spec`` with what the tables of file ``source`` say; raises what ``wrong`` makes."""
    return replace(
        spec,
        rules=tuple(_rule(i, body, wrong, source) for i, body in _several(table, "rules", wrong)),
        hooks=tuple(_hook(i, body, wrong, source) for i, body in _several(table, "hooks", wrong)),
        quotas=_quotas(table.get("quotas", {}), wrong),
    )


def _several(table: dict[str, Any], name: str, wrong: Wrong) -> list[tuple[int, dict[str, Any]]]:
    found = table.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise wrong(f"{name} must be tables: [[{name}]]", name)
    return list(enumerate(found))


def _rule(i: int, body: dict[str, Any], wrong: Wrong, source: Path) -> Rule:
    for key in body:
        if key not in _RULE_KEYS:
            raise wrong(f"unknown key {key!r} in rule {i + 1} (known: {', '.join(_RULE_KEYS)})", "rules", i, key)
    for key in _RULE_KEYS[:2]:
        if key not in body:
            raise wrong(f"rule {i + 1} has no {key}", "rules", i)
    try:
        rule = check_rule(body["operations"], body["paths"], body.get("mode", "allow"))
    except RuleError as exc:
        about = next((key for key in ("pattern", "paths", "mode") if str(exc).startswith(key)), "operations")
        key = "paths" if about == "pattern" else about
        raise wrong(f"rule {i + 1}: {exc}", "rules", i, key) from None
    line = str(wrong("", "rules", i)).split(":")[-2]
    return rule._replace(origin=f"{source.name}:{line}")


def _hook(i: int, body: dict[str, Any], wrong: Wrong, source: Path) -> HookSpec:
    for key, value in body.items():
        if key not in _HOOK_KEYS:
            raise wrong(f"unknown key {key!r} in hook {i + 1} (known: {', '.join(_HOOK_KEYS)})", "hooks", i, key)
        if type(value) not in _HOOK_KEYS[key]:
            raise wrong(f"{key} must be {'a number' if key == 'seconds' else 'a string'}", "hooks", i, key)
    if "call" not in body:
        raise wrong(f"hook {i + 1} has no call, factory:MODULE:FUNCTION", "hooks", i)
    if body.get("on_failure", "deny") not in ("deny", "allow"):
        raise wrong(f"on_failure {body['on_failure']!r} is unknown: use deny, allow", "hooks", i, "on_failure")
    if not 0 < body.get("seconds", 1) <= 60:
        raise wrong("seconds must be more than 0 and at most 60", "hooks", i, "seconds")
    return HookSpec(**body, home=source.parent)


def _quotas(table: Any, wrong: Wrong) -> tuple[QuotaSpec, ...]:
    if not isinstance(table, dict) or not all(isinstance(body, dict) for body in table.values()):
        raise wrong('quotas must be tables such as [quotas."/work/"]', "quotas")
    found = []
    for prefix, body in table.items():
        limits: dict[str, int] = {}
        for key, value in body.items():
            if key not in _QUOTA_KEYS:
                known = ", ".join(_QUOTA_KEYS)
                raise wrong(f"unknown key {key!r} in quota {prefix!r} (known: {known})", "quotas", prefix, key)
            size = _SIZE.fullmatch(str(value)) if type(value) in (int, str) else None
            if size is None:
                raise wrong(f"{key} must be a number, or one with K, M, G or T", "quotas", prefix, key)
            limits[key] = int(size[1]) << _UNITS[size[2]]
        whole = "/" + "".join(part + "/" for part in prefix.split("/") if part)
        found.append(QuotaSpec(whole, **limits))
    return tuple(found)
