"""How rules are told of: the same words in the list of what waits, in the log and in sentences."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import SECONDS, Daemon

from agenttools import tools

pytestmark = pytest.mark.mount


@pytest.fixture
def daemon(tmp_path: Path, engine: str) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, engine, "memory")
    daemon.start()
    yield daemon
    daemon.stop()


def rule(daemon: Daemon, operation: str, path: str, mode: str = "deny") -> None:
    daemon.client.call("rules_set", owner="t", rules=[{"operations": [operation], "paths": [path], "mode": mode}])


def log(daemon: Daemon, *args: str) -> list[dict[str, Any]]:
    done = daemon.vfsd("log", "--name", "test", "--json", *args)
    return [json.loads(line) for line in done.stdout.splitlines()]


def tool(daemon: Daemon, *args: str) -> list[str]:
    return [sys.executable, "-m", "agenttools", "--socket", str(daemon.socket), *args]


def test_what_waits_is_called_as_in_the_log(daemon: Daemon) -> None:
    (daemon.point / "old").write_text("x")
    rule(daemon, "write", "/{new,old}", "interrupt")
    commands = {
        ("create", "/new"): tool(daemon, "write", "/new"),
        ("write", "/old"): tool(daemon, "write", "/old"),
        ("chmod", "/old"): ["chmod", "600", str(daemon.point / "old")],
    }
    for (op, path), command in commands.items():
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
            (question,) = daemon.client.call("approvals", wait=10)["pending"]
            shown = daemon.vfsd("approvals", "--name", "test").stdout
            said = daemon.vfsd("approve", "--name", "test", question["id"]).stdout
            child.communicate(timeout=SECONDS)
        assert (question["op"], question["paths"]) == (op, [path.encode()])
        assert f" {op} {path}  by " in shown and said == f"approved {op} {path}\n"
        assert log(daemon, "--path", path)[-1]["op"] == op


def test_a_denied_look_is_known_by_its_tool_and_call(daemon: Daemon) -> None:
    (daemon.point / "d").mkdir()
    (daemon.point / "d/f").write_text("x")
    rule(daemon, "read", "/{d,d/**}")
    assert tools.read(daemon.client, "/d/f", call_id="c1").error
    assert tools.ls(daemon.client, "/d", call_id="c2").error
    assert tools.edit(daemon.client, "/d/f", "x", "y", call_id="c3").error
    assert tools.edit(daemon.client, "/d/f", "x" * (2 << 20), "y", call_id="c4").error
    found = [(line["tool"], line["call"], line["result"]) for line in log(daemon, "--failed")]
    assert found == [
        ("read", "c1", "EACCES"),
        ("ls", "c2", "EACCES"),
        ("edit", "c3", "EACCES"),
        ("edit", "c4", "EACCES"),
    ]
