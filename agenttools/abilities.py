"""``python -m agenttools.abilities``: what of a confinement this machine can enforce, as JSON for ``vfsd doctor``.

A list of objects ``what``, ``says`` and ``fix``; ``fix`` is empty when all is well. Each is found out by trying.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

from agenttools import confinement, launcher, limits
from agenttools.keeper import KeeperFailed
from agenttools.limits import Limits
from agenttools.views import ViewUnavailable, need_bwrap

_KEY = "doctor"

_SECCOMP = "in a container: --security-opt seccomp=unconfined"
_FIXES = {
    # The kernel refuses a new /proc to who has parts of it covered, as container engines do (fs/namespace.c).
    "mount proc": "in a container: --security-opt unmask=ALL (Docker: --security-opt systempaths=unconfined)",
    "loopback": "in a container: --cap-add NET_ADMIN too",
    "bubblewrap)": "apt-get install -y bubblewrap",
}
"""What to do about what bubblewrap says, by a word of it."""


def profiles() -> dict[str, str]:
    """Whether commands can be confined at all: a keeper, and a command in its namespaces, for each profile."""
    what = "profiles of execute"
    can: list[str] = []
    try:
        bwrap = need_bwrap()
        for profile in (confinement.choose("tree", {}), confinement.choose("offline", {})):
            _try(bwrap, profile)
            can.append(profile)
    except (ViewUnavailable, KeeperFailed) as error:
        said = str(error.strerror)
        fix = next((fix for word, fix in _FIXES.items() if word in said), "")
        return _finding(what, f"only {' and '.join(map(repr, ['open', *can]))}: {said}", fix or _SECCOMP)
    return _finding(what, "'tree' and 'offline' can be enforced, by namespaces and a filter of system calls")


def _try(bwrap: str, profile: confinement.Profile) -> None:
    confined = confinement.prepare(bwrap, profile, Limits(), _KEY)
    gate = confinement.Gate(confined)
    try:
        argv = [bwrap, *gate.options, *confinement.namespaces(confined), "--ro-bind", "/", "/"]
        argv += [*confinement.kernel_files(("/dev", "/proc", "/sys", "/run")), "/bin/true"]
        ran = launcher.start(
            lambda: subprocess.run(argv, pass_fds=gate.fds, capture_output=True, text=True, timeout=20, check=False)
        )
    finally:
        gate.close()
    if ran.returncode:
        raise KeeperFailed(ran.returncode, ran.stderr.strip().rpartition("\n")[2])


def sockets() -> dict[str, str]:
    """Whether ``tree`` keeps commands from the host's abstract sockets; ``offline`` does anywhere."""
    what = "abstract sockets"
    if launcher.scoped():
        return _finding(what, f"out of reach in 'tree' too (Landlock ABI {launcher.abi()})")
    have = f"has Landlock ABI {launcher.abi()}" if launcher.abi() else "has no Landlock"
    fix = "use the profile 'offline', or Linux 6.12 or later with Landlock switched on"
    return _finding(what, f"within reach of commands in 'tree', since this kernel {have}", fix)


def bounds() -> dict[str, str]:
    """How limits of memory and processes are kept here."""
    what = "limits of execute"
    place = limits.parent_group()
    if place is not None:
        return _finding(what, f"memory and processes of all commands together, by cgroups in {place}")
    each = "memory and CPU time of each process, by rlimits"
    fix = f"run as an ordinary user, or where cgroup v2 can be written to below {limits.CGROUPS}"
    if os.getuid() == 0:
        return _finding(what, f"{each}; none of processes, for root needs a cgroup for that", fix)
    return _finding(what, f"{each}; processes of all commands together")


def _finding(what: str, says: str, fix: str = "") -> dict[str, str]:
    return {"what": what, "says": says, "fix": fix}


def examine() -> Iterator[dict[str, str]]:
    """All of it."""
    yield profiles()
    yield sockets()
    yield bounds()


if __name__ == "__main__":
    print(json.dumps(list(examine())))
