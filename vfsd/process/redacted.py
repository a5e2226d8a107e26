"""What may be shown of a status, a configuration and a log to somebody who must not see names, texts or secrets.

Owns what is left. The rule: what is not known to be harmless is left out, whatever it looks like. Must not know where
things come from.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

HIDDEN = "(left out)"

_STATUS = frozenset((
    "name", "thread", "engine", "version", "pid", "started", "uptime", "state", "read_only", "allow_other",
    "activated", "log_level", "log_format", "counters", "operations", "kernel", "connections", "uploading", "rules",
    "approvals"
))  # fmt: skip
_ROUTE = frozenset(("prefix", "kind", "counters", "native"))
_WORDS = frozenset((
    "name", "thread", "engine", "log_level", "log_format", "kind", "profile", "mode", "operations", "on_failure"
))  # fmt: skip
"""Keys of a configuration whose texts are words of ours, or are said to be shown."""

_KEYS = _WORDS | frozenset((
    "read_only", "allow_other", "root_squash", "uid_map", "gid_map", "routes", "location", "factory", "namespace",
    "set", "native", "checkpoints", "every_calls", "every_execute", "keep", "audit", "enabled", "max_bytes",
    "max_age", "reads", "rules", "paths", "rules_options", "hide", "approval_seconds", "hooks", "call", "seconds",
    "quotas", "bytes", "files", "execute", "limits", "memory", "processes", "cpu_seconds", "open_files", "env",
    "pass_env", "metrics", "socket", "port"
))  # fmt: skip
_TEXT = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ([A-Z]+) ([\w.]+):(\d+): ?(.*)")
_FRAME = re.compile(
    r'File "(?P<a>[^"]+)", line (?P<b>\d+), in (?P<c>[\w<>.]+)|(?P<d>/.*):(?P<e>\d+) in (?P<f>[\w<>.]+)'
)
_CLASS = re.compile(r"([A-Za-z_][\w.]*)(:|$)")
_HEAD = ("Traceback (most recent call last):", "Exception Group Traceback (most recent call last):")
_STACK = re.compile(r"task (vfsd[\w.<>]*|trio[\w.<>]*|<init>)|thread [\w -]+")
_STACKS = "all stacks:"
_LOGS = frozenset(["debug", "info", "warning", "error", "exception", "critical", "makeRecord"])
_LIBRARIES = frozenset(["vfsd", "trio", "sqlite3", "msgpack", "psycopg", "obstore", "pyfuse3", "json"])


def status(row: dict[str, Any]) -> dict[str, Any]:
    """A mount's status with numbers, settings and the routes' prefixes; no paths of the host, no texts of others."""
    kept = {key: row[key] for key in _STATUS if key in row}
    kept["routes"] = [
        {key: route[key] for key in _ROUTE if key in route} | {"works": "problem" not in route}
        for route in row.get("routes", [])
    ]
    return kept


def config(table: dict[str, Any]) -> dict[str, Any]:
    """A parsed vfsd.toml: numbers and switches, the routes' prefixes, and texts only where they are words of ours."""
    return {key if key in _KEYS else HIDDEN: _value(key, value) for key, value in table.items()}


def _value(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        if key in ("env", "set"):
            return f"({len(value)} left out)"
        if key in ("routes", "quotas"):
            return {prefix: _value("", body) for prefix, body in value.items()}
        return config(value)
    if isinstance(value, list):
        if key in _WORDS or all(isinstance(one, dict) for one in value):
            return [_value(key, one) for one in value]
        return f"({len(value)} left out)"
    if isinstance(value, (bool, int, float)):
        return value
    return value if key in _WORDS and re.fullmatch(r"[\w.@-]{1,64}", str(value)) else HIDDEN


def log(lines: Iterable[str]) -> Iterator[str]:
    """For each line its time, level and the place in our source that wrote it, with its text as it stands there.

    Of what was said beyond that: the places and classes of exceptions, and stacks. ``lines`` are text or JSON.
    """
    left_out = 0
    stacks = trace = False
    for line in _plain(lines):
        found = _TEXT.fullmatch(line)
        if found is not None:
            if left_out:
                yield f"  ({left_out} lines left out)"
            left_out = 0
            time, level, logger, number, message = found.groups()
            template = template_of(logger, int(number))
            stacks, trace = message == _STACKS and template is not None, False
            where = "(not ours)" if template is None else f"{logger}:{number} {template}".replace("\n", "\\n")
            yield f"{time} {level} {where}"
            continue
        bare = line.lstrip(" |+-")
        frame = _FRAME.fullmatch(bare)
        if bare in _HEAD:
            trace = True
            yield "  Traceback"
        elif frame is not None and (stacks or trace):
            path, number, name = frame.group("a", "b", "c") if frame["a"] else frame.group("d", "e", "f")
            place = _source(path)
            yield f"  {place}:{number} in {name}" if place else "  (a place that is not ours)"
        elif stacks and _STACK.fullmatch(bare):
            yield f"  {bare}"
        elif trace and (one := _CLASS.match(bare)) is not None and _is_exception(one[1]):
            yield f"  {one[1]}"
            trace = False
        else:
            left_out += 1
    if left_out:
        yield f"  ({left_out} lines left out)"


def _plain(lines: Iterable[str]) -> Iterator[str]:
    """Lines of JSON as the same ones of text."""
    for line in lines:
        if not line.startswith("{"):
            yield line
            continue
        try:
            entry = json.loads(line)
            time = entry["time"].replace("T", " ").replace(".", ",")[:23]
            text = f"{entry['message']}\n{entry.get('exception', '')}".rstrip("\n")
            yield from f"{time} {entry['level'].upper()} {entry['logger']}:{entry['line']}: {text}".split("\n")
        except (ValueError, KeyError, AttributeError, TypeError):
            yield ""


@cache
def _calls(module: str) -> list[tuple[int, int, str]]:
    """(first line, last line, text) of what a module of ours writes into the log."""
    if not module.startswith("vfsd."):
        return []
    try:
        spec = importlib.util.find_spec(module)
        tree = ast.parse(Path(spec.origin).read_text()) if spec is not None and spec.origin else ast.Module([], [])
    except (ImportError, OSError, SyntaxError, ValueError):
        return []
    return [
        (node.lineno, node.end_lineno or node.lineno, text)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOGS
        for text in [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)][:1]
    ]


def template_of(logger: str, line: int) -> str | None:
    """The text that line ``line`` of a module logs, before anything is put into it; None for what is not ours."""
    return next((text for begin, end, text in _calls(logger) if begin <= line <= end), None)


def _source(path: str) -> str | None:
    """The end of the path of a source file of ours, of a library or of Python; None for others."""
    here = Path(__file__).parents[2]
    libraries = [place for place in sys.path if place.endswith("-packages")]
    for top, inside in (
        (here, here / "vfsd"),
        (here, here / "agenttools"),
        *((Path(place), Path(place)) for place in (*libraries, os.path.dirname(os.__file__))),
    ):
        if path.startswith(f"{inside}/"):
            return path.removeprefix(f"{top}/")
    return None


def _is_exception(name: str) -> bool:
    top, _, rest = name.partition(".")
    return top in _LIBRARIES if rest else isinstance(getattr(builtins, name, None), type)
