"""The engines that move requests between the kernel and the FUSE door, by name."""

from __future__ import annotations

import importlib.util

from vfsd.doors.engines.base import Engine, Options
from vfsd.doors.engines.native.transport import abort, abort_file, is_dead, mounted, unmount

__all__ = ["NAMES", "Engine", "Options", "abort", "abort_file", "choose", "is_dead", "mounted", "unmount"]

NAMES = ("auto", "native", "pyfuse3")


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
