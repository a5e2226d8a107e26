"""What rules say of a path: the first that matches decides, and what none matches is allowed.

The meaning is that of Deep Agents' ``FilesystemPermission`` (middleware/filesystem.py, 0.7): patterns are wcmatch globs
with braces and ``**``, matched against the whole path; so ``/p/**`` matches neither ``/p`` itself nor names that start
with a dot. Pure: no paths are looked up here, and nothing is remembered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from vfsd.core import globs

READ, WRITE = "read", "write"
OPERATIONS = (READ, WRITE)

ALLOW, INTERRUPT, DENY = 0, 1, 2
"""Verdicts, the stricter the larger."""

MODES = {"allow": ALLOW, "interrupt": INTERRUPT, "deny": DENY}

_WILDCARDS = frozenset("*?[{")

RULES_MAX = 10_000
"""Rules in one list."""


class RuleError(ValueError):
    """A rule that can't be meant; one sentence."""


class Rule(NamedTuple):
    """``operations`` of OPERATIONS, ``paths`` patterns, ``mode`` of MODES; ``origin`` says where it stands."""

    operations: tuple[str, ...]
    paths: tuple[str, ...]
    mode: str = "allow"
    origin: str = ""

    def __str__(self) -> str:
        words = f"{self.mode} {','.join(self.operations)} {' '.join(self.paths)}"
        return f"{words} ({self.origin})" if self.origin else words


class Conflict(NamedTuple):
    """``pattern`` of ``later`` never decides: ``earlier``, of another mode, matches first whatever it matches."""

    earlier: Rule
    later: Rule
    pattern: str
    operation: str

    def __str__(self) -> str:
        return (
            f"conflicting rules: {self.pattern!r} of [{self.later}] never decides a {self.operation}, "
            f"for [{self.earlier}] matches first"
        )


def check_rule(operations: Any, paths: Any, mode: Any = "allow", origin: str = "") -> Rule:
    """A rule from plain values. Raises RuleError with the sentence that says what is wrong."""
    if not _texts(operations) or not set(operations) <= set(OPERATIONS):
        raise RuleError(f"operations must be a list of {' and '.join(map(repr, OPERATIONS))}, not {operations!r}")
    if not _texts(paths):
        raise RuleError(f"paths must be a list of patterns such as '/policies/**', not {paths!r}")
    if not isinstance(mode, str) or mode not in MODES:
        raise RuleError(f"mode {mode!r} is unknown: use {', '.join(MODES)}")
    for pattern in paths:
        _check_pattern(pattern)
    return Rule(tuple(operations), tuple(paths), mode, origin)


def _texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, str) for one in value)


def _check_pattern(pattern: str) -> None:
    parts = pattern.replace("\\", "/").split("/")
    if not pattern.startswith("/"):
        raise RuleError(f"pattern {pattern!r} must start with '/'")
    if ".." in parts or "~" in parts:
        raise RuleError(f"pattern {pattern!r} must not contain '..' or '~'")
    if "\0" in pattern:
        raise RuleError(f"pattern {pattern!r} has a NUL")
    _regexes(pattern)


def _regexes(pattern: str) -> list[str]:
    """The regular expressions a path fully matches one of, if the pattern matches it."""
    try:
        return globs.regexes(pattern)
    except ValueError as exc:
        raise RuleError(f"pattern {pattern!r} is malformed: {exc}") from exc


