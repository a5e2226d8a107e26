"""The commands for the machine's own ways to mount: ``vfsd service install`` and what mount(8) calls.

Owns where systemd and mount(8) look for things, and what the options of fstab(5) mean here. The files themselves are in
``vfsd/systemd``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from vfsd.commands.parsing import command
from vfsd.config import UsageError, config_home
from vfsd.process.control import Failure

PACKAGED = "/usr/bin/vfsd"
"""The program that the files name; ours takes its place."""

HELPER = "mount.fuse.vfsd"

_SYSTEM = {
    "vfsd@.service": "/etc/systemd/system",
    "vfsd@.socket": "/etc/systemd/system",
    "vfsd.conf": "/etc/tmpfiles.d",
    HELPER: "/sbin",
}
"""Where systemd.unit(5), tmpfiles.d(5) and mount(8) look for what the administrator puts there."""

_GIVEN = frozenset(["rw", "defaults", "nosuid", "nodev", "default_permissions", "exec", "async", "noatime", "relatime"])
"""What every vfsd mount is."""

_NOT_OURS = re.compile(r"(no)?auto|nofail|_netdev|(no)?users?|user=.*|owner|group|comment=.*|[xX]-.*")
"""What fstab(5) has for others than the file system."""

_VALUES = {
    "name": "--name",
    "thread": "--thread",
    "config": "--config",
    "engine": "--engine",
    "log_level": "--log-level",
}
_FLAGS = {"ro": "--read-only", "allow_other": "--allow-other"}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Put ``service`` into the parser's ``commands``."""
    p = command(commands, "service", "mounts that systemd and mount(8) start")
    actions = p.add_subparsers(required=True, metavar="ACTION")
    a = command(actions, "install", "put the unit files where they belong, with the path of this program")
    a.add_argument("--system", action="store_true", dest="for_root", help="for root's systemd and for mount(8)")
    a.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="write below DIR instead of /")
    a.set_defaults(run=_install)


def add_helper(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Put what mount(8) calls into ``commands``; the parser, whose ``run`` is the caller's business."""
    p = command(commands, HELPER, "what mount(8) calls for mount -t fuse.vfsd; see docs/operations.md")
    p.add_argument("source", metavar="NAME|FILE", help="a mount's name, or a vfsd.toml by its absolute path")
    p.add_argument("mountpoint", metavar="MOUNTPOINT", help="an empty directory")
    p.add_argument("-o", dest="options", action="append", default=[], metavar="OPTIONS", help="with commas between")
    p.add_argument("-s", dest="sloppy", action="store_true", help="pass over unknown options")
    p.add_argument("-f", dest="fake", action="store_true", help="only check the options")
    p.add_argument("-v", dest="verbose", action="store_true", help="say what was mounted")
    p.add_argument("-n", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("-t", metavar="TYPE", help=argparse.SUPPRESS)
    return p


def mount_arguments(args: argparse.Namespace) -> list[str]:
    """The command line of ``vfsd`` that does what mount(8) wants. UsageError names an option that is not known."""
    found: dict[str, str] = {}
    flags: list[str] = []
    for option in ",".join(args.options).split(","):
        key, eq, value = option.partition("=")
        if eq and key in _VALUES:
            found[key] = value
        elif option in _FLAGS:
            flags.append(_FLAGS[option])
        elif option and option not in _GIVEN and not _NOT_OURS.fullmatch(option) and not args.sloppy:
            known = ", ".join([*(f"{key}=" for key in _VALUES), *_FLAGS])
            raise UsageError(f"unknown mount option {option!r} (known: {known}; all else belongs into vfsd.toml)")
    named = args.source.startswith("/")
    found.setdefault("name", Path(args.source).stem if named else args.source)
    file = Path(found.setdefault("config", args.source if named else str(config_home() / f"{args.source}.toml")))
    if not file.exists():
        raise Failure(f"{file} does not exist: write it (an empty file will do), or give -o config=FILE")
    words = [word for key, value in found.items() for word in (_VALUES[key], value)]
    return ["mount", *words, *flags, args.mountpoint]


class _File(NamedTuple):
    source: str
    target: Path
    executable: bool = False


def _files(system: bool) -> list[_File]:
    if system:
        return [_File(f"system/{name}", Path(place) / name, name == HELPER) for name, place in _SYSTEM.items()]
    place = config_home().parent / "systemd/user"
    return [_File(f"user/{name}", place / name) for name in ("vfsd@.service", "vfsd@.socket")]


def _install(args: argparse.Namespace) -> int:
    system = args.system or args.for_root
    if system and os.geteuid() != 0 and args.root == Path("/"):
        raise Failure("--system writes to /etc and /sbin: type it as root")
    program = _program()
    for file in _files(system):
        text = resources.files("vfsd").joinpath("systemd", file.source).read_text()
        # A unit's way to quote (systemd.service(5)) is not the shell's.
        text = text.replace(PACKAGED, shlex.quote(program) if file.executable else _quoted(program))
        target = args.root / file.target.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755 if file.executable else 0o644)
        print(f"wrote {target}")
    systemctl, home = ("systemctl", "/etc/vfsd") if system else ("systemctl --user", config_home())
    print(f"a mount for {home}/NAME.toml: {systemctl} daemon-reload && {systemctl} enable --now vfsd@NAME")
    return 0


def _program() -> str:
    """The absolute path of ``vfsd``, as it was called or beside the Python that runs it."""
    called = Path(sys.argv[0])
    beside = Path(sys.executable).with_name("vfsd")
    found = called if called.name == "vfsd" and called.exists() else beside if beside.exists() else shutil.which("vfsd")
    if found is None:
        raise Failure("the program vfsd is not installed: pip install it, then type vfsd service install")
    return os.path.abspath(found)


def _quoted(path: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_./@+:,=-]+", path):
        return path
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
