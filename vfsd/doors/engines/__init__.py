"""The engines that move requests between the kernel and the FUSE door, by name."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

from vfsd.doors.engines.base import Engine, Options
from vfsd.doors.engines.native.transport import abort, abort_file, is_dead, mounted, unmount

__all__ = ["NAMES", "Engine", "Options", "abort", "abort_file", "choose", "clock", "is_dead", "mounted", "unmount"]

NAMES = ("auto", "native", "pyfuse3")

_CLOCK_REALTIME_COARSE = 5
"""From linux/time.h, which Python has no name for."""


def choose(name: str) -> tuple[Engine, str]:
    """(a fresh engine, why this one); ValueError for an unknown name, ImportError where pyfuse3 is not installed."""
    if name == "auto":
        engine, _ = choose("native")
        return engine, "auto: native needs nothing but the kernel and is the faster one"
    if name == "native":
        from vfsd.doors.engines.native.engine import NativeEngine

        return NativeEngine(), "asked for"
    if name == "pyfuse3":
        if importlib.util.find_spec("pyfuse3") is None:
            raise ImportError("the pyfuse3 engine needs the package pyfuse3: pip install pyfuse3, or --engine native")
        from vfsd.doors.engines.pyfuse3 import Pyfuse3Engine

        return Pyfuse3Engine(), "asked for"
    raise ValueError(f"unknown engine {name!r}; one of {', '.join(NAMES)}")


def clock(name: str) -> Callable[[], int]:
    """The clock, in nanoseconds, that files are stamped by with this engine.

    The kernel sends the time of its last tick for a touch (UTIME_NOW), and pyfuse3 does not hand on that it means now:
    by a finer clock, what is touched would be older than what was made a moment before. Routes that wait have the finer
    one all the same, since others tell by a file's time whether it was made anew.
    """
    return _last_tick if name == "pyfuse3" else time.time_ns


def _last_tick() -> int:
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
