"""The operations of the tool door that concern the mount as a whole: checkpoints, undo, executes, space.

Registered in ``rpcops.OPS`` by being imported. Must not know sockets or frames, nor how a checkpoint is made.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from vfsd.core.types import Caller
from vfsd.doors.rpcops import Message, Session, op, want

if TYPE_CHECKING:
    from vfsd.past.checkpoints import Checkpoints
    from vfsd.rules.guard import Guard

log = logging.getLogger(__name__)

DIFF_MAX = 20_000
DIFF_BYTES = 6 << 20
"""Changes, and bytes of their paths, in one reply to ``diff``; with the largest patch a reply fits its frame."""


def _checkpoints(s: Session) -> Checkpoints:
    if s.host.checkpoints is None:
        raise OSError(errno.EOPNOTSUPP, "this mount has no checkpoints")
    return s.host.checkpoints


@op
async def checkpoint(s: Session, m: Message, caller: Caller) -> Message:
    """{action, ...} -> {result}: ``action`` is one of ACTIONS, with the parameters and the result of its function"""
    action = want(m, "action", str)
    if action not in ACTIONS:
        raise OSError(errno.EINVAL, f"'checkpoint' has no action {action!r}: use {', '.join(ACTIONS)}")
    # In a field of its own, for it may have an id and a reply has one already.
    result = await ACTIONS[action](s, _checkpoints(s), m, caller)
    if action == "restore":
        _tell(s, action, result, caller)
    return {"result": result}


def _guard(s: Session, m: Message) -> Guard | None:
    """The rules that who asks has to keep; None without any, and for the operator, who gives and takes them."""
    return None if want(m, "operator", bool, False) else s.vfs.guard


def _tell(s: Session, op: str, result: dict[str, Any], caller: Caller) -> None:
    """That the tree has been made what it was."""
    if s.vfs.witness is not None and result["changes"]:
        s.vfs.witness.restored(op, result["id"], result["changes"], caller)


async def _create(s: Session, c: Checkpoints, m: Message, caller: Caller) -> Message:
    """{label=""} -> {id, label, cause, time_ns, path, routes, not_included: [{prefix, kind, why}]}"""
    return await c.create(want(m, "label", str, ""), caller)


async def _list(s: Session, c: Checkpoints, m: Message, caller: Caller) -> Message:
    """{label="", newest=0} -> {checkpoints: [{id, label, cause, time_ns, path, routes}...], oldest first}

    Those whose label begins with ``label``; of these only so many of the newest, unless ``newest`` is 0.
    """
    label, newest = want(m, "label", str, ""), want(m, "newest", int, 0)
    marks = [mark for mark in c.all() if mark.label.startswith(label)]
    return {"checkpoints": [mark.plain() for mark in marks[max(0, len(marks) - newest) if newest > 0 else 0 :]]}


async def _show(s: Session, c: Checkpoints, m: Message, caller: Caller) -> Message:
    """{ref} -> as create, with files, directories, bytes"""
    return await c.show(want(m, "ref", str))


async def _diff(s: Session, c: Checkpoints, m: Message, caller: Caller) -> Message:
    """{a, b?, patch=false, operator=false}
    -> {a, b, changes: [{kind, path, type, what, old_path?, ...}], total, patch?, complete?}

    No patch of what may not be read, unless for the ``operator``.
    """
    b = None if m.get("b") is None else want(m, "b", str)
    guard = _guard(s, m)
    shows = None if guard is None else guard.shows
    found = await c.diff(want(m, "a", str), b, patch=want(m, "patch", bool, False), shows=shows)
    changes: list[dict[str, Any]] = found["changes"]
    room, count = DIFF_BYTES, 0
    for change in changes[:DIFF_MAX]:
        room -= len(change["path"]) + len(change.get("old_path", b""))
        if room < 0:
            break
        count += 1
    return found | {"changes": changes[:count], "total": len(changes)}


async def _restore(s: Session, c: Checkpoints, m: Message, caller: Caller) -> Message:
    """{ref, operator=false} -> {id, label, changes, back: what it did, in words, before: id or nil, not_included}

    EACCES, and nothing is changed, when a rule denies a write that it would take, unless for the ``operator``.
    """
    guard = _guard(s, m)
    return await c.restore(want(m, "ref", str), caller, None if guard is None else guard.restoring)


async def _fork(s: Session, c: Checkpoints, m: Message, caller: Caller) -> Message:
    """{ref, thread, name=""} -> {id, thread, location, volumes, not_included}; ``name``: of its mount, if another"""
    return await c.fork(want(m, "ref", str), want(m, "thread", str), want(m, "name", str, ""))


async def _drop(s: Session, c: Checkpoints, m: Message, caller: Caller) -> Message:
    """{refs: [str]} -> {dropped: [{id, label...}]}"""
    refs = want(m, "refs", list)
    if not refs or not all(type(ref) is str for ref in refs):
        raise OSError(errno.EINVAL, "'checkpoint' needs 'refs' as a list of text")
    return {"dropped": [mark.plain() for mark in await c.drop(refs, caller)]}


ACTIONS: dict[str, Callable[[Session, Checkpoints, Message, Caller], Awaitable[Message]]] = {
    "create": _create,
    "list": _list,
    "show": _show,
    "diff": _diff,
    "restore": _restore,
    "fork": _fork,
    "drop": _drop,
}


@op
async def undo(s: Session, m: Message, caller: Caller) -> Message:
    """{operator=false} -> {result: {id, undone: what, after: [what came later...], changes, back, before: id}}

    EACCES as for ``restore``.
    """
    guard = _guard(s, m)
    result = await _checkpoints(s).undo(caller, None if guard is None else guard.restoring)
    _tell(s, "undo", result, caller)
    return {"result": result}


@op
async def gc(s: Session, m: Message, caller: Caller) -> Message:
    """{} -> {result: {before, after}}: bytes of disk; all the space that can be is given back"""
    return {"result": await _checkpoints(s).collect()}


@functools.cache
def _tell_unseen() -> None:
    log.warning(
        "a command runs in a pid namespace that this daemon does not see: of a change in there the audit can only say "
        "which commands ran at that time. Share the namespace (podman: --pid container:ID, or docs/containers.md)"
    )


@op
async def execute_begin(s: Session, m: Message, caller: Caller) -> Message:
    """{command: bytes, call: str} -> {checkpoint: id or ""}: a command of that marker is about to run in the tree"""
    call = want(m, "call", str)
    # SO_PEERCRED has no number for a process outside our pid namespace, nor has FUSE.
    if caller.pid == 0 and s.vfs.witness is not None:
        _tell_unseen()
        s.unseen.add(call)
        s.vfs.witness.began(call, caller.call_id)
    command = want(m, "command", bytes).decode(errors="replace")
    taken = "" if s.host.checkpoints is None else await s.host.checkpoints.before_execute(command, caller)
    return {"checkpoint": taken}


@op
async def execute_end(s: Session, m: Message, caller: Caller) -> Message:
    """{call: str} -> {}: the command has ended"""
    s.end_unseen(want(m, "call", str))
    return {}
