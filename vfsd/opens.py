"""Whether the kernel may open files by itself, without a request at each open(2) and close(2), and who asks then.

It can't be taken back while mounted, so it is decided by the configuration that a mount starts with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from vfsd.config import Config
from vfsd.doors.engines import mounted
from vfsd.process.openfiles import open_files
from vfsd.statevolume import StateVolume

_ALONE = ("state", "memory")

Programs = Callable[[], Mapping[int, bool]]
"""What tells which inos programs have open, True where for writing."""


def why_heard(config: Config, engine: str) -> str | None:
    """What a mount of ``config`` has to hear of opens and closes for; None: nothing."""
    return next(_reasons(config, engine), None)


def _reasons(config: Config, engine: str) -> Iterator[str]:
    if config.opens == "heard":
        yield 'opens = "heard"'
    if engine != "native":
        yield f"engine {engine}"
    for route in config.routes:
        if route.kind not in _ALONE:
            yield f"route {route.prefix} is of kind {route.kind}"
    if config.rules.rules:
        yield "rules"
    if config.rules.hooks:
        yield "hooks"
    if config.audit.enabled and config.audit.reads:
        yield "the audit of reads"
    if config.root_squash:
        yield "root_squash"


def programs(mountpoint: str) -> dict[int, bool]:
    """What programs have open of the mount there, asked of the kernel: inos, True where for writing."""
    device = mounted(mountpoint)
    return {} if device is None else open_files(device)


def tell_of_programs(volumes: Iterable[object], ask: Programs | None) -> None:
    """Have the state volumes among these ask for what programs have open; None where we hear of all opens."""
    for volume in volumes:
        if isinstance(volume, StateVolume):
            volume.programs = ask
