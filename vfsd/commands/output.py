"""What commands say to a person: sentences on standard error, each of one line whatever names are in it, and sizes."""

from __future__ import annotations

import sys

from vfsd.doors.rpc import one_line


def say(sentence: str) -> None:
    """One line on standard error."""
    print(f"vfsd: {one_line(sentence)}", file=sys.stderr)


def tell(line: str) -> None:
    """One line on standard output."""
    print(one_line(line))


def size_text(count: int) -> str:
    """``count`` bytes as a person reads them."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
