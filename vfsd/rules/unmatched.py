"""Which patterns of rules match nothing that is in the tree now: most likely a slip of who wrote them.

Looks at what is there once for all patterns that begin alike, in pieces, so that nobody waits for it. Must not judge.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Any

import trio

from vfsd.core.policy import READ, Policy, Rule, anchor
from vfsd.core.types import ROOT_NODE
from vfsd.rules.guard import Guard

LOOKED_AT = 5000
"""Entries looked at for patterns that begin alike before they are taken to match something."""

_PIECE = 100


async def unmatched(guard: Guard, patterns: Iterable[str]) -> set[str]:
    """Those of the patterns that match nothing; what there is too much to look at for counts as matched."""
    anchored: dict[str, set[str]] = {}
    for pattern in patterns:
        anchored.setdefault(anchor(pattern), set()).add(pattern)
    for fixed, left in anchored.items():
        await _look_below(guard, fixed, left)
    return set().union(*anchored.values())


async def _look_below(guard: Guard, fixed: str, left: set[str]) -> None:
    """Take out of ``left``, patterns whose anchor is ``fixed``, what matches anything."""
    ino, path = ROOT_NODE, b""
    for part in os.fsencode(fixed).split(b"/"):
        child = next((a for n, a in await _entries(guard, ino) if n == part), None) if part else None
        if part and child is None:
            return
        if child is not None:
            ino, path = child.ino, path + b"/" + part
    policy = _strike_out(_each(left), path or b"/", left)
    todo, seen = [(ino, path)], 0
    while todo and left:
        ino, path = todo.pop()
        for name, child in await _entries(guard, ino):
            seen += 1
            if seen > LOOKED_AT:
                left.clear()
                return
            if seen % _PIECE == 0:
                await trio.lowlevel.checkpoint()
            policy = _strike_out(policy, path + b"/" + name, left)
            if stat.S_ISDIR(child.mode):
                todo.append((child.ino, path + b"/" + name))


def _each(patterns: Iterable[str]) -> Policy:
    """One that tells by which of the patterns a path is matched."""
    return Policy(Rule((READ,), (pattern,)) for pattern in patterns)


def _strike_out(policy: Policy, path: bytes, left: set[str]) -> Policy:
    """Take the patterns that match the path out of ``left``, and return the policy of those that stay."""
    while (rule := policy.decider(READ, path)) is not None:
        left.discard(rule.paths[0])
        policy = _each(left)
    return policy


async def _entries(guard: Guard, ino: int) -> list[tuple[bytes, Any]]:
    try:
        return await guard.everything_in(ino)
    except OSError:
        return []
