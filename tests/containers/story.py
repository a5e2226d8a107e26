"""What must hold wherever the daemon, the tools and the commands are: one path, both ways, and an audit that knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

COMMAND = """
cat outside
echo from inside > /{name}/inside
env -i /bin/sh -c 'echo > cleared'
(sleep 0.1; echo > later) & wait
"""
PIDNS = "unshare --user --map-root-user --pid --fork /bin/sh -c 'echo > pidns'\n"
"""Run by ``execute``: changes by children without the marks in their environment, and in a pid namespace below."""


class Run(Protocol):
    def __call__(self, *argv: str, stdin: str = "") -> str: ...


def one_path_and_who_did_it(
    name: str, outside: Run, inside: Callable[..., str], *, profile: str = "open", pidns: bool = True
) -> None:
    """``outside`` and ``inside`` run a program here and there and give back its output.

    ``inside`` takes environment variables as keywords. ``name``: of a directory of the tree, and of the call.
    """
    outside("agenttools", "write", f"/{name}/outside", stdin="from outside\n")
    command = f"cd /{name}" + COMMAND.format(name=name) + PIDNS * pidns
    said = inside("agenttools", "--json", "execute", "--profile", profile, "--view", "root", command, VFSD_CALL_ID=name)
    result = json.loads(said)
    assert (result["output"], result["exit_code"], result["view"]) == ("from outside\n", 0, "root"), result
    assert inside("agenttools", "read", f"/{name}/inside") == "from inside\n"
    assert outside("agenttools", "read", f"/{name}/inside") == "from inside\n"
    who_did_it(name, outside, ["inside", "cleared", "later", *["pidns"] * pidns])


def who_did_it(name: str, outside: Run, files: list[str]) -> None:
    """The audit leads these files in the directory ``name`` back to one execute, of the call ``name``."""
    made = [record for record in log(outside, "--call", name) if record["op"] == "create"]
    assert [record["path"] for record in made] == [f"/{name}/{file}" for file in files]
    assert len({record["execute"] for record in made}) == 1
    assert all(record["pid"] > 0 and record["command"] for record in made)
    assert f"call {name}" in outside("vfsd", "blame", f"/{name}/{files[0]}")


def log(outside: Run, *filters: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outside("vfsd", "log", "--json", *filters).splitlines()]
