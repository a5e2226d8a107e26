"""The rules of one mount as a whole: from where they come, how they change while it is mounted, what is odd about them.

Owns the layers: the configuration's (``CONFIG``) and those that clients set. Must not know sockets, nor judge anything.
Invariant: rules that can't be read change nothing; those in force stay.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vfsd.core.policy import MODES, Policy, Rule, RuleError, anchor, blind_spot
from vfsd.routes import Route
from vfsd.rules.approvals import Approvals
from vfsd.rules.config import RulesSpec
from vfsd.rules.guard import Guard
from vfsd.rules.hooks import Hooks, quotas_for
from vfsd.rules.unmatched import unmatched
from vfsd.rules.verdicts import Layer
from vfsd.vfs import Vfs

log = logging.getLogger(__name__)

CONFIG = "config"
"""The owner of the rules that the configuration has."""

OWNERS_MAX = 64


class Rulebook:
    """``reread`` gives the configuration's rules as they are now, or raises OSError where there is no file.

    Raises ValueError for what can't be enforced.
    """

    def __init__(self, vfs: Vfs, spec: RulesSpec, reread: Callable[[], RulesSpec]) -> None:
        self._vfs = vfs
        self._reread = reread
        self.approvals = Approvals(spec.approval_seconds)
        self.guard = Guard(vfs, self.approvals)
        self.spec = spec
        self._clients: dict[str, Layer] = {}
        self._install(spec, {})

    def _install(self, spec: RulesSpec, clients: dict[str, Layer]) -> None:
        self._prepare(spec, clients, self._vfs.table.routes)()

    def prepare(self, spec: RulesSpec, routes: Sequence[Route]) -> Callable[[], None]:
        """What puts the configuration's rules in force, once these are the routes. Raises ValueError, then nothing."""
        return self._prepare(spec, None, routes)

    def _prepare(
        self, spec: RulesSpec, clients: dict[str, Layer] | None, routes: Sequence[Route]
    ) -> Callable[[], None]:
        config = Layer(Policy(spec.rules), spec.hide)
        hooks = self.guard.hooks if spec.hooks == self.spec.hooks and self.guard.hooks else Hooks(spec.hooks)
        quotas = quotas_for(spec.quotas, routes)

        def install() -> None:
            self.spec, self._clients = spec, self._clients if clients is None else clients
            self.approvals.seconds = spec.approval_seconds
            self.guard.install({CONFIG: config, **self._clients}, hooks, quotas)

        return install

    async def reload(self) -> dict[str, Any]:
        """Read the configuration's rules anew; OSError with the sentence, and those of before stay in force."""
        try:
            self._install(self._reread(), self._clients)
        except OSError:
            raise
        except Exception as exc:
            log.error("rules are as before: %s", exc)
            raise OSError(errno.EINVAL, f"{exc}; the rules of before stay in force") from None
        warnings = await self.warnings()
        log.info("rules reloaded: %d", len(self.spec.rules))
        return {"rules": len(self.spec.rules), "warnings": warnings}

    async def set(self, owner: str, rules: Sequence[Rule], *, hide: bool, waits: bool = True) -> dict[str, Any]:
        """Put ``owner``'s rules in place of those it set before. Of the same ones again, nothing is said anew."""
        if owner == CONFIG or not owner or len(owner) > 256:
            raise OSError(errno.EINVAL, f"owner {owner!r}: use a name of your own")
        clients = {name: layer for name, layer in self._clients.items() if name != owner}
        try:
            if rules:
                clients[owner] = Layer(Policy(rules), hide, waits)
        except RuleError as exc:
            raise OSError(errno.EINVAL, str(exc)) from None
        before, now = self._clients.get(owner), clients.get(owner)
        if before is not None and now is not None and before[1:] == now[1:] and before.policy.rules == now.policy.rules:
            # Each new connection of an agent says so; kernel caches need not go for that.
            return {"rules": len(rules), "warnings": []}
        if len(clients) > OWNERS_MAX:
            raise OSError(errno.EINVAL, f"more than {OWNERS_MAX} clients have set rules")
        self._install(self.spec, clients)
        return {"rules": len(rules), "warnings": await self.warnings([owner])}

    def plain(self) -> dict[str, Any]:
        """All that is in force, for programs."""
        return {
            "layers": [
                {"owner": owner, "hide": layer.hide, "rules": [rule._asdict() for rule in layer.policy.rules]}
                for owner, layer in self.guard.layers.items()
            ],
            "hooks": [hook.call for hook in self.spec.hooks],
            "quotas": [quota._asdict() for quota in self.spec.quotas],
        }

    async def warn(self) -> None:
        """Log what is odd about the rules that the mount starts with."""
        for warning in await self.warnings():
            log.warning("%s", warning)

    async def warnings(self, owners: Iterable[str] | None = None) -> list[str]:
        """Rules that contradict each other, patterns that match nothing, what a pattern leaves out: a sentence each."""
        found: list[str] = []
        layers = [self.guard.layers[one] for one in owners or self.guard.layers if one in self.guard.layers]
        idle = await unmatched(self.guard, (p for one in layers for rule in one.policy.rules for p in rule.paths))
        for layer in layers:
            found += of_policy(layer.policy)
            for rule in layer.policy.rules:
                for pattern in rule.paths:
                    if pattern in idle:
                        found.append(f"pattern {pattern!r} of [{rule}] matches nothing that is there now")
                    found += self._native(rule, pattern)
        return list(dict.fromkeys(found))

    def _native(self, rule: Rule, pattern: str) -> list[str]:
        """Commands whose root is the tree have the host's directories bound over it."""
        fixed = anchor(pattern)
        for route in self._vfs.table.routes:
            if route.kind == "system" and (fixed + "/").startswith(os.fsdecode(route.prefix)):
                return [
                    f"pattern {pattern!r} of [{rule}]: commands run in the tree see the host's {fixed} as it is; "
                    f"there the rule holds for tools and the mount only"
                ]
        return []


def of_policy(policy: Policy) -> list[str]:
    """What can be said of rules without a tree: conflicts, and names with a dot that a pattern leaves out."""
    found = [str(conflict) for conflict in policy.conflicts()]
    for rule in policy.rules:
        for pattern in rule.paths:
            more = blind_spot(pattern)
            if rule.mode == "allow" or more is None:
                continue
            hidden = anchor(pattern).rstrip("/") + "/.x"
            if any(policy.judge(operation, hidden) != MODES[rule.mode] for operation in rule.operations):
                found.append(
                    f"pattern {pattern!r} of [{rule}] leaves out names that begin with a dot; {more!r} has them"
                )
    return found
