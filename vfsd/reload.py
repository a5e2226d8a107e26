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
    """What a reload is to do. ``settings`` changed besides routes; ``fixed`` needs a new mount. Both are named as they
    are in the file."""

    add: list[RouteSpec]
    remove: list[str]
    settings: list[str]
    fixed: list[str]


def plan(old: Config, new: Config) -> Plan:
    """The way from one configuration to another."""
    before = {spec.prefix: spec for spec in old.routes}
    after = {spec.prefix: spec for spec in new.routes}
    changed = [f.name for f in fields(Config) if f.name != "routes" and getattr(old, f.name) != getattr(new, f.name)]
    fixed = [name for name in changed if name not in LIVE]
    fixed += [f"route {prefix}" for prefix in before if prefix in after and before[prefix] != after[prefix]]
    added = [after[prefix] for prefix in after if prefix not in before]
    return Plan(added, [prefix for prefix in before if prefix not in after], changed, fixed)


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
        """Put the file in force: {source: path, added, removed: [prefix...], changed: settings in words, rules: count,
        warnings: [sentence...]}.

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
            rules, changed = len(new.rules.rules), _listed(todo.settings)
            log.info("reloaded: changed %s, %d rules, routes added %s, removed %s", changed, rules, added, todo.remove)
            told = {"source": str(new.source), "changed": changed, "rules": rules, "warnings": warnings}
            return told | {"added": added, "removed": todo.remove}

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
    """As a sentence has them; empty for none."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
