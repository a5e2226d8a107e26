"""Whether the kernel may open files by itself, without a request at each open(2) and close(2), and who asks then.

It can't be taken back while mounted, so it is decided by the configuration that a mount starts with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vfsd.config import Config
from vfsd.process.mountpoint import mounts
from vfsd.process.openfiles import open_files
from vfsd.statevolume import StateVolume

_ALONE = ("state", "memory")


def why_heard(config: Config, engine: str) -> str | None:
    """What a mount of ``config`` has to hear of opens and closes for; None: nothing."""
    others = [f"route {route.prefix} is of kind {route.kind}" for route in config.routes if route.kind not in _ALONE]
    reasons = [
        *(['opens = "heard"'] if config.opens == "heard" else []),
        *([f"engine {engine}"] if engine != "native" else []),
        *others[:1],
        *(["rules"] if config.rules.rules else []),
        *(["hooks"] if config.rules.hooks else []),
        *(["the audit of reads"] if config.audit.enabled and config.audit.reads else []),
        *(["root_squash"] if config.root_squash else []),
    ]
    return reasons[0] if reasons else None


def programs(mountpoint: str) -> dict[int, bool]:
    """What programs have open of the mount there, asked of the kernel: inos, True where for writing."""
    devs = [mount.dev for mount in mounts() if mount.path == mountpoint]
    return open_files(devs[-1]) if devs else {}


def tell_of_programs(volumes: Iterable[object], ask: Callable[[], dict[int, bool]]) -> None:
    """Have the state volumes among these ask for what programs have open, where nobody tells of opens."""
    for volume in volumes:
        if isinstance(volume, StateVolume):
            volume.programs = ask
