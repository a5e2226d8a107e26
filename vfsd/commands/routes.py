"""The commands ``vfsd route`` and ``vfsd blob``, on a running mount."""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from vfsd import config
from vfsd.commands.output import say
from vfsd.commands.parsing import add_mount, command
from vfsd.process import registry
from vfsd.process.control import Failure, ask

SECONDS = 60.0
"""How long opening or closing a route may take."""


def add(commands: Any) -> None:
    """Put the commands on the parser."""
    p = command(commands, "route", "routes of a running mount")
    actions = p.add_subparsers(required=True, metavar="ACTION")
    one = command(actions, "list", "what is mounted where")
    add_mount(one, alone=True)
    one.set_defaults(run=_list)
    one = command(actions, "add", "mount one more route")
    one.add_argument(
        "route",
        metavar="PREFIX=KIND[:LOCATION][#NAMESPACE]",
        help=f"kind is one of {', '.join(config.KINDS)}",
    )
    one.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="values",
        help="what {NAME} in the namespace of a store stands for; repeatable",
    )
    add_mount(one)
    one.set_defaults(run=_add)
    one = command(actions, "remove", "take a route out of the tree; its files stay where they are")
    one.add_argument("prefix", metavar="PREFIX", help="the route's directory in the tree")
    add_mount(one)
    one.set_defaults(run=_remove)

    p = command(commands, "blob", "contents named by their sha256")
    actions = p.add_subparsers(required=True, metavar="ACTION")
    one = command(actions, "put", "store a file's content and print its path in the tree")
    one.add_argument("file", type=Path, metavar="FILE", help="any file of this machine")
    add_mount(one)
    one.set_defaults(run=_put)


def _running(name: str) -> dict[str, Any]:
    for entry in registry.entries():
        if entry["name"] == name and entry["alive"]:
            return entry
    raise Failure(f"no mount is called {name!r}: start it with vfsd mount --name {name} MOUNTPOINT")


def _list(args: argparse.Namespace) -> int:
    for route in ask(_running(args.name)["socket"], "status", SECONDS)["routes"]:
        if route["kind"] != "system":
            print(f"{route['prefix']} {route['kind']} {route['location'] or ''}".rstrip())
            if "problem" in route:
                print(f"  does not work: {route['problem']}")
            if "notice" in route:
                print(f"  {route['notice']}")
    return 0


def _add(args: argparse.Namespace) -> int:
    config.parse_route(args.route)
    values = dict(map(config.parse_set, args.values))
    entry = _running(args.name)
    reply = ask(entry["socket"], "route", SECONDS, action="add", route=args.route, cwd=os.getcwd(), values=values)
    route = reply["route"]
    print(f"{route['prefix']} {route['kind']} {route['location'] or ''}".rstrip())
    for warning in route["warnings"]:
        say(warning)
    return 1 if route["problem"] else 0


def _remove(args: argparse.Namespace) -> int:
    ask(_running(args.name)["socket"], "route", SECONDS, action="remove", prefix=args.prefix)
    return 0


def _put(args: argparse.Namespace) -> int:
    entry = _running(args.name)
    prefix = next((route["prefix"] for route in entry["routes"] if route["kind"] == "blob"), None)
    if prefix is None:
        raise Failure(f"{args.name!r} has no route of kind blob: vfsd route add /blobs/=blob")
    with open(args.file, "rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
        path = prefix + digest
        target = entry["mountpoint"].rstrip("/") + path
        source.seek(0)
        try:
            # Not opened to be cut: one that is there is the same already.
            with open(target, "xb") as blob:
                shutil.copyfileobj(source, blob, 1 << 20)
        except FileExistsError:
            # Young again, so that nobody collects it before it is mentioned.
            os.utime(target)
        except OSError as exc:
            if exc.errno == errno.EBADMSG:
                raise Failure(f"{args.file} changed while it was read: nothing was stored") from None
            raise
    print(path)
    return 0
