"""What the parsers of all commands have in common: a command's own line of help, and the options that many take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vfsd.config import LOG_LEVELS, UsageError
from vfsd.process.control import Failure, find


def command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A further command, or action of one; ``text`` is shown in the list of them and by its own ``--help``."""
    made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:])
    return made


def add_mount(
    p: argparse.ArgumentParser, default: str | None = "default", *, said: str = "default", alone: bool = False
) -> None:
    """The option ``--name``, and what it is without, ``said`` in its help. ``alone``: the command takes nothing else,
    so that the name will do by itself."""
    p.add_argument("--name", metavar="NAME", help=f"the mount's name, or the directory it is on (default: {said})")
    if alone:
        p.add_argument("word", metavar="NAME", nargs="?", help="the same as --name NAME")
    p.set_defaults(mount=default)


def settle_mount(args: argparse.Namespace) -> None:
    """Have ``args.name`` be the name of the mount that is meant, however that was said; a name that no mount has stays.
    Raises UsageError, and Failure for a directory with no mount."""
    if "mount" not in args:
        return
    word = getattr(args, "word", None)
    if word is not None and args.name is not None:
        if getattr(args, "level", word) is not None or word not in LOG_LEVELS:
            raise UsageError(f"{word!r} is one word too many: --name says which mount")
        args.level, word = word, None  # vfsd log-level takes that besides
    said = word if args.name is None else args.name
    if said is None:
        args.name = args.mount
        return
    entry = find(said)
    if entry is not None:
        args.name = entry["name"]
    elif "/" in said and "lazy" not in args:  # vfsd umount takes away what no daemon is known of
        raise Failure(f"no vfsd mount is on {said}: see vfsd status")
    else:
        args.name = said


def add_thread(p: argparse.ArgumentParser) -> None:
    """The option ``--thread``."""
    p.add_argument("--thread", metavar="T", help="whose (default: the mount's, else default)")


def surplus_word(surplus: Sequence[str]) -> str:
    """What is wrong with the words that are left over when a command line is parsed."""
    word = next((word for word in surplus if word.startswith("-")), surplus[0])
    return f"there is no option {word!r}" if word.startswith("-") else f"{word!r} is one word too many"