class _Compiled:
    """The rules that concern one operation as one regular expression, whose alternatives are tried in order."""

    def __init__(self, rules: Sequence[Rule], operation: str) -> None:
        self.rules = {f"r{i}": rule for i, rule in enumerate(rules) if operation in rule.operations}
        alternatives = [
            f"(?P<{name}>{'|'.join(f'(?:{one})' for pattern in rule.paths for one in _regexes(pattern))})"
            for name, rule in self.rules.items()
        ]
        self._match = re.compile("|".join(alternatives)).fullmatch if alternatives else None
        ends = [_ends(pattern) for rule in self.rules.values() for pattern in rule.paths]
        self._any_name = ("", "") in ends
        self._heads = tuple({head for head, _ in ends if head})
        self._tails = tuple({tail for head, tail in ends if not head})

    def decider(self, path: str) -> Rule | None:
        """The first rule that matches. Most names are told apart from all patterns without the expression."""
        if self._match is None:
            return None
        if not self._any_name:
            name = path.rpartition("/")[2]
            if not name.startswith(self._heads) and not name.endswith(self._tails):
                return None
        found = self._match(path)
        return self.rules[str(found.lastgroup)] if found else None


class Policy:
    """A list of rules. Paths are bytes or text, whole, without ``.``, ``..`` and doubled slashes."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(rules)
        if len(self.rules) > RULES_MAX:
            raise RuleError(f"{len(self.rules)} rules: {RULES_MAX} are the most")
        self._compiled = {operation: _Compiled(self.rules, operation) for operation in OPERATIONS}
        self._anchors = [[_certain(pattern) for pattern in rule.paths] for rule in self.rules]
        self._among: dict[tuple[Rule, ...], Policy] = {}
        self.mute = _mute([_ends(pattern) for rule in self.rules for pattern in rule.paths])
        """Whether it is plain to see that no pattern matches a path that ends in a name."""

    def among(self, directory: bytes | str) -> Policy:
        """The rules, with the patterns, that can match an entry of the directory: of its entries it says the same."""
        parts = _parts(directory if isinstance(directory, str) else os.fsdecode(directory))
        left = []
        for rule, anchors in zip(self.rules, self._anchors, strict=True):
            paths = [p for p, at in zip(rule.paths, anchors, strict=True) if _meets(at, parts)]
            if paths:
                left.append(rule._replace(paths=tuple(paths)))
        key = tuple(left)
        if key not in self._among:
            self._among[key] = Policy(left)
        return self._among[key]

    def decider(self, operation: str, path: bytes | str) -> Rule | None:
        """The first rule that matches, None when none does."""
        return self._compiled[operation].decider(path if isinstance(path, str) else os.fsdecode(path))

    def judge(self, operation: str, path: bytes | str) -> int:
        """ALLOW, INTERRUPT or DENY."""
        rule = self.decider(operation, path)
        return ALLOW if rule is None else MODES[rule.mode]

    def concerns(self, operation: str, *verdicts: int) -> bool:
        """Whether any rule can give the operation one of the verdicts."""
        return any(MODES[rule.mode] in verdicts for rule in self._compiled[operation].rules.values())

    def below(self, operation: str, path: bytes | str, verdict: int = DENY) -> Rule | None:
        """A rule of that verdict that could match ``path`` or something below it, whatever rules come before.

        As Deep Agents judges the delete of a directory: a literal pattern also holds for all below it, and a doubt
        counts as a match.
        """
        target = path if isinstance(path, str) else os.fsdecode(path)
        for rule in self._compiled[operation].rules.values():
            if MODES[rule.mode] == verdict and any(_overlaps(pattern, target) for pattern in rule.paths):
                return rule
        return None

    def conflicts(self) -> list[Conflict]:
        """Patterns that never decide because a rule before them, of another mode, takes all they match.

        Found by examples of what the later pattern matches; a pattern that is only partly covered is no conflict.
        """
        found = []
        for at, later in enumerate(self.rules):
            for operation in later.operations:
                for pattern in later.paths:
                    earlier = self._covering(at, operation, pattern)
                    if earlier is not None and earlier.mode != later.mode:
                        found.append(Conflict(earlier, later, pattern, operation))
        return found

    def _covering(self, at: int, operation: str, pattern: str) -> Rule | None:
        examples = _examples(pattern)
        for rule in self.rules[:at]:
            if operation in rule.operations and any(
                pattern == one or all(globs.matches(example, one) for example in examples) for one in rule.paths
            ):
                return rule
        return None


def anchor(pattern: str) -> str:
    """The longest leading directory without wildcards, ``/`` when there is none (Deep Agents' _glob_anchor)."""
    safe: list[str] = []
    for part in _parts(pattern.replace("\\", "/")):
        if _WILDCARDS & set(part):
            break
        safe.append(part)
    return "/" + "/".join(safe)


def _certain(pattern: str) -> list[str]:
    """Names that any path the pattern matches begins with."""
    return [] if "\\" in pattern else _parts(anchor(pattern))


def _ends(pattern: str) -> tuple[str, str]:
    """What each name the pattern matches begins with, or else ends with; both empty when that is not plain to see."""
    last = pattern.rpartition("/")[2]
    if "\\" in pattern or last.count("{") != last.count("}") or last.count("[") != last.count("]"):
        return "", ""
    head = re.split(r"[*?\[{\]}]", last, maxsplit=1)[0]
    return head, "" if head else re.split(r"[*?\[{\]}]", last)[-1]


def _mute(ends: Sequence[tuple[str, str]]) -> Callable[[bytes], bool]:
    """What tells names that none of the ``ends`` fits: a closure, for it is asked at every change of a name."""
    if ("", "") in ends:
        return lambda name: False
    heads = tuple({os.fsencode(head) for head, _ in ends if head})
    tails = tuple({os.fsencode(tail) for head, tail in ends if not head})
    # One byte tells most of them apart, however many patterns there are.
    firsts = frozenset(head[:1] for head in heads)
    lasts = frozenset(tail[-1:] for tail in tails)

    def mute(name: bytes) -> bool:
        begins = name[:1] in firsts and name.startswith(heads)
        return not begins and not (name[-1:] in lasts and name.endswith(tails)) and name != b""

    return mute


def _meets(fixed: Sequence[str], directory: Sequence[str]) -> bool:
    """Whether an entry of the directory can begin with, or be, all the ``fixed`` names."""
    return len(fixed) <= len(directory) + 1 and _begins(directory, fixed[: len(directory)])


def blind_spot(pattern: str) -> str | None:
    """A pattern to add where this one ends in ``**`` or ``*`` and so leaves out names that begin with a dot."""
    head, _, last = pattern.rpartition("/")
    if last == "**":
        return f"{head}/{{**/.*,**/.*/**}}"
    return f"{head}/.*" if last == "*" else None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _begins(path: Sequence[str], with_: Sequence[str]) -> bool:
    return list(path[: len(with_)]) == list(with_)


def _overlaps(pattern: str, target: str) -> bool:
    """Deep Agents' _find_delete_deny_patterns for one pattern and a directory."""
    fixed, parts = _parts(anchor(pattern)), _parts(target)
    if not _WILDCARDS & set(pattern):
        return _begins(parts, fixed) or _begins(fixed, parts)
    if not fixed or _begins(fixed, parts) or globs.matches(target, pattern):
        return True
    if not _begins(parts, fixed):
        return False
    suffix = _parts(pattern)[len(fixed) :]
    if len(suffix) != 1 or "**" in suffix[0]:
        return True
    # One component of fixed depth: what it matches may be a directory above the target.
    above = ("/" + "/".join(parts[:depth]) for depth in range(len(fixed), len(parts)))
    return any(globs.matches(path, pattern) for path in above)


def _examples(pattern: str) -> list[str]:
    """Paths the pattern matches, unlike enough that what matches them all can be taken to match whatever it does."""
    plain = re.sub(r"\[[^\]]*\]|\{[^}]*\}|\?", "q", pattern)
    deep = [plain.replace("**", middle).replace("*", "q1") for middle in ("q2", "q3/q4", "q5/q6/q7.q")]
    matching = [path for path in deep if globs.matches(path, pattern)]
    return matching or [pattern]
