"""What the funnels of ``vfs`` tell of each exit, and to whom; the audit is one. Types only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from vfsd.core.types import Caller


class Witness(Protocol):
    """Who is told of each exit of the funnels, once; raises nothing. ``args`` are the operation's after the ino."""

    @property
    def reads(self) -> Collection[str]:
        """The operations that change nothing and are to be told of when they succeed."""

    def before(self, op: str, ino: int, args: tuple[Any, ...]) -> Any:
        """A change is about to be made; what this returns is given to ``done``."""

    def done(self, before: Any, op: str, caller: Caller, ino: int, args: tuple[Any, ...], result: Any) -> None: ...
    def failed(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...], error: BaseException) -> None: ...
    def saw(self, op: str, caller: Caller, ino: int) -> None: ...
    def unseen(self, op: str, caller: Caller, ino: int, args: tuple[Any, ...], error: OSError) -> None: ...

    def refused(self, message: Mapping[str, Any], caller: Caller, error: OSError) -> None:
        """A request of the tool door failed, in a funnel (which has told of it) or before it reached one."""

    def began(self, execute: str, call: str) -> None:
        """An execute of the tool call ``call`` begins whose processes have no pid here."""

    def ended(self, execute: str) -> None:
        """... and has ended, or whoever told of it has gone."""

    def restored(self, op: str, checkpoint: str, changes: int, caller: Caller) -> None:
        """The tree went back to a checkpoint, which no funnel sees."""
