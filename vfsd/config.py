"""What a mount should be: vfsd.toml, the command line's ``--route`` values, and the directories they imply.

Owns the reading of the environment and of configuration files; nothing below the daemon reads either. Must not
know trio, volumes or doors: it yields plain values. A mistake is a ``ConfigError`` whose text names the file and
the line, because the person who reads it has to find the place.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vfsd import executeconfig, metricsconfig
from vfsd.backends.remote import RemoteError, check_place
from vfsd.core import ids
from vfsd.core.types import NAME_MAX
from vfsd.executeconfig import DEFAULT_EXECUTE, ExecutePolicy
from vfsd.metricsconfig import NO_METRICS, MetricsPolicy
from vfsd.rules.config import NO_RULES, RulesSpec, with_tables

KINDS = ("state", "memory", "local", "store", "blob", "backend")
"""The kinds of route this version serves."""

NAMESPACE = ("filesystem",)
"""The namespace of a store route that names none."""

ENGINES = ("auto", "native", "pyfuse3")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
_CHOICES = {"engine": ENGINES, "opens": ("auto", "heard"), "log_level": LOG_LEVELS, "log_format": LOG_FORMATS}
MAX_CONFIG = 1 << 20
"""Bytes read of a configuration file; a longer one is a mistake, not a configuration."""


class ConfigError(Exception):
    """One sentence that says what is wrong and where."""


class UsageError(ConfigError):
    """The same of what was typed on a command line."""


@dataclass(frozen=True)
class RouteSpec:
    """``prefix`` begins and ends with ``/``; ``location`` is an absolute host path, or None where there is none.

    ``uri`` is the place of a store, blob or backend route that is no directory. ``namespace`` is a store's template,
    ``values`` what its ``{names}`` stand for. ``home`` is where the modules of factories are looked for. ``native``: a
    command may have a local route's directory itself, where nothing that it does there is to be seen.
    """

    prefix: str
    kind: str
    location: Path | None
    uri: str = ""
    namespace: tuple[str, ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    home: Path | None = None
    native: bool = False


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are taken unasked, and how many of those stay.

    ``every_calls``: before each so many tool calls that change something, 0 for never. ``every_execute``: before each
    command that a tool runs. ``keep`` counts all that nobody asked for.
    """

    every_calls: int = 0
    every_execute: bool = True
    keep: int = 50


@dataclass(frozen=True)
class AuditPolicy:
    """Whether changes and refusals are recorded, and how much is kept: ``max_bytes``, and ``max_age`` in seconds.

    ``reads``: what only looks is recorded too. ``asked``: it is on because the configuration says so.
    """

    enabled: bool = True
    max_bytes: int = 64 << 20
    max_age: int = 30 * 86400
    reads: bool = False
    asked: bool = False


