"""The audit log of a real mount: both doors, executes, the files in the mount, the commands, kill -9."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon

from agenttools import tools

pytestmark = [pytest.mark.mount, pytest.mark.timeout(120)]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
one_engine = pytest.mark.parametrize("daemon", ["native"], indirect=True)
"""For what commands make of records that are the same with both."""


@pytest.fixture(params=["native", "pyfuse3"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path, request.param)
    made.start()
    yield made
    try:
        if made.process is not None:
            made.stop()
    finally:
        made.abort()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Daemon]]:
    """A function that mounts with an ``[audit]`` table."""
    started: list[Daemon] = []

    def run(settings: str) -> Daemon:
        (tmp_path / "vfsd.toml").write_text(settings)
        made = Daemon(tmp_path / "mount", extra=("--config", str(tmp_path / "vfsd.toml")))
        started.append(made)
        made.start()
        return made

    yield run
    for made in started:
        try:
            made.stop()
        finally:
            made.abort()


def records(daemon: Daemon, name: str = "log") -> list[dict[str, Any]]:
    text = (daemon.point / f".vfsd/{name}.ndjson").read_bytes()
    return [json.loads(line) for line in text.splitlines()]


def of(daemon: Daemon, path: str) -> list[dict[str, Any]]:
    return [r for r in records(daemon) if r["path"] == path]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_shell_is_known_by_its_program(daemon: Daemon) -> None:
    done = subprocess.Popen(["/bin/sh", "-c", "echo words > f; chmod 600 f; :"], cwd=daemon.point)
    assert done.wait(20) == 0
    made, written, changed = of(daemon, "/f")
    assert [r["op"] for r in (made, written, changed)] == ["create", "write", "chmod"]
    assert made["pid"] == written["pid"] == done.pid
    assert made["uid"] == os.getuid() and made["door"] == "fuse"
    assert made["command"] == "/bin/sh -c echo words > f; chmod 600 f; :"
    assert changed["command"] == "chmod 600 f"
    assert written["size"] == [0, 6]
    assert "call" not in made


def test_a_tool_is_known_by_its_name_and_call(daemon: Daemon) -> None:
    tools.write(daemon.client, "/t/x", "one", call_id="call_1")
    tools.edit(daemon.client, "/t/x", "one", "three", call_id="call_2")
    tools.delete(daemon.client, "/t/x", call_id="call_3")
    found = [(r["op"], r["door"], r["tool"], r["call"], r["pid"]) for r in of(daemon, "/t/x")]
    me = os.getpid()
    assert found == [
        ("create", "rpc", "write", "call_1", me),
        ("write", "rpc", "edit", "call_2", me),
        ("unlink", "rpc", "delete", "call_3", me),
    ]


@pytest.mark.parametrize(("view", "profile"), [("root", "open"), ("root", "tree"), ("mount", "open")])
def test_all_children_of_an_execute_lead_to_its_call(daemon: Daemon, view: str, profile: str) -> None:
    orphan = "(setsid env -i /bin/sh -c 'sleep 0.2; echo > orphan' </dev/null >/dev/null 2>&1 &); sleep 0.6;"
    namespace = "unshare -pf /bin/sh -c 'echo > pidns';" if os.geteuid() == 0 and profile == "open" else ""
    command = f"echo > direct; env -i /bin/sh -c 'echo > cleared'; {namespace} (echo > subshell & wait);"
    command += orphan if view == "root" else ""
    ran = tools.execute(daemon.client, command, view=view, profile=profile, call_id="call_9")
    if ran.view != view:
        pytest.skip(f"no view {view} here")
    assert ran.exit_code == 0, ran
    names = ["direct", "cleared", "subshell"] + ["pidns"] * bool(namespace) + ["orphan"] * (view == "root")
    executes = set()
    for name in names:
        made = of(daemon, f"/{name}")[0]
        assert (name, made.get("call")) == (name, "call_9")
        executes.add(made["execute"])
    assert len(executes) == 1
    subprocess.run(["touch", daemon.point / "after"], check=True)
    assert "call" not in of(daemon, "/after")[0]


def test_an_execute_without_a_call_is_known_by_its_own_id(daemon: Daemon) -> None:
    assert tools.execute(daemon.client, "echo > a").exit_code == 0
    made = of(daemon, "/a")[0]
    assert len(made["execute"]) == 16 and "call" not in made


def test_refusals_are_there_with_the_reason(daemon: Daemon) -> None:
    with pytest.raises(OSError):
        os.rmdir(daemon.point / "usr")
    assert tools.delete(daemon.client, "/none", call_id="call_4").error
    assert tools.write(daemon.client, "/usr/lib/x", "", call_id="call_5").error
    found = [(r["op"], r["path"], r["result"], r.get("call")) for r in records(daemon, "errors")]
    assert found == [
        ("rmdir", "/usr", "EBUSY", None),
        ("delete", "/none", "ENOENT", "call_4"),
        ("create", "/usr/lib/x", "EROFS", "call_5"),
    ]
    assert records(daemon, "errors")[-1]["error"] == "Read-only file system"
    assert [r["seq"] for r in records(daemon, "errors")] == [r["seq"] for r in records(daemon) if r["result"] != "ok"]


def test_the_files_are_hidden_and_read_only(daemon: Daemon) -> None:
    (daemon.point / "f").write_text("x")
    assert ".vfsd" not in os.listdir(daemon.point)
    assert sorted(os.listdir(daemon.point / ".vfsd")) == ["errors.ndjson", "log.ndjson"]
    assert tools.grep(daemon.client, '"op":"create"').matches == []
    assert tools.ls(daemon.client, "/.vfsd").entries
    assert '"path":"/f"' in tools.read(daemon.client, "/.vfsd/log.ndjson").text
    log = daemon.point / ".vfsd/log.ndjson"
    for refused in (
        lambda: log.write_text(""),
        lambda: os.truncate(log, 0),
        lambda: log.unlink(),
        lambda: log.chmod(0o666),
        lambda: (daemon.point / ".vfsd/x").write_text(""),
        lambda: os.rename(log, daemon.point / "log"),
        lambda: (daemon.point / ".vfsd").rmdir(),
    ):
        with pytest.raises(OSError) as caught:
            refused()
        assert caught.value.errno in (errno.EROFS, errno.EBUSY, errno.EXDEV, errno.EACCES)


def test_tail_grep_and_jq_work(daemon: Daemon, tmp_path: Path) -> None:
    log = daemon.point / ".vfsd/log.ndjson"
    (daemon.point / "first").write_text("x")
    with open(tmp_path / "tail", "wb") as out:
        tail = subprocess.Popen(["tail", "-n", "+1", "-f", log], stdout=out)
    try:
        for i in range(20):
            (daemon.point / f"f{i}").write_text("x")
        # The write of the last one is recorded at its close, after its creation.
        until(lambda: (tmp_path / "tail").read_bytes() == log.read_bytes())
    finally:
        tail.kill()
        tail.wait()
    counted = subprocess.run(["grep", "-c", '"op":"create"', log], capture_output=True, text=True, check=True)
    assert counted.stdout == "21\n"
    assert log.stat().st_size == len(log.read_bytes())
    if shutil.which("jq"):
        done = subprocess.run(["jq", "-r", ".path", log], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "/f19"


def test_a_reader_goes_on_while_the_log_rotates(start: Callable[[str], Daemon]) -> None:
    daemon = start("[audit]\nmax_bytes = 65536\n")
    log = daemon.point / ".vfsd/log.ndjson"
    seen: list[int] = []
    with open(log, "rb", buffering=0) as reader:
        rest, target = b"", daemon.point / "f"
        for i in range(150):
            for _ in range(5):
                target.write_bytes(b"x")
            while piece := reader.read(1 << 16):
                rest += piece
            *whole, rest = rest.split(b"\n")
            seen += [json.loads(line)["seq"] for line in whole if line]
            assert i < 100 or seen
    assert seen == list(range(1, seen[-1] + 1))
    kept = records(daemon)
    assert kept[-1]["seq"] == seen[-1] and kept[0]["seq"] > 1
    assert log.stat().st_size <= 65536
    place = daemon.base / "state/vfsd/test/threads/default/audit"
    assert sum(path.stat().st_size for path in place.iterdir()) <= 2 * 65536


def test_a_killed_daemon_loses_no_record(daemon: Daemon) -> None:
    acknowledged = 0
    writer = "import os\nfor i in range(100000):\n open(f'k{i}','x').close()\n print(i, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", writer], cwd=daemon.point, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        acknowledged = int(line)
        if acknowledged == 300:
            daemon.kill()
    process.stdout.close()
    process.wait(20)
    daemon.abort()
    daemon.start()
    made = {r["path"] for r in records(daemon) if r["op"] == "create" and r["result"] == "ok"}
    assert {f"/k{i}" for i in range(acknowledged + 1)} <= made
    before = records(daemon)[-1]["seq"]
    (daemon.point / "more").mkdir()
    assert records(daemon)[-1]["seq"] == before + 1


@one_engine
def test_log_and_blame(daemon: Daemon) -> None:
    tools.write(daemon.client, "/src/a.txt", "one", call_id="call_1")
    subprocess.run(["sed", "-i", "s/one/two/", "src/a.txt"], cwd=daemon.point, check=True)
    subprocess.run(["mv", "src/a.txt", "src/b.txt"], cwd=daemon.point, check=True)
    pid = subprocess.Popen(["touch", daemon.point / "other"])
    pid.wait(20)

    def log(*args: str) -> list[dict[str, Any]]:
        done = daemon.vfsd("log", "--name", "test", "--json", *args)
        assert done.returncode == 0, done
        return [json.loads(line) for line in done.stdout.splitlines()]

    everything = log()
    assert everything == records(daemon)
    assert {r["path"] for r in log("--call", "call_1")} == {"/src", "/src/a.txt"}
    assert {r["path"] for r in log("--pid", str(pid.pid))} == {"/other"}
    assert [r["op"] for r in log("--path", "/src/b.txt")] == ["rename"]
    assert [r["op"] for r in log("--path", str(daemon.point / "src/b.txt"))] == ["rename"]
    assert log("--path", "/s*/**") == [r for r in everything if r["path"] != "/other"]
    assert log("--since", "1h") == everything and log("--since", "2099-01-01") == []
    assert log("-n", "1") == everything[-1:]
    blamed = daemon.vfsd("blame", "--name", "test", "/src/b.txt").stdout.splitlines()
    assert "mv src/a.txt src/b.txt" in blamed[0]
    assert any("sed -i s/one/two/ src/a.txt" in line and " write " in line for line in blamed)
    assert "call call_1" in blamed[-1]
    assert daemon.vfsd("blame", "--name", "test", "/nothing").stderr.startswith("vfsd: nothing that is still recorded")
    wrong = daemon.vfsd("log", "--name", "test", "--since", "soon")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    daemon.stop()
    assert log("-n", "1")  # without a daemon too


@one_engine
def test_log_follows(daemon: Daemon, tmp_path: Path) -> None:
    (daemon.point / "before").mkdir()
    with open(tmp_path / "out", "wb") as out:
        follow = subprocess.Popen(
            [sys.executable, "-m", "vfsd", "log", "--name", "test", "--follow", "--json", "--path", "*e*"],
            env=daemon.environ, stdout=out,
        )  # fmt: skip
    try:
        until(lambda: b"/before" in (tmp_path / "out").read_bytes())
        (daemon.point / "xyz").mkdir()
        (daemon.point / "later").mkdir()
        until(lambda: b"/later" in (tmp_path / "out").read_bytes())
    finally:
        follow.kill()
        follow.wait()
    assert b"/xyz" not in (tmp_path / "out").read_bytes()


@one_engine
def test_what_a_name_says_cannot_reach_the_terminal(daemon: Daemon) -> None:
    (daemon.point / "a\x1b[2J\n").mkdir()
    shown = daemon.vfsd("log", "--name", "test").stdout
    assert "\x1b" not in shown and shown.count("\n") == 1


def test_a_restore_is_told_of(daemon: Daemon) -> None:
    (daemon.point / "f").write_text("one")
    made = daemon.client.call("checkpoint", action="create", label="x")["result"]
    (daemon.point / "f").write_text("two")
    daemon.client.call("checkpoint", action="restore", ref=made["id"], tool="checkpoint", call_id="call_8")
    last = records(daemon)[-1]
    assert (last["op"], last["checkpoint"], last["call"]) == ("restore", made["id"], "call_8")
    assert last["changes"] > 0


def test_off_and_reads(start: Callable[[str], Daemon]) -> None:
    daemon = start("[audit]\nreads = true\n")
    (daemon.point / "f").write_text("x")
    assert tools.read(daemon.client, "/f").error is None
    found = of(daemon, "/f")
    assert ("read", "read") in [(r["op"], r.get("tool")) for r in found] or "read" in [r["op"] for r in found]
    count = len(records(daemon))
    records(daemon)
    assert all(not r["path"].startswith("/.vfsd") for r in records(daemon))
    assert len(records(daemon)) <= count + 8


def test_without_an_audit_there_is_none(start: Callable[[str], Daemon]) -> None:
    daemon = start("[audit]\nenabled = false\n")
    (daemon.point / "f").write_text("x")
    assert not (daemon.point / ".vfsd").exists()
    done = daemon.vfsd("log", "--name", "test")
    assert done.returncode == 1 and done.stderr.startswith("vfsd: nothing is recorded for 'test'")


@pytest.mark.parametrize(
    "settings", ["max_bytes = 1", "max_age = 0", "enabled = 1", "reads = 'yes'", "max_bytes = true", "more = 1"]
)
def test_bad_settings_are_refused(tmp_path: Path, settings: str) -> None:
    (tmp_path / "vfsd.toml").write_text(f"[audit]\n{settings}\n")
    daemon = Daemon(tmp_path / "mount")
    done = daemon.vfsd("mount", "--config", str(tmp_path / "vfsd.toml"), str(daemon.point))
    assert done.returncode == 1
    assert done.stderr.startswith(f"vfsd: {tmp_path}/vfsd.toml:2: ") and done.stderr.count("\n") == 1
