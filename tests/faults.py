"""Failing system calls, on demand: the nth one of a module fails, once or from then on.

    with failing(extents, "pwrite", nth=3, code=errno.EIO, for_good=True) as calls:
        ...

``name`` is a function of ``os`` as that module sees it, or a function of the module itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class Calls:
    """How many calls were made and how many of them failed."""

    def __init__(self) -> None:
        self.made = 0
        self.failed = 0


class _Os:
    """``os`` with some functions replaced."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def failing(
    module: ModuleType, *names: str, code: int, nth: int = 1, for_good: bool = False, torn: bool = False
) -> Iterator[Calls]:
    """Calls of ``names`` by ``module`` are counted together; the nth raises OSError(code), with ``for_good`` all later.

    ``torn``: a failing write has written half its bytes before it fails.
    """
    calls = Calls()

    def wrap(real: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.made += 1
            if calls.made == nth or (for_good and calls.made > nth):
                calls.failed += 1
                if torn:
                    fd, data = args[:2]
                    real(fd, data[: len(data) // 2], *args[2:])
                raise OSError(code, os.strerror(code))
            return real(*args)

        return call

    original: Any = vars(module).get("os")
    replaced = _Os(original)
    own: dict[str, Any] = {}
    for name in names:
        if name in vars(module):
            own[name] = vars(module)[name]
            setattr(module, name, wrap(own[name]))
        else:
            setattr(replaced, name, wrap(getattr(original, name)))
    module.os = replaced  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        module.os = original  # type: ignore[attr-defined]
        for name, real in own.items():
            setattr(module, name, real)