@dataclass(frozen=True)
class Given:
    """What the command line put over the file, which it does again whenever the file is read anew."""

    routes: tuple[RouteSpec, ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    overrides: tuple[tuple[str, Any], ...] = ()


NOTHING_GIVEN = Given()


@dataclass(frozen=True)
class Config:
    """A whole mount. ``routes`` always has one for ``/``; ``source`` is the file it was read from."""

    name: str = "default"
    thread: str = "default"
    engine: str = "auto"
    opens: str = "auto"
    read_only: bool = False
    allow_other: bool = False
    root_squash: bool = False
    uid_map: tuple[ids.Range, ...] = ()
    gid_map: tuple[ids.Range, ...] = ()
    log_level: str = "info"
    log_format: str = "text"
    routes: tuple[RouteSpec, ...] = ()
    checkpoints: CheckpointPolicy = CheckpointPolicy()
    audit: AuditPolicy = AuditPolicy()
    metrics: MetricsPolicy = NO_METRICS
    rules: RulesSpec = NO_RULES
    execute: ExecutePolicy = DEFAULT_EXECUTE
    source: Path | None = None
    given: Given = NOTHING_GIVEN


_SCALARS: dict[str, type] = {
    **dict.fromkeys(("name", "thread", "engine", "opens"), str),
    "read_only": bool,
    "allow_other": bool,
    "root_squash": bool,
    "uid_map": list,
    "gid_map": list,
    "log_level": str,
    "log_format": str,
}
_WORDS = {bool: "true or false", str: "a string", list: "a list of strings"}
_ROUTE_KEYS = ("kind", "location", "factory", "namespace", "set", "native")
_POLICIES: dict[str, dict[str, type]] = {
    "checkpoints": {"every_calls": int, "every_execute": bool, "keep": int},
    "audit": {"enabled": bool, "max_bytes": int, "max_age": int, "reads": bool},
    "rules_options": {"hide": bool, "approval_seconds": int},
}
_LEAST = {"keep": 1, "max_bytes": 1 << 16, "max_age": 60, "approval_seconds": 1}
_TABLES = ("routes", "rules", "hooks", "quotas", "execute", "metrics", *_POLICIES)


def state_home(env: Mapping[str, str] | None = None) -> Path:
    """``$XDG_STATE_HOME/vfsd``, by default ``~/.local/state/vfsd`` (XDG Base Directory Specification 0.8)."""
    return _base("XDG_STATE_HOME", "~/.local/state", env) / "vfsd"


def _base(variable: str, default: str, env: Mapping[str, str] | None) -> Path:
    base = (os.environ if env is None else env).get(variable, "")
    # The specification: a path that is not absolute is to be ignored.
    base = base if base.startswith("/") else os.path.expanduser(default)
    if base.startswith("~"):
        raise ConfigError(f"there is no home directory: set HOME, or {variable}")
    return Path(base)


def config_home(env: Mapping[str, str] | None = None) -> Path:
    """``$XDG_CONFIG_HOME/vfsd``, by default ``~/.config/vfsd``: the configurations that services and mount(8) use."""
    return _base("XDG_CONFIG_HOME", "~/.config", env) / "vfsd"


def mount_home(config: Config) -> Path:
    """Where a mount's log is, whatever its routes."""
    return state_home() / config.name


def thread_home(name: str, thread: str) -> Path:
    """Where the state routes of ``thread`` live that name no location."""
    return state_home() / name / "threads" / thread


def audit_home(name: str, thread: str) -> Path:
    """Where the record is of who changed what in ``thread``."""
    return thread_home(name, thread) / "audit"


def check_word(what: str, value: str) -> str:
    """``value`` if it can be a file name here and part of a socket's path (108 bytes in all); else ConfigError."""
    good = value and len(value) <= 64 and all(c.isalnum() or c in "._-@" for c in value) and value[0] not in ".-"
    if not good:
        raise ConfigError(
            f"{what} {value!r}: use 1 to 64 letters, digits, '.', '_', '-' or '@', the first one a letter or digit"
        )
    return value


def _choice(what: str, value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise ConfigError(f"{what} {value!r} is unknown: use {', '.join(allowed)}")
    return value


def _prefix(text: str) -> str:
    parts = [p for p in text.split("/") if p]
    if not text.startswith("/") or "." in parts or ".." in parts or "\0" in text:
        raise ConfigError(f"route prefix {text!r} must be an absolute path without '.' and '..'")
    if any(len(os.fsencode(part)) > NAME_MAX for part in parts):
        raise ConfigError(f"route prefix {text!r} has a name of more than {NAME_MAX} bytes")
    if parts and parts[0] in (".vfsd", ".checkpoints"):
        raise ConfigError(f"route prefix {text!r}: /{parts[0]} is vfsd's own: choose another")
    return "/" + "".join(p + "/" for p in parts)


def _route(
    prefix: str,
    kind: str,
    location: str | None,
    relative_to: Path,
    namespace: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
) -> RouteSpec:
    """A checked route; its location made absolute, or left None for the default to be filled in by ``_complete``."""
    prefix = _prefix(prefix)
    _choice(f"route {prefix}: kind", kind, KINDS)
    if "\0" in (location or "") or "\0" in str(relative_to):
        raise ConfigError(f"route {prefix}: location {location!r} has a NUL")
    if kind == "local" and not location:
        raise ConfigError(f"route {prefix}: kind 'local' needs a location, the host directory it shows")
    if kind == "memory" and location:
        raise ConfigError(f"route {prefix}: kind 'memory' has no location")
    if kind == "backend" and not location:
        raise ConfigError(f"route {prefix}: kind 'backend' needs a factory, factory:MODULE:FUNCTION")
    if kind != "store" and (namespace or values):
        raise ConfigError(f"route {prefix}: only a store has a namespace")
    uri = ""
    if kind in ("store", "backend") or (kind == "blob" and ":" in (location or "").partition("/")[0]):
        uri, location = location or "", None
        if uri.startswith("sqlite:") and uri != "sqlite:":
            uri = "sqlite:" + os.path.abspath(relative_to / os.path.expanduser(uri.partition(":")[2]))
    if uri:
        try:
            check_place(kind, uri)
        except RemoteError as exc:
            raise ConfigError(f"route {prefix}: {exc}") from None
    path = Path(os.path.abspath(relative_to / os.path.expanduser(location))) if location else None
    home = relative_to if uri.startswith("factory:") else None
    return RouteSpec(prefix, kind, path, uri, tuple(namespace), tuple((values or {}).items()), home)


def parse_route(text: str, cwd: Path | None = None) -> RouteSpec:
    """``PREFIX=KIND[:LOCATION][#NAMESPACE]`` of the command line; a relative location is relative to ``cwd``.

    A store's namespace is its components with slashes between.
    """
    prefix, eq, rest = text.partition("=")
    if not eq:
        raise UsageError(f"--route {text!r}: write it as PREFIX=KIND[:LOCATION], such as /work/=local:~/project")
    kind, _, location = rest.partition(":")
    namespace: list[str] = []
    if kind == "store" and "#" in location:
        location, _, fragment = location.partition("#")
        namespace = fragment.split("/")
    try:
        return _route(prefix, kind, location or None, cwd or Path.cwd(), namespace)
    except ConfigError as exc:
        raise UsageError(str(exc)) from None


def parse_set(text: str) -> tuple[str, str]:
    """``NAME=VALUE`` of the command line."""
    name, eq, value = text.partition("=")
    if not eq or not name.isidentifier():
        raise UsageError(f"--set {text!r}: write it as NAME=VALUE, such as user=alice")
    return name, value


def _line_of(text: str, *keys: str | int) -> int:
    """The line (from 1) where the statement begins that first defines the key path ``keys`` in TOML ``text``.

    tomllib tells no lines. The shortest run of lines that parses and has the key ends with the statement that
    defines it; that statement begins after the longest shorter run that parses.
    """
    lines = text.splitlines(keepends=True)
    begin = 1
    for n in range(1, len(lines) + 1):
        try:
            value: Any = tomllib.loads("".join(lines[:n]))
        except tomllib.TOMLDecodeError:
            continue
        for key in keys:
            if isinstance(key, int):
                value = value[key] if isinstance(value, list) and key < len(value) else None
            else:
                value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return begin
        begin = n + 1
    return 1


def load(path: Path) -> Config:
    """The configuration in file ``path``, routes as written (``complete`` adds the defaults); ConfigError if wrong."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from None
    if len(raw) > MAX_CONFIG:
        raise ConfigError(f"{path}: larger than {MAX_CONFIG} bytes")
    try:
        text = raw.decode()
        table = tomllib.loads(text)
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8") from None
    except tomllib.TOMLDecodeError as exc:
        at = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)\Z", str(exc))
        line = text.count("\n") + 1 if at is None or at[1] is None else int(at[1])
        raise ConfigError(f"{path}:{line}: {str(exc)[: at.start()] if at else exc}") from None

    def wrong(message: str, *keys: str | int) -> ConfigError:
        return ConfigError(f"{path}:{_line_of(text, *keys)}: {message}")

    for key, value in table.items():
        if key in _TABLES:
            continue
        if key not in _SCALARS:
            raise wrong(f"unknown key {key!r} (known: {', '.join((*_SCALARS, *_TABLES))})", key)
        if not isinstance(value, _SCALARS[key]):
            raise wrong(f"{key} must be {_WORDS[_SCALARS[key]]}", key)
        try:
            table[key] = _scalar(key, value)
        except ConfigError as exc:
            raise wrong(str(exc), key) from None
    scalars: dict[str, Any] = {key: table[key] for key in _SCALARS if key in table}
    routes: dict[str, RouteSpec] = {}
    route_tables = table.get("routes", {})
    if not isinstance(route_tables, dict):
        raise wrong('routes must be tables such as [routes."/work/"]', "routes")
    for prefix, body in route_tables.items():
        if not isinstance(body, dict):
            raise wrong(f"unknown key {prefix!r} in [routes]", "routes", prefix)
        for key, value in body.items():
            if key not in _ROUTE_KEYS:
                known = ", ".join(_ROUTE_KEYS)
                raise wrong(f"unknown key {key!r} in route {prefix!r} (known: {known})", "routes", prefix, key)
            must = _not_of_kind(key, value)
            if must is not None:
                raise wrong(f"{key} must be {must}", "routes", prefix, key)
        try:
            if "kind" not in body:
                raise ConfigError(f"route {prefix!r} has no kind")
            place = body.get("location", f"factory:{body['factory']}" if "factory" in body else None)
            home = path.absolute().parent
            spec = _route(prefix, body["kind"], place, home, body.get("namespace", ()), body.get("set"))
            if body.get("native"):
                if spec.kind != "local":
                    raise ConfigError(f"route {spec.prefix}: only a local route can be native")
                spec = replace(spec, native=True)
            if spec.prefix in routes:
                raise ConfigError(f"route {spec.prefix!r} is there twice")
        except ConfigError as exc:
            raise wrong(str(exc), "routes", prefix) from None
        routes[spec.prefix] = spec
    config = Config(
        **scalars,
        routes=tuple(routes.values()),
        source=path.absolute(),
        **_policies(table, wrong, path.absolute().parent),
    )
    return replace(config, rules=with_tables(config.rules, table, wrong, path.absolute()))


def _not_of_kind(key: str, value: Any) -> str | None:
    """What a route's value must be, None when it is."""
    if key == "namespace":
        good = isinstance(value, list) and value and all(isinstance(part, str) for part in value)
        return None if good else "a list of strings"
    if key == "set":
        good = isinstance(value, dict) and all(isinstance(part, str) for part in value.values())
        return None if good else "a table of strings"
    if key == "native":
        return None if isinstance(value, bool) else "true or false"
    return None if isinstance(value, str) else "a string"


def _policies(table: dict[str, Any], wrong: Callable[..., ConfigError], home: Path) -> dict[str, Any]:
    """The tables that hold settings of one matter each, as fields of Config."""
    audit = _settings("audit", table, wrong)
    return {
        "checkpoints": CheckpointPolicy(**_settings("checkpoints", table, wrong)),
        "audit": AuditPolicy(**audit, asked=bool(audit.get("enabled") or audit.get("reads"))),
        "metrics": metricsconfig.read(table, wrong, home),
        "rules": RulesSpec(**_settings("rules_options", table, wrong)),
        "execute": executeconfig.read(table.get("execute", {}), wrong),
    }


def _settings(name: str, table: dict[str, Any], wrong: Callable[..., ConfigError]) -> dict[str, Any]:
    """The checked table ``[name]``."""
    settings, known = table.get(name, {}), _POLICIES[name]
    if not isinstance(settings, dict):
        raise wrong(f"{name} must be a table: [{name}]", name)
    for key, value in settings.items():
        if key not in known:
            raise wrong(f"unknown key {key!r} in [{name}] (known: {', '.join(known)})", name, key)
        if type(value) is not known[key]:
            raise wrong(f"{key} must be {'true or false' if known[key] is bool else 'a number'}", name, key)
        number: Any = value
        if known[key] is int and number < _LEAST.get(key, 0):
            raise wrong(f"{key} must be at least {_LEAST.get(key, 0)}", name, key)
    return settings


def _scalar(key: str, value: Any) -> Any:
    """The checked value of a key."""
    if key in ("name", "thread"):
        check_word(key, value)
    elif key in _CHOICES:
        _choice(key, value, _CHOICES[key])
    elif key in ("uid_map", "gid_map"):
        try:
            value = tuple(ids.parse(str(text)) for text in value)
            ids.check(value)
        except ValueError as exc:
            raise ConfigError(f"{key} (--map-{key[:3]}): {exc}") from None
    return value


def complete(
    config: Config, routes: Iterable[RouteSpec] = (), values: Mapping[str, str] | None = None, **overrides: Any
) -> Config:
    """``config`` with the command line's ``overrides`` (None: not given) and ``routes`` put over it, and the defaults.

    A missing ``/`` becomes a state route, with a store at ``/memories/`` and blobs at ``/blobs/`` that all mounts of
    this user share; a state route without a location lives under the thread's directory. ``values`` are for the
    namespaces of stores. Raises ConfigError for a bad value or two routes on one prefix.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    word = Given(tuple(routes), tuple((values or {}).items()), tuple(given.items()))
    try:
        config = replace(config, **{key: _scalar(key, value) for key, value in given.items()}, given=word)
    except ConfigError as exc:
        raise UsageError(str(exc)) from None
    table = {spec.prefix: spec for spec in config.routes}
    seen: set[str] = set()
    for spec in word.routes:
        if spec.prefix in seen:
            raise UsageError(f"--route {spec.prefix} is given twice")
        seen.add(spec.prefix)
        table[spec.prefix] = spec
    if "/" not in table:
        table["/"] = RouteSpec("/", "state", None)
        table.setdefault("/memories/", RouteSpec("/memories/", "store", None))
        table.setdefault("/blobs/", RouteSpec("/blobs/", "blob", None))
    table = {prefix: finished(spec, config, values or {}) for prefix, spec in table.items()}
    check_locations(table.values())
    return replace(config, routes=tuple(table[p] for p in sorted(table)))


def again(config: Config) -> Config:
    """``config`` as its file has it now, the command line's word put over it as before. ConfigError as ``load``."""
    assert config.source is not None
    given = config.given
    return complete(load(config.source), given.routes, dict(given.values), **dict(given.overrides))


def finished(spec: RouteSpec, config: Config, values: Mapping[str, str]) -> RouteSpec:
    """A route with the defaults of its kind filled in."""
    prefix, home = spec.prefix, thread_home(config.name, config.thread)
    if spec.kind == "state" and spec.location is None:
        own = home / "root" if prefix == "/" else home / "routes" / quote(prefix.strip("/"), safe="")
        return replace(spec, location=own)
    if spec.kind == "store":
        known = dict(spec.values) | dict(values)
        return replace(
            spec,
            uri=spec.uri or f"sqlite:{state_home() / 'memories.db'}",
            namespace=spec.namespace or NAMESPACE,
            values=tuple(known.items()),
        )
    if spec.kind == "blob" and spec.location is None and not spec.uri:
        return replace(spec, location=state_home() / "blobs")
    return spec


def check_locations(routes: Iterable[RouteSpec]) -> None:
    """No state volume may be another route's location, lie inside one, or hold one: both would write the same files.

    ConfigError.
    """
    placed = [spec for spec in routes if spec.location is not None]
    for i, one in enumerate(placed):
        for other in placed[i + 1 :]:
            if "state" not in (one.kind, other.kind):
                continue
            a, b = os.path.realpath(str(one.location)), os.path.realpath(str(other.location))
            if a == b or a.startswith(b + "/") or b.startswith(a + "/"):
                raise ConfigError(f"routes {one.prefix} and {other.prefix} both use {one.location}")
