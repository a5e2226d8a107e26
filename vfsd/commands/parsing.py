"""What the parsers of all commands have in common: a command's own line of help, and the options that many take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A further command, or action of one; ``text`` is shown in the list of them and by its own ``--help``."""
    made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:])
    return made


def add_name(p: argparse.ArgumentParser) -> None:
    """The option ``--name``."""
    p.add_argument("--name", default="default", metavar="N", help="the mount's name (default: default)")


def add_thread(p: argparse.ArgumentParser) -> None:
    """The option ``--thread``."""
    p.add_argument("--thread", metavar="T", help="whose (default: the mount's, else default)")


def surplus_word(surplus: Sequence[str]) -> str:
    """What is wrong with the words that are left over when a command line is parsed."""
    word = next((word for word in surplus if word.startswith("-")), surplus[0])
    return f"there is no option {word!r}" if word.startswith("-") else f"{word!r} is one word too many"
