"""Globs as regular expressions whose time does not explode: for searches and for rules.

The meaning is wcmatch's, with braces and ``**``, as Deep Agents' tools have it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from wcmatch import glob as wcglob

_FLAGS = wcglob.BRACE | wcglob.GLOBSTAR
_ACROSS = r"(?:(?!(?:[/]|^)\.).)*?"
"""What wcmatch makes of ``**``. Of a version that makes something else, patterns mean the same and may take long."""


def regexes(pattern: str) -> list[str]:
    """The regular expressions a path fully matches one of, if the pattern matches it. Raises ValueError."""
    try:
        include, _ = wcglob.translate(pattern, flags=_FLAGS)
        found = [_decided(one) for one in include]
        for one in found:
            re.compile(one)
    except Exception as exc:  # wcmatch raises only types of its private modules
        raise ValueError(str(exc)) from exc
    return found


def compiled(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """``fullmatch`` of a pattern. Raises ValueError."""
    return re.compile("|".join(f"(?:{one})" for one in regexes(pattern))).fullmatch


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> Callable[[str], re.Match[str] | None]:
    return compiled(pattern)


def matches(path: str, pattern: str) -> bool:
    """Whether the pattern matches a whole path. Raises ValueError."""
    return _matcher(pattern)(path) is not None


def _decided(regex: str) -> str:
    """The expression with the place of what stands between two ``**`` settled by the first that fits.

    A later one is never better: what the first leaves, the next ``**`` takes. Without, each more of them multiplies the
    time by the length of the path, up to hours for one path, in which nothing else runs.
    """
    first, *between = regex.split(_ACROSS)
    if len(between) < 2:
        return regex
    return first + "".join(f"(?>{_ACROSS}{part})" for part in between[:-1]) + _ACROSS + between[-1]
