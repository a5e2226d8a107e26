"""The commands that look after a running mount: ``vfsd reload`` and ``vfsd log-level``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vfsd.commands.parsing import command
from vfsd.config import LOG_LEVELS
from vfsd.process.control import connect


def add(commands: Any) -> None:
    """Put the commands into the parser's ``commands``."""
    p = command(commands, "reload", "put a mount's configuration file in force as it is now: all of it, or nothing")
    p.add_argument("name", metavar="NAME", nargs="?", default="default", help="the mount's name (default: default)")
    p.set_defaults(run=_reload)
    p = command(commands, "log-level", "what a running mount writes into its log")
    p.add_argument("name", metavar="NAME", help="the mount's name")
    p.add_argument("level", metavar="LEVEL", nargs="?", choices=LOG_LEVELS, help="(default: only say which it is)")
    p.set_defaults(run=_log_level)


def _reload(args: argparse.Namespace) -> int:
    with connect(args.name) as control:
        reply = control.call("reload")
    for warning in reply["warnings"]:
        print(f"vfsd: warning: {warning}", file=sys.stderr)
    changed = [f"{what} {prefix}" for what in ("added", "removed") for prefix in reply[what]]
    print(", ".join([f"{reply['rules']} rules in force", *changed]))
    return 0


def _log_level(args: argparse.Namespace) -> int:
    with connect(args.name) as control:
        print(control.call("log_level", level=args.level or "")["level"])
    return 0
