"""Arguments of a wrong type, told as the sentence that names the one.

Owns what annotations say of values. A tool is not slowed down by it: only when it fails as Python fails are its
arguments looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

FAULTS = (TypeError, AttributeError)
"""What a value of a wrong type may raise, deep inside."""


def mistaken(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TypeError | None:
    """The error that names the first argument of a call that is not what ``function`` is annotated with, if any."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as exc:
        return TypeError(f"{function.__name__.lstrip('_')}: {exc}")
    try:
        check(function, given)
    except TypeError as exc:
        return exc
    return None


def check(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """TypeError for the first of these arguments of ``function`` that is not what it is annotated with."""
    hints = _hints(function)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            called = function.__qualname__.removesuffix(".__init__").lstrip("_")
            raise TypeError(f"{called}: {name} must be {_shown(hints[name])}, not {type(value).__name__}")


@lru_cache(maxsize=256)
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function)


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, (int, float))
    kind = hint if origin is None else origin
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def _shown(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_shown, get_args(hint)))
    if origin is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is NoneType:
        return "None"
    kind = hint if origin is None else origin
    return kind.__name__ if isinstance(kind, type) else str(kind)
