"""The commands ``vfsd log`` and ``vfsd blame``: who did what, for people and, with ``--json``, for programs.

Owns how lines look. They are read from their files, so that a mount need not run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from vfsd.audit import log as auditlog
from vfsd.audit.history import Filter, Record, blame, pattern, since
from vfsd.commands.parsing import add_mount, add_thread, command
from vfsd.config import UsageError, audit_home
from vfsd.doors.rpc import one_line
from vfsd.process.control import Failure, running

_POLL = 0.1
"""Seconds between two looks for new lines."""

_RED, _YELLOW, _CYAN, _END = "\033[31m", "\033[33m", "\033[36m", "\033[m"


def add(commands: Any) -> None:
    """Put the commands into the parser's ``commands``."""
    p = command(commands, "log", "who changed what, and what was refused")
    p.add_argument("-f", "--follow", action="store_true", help="go on with what comes, until ^C")
    p.add_argument("--path", metavar="GLOB", help="only these: *, ?, ** across directories; a directory with all below")
    p.add_argument("--call", metavar="ID", help="only what this tool call or execute did")
    p.add_argument("--pid", type=int, metavar="N", help="only what this process did")
    p.add_argument("--since", metavar="T", help="10m, 2h, 3d ago, or a date and time")
    p.add_argument("--failed", action="store_true", help="only what was denied or failed")
    p.add_argument("-n", "--lines", type=int, metavar="N", help="only the last N")
    _common(p, _log, alone=True)
    p = command(commands, "blame", "which commands and tool calls changed a file, newest first")
    p.add_argument("path", metavar="PATH", help="in the tree, or below the mountpoint")
    p.add_argument("-n", "--lines", type=int, metavar="N", default=10, help="at most N, 0 for all (default: 10)")
    _common(p, _blame)


def _common(p: argparse.ArgumentParser, run: Any, *, alone: bool = False) -> None:
    add_mount(p, alone=alone)
    add_thread(p)
    p.add_argument("--json", action="store_true", help="one object a line, for programs")
    p.set_defaults(run=run)


def _place(args: argparse.Namespace, entry: dict[str, Any] | None) -> Path:
    thread = args.thread or ("default" if entry is None else entry["thread"])
    place = audit_home(args.name, thread)
    if not auditlog.segments(place, "log"):
        raise Failure(f"nothing is recorded for {args.name!r}, thread {thread!r} ({place})")
    return place


def _in_tree(path: str, entry: dict[str, Any] | None) -> str:
    """A path of the tree: as it is, or one of this machine that leads into the mount."""
    if entry is not None:
        top = entry["mountpoint"]
        here = os.path.join(os.getcwd(), path)
        if here == top or here.startswith(top + "/"):
            return os.path.normpath("/" + here[len(top) :].lstrip("/"))
    return path


# -- log


def _log(args: argparse.Namespace) -> int:
    entry = running(args.name)
    place = _place(args, entry)
    try:
        start = None if args.since is None else since(args.since)
    except ValueError as exc:
        raise UsageError(f"--since {exc}") from None
    glob = None if args.path is None else pattern(_in_tree(args.path, entry) if "/" in args.path else args.path)
    wanted = Filter(glob, args.call, args.pid, start, args.failed)
    position = _end(place)
    found: Iterator[tuple[bytes, Record]] | deque[tuple[bytes, Record]] = wanted.records(
        auditlog.lines(place, "log", position)
    )
    for line, record in found if args.lines is None else deque(found, max(0, args.lines)):
        _show(line, record, args.json)
    if args.follow:
        sys.stdout.flush()
        for line, record in wanted.records(_coming(place, position)):
            _show(line, record, args.json)
            sys.stdout.flush()
    return 0


def _end(place: Path) -> int:
    """The position of the log's end."""
    last = auditlog.segments(place, "log")[-1]
    return last.start + last.path.stat().st_size


def _coming(place: Path, position: int) -> Iterator[bytes]:
    """Lines from ``position`` on, as they come; never ends."""
    rest = b""
    while True:
        data, position = auditlog.read_from(place, "log", position)
        if not data:
            time.sleep(_POLL)
            continue
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


# -- blame


def _blame(args: argparse.Namespace) -> int:
    entry = running(args.name)
    place = _place(args, entry)
    path = _in_tree(args.path, entry)
    shown = 0
    exists = entry is not None and os.path.lexists(entry["mountpoint"] + "/" + path.strip("/"))
    for line, record in blame(lambda: auditlog.lines_back(place, "log"), path, exists=exists):
        _show(line, record, args.json)
        shown += 1
        if shown == args.lines:
            return 0
    if not shown:
        missing = "" if exists or entry is None else ", and there is no such file"
        raise Failure(f"nothing that is still recorded changed {path}{missing}")
    return 0


# -- how it looks


def _show(line: bytes, record: Record, as_json: bool) -> None:
    if as_json:
        sys.stdout.buffer.write(line + b"\n")
        return
    print(_plain(record))


def _plain(r: Record) -> str:
    when = datetime.fromisoformat(r["time"]).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    what = one_line(r.get("path") or f"inode {r.get('ino', '?')} (no name)")
    if "path2" in r:
        what += (" <-> " if r.get("exchange") else " -> ") + one_line(r["path2"])
    size = r.get("size")
    if size and size[0] != size[1]:
        what += f" ({'-' if size[0] is None else size[0]} -> {'-' if size[1] is None else size[1]} bytes)"
    for key in ("mode", "to_uid", "to_gid", "name", "checkpoint", "count"):
        what += f" {key}={one_line(str(r[key]))}" if key in r else ""
    op = one_line(str(r.get("op", "?")))
    line = f"{when} {_paint(f'{op:9}', _YELLOW)} {what}"
    if r.get("result") != "ok":
        line += " " + _paint(f"{r.get('result')}: {one_line(r.get('error', ''))}", _RED)
    who = []
    if r.get("tool"):
        who.append(f"tool {one_line(r['tool'])}")
    if r.get("call"):
        who.append(f"call {one_line(r['call'])}")
    if r.get("execute"):
        who.append(f"execute {one_line(r['execute'])}")
    if r.get("pid"):
        who.append(f"pid {r['pid']} uid {r.get('uid')}")
    elif r.get("door") == "fuse":
        who.append(f"a process in a pid namespace out of sight, or the kernel, uid {r.get('uid')}")
        running = [f"call {one['call']} execute {one['execute']}" for one in r.get("among", ())]
        who.append(one_line(f"while {' and '.join(running) or 'no command'} ran"))
    if r.get("command"):
        who.append(one_line(r["command"]))
    return f"{line}  {_paint(', '.join(who) or r.get('door', ''), _CYAN)}"


def _paint(text: str, colour: str) -> str:
    return f"{colour}{text}{_END}" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text
