"""A coroutine that was started by hand, to see whether it suspends, gone on with as if it were awaited."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any


@coroutine
def carry_on(request: Coroutine[Any, Any, None], trap: Any) -> Generator[Any, Any, None]:
    """Await a coroutine that was started by hand and has yielded ``trap`` to the scheduler already."""
    while True:
        thrown: BaseException | None = None
        value = None
        try:
            value = yield trap
        except BaseException as exc:
            thrown = exc
        try:
            trap = request.send(value) if thrown is None else request.throw(thrown)
        except StopIteration:
            return
