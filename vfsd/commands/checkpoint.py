"""The commands about checkpoints: ``vfsd checkpoint ...``, ``vfsd undo``, ``vfsd gc``.

Owns how they look, for people (with colour on a terminal) and for programs (``--json``). What they do is done by the
daemon, and by this process only to volumes that are not mounted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vfsd.commands import blobs
from vfsd.commands.output import say, size_text
from vfsd.commands.parsing import add_mount, add_thread, command
from vfsd.process.control import Failure, connect, running, thread_of

_RED, _GREEN, _YELLOW, _CYAN, _BOLD, _END = "\033[31m", "\033[32m", "\033[33m", "\033[36m", "\033[1m", "\033[m"
_SHOWN = {
    "added": ("A", _GREEN),
    "deleted": ("D", _RED),
    "modified": ("M", _YELLOW),
    "renamed": ("R", _CYAN),
    "mode": ("m", _YELLOW),
    "owner": ("o", _YELLOW),
    "xattr": ("x", _YELLOW),
}
"""The letter and colour of each kind of change."""


_REF = "an id, its beginning, or a label"


def add(commands: Any) -> None:
    """Put the commands into the parser's ``commands``."""
    p = command(commands, "checkpoint", "hold, compare and go back to states of the tree")
    actions = p.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        a = command(actions, name, text)
        _common(a, run, alone=name == "list")
        return a

    a = action("create", _create, "hold the tree as it is now")
    a.add_argument("label", metavar="LABEL", nargs="?", default="", help="what to call it (default: nothing)")
    action("list", _list, "all checkpoints, oldest first")
    a = action("show", _show, "one checkpoint: when, why, and how much is in it")
    a.add_argument("ref", metavar="CHECKPOINT", help=_REF)
    a = action("diff", _diff, "what changed since a checkpoint, or between two")
    a.add_argument("a", metavar="A", help=_REF)
    a.add_argument("b", metavar="B", nargs="?", help="another (default: the tree as it is now)")
    a.add_argument("-p", "--patch", action="store_true", help="a unified diff of the texts, as git and patch take it")
    a = action("restore", _restore, "make the tree what it was; how it is now becomes a checkpoint of its own first")
    a.add_argument("ref", metavar="CHECKPOINT", help=_REF)
    a = action("fork", _fork, "make another thread's tree of a checkpoint")
    a.add_argument("ref", metavar="CHECKPOINT", help=_REF)
    a.add_argument("--thread", required=True, metavar="T", help="a thread that is not there yet")
    a = action("drop", _drop, "forget checkpoints, and give back the space only they needed")
    a.add_argument("refs", metavar="CHECKPOINT", nargs="+", help=_REF)

    p = command(commands, "undo", "take back the last execute, and with every_calls = 1 the last tool call, as a whole")
    _common(p, _undo, alone=True)


def add_gc(commands: Any) -> None:
    """Put the command that gives back space into the parser's ``commands``."""
    p = command(commands, "gc", "give back all the disk space that can be")
    add_thread(p)
    p.add_argument("--location", type=Path, metavar="DIR", help="one state volume's directory, not mounted")
    blobs.add_arguments(p)
    _common(p, _gc, alone=True)


def _common(p: argparse.ArgumentParser, run: Any, *, alone: bool = False) -> None:
    add_mount(p, alone=alone)
    p.add_argument("--json", action="store_true", help="one object, for programs")
    p.set_defaults(run=run)


# -- what they do


def _ask(args: argparse.Namespace, op: str, **params: Any) -> Any:
    with connect(args.name) as control:
        return _text(control.call(op, **params)["result"])


