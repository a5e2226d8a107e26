"""The commands about rules: ``vfsd rules ...``, and ``vfsd approvals``, ``approve`` and ``reject``.

Owns how they look, for people and for programs (``--json``). The daemon does the work; only a file is checked here.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from vfsd import config
from vfsd.commands.output import say, tell
from vfsd.commands.parsing import add_mount, command
from vfsd.core.policy import Policy
from vfsd.process.control import connect
from vfsd.rules.book import of_policy


def add(commands: Any) -> None:
    """Put the commands into the parser's ``commands``."""
    p = command(commands, "rules", "what may be read and written, whatever door is used")
    actions = p.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("list", _list, "the rules in force, in the order in which they are tried"),
        ("check", _check, "what is odd about the rules in force, or those in a file"),
        ("reload", _reload, "read the mount's configuration file anew and put its rules in force"),
    ):
        a = command(actions, name, text)
        _common(a, run, alone=name != "check")
        if name == "check":
            a.add_argument("file", metavar="FILE", nargs="?", type=Path, help="a vfsd.toml (default: a running mount)")

    p = command(commands, "approvals", "the operations that wait for a yes")
    _common(p, _approvals, alone=True)
    p = command(commands, "approve", "let an operation that waits go on")
    p.add_argument("id", metavar="ID", help="as vfsd approvals shows it")
    _common(p, _approve)
    p = command(commands, "reject", "deny an operation that waits")
    p.add_argument("id", metavar="ID", help="as vfsd approvals shows it")
    p.add_argument("--reason", default="", help="what the tool that asked is told")
    _common(p, _reject)


def _common(p: argparse.ArgumentParser, run: Any, *, alone: bool = False) -> None:
    add_mount(p, alone=alone)
    p.add_argument("--json", action="store_true", help="one object, for programs")
    p.set_defaults(run=run)


def _ask(args: argparse.Namespace, op: str, **params: Any) -> dict[str, Any]:
    with connect(args.name) as control:
        reply = control.call(op, **params)
    return {key: value for key, value in reply.items() if key not in ("id", "ok")}


def _text(value: Any) -> str:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


def _json(value: Any) -> int:
    print(json.dumps(value, indent=1, default=_text))
    return 0


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}")


def _list(args: argparse.Namespace) -> int:
    found = _ask(args, "rules")
    if args.json:
        return _json(found)
    for layer in found["layers"]:
        for rule in layer["rules"]:
            print(f"{rule['mode']:9} {','.join(rule['operations']):10} {' '.join(rule['paths'])}  ({rule['origin']})")
        if layer["hide"] and layer["rules"]:
            print(f"listings leave out what {layer['owner']} denies to read")
    for hook in found["hooks"]:
        print(f"hook      write      {hook}")
    for quota in found["quotas"]:
        limits = [f"{quota[key]} {key}" for key in ("bytes", "files") if quota[key] is not None]
        print(f"quota     {quota['prefix']}  {', '.join(limits)}")
    if not (found["hooks"] or found["quotas"] or any(layer["rules"] for layer in found["layers"])):
        print("no rules: everything is allowed")
    return 0


def _check(args: argparse.Namespace) -> int:
    if args.file is None:
        warnings = _ask(args, "rules_check")["warnings"]
    else:
        warnings = of_policy(Policy(config.load(args.file).rules.rules))
    if args.json:
        return _json({"warnings": warnings})
    _warn(warnings)
    print(f"{len(warnings)} warnings" if warnings else "the rules are sound")
    return 0


def _reload(args: argparse.Namespace) -> int:
    found = _ask(args, "rules_reload")
    if args.json:
        return _json(found)
    _warn(found["warnings"])
    print(f"rules in force, as the configuration file has them now: {found['rules']}")
    return 0


def _approvals(args: argparse.Namespace) -> int:
    pending = _ask(args, "approvals")["pending"]
    if args.json:
        return _json(pending)
    for one in pending:
        who = one["tool"] or f"pid {one['pid']}"
        paths = " ".join(map(_text, one["paths"]))
        tell(f"{one['id']}  {one['op']} {paths}  by {who}, for {time.time() - one['time']:.0f} s: {one['rule']}")
    if not pending:
        print("nothing waits")
    return 0


def _approve(args: argparse.Namespace) -> int:
    return _decided(args, "approved", _ask(args, "approve", question=args.id))


def _reject(args: argparse.Namespace) -> int:
    return _decided(args, "rejected", _ask(args, "reject", question=args.id, reason=args.reason))


def _decided(args: argparse.Namespace, what: str, reply: dict[str, Any]) -> int:
    question = reply["question"]
    if args.json:
        return _json(question)
    tell(f"{what} {question['op']} {' '.join(map(_text, question['paths']))}")
    return 0
