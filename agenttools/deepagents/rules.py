"""Deep Agents' FilesystemPermission rules for the daemon, which enforces them for tools and commands alike.

``create_deep_agent`` of Deep Agents refuses rules for a backend that executes, because its tools cannot look into
commands; the one here hands them to the daemon instead. Owns how rules are told to it. Must not judge anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import deepagents
from deepagents.backends import CompositeBackend

from agenttools.wire import Message

if TYPE_CHECKING:
    from agenttools.deepagents.backend import VfsBackend

_MAX = 256 << 10
"""Bytes of rules: they go out with each new connection's first words, for which its buffer has room."""


def _plain(permissions: Sequence[Any]) -> list[dict[str, Any]]:
    for one in permissions:
        if not hasattr(one, "operations"):
            raise TypeError(f"permissions must be FilesystemPermission rules, not {type(one).__name__}")
    return [{"operations": list(p.operations), "paths": list(p.paths), "mode": p.mode} for p in permissions]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists of rules say the same."""
    return _plain(one) == _plain(other)


def request_of(permissions: Sequence[Any]) -> list[Message]:
    """The requests that put rules in force, to be made first on a connection; none without rules."""
    rules = _plain(permissions)
    if not rules:
        return []
    text = json.dumps(rules)
    if len(text) > _MAX:
        raise ValueError(f"more than {_MAX} bytes of rules; put them into vfsd.toml")
    # The same rules have the same owner, in every process; other agents' rules on this mount stay in force too.
    owner = f"deepagents-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return [{"op": "rules_set", "owner": owner, "rules": rules, "waits": False}]


def create_deep_agent(
    *args: Any,
    backend: Any = None,
    permissions: Sequence[Any] | None = None,
    subagents: Sequence[Any] | None = None,
    **options: Any,
) -> Any:
    """Deep Agents' ``create_deep_agent``, with ``permissions`` on a VfsBackend, which may execute.

    The daemon enforces them for all who use the mount, so that a subagent cannot have its own (ValueError). With a
    CompositeBackend whose default is a VfsBackend, rules for its routes stay with Deep Agents' tools; a rule must be
    for the one or the other (ValueError).
    """
    from agenttools.deepagents.backend import VfsBackend

    if backend is None:
        backend = VfsBackend()
    tree = backend.default if isinstance(backend, CompositeBackend) else backend
    if isinstance(tree, VfsBackend):
        _refuse_own_rules(subagents or ())
        if permissions:
            permissions = _handed_over(tree, backend, permissions)
    return deepagents.create_deep_agent(
        *args, backend=backend, permissions=list(permissions or ()) or None, subagents=subagents, **options
    )


def _refuse_own_rules(subagents: Sequence[Any]) -> None:
    for spec in subagents:
        if isinstance(spec, dict) and spec.get("permissions"):
            raise ValueError(
                f"subagent {spec.get('name')!r} has permissions of its own, but a VfsBackend's rules hold for the "
                f"whole mount: give them to the agent, or the subagent a mount of its own"
            )


def _handed_over(tree: VfsBackend, backend: Any, permissions: Sequence[Any]) -> list[Any]:
    """Give the tree's rules to its daemon; those that are left."""
    routes = [route.rstrip("/") + "/" for route in backend.routes] if isinstance(backend, CompositeBackend) else []
    ours, theirs = [], []
    for rule in permissions:
        routed = [any(path.startswith(route) for route in routes) for path in rule.paths]
        if all(routed) and routes:
            theirs.append(rule)
        elif any(routed) or any(_reaches(path, route) for path in rule.paths for route in routes):
            raise ValueError(
                f"the rule for {', '.join(rule.paths)} is for the tree and for a route of the CompositeBackend: "
                f"make a rule for each"
            )
        else:
            ours.append(rule)
    tree.permit(ours)
    return theirs


def _reaches(pattern: str, route: str) -> bool:
    """Whether a pattern that does not begin with the route could match below it: its wildcards come before."""
    fixed = pattern[: min((pattern.find(c) for c in "*?[{" if c in pattern), default=len(pattern))]
    return fixed != pattern and route.startswith(fixed)
