"""Local routes that commands may have as the host's own directory: which ones, and why the others not.

A command in the root view then works in the host directory itself, at the host's speed, and past the daemon: no rule,
hook or record sees what it does there. So it is given only where there is nothing to see. Must not know sockets, nor
how a directory is bound.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vfsd.config import Config
from vfsd.core.policy import DENY, INTERRUPT, OPERATIONS
from vfsd.routes import Route, RouteTable
from vfsd.rules.book import Rulebook
from vfsd.system import STUB_DIRECTORIES, SYSTEM_DIRECTORIES


class NativeRoutes:
    """Those of ``config`` with ``native = true``; ``private`` gives the daemon's own files."""

    def __init__(
        self, config: Config, table: RouteTable, rulebook: Rulebook, private: Callable[[], Sequence[Path]]
    ) -> None:
        self._table = table
        self._rulebook = rulebook
        self._private = private
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go by this configuration from now on."""
        self._config = config
        self._wanted = {os.fsencode(spec.prefix): str(spec.location) for spec in config.routes if spec.native}

    def _asked(self, route: Route) -> bool:
        return route.kind == "local" and self._wanted.get(route.prefix) == route.location

    def binds(self) -> list[dict[str, Any]]:
        """What may be bound now: ``path`` in the tree, ``location`` on the host, ``dev`` and ``ino`` of the latter."""
        found = []
        for route in self._table.routes:
            if self._asked(route) and self._reason(route) is None:
                try:
                    st = os.stat(route.location)
                except OSError:
                    continue
                location = os.fsencode(route.location)
                found.append(
                    {"path": route.prefix.rstrip(b"/"), "location": location, "dev": st.st_dev, "ino": st.st_ino}
                )
        return found

    def told(self, route: Route) -> dict[str, Any]:
        """What status says of a route: ``native``, and a ``notice`` about what that means or why it is not so."""
        if not self._asked(route):
            return {}
        reason = self._reason(route)
        if reason is not None:
            return {"native": False, "notice": f"not native: {reason}; commands reach it through the mount"}
        if self._config.audit.enabled:
            return {"native": True, "notice": "native: what commands change there is not in the audit log"}
        return {"native": True}

    def _reason(self, route: Route) -> str | None:
        """Why a route can't be native now."""
        return next(self._reasons(os.fsdecode(route.prefix), route.location), None)

    def _reasons(self, prefix: str, location: str) -> Iterator[str]:
        config = self._config
        top = prefix.split("/")[1]
        if not top:
            yield "the root holds the system's directories too"
        if top in (*SYSTEM_DIRECTORIES, *STUB_DIRECTORIES):
            yield f"commands have the host's own /{top}"
        if config.read_only:
            yield "the mount is read-only"
        if config.root_squash or config.uid_map or config.gid_map:
            yield "ids on the host are others than in the mount (root_squash, uid_map, gid_map)"
        for layer in self._rulebook.guard.layers.values():
            for operation in OPERATIONS:
                for verdict in (DENY, INTERRUPT):
                    rule = layer.policy.below(operation, prefix.rstrip("/"), verdict)
                    if rule is not None:
                        yield f"the rule [{rule}] could match in it"
        if self._rulebook.spec.hooks:
            yield f"the hook {self._rulebook.spec.hooks[0].call} is to see each change"
        if config.audit.enabled and config.audit.asked:
            yield "[audit] asks for a record of each change"
        inside = (os.fsdecode(r.prefix) for r in self._table.routes if r.prefix.startswith(os.fsencode(prefix)))
        for other in inside:
            if other != prefix:
                yield f"the route {other} is mounted in it"
        real = os.path.realpath(location)
        for path in map(os.path.realpath, self._private()):
            if path == real or path.startswith(real.rstrip("/") + "/"):
                yield f"it holds vfsd's own files ({path})"
