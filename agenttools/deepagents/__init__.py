"""The tree as the backend of a Deep Agents agent.

    from agenttools.deepagents import VfsBackend
    agent = create_deep_agent(model=..., backend=VfsBackend())

Importing it says so when Deep Agents is missing or too old.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

OLDEST = (0, 7, 21)
"""The oldest deepagents this is tested with; an older one has other result types."""


def _check() -> None:
    wanted = f"agenttools.deepagents needs deepagents {'.'.join(map(str, OLDEST))} or later"
    try:
        found = version("deepagents")
    except PackageNotFoundError:
        raise ImportError(f"{wanted}, which is not installed: pip install 'vfsd[deepagents]'") from None
    numbers = tuple(int(part) if part.isdigit() else 0 for part in found.split("+")[0].split(".")[:3])
    if numbers < OLDEST:
        raise ImportError(f"{wanted}; this is {found}: pip install -U deepagents")


_check()

# ruff: noqa: E402 - what these import may be missing in older versions
from agenttools.deepagents.backend import VfsBackend
from agenttools.deepagents.files import FilesBridge
from agenttools.deepagents.rules import create_deep_agent
from agenttools.deepagents.timetravel import TimeTravel

__all__ = ["FilesBridge", "TimeTravel", "VfsBackend", "create_deep_agent"]
