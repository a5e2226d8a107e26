"""What of a changed configuration file can be put in force while mounted, and doing it: all of it or nothing.

Owns which settings those are and the order of the steps. Must not know files, sockets or signals; the daemon gives it
the configuration as it is now.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from vfsd.config import Config, ConfigError, RouteSpec
from vfsd.liveroutes import LiveRoutes
from vfsd.past.checkpoints import Checkpoints
from vfsd.rules.book import Rulebook

if TYPE_CHECKING:
    from vfsd.routes import Route

log = logging.getLogger(__name__)

LIVE = frozenset(["routes", "rules", "checkpoints", "execute", "log_level", "log_format"])
"""Fields of a Config that may change; ``source`` and ``given`` never do."""


class Plan(NamedTuple):
    """What a reload is to do. ``fixed``: what changed and needs a new mount, as it is called in the file."""

    add: list[RouteSpec]
    remove: list[str]
    fixed: list[str]


def plan(old: Config, new: Config) -> Plan:
    """The way from one configuration to another."""
    before = {spec.prefix: spec for spec in old.routes}
    after = {spec.prefix: spec for spec in new.routes}
    fixed = [f.name for f in fields(Config) if f.name not in LIVE and getattr(old, f.name) != getattr(new, f.name)]
    fixed += [f"route {prefix}" for prefix in before if prefix in after and before[prefix] != after[prefix]]
    added = [after[prefix] for prefix in after if prefix not in before]
    return Plan(added, [prefix for prefix in before if prefix not in after], fixed)


class Reloader:
    """Reloads one mount. ``reread`` gives the configuration as the file has it now (ConfigError), on a thread;
    ``apply`` takes what is neither routes nor rules, and can't fail."""

    def __init__(
        self,
        config: Config,
        reread: Callable[[Config], Config],
        live: LiveRoutes,
        book: Rulebook,
        checkpoints: Checkpoints,
        apply: Callable[[Config], None],
    ) -> None:
        self.config = config
        self._reread = reread
        self._live = live
        self._book = book
        self._checkpoints = checkpoints
        self._apply = apply
        self._one = trio.Lock()

    async def reload(self) -> dict[str, Any]:
        """Put the file in force: {added, removed: [prefix...], rules: count, warnings: [sentence...]}.

        OSError with one sentence that says what can't be, and then all is as it was.
        """
        async with self._one:
            try:
                new = await trio.to_thread.run_sync(self._reread, self.config)
                todo = plan(self.config, new)
                if todo.fixed:
                    name = self.config.name
                    raise ConfigError(
                        f"{_listed(todo.fixed)} can't change while mounted: vfsd umount {name}, then mount it again"
                    )
                problems = await self._live.change(todo.add, todo.remove, lambda routes: self._prepare(new, routes))
            except (ConfigError, ValueError) as exc:
                raise OSError(errno.EINVAL, f"{exc}; all is as it was before") from None
            except OSError as exc:
                raise OSError(exc.errno, f"{exc.strerror}; all is as it was before") from None
            warnings = [*problems, *await self._book.warnings()]
            added = [spec.prefix for spec in todo.add]
            log.info("reloaded: %d rules, routes added %s, removed %s", len(new.rules.rules), added, todo.remove)
            return {"added": added, "removed": todo.remove, "rules": len(new.rules.rules), "warnings": warnings}

    def _prepare(self, new: Config, routes: list[Route]) -> Callable[[], None]:
        """What puts all but the routes in force. ValueError for rules that can't be."""
        install = self._book.prepare(new.rules, routes)

        def commit() -> None:
            install()
            self._checkpoints.policy = new.checkpoints
            self.config = new
            self._apply(new)

        return commit


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
