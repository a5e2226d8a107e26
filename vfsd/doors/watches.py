"""Who watches files: inotify and fanotify marks of all processes, as /proc shows them (proc_pid_fdinfo(5)).

Blocking, a few milliseconds for each hundred processes; touches no file system but /proc.
"""

from __future__ import annotations

import os
import re

_KINDS = ("anon_inode:inotify", "anon_inode:[fanotify]")
_MARK = re.compile(r"^(?:inotify wd:\S+|fanotify) ino:([0-9a-f]+) sdev:([0-9a-f]+) ", re.MULTILINE)


def watched(device: int) -> set[int]:
    """The inos on ``device`` (st_dev) that a process watches whose descriptors we may see."""
    want = os.major(device) << 20 | os.minor(device)  # the kernel's own dev_t
    found: set[int] = set()
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            for text in _marks(f"/proc/{pid}"):
                found.update(int(ino, 16) for ino, dev in _MARK.findall(text) if int(dev, 16) == want)
    return found


def _marks(process: str) -> list[str]:
    found = []
    try:
        for fd in os.listdir(f"{process}/fd"):
            try:
                if os.readlink(f"{process}/fd/{fd}") in _KINDS:
                    with open(f"{process}/fdinfo/{fd}") as file:
                        found.append(file.read())
            except OSError:
                continue
    except OSError:  # gone, or not ours to see
        pass
    return found
