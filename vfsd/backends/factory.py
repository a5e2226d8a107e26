"""Objects made by name: ``factory:module:function``, called without arguments."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from vfsd.backends.remote import RemoteError


def build(location: str) -> Any:
    """What the function that ``factory:MODULE:FUNCTION`` names returns; RemoteError says what is wrong with it."""
    _, module_name, name = location.split(":", 2)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:
        raise RemoteError(f"{location}: cannot import {module_name}: {exc}") from exc
    function = getattr(module, name, None)
    if not callable(function):
        raise RemoteError(f"{location}: {module_name} has no function {name!r}")
    try:
        made = function()
    except (Exception, SystemExit) as exc:
        raise RemoteError(f"{location} failed: {type(exc).__name__}: {exc}") from exc
    if made is None or inspect.isawaitable(made):
        raise RemoteError(f"{location} returned {type(made).__name__}, which is no object to use")
    return made
