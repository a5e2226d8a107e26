"""Checkpoints of the tree over a client: hold it, compare, go back, take back the last change.

    with Client() as client:
        made = checkpoints.create(client, "before the refactoring")
        checkpoints.restore(client, made.data["id"])          # and in asyncio or trio: await checkpoints.arestore(...)

Owns how they are asked for and worded. Must not know vfsd. No function raises for what the daemon says: the result's
``error`` does. A checkpoint is named by its id, the beginning of its id, or its label; each is also the read-only
directory ``/.checkpoints/<id>`` of the tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agenttools.steps import FAILURES, Steps, both

_LETTERS = {
    "added": "A",
    "deleted": "D",
    "modified": "M",
    "renamed": "R",
    "mode": "m",
    "owner": "o",
    "xattr": "x",
}


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    """``data``: what the daemon answered, paths as text (surrogate escapes); ``said``: the same in words."""

    data: dict[str, Any] = field(default_factory=dict)
    said: str = ""
    error: str | None = None

    @property
    def text(self) -> str:
        """What a model is told."""
        return self.said if self.error is None else f"Error: {self.error}"


def _asked(op: str, **params: Any) -> Steps[CheckpointResult]:
    """The answer, not yet in words."""
    try:
        return CheckpointResult(_text((yield op, params)["result"]))
    except FAILURES as exc:
        return CheckpointResult(error=exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc))


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, list):
        return [_text(item) for item in value]
    if isinstance(value, dict):
        return {key: _text(item) for key, item in value.items()}
    return value


def _time(mark: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(mark["time_ns"] // 10**9))


def _worded(result: CheckpointResult, said: str) -> CheckpointResult:
    return CheckpointResult(result.data, said)


def _create(label: str = "") -> Steps[CheckpointResult]:
    """Hold the tree as it is now; ``data`` has ``id`` and ``not_included``, the routes that are left out and why."""
    result = yield from _asked("checkpoint", action="create", label=label)
    if result.error is not None:
        return result
    lines = [f"Checkpoint {result.data['id']} made; it can be read at {result.data['path']}."]
    lines += [f"{route['prefix']} ({route['kind']}) is {route['why']}." for route in result.data["not_included"]]
    return _worded(result, "\n".join(lines))


create, acreate = both(_create)


def _all_of() -> Steps[CheckpointResult]:
    """All checkpoints, oldest first, in ``data["checkpoints"]``."""
    result = yield from _asked("checkpoint", action="list")
    marks = result.data.get("checkpoints", [])
    lines = [f"{mark['id']}  {_time(mark)}  {mark['cause']:7}  {mark['label']}".rstrip() for mark in marks]
    return result if result.error is not None else _worded(result, "\n".join(lines) or "There are no checkpoints.")


all_of, aall_of = both(_all_of)


def _show(ref: str) -> Steps[CheckpointResult]:
    """One checkpoint with what is in it: ``files``, ``directories``, ``bytes``."""
    result = yield from _asked("checkpoint", action="show", ref=ref)
    if result.error is not None:
        return result
    d = result.data
    label = f" ({d['label']})" if d["label"] else ""
    return _worded(result, f"{d['id']}{label}: {d['files']} files, {d['directories']} directories, {d['bytes']} bytes.")


show, ashow = both(_show)


def _diff(a: str, b: str | None = None, *, patch: bool = False) -> Steps[CheckpointResult]:
    """What changed from checkpoint ``a`` to ``b`` (None: now); with ``patch`` also as a unified diff."""
    result = yield from _asked("checkpoint", action="diff", a=a, b=b, patch=patch)
    if result.error is not None:
        return result
    lines = []
    for change in result.data["changes"]:
        was = f"{change['old_path']} -> " if "old_path" in change else ""
        lines.append(f"{_LETTERS[change['kind']]} {was}{change['path']}")
    left = result.data["total"] - len(lines)
    if left:
        lines.append(f"and {left} more")
    return _worded(result, result.data["patch"] if patch else "\n".join(lines) or "Nothing changed.")


diff, adiff = both(_diff)


def _restore(ref: str) -> Steps[CheckpointResult]:
    """Make the tree what it was; how it was until now is checkpoint ``data["before"]``."""
    result = yield from _asked("checkpoint", action="restore", ref=ref)
    if result.error is not None:
        return result
    d = result.data
    if d["before"] is None:
        return _worded(result, f"Nothing to restore: the tree is as it was at checkpoint {d['id']}.")
    done = d["back"] or "only times were other"
    return _worded(result, f"Restored checkpoint {d['id']}: {done}. How it was until now is checkpoint {d['before']}.")


restore, arestore = both(_restore)


def _fork(ref: str, thread: str) -> Steps[CheckpointResult]:
    """Make the tree of a new ``thread`` of a checkpoint; ``data["volumes"]`` are its directories."""
    result = yield from _asked("checkpoint", action="fork", ref=ref, thread=thread)
    if result.error is not None:
        return result
    return _worded(result, f"Thread {thread} is made of checkpoint {result.data['id']}: {result.data['location']}")


fork, afork = both(_fork)


def _drop(refs: Sequence[str]) -> Steps[CheckpointResult]:
    """Forget checkpoints; either all of ``refs`` are known, or none is dropped."""
    result = yield from _asked("checkpoint", action="drop", refs=list(refs))
    if result.error is not None:
        return result
    return _worded(result, "Dropped " + ", ".join(mark["id"] for mark in result.data["dropped"]) + ".")


drop, adrop = both(_drop)


def _undo() -> Steps[CheckpointResult]:
    """Take back the last execute or tool call that changed something, as a whole, with what came after it."""
    result = yield from _asked("undo")
    if result.error is not None:
        return result
    d = result.data
    done = d["back"]
    after = "".join(f"\nand what came after it: {what}" for what in d["after"])
    return _worded(
        result,
        f"Took back {d['undone']}: {done}{after}\nTo have it again, restore checkpoint {d['before']}.",
    )


undo, aundo = both(_undo)