def _text(value: Any) -> Any:
    """Bytes as the text that stands for them (surrogateescape), all the way down."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, list):
        return [_text(item) for item in value]
    if isinstance(value, dict):
        plain = {key: _text(item) for key, item in value.items()}
        if "time_ns" in plain:
            plain["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(plain["time_ns"] // 10**9))
        return plain
    return value


def _create(args: argparse.Namespace) -> int:
    made = _ask(args, "checkpoint", action="create", label=args.label)
    if args.json:
        return _json(made)
    print(f"checkpoint {_named(made)}: {made['path']}")
    _tell_excluded(made)
    return 0


def _list(args: argparse.Namespace) -> int:
    found = _ask(args, "checkpoint", action="list")["checkpoints"]
    if args.json:
        return _json(found)
    for mark in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(mark["time_ns"] // 10**9))
        print(f"{_paint(mark['id'], _YELLOW)}  {when}  {mark['cause']:7}  {mark['label']}".rstrip())
    if not found:
        print("no checkpoints")
    return 0


def _show(args: argparse.Namespace) -> int:
    found = _ask(args, "checkpoint", action="show", ref=args.ref)
    if args.json:
        return _json(found)
    print(f"checkpoint {_paint(found['id'], _YELLOW)}")
    for key in ("label", "cause", "time", "path"):
        print(f"  {key:6} {found[key]}".rstrip())
    print(f"  routes {', '.join(found['routes'])}")
    print(f"  holds  {found['files']} files, {found['directories']} directories, {size_text(found['bytes'])}")
    _tell_excluded(found)
    return 0


def _diff(args: argparse.Namespace) -> int:
    found = _ask(args, "checkpoint", action="diff", a=args.a, b=args.b, patch=args.patch, operator=True)
    if args.json:
        return _json(found)
    for change in found["changes"]:
        if not args.patch or not _in_patch(change):
            _out(_line(change))
    if found["total"] > len(found["changes"]):
        say(f"and {found['total'] - len(found['changes'])} more changes")
    if args.patch:
        for line in found["patch"].split("\n")[:-1]:
            _out(_paint(line, _patch_colour(line)))
        if not found["complete"]:
            say("the texts of some files differ too much to be shown")
    return 0


def _in_patch(change: dict[str, Any]) -> bool:
    """Whether a patch says all of the change."""
    return change["type"] in ("file", "symlink") and not {"owner", "xattr"} & set(change["what"])


def _line(change: dict[str, Any]) -> str:
    letter, colour = _SHOWN[change["kind"]]
    path = change["path"] + ("/" if change["type"] == "directory" else "")
    if change["kind"] == "renamed":
        path = f"{change['old_path']} -> {path}"
    notes = [name for name in change["what"] if name not in (change["kind"], "content")]
    if "mode" in change["what"]:
        notes = [n for n in notes if n != "mode"]
        notes.append(f"{change['old_mode'] & 0o7777:04o} -> {change['new_mode'] & 0o7777:04o}")
    if change["kind"] == "renamed" and "content" in change["what"]:
        notes.insert(0, "modified")
    return _paint(f"{letter} {path}", colour) + (f" ({', '.join(notes)})" if notes else "")


def _patch_colour(line: str) -> str:
    if line.startswith(("diff ", "--- ", "+++ ")):
        return _BOLD
    return {"+": _GREEN, "-": _RED, "@": _CYAN}.get(line[:1], "")


def _restore(args: argparse.Namespace) -> int:
    done = _ask(args, "checkpoint", action="restore", ref=args.ref, operator=True)
    if args.json:
        return _json(done)
    if done["before"] is None:
        print(f"nothing to restore: the tree is as it was at {_named(done)}")
        return 0
    print(f"restored {_named(done)}: {done['back'] or 'only times were other'}")
    print(f"how it was until now: vfsd checkpoint restore{_name(args)} {done['before']}")
    _tell_excluded(done)
    return 0


def _fork(args: argparse.Namespace) -> int:
    made = _ask(args, "checkpoint", action="fork", ref=args.ref, thread=args.thread)
    if args.json:
        return _json(made)
    print(f"thread {made['thread']} is made of checkpoint {made['id']} in {made['location']}")
    routes = " ".join(f"--route {p}=state:{v}" for p, v in zip(made["routes"], made["volumes"], strict=True))
    print(f"mount it: vfsd mount --name {made['thread']} --thread {made['thread']} {routes} MOUNTPOINT")
    _tell_excluded(made)
    return 0


def _drop(args: argparse.Namespace) -> int:
    dropped = _ask(args, "checkpoint", action="drop", refs=args.refs)["dropped"]
    if args.json:
        return _json({"dropped": dropped})
    for mark in dropped:
        print(f"dropped {_named(mark)}")
    return 0


def _undo(args: argparse.Namespace) -> int:
    done = _ask(args, "undo", operator=True)
    if args.json:
        return _json(done)
    print(f"took back {done['undone']}: {done['back']}")
    for what in done["after"]:
        print(f"  and what came after it: {what}")
    print(f"to have it again: vfsd checkpoint restore{_name(args)} {done['before']}")
    return 0


def _gc(args: argparse.Namespace) -> int:
    if args.blobs:
        return _gc_blobs(args)
    if args.remove or args.also:
        raise Failure("--remove and --also go with --blobs")
    if args.location is None and running(args.name, args.thread) is not None:
        done = _ask(args, "gc")
    else:
        done = _gc_unmounted(args)
    if args.json:
        return _json(done)
    print(f"gave back {size_text(max(0, done['before'] - done['after']))}: {size_text(done['after'])} in use")
    return 0


def _gc_blobs(args: argparse.Namespace) -> int:
    done = blobs.collect(args)
    if args.json:
        _json(done)
        return 1 if done["problems"] else 0
    for one in done["unmentioned"]:
        print(f"{one['name']}  {size_text(one['size'])}  {one['age'] // 86400} days")
    what = "removed" if done["removed"] else "mentioned nowhere on this machine"
    total = size_text(sum(one["size"] for one in done["unmentioned"]))
    print(f"{len(done['unmentioned'])} blobs in {done['place']} {what}, {total}")
    print(f"{done['mentioned']} are mentioned, {done['young']} others are younger than {args.days:g} days")
    if done["problems"]:
        raise Failure("; ".join(done["problems"]) + (": nothing was removed" if args.remove else ""))
    if done["unmentioned"] and not args.remove:
        print("to remove them: vfsd gc --blobs --remove (an agent's conversation may mention them too: --also FILE)")
    return 0


def _gc_unmounted(args: argparse.Namespace) -> dict[str, int]:
    import trio

    from vfsd.archive.atrest import volumes_of
    from vfsd.backends.base import VolumeError
    from vfsd.backends.sqlite import SqliteBackend

    before = after = 0
    thread = thread_of(args.name, args.thread)
    for place in [args.location] if args.location else [v.location for v in volumes_of(args.name, thread)]:
        if not (place / "tree.db").exists():
            raise Failure(f"{place} holds no volume (no tree.db)")
        try:
            store = SqliteBackend(place)
        except VolumeError as exc:
            raise Failure(str(exc)) from None
        try:
            before += store.disk_used()
            trio.run(store.compact)
            after += store.disk_used()
        finally:
            store.close()
    return {"before": before, "after": after}


# -- how it looks


def _json(value: Any) -> int:
    print(json.dumps(value, indent=1))
    return 0


def _paint(text: str, colour: str) -> str:
    """Colour on a terminal, unless NO_COLOR is set (no-color.org)."""
    if not colour or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return f"{colour}{text}{_END}"


def _out(line: str) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(line.encode(errors="surrogateescape") + b"\n")


def _named(mark: dict[str, Any]) -> str:
    return f"{mark['id']} ({mark['label']})" if mark.get("label") else str(mark["id"])


def _name(args: argparse.Namespace) -> str:
    return "" if args.name == "default" else f" --name {args.name}"


def _tell_excluded(reply: dict[str, Any]) -> None:
    for route in reply["not_included"]:
        print(f"  {route['prefix']} ({route['kind']}) is {route['why']}")
