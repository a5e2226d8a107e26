"""The commands that look after a mount: ``vfsd reload``, ``vfsd log-level`` and ``vfsd bugreport``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from vfsd.commands.output import say
from vfsd.commands.parsing import add_mount, command
from vfsd.config import LOG_LEVELS
from vfsd.process import registry
from vfsd.process.control import Failure, connect, state_of


def add(commands: Any) -> None:
    """Put the commands into the parser's ``commands``."""
    p = command(commands, "reload", "put a mount's configuration file in force as it is now: all of it, or nothing")
    add_mount(p, alone=True)
    p.set_defaults(run=_reload)
    p = command(commands, "log-level", "what a running mount writes into its log")
    add_mount(p, alone=True)
    p.add_argument("level", metavar="LEVEL", nargs="?", choices=LOG_LEVELS, help="(default: only say which it is)")
    p.set_defaults(run=_log_level)
    p = command(commands, "bugreport", "one file that tells of a fault, with no names, contents or secrets in it")
    add_mount(p, None, said="default, if there is one", alone=True)
    p.add_argument("-o", "--output", type=Path, metavar="FILE", help="a new file (default: one here, by name and time)")
    p.set_defaults(run=_bugreport)


def _reload(args: argparse.Namespace) -> int:
    with connect(args.name) as control:
        reply = control.call("reload")
    for warning in reply["warnings"]:
        say(f"warning: {warning}")
    changed = [f"{reply['changed']} changed"] if reply["changed"] else []
    changed += [f"{what} {prefix}" for what in ("added", "removed") for prefix in reply[what]]
    print(f"{reply['source']}: {', '.join(changed) or 'nothing changed'}; rules in force: {reply['rules']}")
    return 0


def _log_level(args: argparse.Namespace) -> int:
    with connect(args.name) as control:
        print(control.call("log_level", level=args.level or "")["level"])
    return 0


def _bugreport(args: argparse.Namespace) -> int:
    name = args.name or "default"
    row = next((state_of(entry) for entry in registry.entries() if entry["name"] == name), None)
    if row is None and args.name:
        raise Failure(f"no mount is called {name!r}")
    file = args.output or Path(f"vfsd-bugreport-{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    # Before all the work, for it may not be possible.
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as out:
            _report(file, out, name, row)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return 0


def _report(file: Path, out: BinaryIO, name: str, row: dict[str, Any] | None) -> None:
    from vfsd.process import bugreport

    print(f"{file} is to have, of {'this machine only' if row is None else repr(name)}:")
    for part, text in bugreport.PARTS.items():
        print(f"  {part:14} {text}")
    print("No contents and no names of files, no environment, no texts of the configuration. This takes some seconds.")
    sys.stdout.flush()
    print(f"wrote {file}, {bugreport.write(out, row)} bytes: look into it before you give it away")
