"""Where mounts of this user have kept files: a list in the state directory, so that ``vfsd gc --blobs`` finds them all.

One JSON object a line: kind, place, and for a factory where its module lies. Passwords are left out. What lies in the
state directory itself needs no line. Lines are only added; who wants a place forgotten deletes its line.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import NamedTuple

from vfsd.backends.remote import shown
from vfsd.config import RouteSpec, state_home


class Kept(NamedTuple):
    """A place of kind state, local, store or backend; ``home`` is where a factory's module lies, or empty."""

    kind: str
    place: str
    home: str = ""


def list_file() -> Path:
    """The file with the list."""
    return state_home() / "places"


def remember(spec: RouteSpec) -> None:
    """Put a route's place on the list, unless it is there or goes with the daemon. Raises OSError."""
    if spec.kind in ("memory", "blob") or (not spec.uri and spec.location is None) or spec.uri == "memory:":
        return
    if spec.kind == "state" and spec.location is not None and spec.location.is_relative_to(state_home()):
        return
    kept = Kept(spec.kind, shown(spec.uri) if spec.uri else str(spec.location), str(spec.home or ""))
    path = list_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", errors="surrogateescape") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = json.dumps(kept._asdict(), sort_keys=True) + "\n"
        if line not in file.readlines():
            file.write(line)


def remembered() -> tuple[list[Kept], list[str]]:
    """All that is on the list, and its lines that are none of ours. Raises OSError."""
    found: list[Kept] = []
    odd: list[str] = []
    try:
        lines = list_file().read_text(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return found, odd
    for line in lines:
        try:
            one = Kept(**json.loads(line))
        except (ValueError, TypeError):
            odd.append(line)
            continue
        if all(isinstance(field, str) for field in one):
            found.append(one)
        else:
            odd.append(line)
    return found, odd
