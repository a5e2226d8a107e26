"""The operations of the tool door that concern rules, and the operations that wait for a yes.

Registered in ``rpcops.OPS`` by being imported. Must not know sockets or frames, nor what a rule means.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from vfsd.core.policy import Rule, RuleError, check_rule
from vfsd.core.types import Caller
from vfsd.doors.rpcops import Message, Session, op, want

if TYPE_CHECKING:
    from vfsd.rules.book import Rulebook

WAIT_MAX = 60
"""Seconds that ``approvals`` waits at most for something to decide."""


def _rulebook(s: Session) -> Rulebook:
    if s.host.rules is None:
        raise OSError(errno.EOPNOTSUPP, "this mount has no rules")
    return s.host.rules


@op
async def rules(s: Session, m: Message, caller: Caller) -> Message:
    """{} -> {layers: [{owner, hide, rules: [{operations, paths, mode, origin}...]}...], hooks, quotas}"""
    return _rulebook(s).plain()


@op
async def rules_check(s: Session, m: Message, caller: Caller) -> Message:
    """{} -> {warnings: [text...]} about the rules in force"""
    return {"warnings": await _rulebook(s).warnings()}


@op
async def rules_reload(s: Session, m: Message, caller: Caller) -> Message:
    """{} -> {rules: count, warnings}: those of the configuration file, read anew; EINVAL and the old ones stay"""
    return await _rulebook(s).reload()


@op
async def rules_set(s: Session, m: Message, caller: Caller) -> Message:
    """{owner: str, rules: [{operations, paths, mode="allow"}...], hide=false, waits=true} -> {rules: count, warnings}

    The rules of one client, named by itself, for the whole mount, besides those of the configuration: the strictest
    verdict counts. They stay until the owner sets others, none, or the daemon ends. EINVAL and nothing is changed.
    Without ``waits`` what an interrupt rule matches does not wait for a yes: it is refused, to programs for good, and
    to tools with ``approval`` in the reply, whereupon they may ask somebody and come again with ``approved``.
    """
    owner, given = want(m, "owner", str), want(m, "rules", list)
    found: list[Rule] = []
    for number, one in enumerate(given, 1):
        try:
            if not isinstance(one, dict) or not set(one) <= {"operations", "paths", "mode"}:
                raise RuleError("it must be a map of operations, paths and mode")
            origin = f"{owner} rule {number}"
            found.append(check_rule(one.get("operations"), one.get("paths"), one.get("mode", "allow"), origin))
        except RuleError as exc:
            raise OSError(errno.EINVAL, f"rule {number}: {exc}") from None
    return await _rulebook(s).set(owner, found, hide=want(m, "hide", bool, False), waits=want(m, "waits", bool, True))


@op
async def approvals(s: Session, m: Message, caller: Caller) -> Message:
    """{wait=0} -> {pending: [{id, op, operation, paths, rule, door, pid, uid, tool, call_id, time}...]}

    What waits for a yes; with ``wait`` not before there is something, or so many seconds have passed.
    """
    seconds = min(want(m, "wait", int, 0), WAIT_MAX)
    return {"pending": [question.plain() for question in await _rulebook(s).approvals.some(max(0, seconds))]}


@op
async def approve(s: Session, m: Message, caller: Caller) -> Message:
    """{question: str} -> {question}: what waits under that id goes on; ENOENT"""
    return _decide(s, want(m, "question", str), True, "")


@op
async def reject(s: Session, m: Message, caller: Caller) -> Message:
    """{question: str, reason=""} -> {question}: what waits under that id is denied; ENOENT"""
    return _decide(s, want(m, "question", str), False, want(m, "reason", str, ""))


def _decide(s: Session, number: str, approve: bool, reason: str) -> Message:
    try:
        return {"question": _rulebook(s).approvals.decide(number, approve=approve, reason=reason[:1000]).plain()}
    except KeyError:
        raise OSError(errno.ENOENT, f"nothing waits for approval as {number!r}: see vfsd approvals") from None
