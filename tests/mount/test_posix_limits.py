"""Limits a program meets are its own, not the daemon's."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

from trees import Mounts

OPEN_ALL = """
import errno, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
held = []
try:
    while True:
        held.append(os.open(f"{sys.argv[1]}/f{len(held)}", os.O_CREAT | os.O_RDWR))
except OSError as e:
    print(e.errno, len(held))
"""


def may_raise_limits() -> bool:
    """Root with CAP_SYS_RESOURCE may go past the hard limit, as the daemon then does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard + 1))
    except (ValueError, OSError):
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return True


def test_a_program_may_open_all_it_is_allowed_below_a_local_route(mounts: Mounts) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = min(20_000, hard if may_raise_limits() else hard // 2)
    with mounts.directory("mount-native-local") as (daemon, path):
        done = subprocess.run(
            [sys.executable, "-c", OPEN_ALL, f"{daemon.point}{path}", str(limit)],
            stdout=subprocess.PIPE, text=True, timeout=120, check=True,
        )  # fmt: skip
    code, held = map(int, done.stdout.split())
    assert code == errno.EMFILE
    assert held > limit - 20
