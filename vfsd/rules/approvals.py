"""Operations that wait for somebody to say yes: who waits for what, and what has been decided.

Owns the questions and, for a while, the answers: who was allowed something need not ask again for the rest of the same
piece of work (a program opens, truncates and writes). Must not know rules, paths' meaning or doors. All on the loop.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import trio

from vfsd.core.types import Caller

GRANT_SECONDS = 30.0
"""How long a yes holds for the same process (or tool connection), operation and path."""

PENDING_MAX = 1000
"""Questions at a time; one more is a no."""

Want = tuple[str, bytes, bool]
"""An operation, a path, and whether all below it is meant too."""


class Refused(Exception):
    """The answer is no; the message says whose."""


class Question(NamedTuple):
    """``wants`` is all that one yes allows."""

    id: str
    what: str
    wants: tuple[Want, ...]
    rule: str
    caller: Caller
    time: float
    decided: trio.Event
    answer: list[str]

    def plain(self) -> dict[str, Any]:
        """For lists and programs; ``time`` in seconds since the epoch."""
        return {
            "id": self.id,
            "op": self.what,
            "operation": self.wants[0][0],
            "paths": [path for _, path, _ in self.wants],
            "rule": self.rule,
            "door": self.caller.door,
            "pid": self.caller.pid,
            "uid": self.caller.uid,
            "tool": self.caller.tool,
            "call_id": self.caller.call_id,
            "time": self.time,
        }


class Approvals:
    """``seconds``: how long a question waits before the answer is no."""

    def __init__(self, seconds: float = 300.0) -> None:
        self.seconds = seconds
        self._numbers = itertools.count(1)
        self._pending: dict[str, Question] = {}
        self._asked = trio.Event()
        self._grants: dict[tuple[str, int, str, bytes, bool], float] = {}

    def pending(self) -> list[Question]:
        """What waits, oldest first."""
        return list(self._pending.values())

    def granted(self, caller: Caller, operation: str, path: bytes) -> bool:
        """Whether a yes of before covers this, or the caller has one."""
        if caller.approved:
            return True
        if not self._grants:
            return False
        now = time.monotonic()
        if any(until < now for until in self._grants.values()):
            self._grants = {key: until for key, until in self._grants.items() if until >= now}
        who = (caller.door, caller.pid)
        if (*who, operation, path, False) in self._grants or (*who, operation, path, True) in self._grants:
            return True
        return any(
            deep and (door, pid) == who and op == operation and path.startswith(above.rstrip(b"/") + b"/")
            for door, pid, op, above, deep in self._grants
        )

    async def ask(self, what: str, wants: tuple[Want, ...], rule: str, caller: Caller) -> None:
        """Return when somebody has said yes. Raises Refused: a no, or nobody in time. Cancelled: the question goes."""
        if len(self._pending) >= PENDING_MAX:
            raise Refused(f"{PENDING_MAX} operations wait for approval already")
        number = str(next(self._numbers))
        question = Question(number, what, wants, rule, caller, time.time(), trio.Event(), [])
        self._pending[number] = question
        self._asked.set()
        self._asked = trio.Event()
        try:
            with trio.move_on_after(self.seconds):
                await question.decided.wait()
        finally:
            del self._pending[number]
        if not question.answer:
            raise Refused(f"nobody approved it in {self.seconds:g} s")
        if question.answer[0]:
            raise Refused(question.answer[0])
        until = time.monotonic() + GRANT_SECONDS
        for operation, path, deep in wants:
            self._grants[caller.door, caller.pid, operation, path, deep] = until

    def decide(self, number: str, *, approve: bool, reason: str = "") -> Question:
        """Answer a question. Raises KeyError when nothing with that id waits."""
        question = self._pending[number]
        if not question.decided.is_set():
            question.answer.append("" if approve else f"rejected{': ' + reason if reason else ''}")
            question.decided.set()
        return question

    async def some(self, seconds: float) -> list[Question]:
        """What waits, as soon as something does, or after ``seconds``."""
        if not self._pending:
            with trio.move_on_after(seconds):
                await self._asked.wait()
        return self.pending()

    def forget(self) -> None:
        """No yes of before counts any more (the rules are other ones)."""
        self._grants.clear()
