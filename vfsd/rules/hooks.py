"""Functions of the user's that see each change before it is made and may refuse it, and limits for a route's size.

Owns how a hook is called: on a thread, with a bound in time, never more than HOOKS_AT_ONCE at once; one that fails or
is late refuses or allows, as its configuration says, and never holds up the mount. Must not know rules or doors.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trio

from vfsd.core.types import Caller

log = logging.getLogger(__name__)

HOOKS_AT_ONCE = 16

DATA_MAX = 8 << 20
"""Bytes of a change that a hook is shown."""


class HookSpec(NamedTuple):
    """``call`` is ``factory:MODULE:FUNCTION``; ``on_failure`` is deny or allow; ``home`` is where modules are found."""

    call: str
    seconds: float = 2.0
    on_failure: str = "deny"
    home: Path | None = None


class QuotaSpec(NamedTuple):
    """Limits of the route ``prefix``, None for none: ``bytes`` of contents on disk, ``files`` of any type."""

    prefix: str
    bytes: int | None = None
    files: int | None = None


class Mutation(NamedTuple):
    """What a hook is called with: a change that is about to be made.

    ``op`` is the inode API's name of it, ``paths`` all paths it concerns (text, undecodable bytes as surrogates),
    ``size`` the bytes of content it brings or None, ``offset`` where in the file, ``data`` those bytes or None.
    """

    op: str
    paths: tuple[str, ...]
    caller: Caller
    size: int | None = None
    offset: int = 0
    data: bytes | None = None


Hook = Callable[[Mutation], object]


def build_hook(spec: HookSpec) -> Hook:
    """What the factory makes: a callable that returns a reason to refuse, or None. ValueError says what is wrong."""
    scheme, _, rest = spec.call.partition(":")
    module_name, _, name = rest.partition(":")
    if scheme != "factory" or not module_name or not name:
        raise ValueError(f"hook {spec.call!r}: write factory:MODULE:FUNCTION")
    if spec.home is not None and str(spec.home) not in sys.path:
        sys.path.append(str(spec.home))
    try:
        made = getattr(importlib.import_module(module_name), name)()
    except (Exception, SystemExit) as exc:
        raise ValueError(f"hook {spec.call}: {type(exc).__name__}: {exc}") from exc
    if not callable(made):
        raise ValueError(f"hook {spec.call}: it made {type(made).__name__}, which can't be called")
    hook: Hook = made
    return hook


class Hooks:
    """The hooks of one mount, called in order."""

    def __init__(self, specs: Iterable[HookSpec] = ()) -> None:
        self._hooks = [(spec, build_hook(spec)) for spec in specs]
        self._threads = trio.CapacityLimiter(HOOKS_AT_ONCE) if self._hooks else None

    def __bool__(self) -> bool:
        return bool(self._hooks)

    async def check(self, mutation: Mutation) -> tuple[str, str] | None:
        """(hook, reason) of the first that refuses; None when all let it pass."""
        for spec, hook in self._hooks:
            reason = await self._ask(spec, hook, mutation)
            if reason is not None:
                return spec.call, reason
        return None

    async def _ask(self, spec: HookSpec, hook: Hook, mutation: Mutation) -> str | None:
        assert self._threads is not None
        problem = f"no answer in {spec.seconds:g} s"
        with trio.move_on_after(spec.seconds):
            try:
                # Left to itself when late: a thread can't be ended, and it holds its place until it does end.
                reason = await trio.to_thread.run_sync(hook, mutation, abandon_on_cancel=True, limiter=self._threads)
                return None if reason is None or reason is True else str(reason) or "no reason given"
            except (Exception, SystemExit) as exc:
                problem = f"{type(exc).__name__}: {exc}"
        log.error("hook %s: %s, before %s of %s", spec.call, problem, mutation.op, ", ".join(mutation.paths))
        return None if spec.on_failure == "allow" else f"the hook failed ({problem})"


class Quota:
    """The limits of one route; ``used()`` gives (nodes, bytes)."""

    def __init__(self, spec: QuotaSpec, used: Callable[[], tuple[int, int]]) -> None:
        self.spec = spec
        self._used = used

    def check(self, files: int, growth: int) -> None:
        """EDQUOT when so many more files, or bytes, would be too many."""
        nodes, held = self._used()
        if files and self.spec.files is not None and nodes + files > self.spec.files:
            raise self._full(f"{self.spec.files} files")
        if growth > 0 and self.spec.bytes is not None and held + growth > self.spec.bytes:
            raise self._full(f"{self.spec.bytes} bytes")

    def _full(self, limit: str) -> OSError:
        return OSError(errno.EDQUOT, f"{os.strerror(errno.EDQUOT)}: route {self.spec.prefix} has a limit of {limit}")


def quotas_for(specs: Sequence[QuotaSpec], routes: Iterable[Any]) -> dict[int, Quota]:
    """Volume number -> its limits. ValueError for a route that is not there or keeps no count."""
    volumes = {os.fsdecode(route.prefix): route.volume for route in routes}
    found: dict[int, Quota] = {}
    for spec in specs:
        volume = volumes.get(spec.prefix)
        if volume is None:
            raise ValueError(f"quota for {spec.prefix}: no such route; there are {', '.join(volumes)}")
        if volume.kind not in ("state", "memory"):
            raise ValueError(f"quota for {spec.prefix}: a route of kind {volume.kind} keeps no count of its own")
        found[volume.base >> 48] = Quota(spec, volume.used)
    return found
