"""The names of checkpoints: what one is called, and what a user may call it.

Must not know how checkpoints are made.
"""

from __future__ import annotations

import errno
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vfsd.past.slots import Part

LABEL_MAX = 200

_EXCLUDED = {
    "local": "not included: its files are the host's, and a restore leaves them as they are",
    "memory": "not included: it is in memory only, and a restore leaves it as it is",
    "store": "not included: all threads share it, and a restore leaves it as it is",
    "blob": "not included: its contents never change",
}
_ELSEWHERE = "not included: another program keeps it, and a restore leaves it as it is"


def why_excluded(kind: str) -> str:
    """What checkpoints do about a route of this kind, which they leave out."""
    return _EXCLUDED.get(kind, _ELSEWHERE)


@dataclass
class Mark:
    """One checkpoint; ``parts`` has its state routes, ``after`` what tools did since, as far as is remembered."""

    id: str
    label: str
    cause: str
    time_ns: int
    parts: list[Part] = field(default_factory=list)
    readers: int = 0
    after: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As an object for programs."""
        return {
            "id": self.id,
            "label": self.label,
            "cause": self.cause,
            "time_ns": self.time_ns,
            "path": f"/.checkpoints/{self.id}",
            "routes": [part.prefix for part in self.parts],
        }


def check_label(label: str) -> None:
    """EINVAL for a label that would not stay on its line."""
    if len(label) > LABEL_MAX or any(unicodedata.category(c).startswith("C") for c in label):
        raise OSError(errno.EINVAL, f"a label has at most {LABEL_MAX} characters, none of them a control character")


def find(marks: Mapping[str, Mark], ref: str) -> Mark:
    """The checkpoint with this id, else this label, else an id that begins so. ENOENT, EINVAL (ambiguous)."""
    mark = marks.get(ref)
    if mark is not None:
        return mark
    found = [m for m in marks.values() if ref and m.label == ref]
    found = found or [m for m in marks.values() if ref and m.id.startswith(ref)]
    if not found:
        raise OSError(errno.ENOENT, f"no checkpoint is called {ref!r}: see vfsd checkpoint list")
    if len(found) > 1:
        which = ", ".join(f"{m.id} ({m.label})" if m.label else m.id for m in found[:8])
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise OSError(errno.EINVAL, f"{ref!r} may be any of these checkpoints: {which}{more}")
    return found[0]
