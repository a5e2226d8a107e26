"""Reading the audit log: which lines are wanted, and what has happened to one file under all its names.

Pure but for the lines given. Must not know where they are kept or how they are shown.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vfsd.audit.line import quoted

Record = dict[str, Any]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def record_of(line: bytes) -> Record | None:
    """What a line says; None for one that a lost machine has left damaged."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "seq" in found else None


def since(text: str, now: float | None = None) -> str:
    """A moment as lines have it: ``text`` is how long ago (10m, 2h, 3d), or a date with or without a time.

    Times without a zone are local. ValueError with a sentence.
    """
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    try:
        if ago is not None:
            moment = (time.time() if now is None else now) - float(ago[1]) * _UNITS[ago[2]]
            when = datetime.fromtimestamp(moment, UTC)
        else:
            when = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is no moment: write 10m, 2h, 3d, or 2030-01-31T12:00") from None
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def pattern(glob: str) -> re.Pattern[str]:
    """Paths that ``glob`` means: ``*`` and ``?`` within one name, ``**`` across names, ``[...]``.

    One without a slash means the last name, anywhere. A path without wildcards means also all that is below it.
    """
    if "/" not in glob:
        glob = f"/**/{glob}"
    glob = "/" + glob.strip("/")
    if not re.search(r"[*?\[]", glob):
        return re.compile(re.escape(glob.rstrip("/")) + r"(/.*)?\Z", re.DOTALL)
    parts, at = [], 0
    for token in re.finditer(r"/\*\*(?=/|\Z)|\*+|\?|\[!?\]?[^\]]*\]", glob):
        parts.append(re.escape(glob[at : token.start()]))
        found = token[0]
        if found == "/**":
            parts.append("(?:/.*)?")
        elif found[0] == "[":
            inner = found[1:-1].replace("\\", r"\\").replace("[", r"\[")
            parts.append("[" + ("^" + inner[1:] if inner[0] == "!" else inner.replace("^", r"\^", 1)) + "]")
        else:
            parts.append("[^/]*" if found[0] == "*" else "[^/]")
        at = token.end()
    return re.compile("".join(parts) + re.escape(glob[at:]) + r"\Z", re.DOTALL)


@dataclass(frozen=True)
class Filter:
    """Which records are wanted; what is None does not matter. ``since`` as the function of that name gives it."""

    path: re.Pattern[str] | None = None
    call: str | None = None
    pid: int | None = None
    since: str | None = None
    failed: bool = False

    def records(self, lines: Iterable[bytes]) -> Iterator[tuple[bytes, Record]]:
        """The wanted ones, with their lines."""
        word = None if self.call is None else quoted(self.call)
        for line in lines:
            if word is not None and word not in line:
                continue
            record = record_of(line)
            if record is not None and self._wants(record):
                yield line, record

    def _wants(self, record: Record) -> bool:
        if self.since is not None and str(record.get("time", "")) < self.since:
            return False
        if self.call is not None and all(self.call not in (r.get("call"), r.get("execute")) for r in _whose(record)):
            return False
        if self.pid is not None and record.get("pid") != self.pid:
            return False
        if self.failed and record.get("result") == "ok":
            return False
        paths = (record.get("path"), record.get("path2"))
        return self.path is None or any(type(p) is str and self.path.match(p) for p in paths)


def _whose(record: Record) -> list[Record]:
    """The record, and the executes of which one may have been behind it."""
    among = record.get("among", [])
    return [record, *(one for one in among if isinstance(one, dict))] if isinstance(among, list) else [record]


class _Names:
    """The names a file has had, going back in time."""

    def __init__(self, path: str, ino: int | None) -> None:
        self._first = path
        self._paths = {path}
        self._inos = set() if ino is None else {ino}
        self._again()

    def _again(self) -> None:
        self._words = [quoted(path) for path in self._paths] + [b'"ino":%d,' % ino for ino in self._inos]

    def may_concern(self, line: bytes) -> bool:
        """Whether it is worth reading the whole line."""
        if any(op in line for op in (b'"op":"rename"', b'"op":"restore"', b'"op":"undo"')):
            return True
        return any(word in line for word in self._words)

    def concerns(self, record: Record) -> bool:
        """Whether it changed the file; from here on what came before it is looked for under the name it had then."""
        op, path, path2, ino = (record.get(key) for key in ("op", "path", "path2", "ino"))
        if record.get("result") != "ok":
            return False
        if op in ("restore", "undo"):
            return True
        if op == "rename":
            return self._renamed(str(path), str(path2), ino, bool(record.get("exchange")))
        mine = path in self._paths or ino in self._inos or (op == "link" and path2 in self._paths)
        if not mine:
            return False
        if op == "create" and record.get("size", [None])[0] is None:
            # Here the file begins: what had its number or another name before was another file.
            self._inos.discard(ino)
            if path != self._first:
                self._paths.discard(path)
        elif op == "unlink" and path in self._paths and ino not in self._inos:
            pass  # the file that was there before
        elif type(ino) is int and op != "link":
            self._inos.add(ino)
        if op == "link" and type(path) is str:
            self._paths.add(path)
        self._again()
        return True

    def _renamed(self, old: str, new: str, ino: Any, exchange: bool) -> bool:
        found = old in self._paths
        for path in list(self._paths):
            for here, there in ((new, old), (old, new)) if exchange else ((new, old),):
                if path == here or path.startswith(here + "/"):
                    self._paths.add(there + path[len(here) :])
                    if path == here and type(ino) is int and not exchange:
                        self._inos.add(ino)
                    found = True
        if found:
            self._again()
        return found or ino in self._inos


def blame(
    lines_back: Callable[[], Iterable[bytes]], path: str, *, exists: bool = False
) -> Iterator[tuple[bytes, Record]]:
    """What changed the file ``path``, newest first, also by its other and former names; restores of the tree too,
    if anything else tells of the file or it ``exists``."""
    whole: list[tuple[bytes, Record]] = []
    path = "/" + path.strip("/")
    names = _Names(path, _ino_of(lines_back(), path))
    for line in lines_back():
        if names.may_concern(line):
            record = record_of(line)
            if record is None or not names.concerns(record):
                continue
            if record.get("op") in ("restore", "undo") and not exists:
                whole.append((line, record))
                continue
            exists = True
            yield from whole
            whole.clear()
            yield line, record


def _ino_of(lines_back: Iterable[bytes], path: str) -> int | None:
    """The number of the file that had the path last."""
    word = quoted(path)
    for line in lines_back:
        record = record_of(line) if word in line else None
        if record is not None and record.get("result") == "ok" and type(record.get("ino")) is int:
            renamed = record.get("op") == "rename" and not record.get("exchange")
            if record.get("path2" if renamed else "path") == path or record.get("path2") == path:
                return int(record["ino"])
    return None
