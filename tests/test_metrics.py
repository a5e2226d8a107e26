"""What a platform watches a mount by: metrics, logs as JSON, stacks on a signal, ``vfsd status --json``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cli_world import World

import agenttools
from vfsd.doors.tally import SPANS, Tally, took

OPERATIONS_MD = (Path(__file__).resolve().parent.parent / "docs/operations.md").read_text()
CONFIG = """
[routes."/"]
kind = "state"
[routes."/broken/"]
kind = "backend"
factory = "no_such_module:make"
[[rules]]
operations = ["write"]
paths = ["/a"]
mode = "deny"
"""


def mount(world: World, text: str, *args: str) -> agenttools.Client:
    file = world.base / "vfsd.toml"
    file.write_text(text)
    world.vfsd("mount", "--config", file, *args, world.mp)
    return agenttools.Client(socket=world.run_dir / "vfsd/default.sock")


def get(place: str, head: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[str, str]:
    """(status line, body) of one request at a port or socket."""
    found = re.fullmatch(r"http://([0-9.]+):(\d+)/metrics", place)
    with socket.socket(socket.AF_INET if found else socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect((found[1], int(found[2])) if found else place)
        sock.sendall(head)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    above, _, body = answer.decode().partition("\r\n\r\n")
    return above.partition("\r\n")[0], body


def samples(text: str) -> dict[str, float]:
    """Samples by name and labels; what is no metric fails."""
    from prometheus_client import parser

    return {
        s.name + "".join(f",{key}={value}" for key, value in sorted(s.labels.items())): s.value
        for family in parser.text_string_to_metric_families(text)
        for s in family.samples
    }


def test_a_scrape_has_what_happened(world: World) -> None:
    place = world.base / "metrics.sock"
    with mount(world, CONFIG + f'[metrics]\nsocket = "{place.name}"\n') as client:
        assert oct(place.stat().st_mode & 0o777) == "0o600"
        for name in ("b", "c"):
            (world.mp / name).write_text("x" * 5000)
        with pytest.raises(PermissionError):
            (world.mp / "a").write_text("x")
        agenttools.write(client, "/by-tool", "x")
        agenttools.read(client, "/none")
        with open(world.mp / "b"):
            status, text = get(str(place))
        told = client.call("status")
    assert status == "HTTP/1.1 200 OK"
    found = samples(text)
    assert found["vfsd_operations_total,door=fuse,operation=create,result=ok"] == 2
    assert found["vfsd_operations_total,door=fuse,operation=create,result=EACCES"] == 1
    assert found["vfsd_operations_total,door=rpc,operation=write,result=ok"] == 1
    assert found["vfsd_operations_total,door=rpc,operation=hello,result=ok"] >= 1
    assert found["vfsd_operation_seconds_count,door=fuse,operation=create"] == 3
    name = re.compile("vfsd_operation_seconds_bucket,door=fuse,le=.*,operation=create")
    buckets = [value for key, value in found.items() if name.fullmatch(key)]
    assert buckets == sorted(buckets) and buckets[-1] == 3
    assert 0 < found["vfsd_operation_seconds_sum,door=fuse,operation=create"] < 60
    assert found["vfsd_open_handles,kind=state,route=/"] == 1
    assert found["vfsd_volume_bytes,kind=state,route=/"] >= 10_000
    assert found["vfsd_volume_nodes,kind=state,route=/"] >= 4
    assert found["vfsd_journal_bytes,kind=state,route=/"] >= 0
    assert (found["vfsd_route_up,kind=state,route=/"], found["vfsd_route_up,kind=backend,route=/broken/"]) == (1, 0)
    assert (found["vfsd_rules"], found["vfsd_rpc_connections"], found["vfsd_audit_lost_total"]) == (1, 1, 0)
    assert found["vfsd_audit_lines_total"] >= 4 and found["vfsd_commits_total"] >= 3
    assert found["vfsd_kernel_inodes"] >= 3 and found["vfsd_feed_behind"] == 0
    assert found["vfsd_kernel_notifications_total"] >= 0 and found["process_resident_memory_bytes"] > 1 << 20
    assert told["operations"]["fuse"]["create"]["errors"] == {"EACCES": 1}
    names = {key.partition(",")[0] for key in found if key.startswith("vfsd_")}
    assert [name for name in names if not documented(name)] == []
    world.vfsd("umount", "default")
    assert not place.exists()


def documented(metric: str) -> bool:
    return f"`{re.sub('_(total|bucket|count|sum)$', '', metric)}" in OPERATIONS_MD


def test_a_port_of_the_loopback_address_and_odd_clients(world: World) -> None:
    with mount(world, "[metrics]\nport = 0\n") as client:
        place = client.call("status")["metrics"]
        assert get(place)[0] == "HTTP/1.1 200 OK"
        assert get(place, b"HEAD /metrics HTTP/1.1\r\n\r\n") == ("HTTP/1.1 200 OK", "")
        assert get(place, b"GET / HTTP/1.1\r\n\r\n") == ("HTTP/1.1 404 Not Found", "the metrics are at /metrics\n")
        assert get(place, b"POST /metrics HTTP/1.1\r\n\r\n")[0] == "HTTP/1.1 405 Method Not Allowed"
        with contextlib.suppress(ConnectionResetError):
            assert get(place, b"\xff" * 9000) == ("", "")
        host, port = place.removeprefix("http://").removesuffix("/metrics").split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(30)]
        assert sorted(os.listdir(world.mp)) == ["blobs", "memories"]
        for one in idle:
            one.close()
        assert get(place)[0] == "HTTP/1.1 200 OK"
        assert client.call("status")["metrics"] == place
        other = world.directory("other")
        (world.base / "two.toml").write_text(f"[metrics]\nport = {port}\n")
        said = world.refused("mount", "--name", "two", "--config", world.base / "two.toml", other)
        assert said == f"[metrics]: port {port} of 127.0.0.1: Address already in use"


def test_wrong_settings(world: World) -> None:
    file = world.base / "vfsd.toml"
    for text, sentence in {
        "[metrics]\n": "vfsd.toml:1: [metrics] needs a socket (a path) or a port (of the loopback address), one of",
        '[metrics]\nport = 1\nsocket = "s"\n': "vfsd.toml:1: [metrics] needs a socket",
        '[metrics]\nport = "x"\n': "vfsd.toml:2: port must be a number",
        "[metrics]\nport = 70000\n": "vfsd.toml:2: port must be from 0 to 65535",
        "[metrics]\nsocket = 3\n": "vfsd.toml:2: socket must be a string",
        'log_format = "xml"\n': "vfsd.toml:1: log_format 'xml' is unknown: use text, json",
        f'[metrics]\nsocket = "{"x" * 200}"\n': "AF_UNIX path too long",
    }.items():
        file.write_text(text)
        assert sentence in world.refused("mount", "--config", file, world.mp)


def test_without_the_package_it_is_named(world: World) -> None:
    (world.base / "prometheus_client.py").write_text("raise ImportError\n")
    world.env["PYTHONPATH"] = str(world.base)
    (world.base / "vfsd.toml").write_text("[metrics]\nport = 0\n")
    said = world.refused("mount", "--config", world.base / "vfsd.toml", world.mp)
    assert said == "[metrics] needs the package prometheus-client: pip install 'vfsd[metrics]'"


def test_status_tells_all_that_is_documented_and_nothing_else(world: World) -> None:
    with mount(world, CONFIG) as client:
        agenttools.write(client, "/b", "x")
        row = world.status()
    table = OPERATIONS_MD.partition("## Status")[2].partition("\n## ")[0]
    fields = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(row) == set(re.findall(r"`(\w+)`", "".join(fields)))
    assert row["version"] and row["config"] == str(world.base / "vfsd.toml") and row["state"] == "running"
    assert row["routes"][1]["problem"] and row["routes"][0]["counters"]["nodes"] >= 2
    assert (row["rules"], row["approvals"], row["log_level"], row["log_format"]) == (1, 0, "info", "text")
    assert row["operations"]["rpc"]["write"]["count"] == 1


def test_either_engine_counts(world: World) -> None:
    with mount(world, CONFIG, "--engine", "pyfuse3") as client:
        (world.mp / "b").write_text("x")
        with pytest.raises(PermissionError):
            (world.mp / "a").write_text("x")
        told = client.call("status")
    create = told["operations"]["fuse"]["create"]
    assert (create["count"], create["errors"], sum(create["spans"])) == (2, {"EACCES": 1}, 2)
    assert told["kernel"]["inodes"] >= 1 and told["kernel"]["behind"] == 0


def test_the_log_as_json(world: World) -> None:
    with mount(world, CONFIG, "--log-format", "json") as client:
        client.call("status")
        os.kill(client.call("status")["pid"], signal.SIGUSR1)
        log = world.base / "state/vfsd/default/vfsd.log"
        world.wait(lambda: "all stacks" in log.read_text())
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(set(line) == {"time", "level", "logger", "line", "message"} for line in lines)
    mounted = next(line for line in lines if line["message"].startswith("mounted default on"))
    assert (mounted["level"], mounted["logger"]) == ("info", "vfsd.daemon") and mounted["time"].endswith("+00:00")
    assert any(line["level"] == "warning" and "/broken/" in line["message"] for line in lines)


def test_stacks_of_tasks_and_threads(world: World) -> None:
    with mount(world, CONFIG.replace("deny", "interrupt"), "--log-level", "error") as client:
        waiting = threading.Thread(target=client.call, args=("write",), kwargs={"path": b"/a", "data": b"x"})
        waiting.start()
        (question,) = client.call("approvals", wait=20)["pending"]
        os.kill(client.call("status")["pid"], signal.SIGUSR1)
        log = world.base / "state/vfsd/default/vfsd.log"
        world.wait(lambda: "thread MainThread" in log.read_text())
        client.call("approve", question=question["id"])
        waiting.join(20)
    said = log.read_text()
    assert re.search(r"^\S+ \S+ INFO vfsd\.process\.logs:\d+: all stacks:$", said, re.MULTILINE)
    for what in ("task vfsd.doors.rpc.RpcDoor.serve", "approvals.py", "thread vfsd-notify", "thread MainThread"):
        assert what in said, said


def test_stacks_of_a_loop_that_hangs(world: World) -> None:
    (world.base / "stuck.py").write_text("import time\n\n\ndef make():\n    time.sleep(1e9)\n")
    with mount(world, CONFIG) as client:
        pid = client.call("status")["pid"]
        (world.base / "vfsd.toml").write_text('[[hooks]]\ncall = "factory:stuck:make"\n')

        def ask() -> None:
            with contextlib.suppress(OSError):
                client.call("rules_reload")

        asked = threading.Thread(target=ask)
        asked.start()
        log = world.base / "state/vfsd/default/vfsd.log"

        def shown() -> bool:
            os.kill(pid, signal.SIGUSR1)
            return "stuck.py:5 in make" in log.read_text()

        world.wait(shown)
        os.kill(pid, signal.SIGKILL)
        asked.join(20)


def test_a_tally() -> None:
    tally = Tally()
    row = tally.row("read")
    assert tally.plain() == {}
    for seconds in (0.0, 0.9e-6, 3e-6, 1e-3, 1e30):
        took(row, seconds)
    tally.failed["read", 5] += 1
    tally.failed["read", 9999] += 1
    found = tally.plain()["read"]
    assert (found["count"], found["errors"]) == (5, {"EIO": 1, "9999": 1})
    assert {n: count for n, count in enumerate(found["spans"]) if count} == {0: 2, 2: 1, 10: 1, SPANS - 1: 1}
    assert sys.getsizeof(row) < 1000
