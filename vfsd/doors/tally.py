"""How often each operation of a door was asked for, how long it took, and how it failed.

Owns the counts. Must not know what an operation is, nor what is made of the counts. Cheap enough for each request: a
row is a list, which whoever counts keeps at hand.
"""

from __future__ import annotations

import errno
from collections import Counter
from typing import Any

SPANS = 40
"""Spans of time told apart: the nth holds what took less than 2**n microseconds."""

Row = list[float]
"""Seconds in all; then the number of operations in each span."""


def took(row: Row, seconds: float) -> None:
    """One operation more."""
    row[0] += seconds
    span = int(seconds * 1e6).bit_length()
    row[span + 1 if span < SPANS else SPANS] += 1


class Tally:
    """The operations of one door, by name."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self.failed: Counter[tuple[str, int]] = Counter()
        """By operation and errno; they are in the rows too."""

    def row(self, name: str) -> Row:
        """The row of an operation, for ``took``."""
        return self._rows.setdefault(name, [0.0] + [0] * SPANS)

    def plain(self) -> dict[str, dict[str, Any]]:
        """By operation, of those that were asked for: {count, seconds, errors: {EIO: count...}, spans: [count...]}."""
        errors: dict[str, dict[str, int]] = {}
        for (name, code), count in self.failed.items():
            errors.setdefault(name, {})[errno.errorcode.get(code, str(code))] = count
        return {
            name: {"count": count, "seconds": row[0], "errors": errors.get(name, {}), "spans": row[1:]}
            for name, row in self._rows.items()
            if (count := int(sum(row[1:])))
        }
