"""``vfsd bugreport``: what helps is in it, and nothing that names or tells of anything of the user's."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest
from cli_world import World

import agenttools
from vfsd.process import bugreport, redacted

CONFIG = """
thread = "t1"
[routes."/"]
kind = "state"
[routes."/db/"]
kind = "store"
location = "postgresql://me:SECRET-dsn@/none?host=/SECRET-host&password=SECRET-query"
namespace = ["{user}", "SECRETnamespace"]
set = { user = "SECRETuser" }
[routes."/hub/"]
kind = "backend"
factory = "SECRETmodule:make"
[execute]
pass_env = ["SECRET_PASSED"]
[execute.env]
SECRET_NAME = "SECRET-value"
[execute.limits]
processes = 77
[[rules]]
operations = ["write"]
paths = ["/SECRET-pattern/**"]
mode = "deny"
[quotas."/"]
files = 100
"""


def read(file: Path) -> dict[str, str]:
    with tarfile.open(file) as tar:
        found = {name: tar.extractfile(name) for name in tar.getnames()}
        return {name.removeprefix("vfsd-bugreport/"): part.read().decode() for name, part in found.items() if part}


def test_a_report_has_what_helps_and_no_secret(world: World) -> None:
    config = world.base / "vfsd.toml"
    config.write_text(CONFIG)
    world.env |= {"SECRET_VARIABLE": "SECRET-environment", "AWS_SECRET_ACCESS_KEY": "SECRET-key"}
    world.vfsd("mount", "--config", config, "--log-level", "debug", world.mp)
    (world.mp / "SECRET-name").write_text("SECRET-contents")
    with agenttools.Client(socket=world.run_dir / "vfsd/default.sock") as client:
        agenttools.write(client, "/SECRET-pattern/x", "x")
        config.write_text(CONFIG.replace('"deny"', '"SECRET-mode"'))
        with pytest.raises(OSError):
            client.call("reload")
        with pytest.raises(OSError):
            client.call("rules_reload")
    config.write_text(CONFIG)
    log = world.base / "state/vfsd/default/vfsd.log"
    assert "SECRET-mode" in log.read_text()
    file = world.base / "report.tar.gz"
    said = world.vfsd("bugreport", "-o", file).stdout

    parts = read(file)
    assert set(parts) == {"versions.json", "machine.json", "doctor.txt", "status.json", "config.json", "log.txt"}
    assert all(re.search(rf"^  {name} +\S", said, re.MULTILINE) for name in parts)
    assert said.index("is to have") < said.index(f"wrote {file}")
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    for name, text in parts.items():
        assert "SECRET" not in text and "could not be had" not in text, (name, text)
    status, kept = json.loads(parts["status.json"]), json.loads(parts["config.json"])
    assert (status["name"], status["thread"], status["state"], status["rules"]) == ("default", "t1", "running", 1)
    assert [(r["prefix"], r["works"]) for r in status["routes"]][:3] == [("/", True), ("/db/", False), ("/hub/", False)]
    assert status["operations"]["fuse"]["create"]["count"] == 1
    assert kept["execute"] == {"pass_env": "(1 left out)", "env": "(1 left out)", "limits": {"processes": 77}}
    assert kept["rules"] == [{"operations": ["write"], "paths": "(1 left out)", "mode": "deny"}]
    assert kept["routes"]["/db/"]["kind"] == "store" and kept["quotas"] == {"/": {"files": 100}}
    assert re.search(r" ERROR vfsd\.rules\.book:\d+ rules are as before: %s$", parts["log.txt"], re.MULTILINE)
    assert re.search(r" INFO vfsd\.daemon:\d+ mounted %s on %s$", parts["log.txt"], re.MULTILINE)
    assert "trial mount: mounted" in parts["doctor.txt"]
    versions, machine = json.loads(parts["versions.json"]), json.loads(parts["machine.json"])
    assert versions["vfsd"] and versions["libraries"]["trio"] and machine["kernel"].startswith("Linux ")
    assert str(world.base) not in "".join(parts.values())
    shown = world.vfsd("status").stdout
    assert "SECRET-host" in shown and "SECRET-dsn" not in shown and "SECRET-query" not in shown
    assert world.refused("bugreport", "-o", file) == f"{file}: File exists"
    assert world.vfsd("bugreport", "-o", file, code=1).stdout == ""


def test_a_report_without_a_mount_and_of_a_dead_one(world: World) -> None:
    assert world.refused("bugreport", "nobody") == "no mount is called 'nobody'"
    world.vfsd("mount", "--name", "gone", "--route", "/=memory", world.mp)
    world.kill("gone")
    said = world.vfsd("bugreport", "gone", cwd=world.base).stdout
    (file,) = world.base.glob("vfsd-bugreport-gone-*.tar.gz")
    assert said.startswith(f"{file.name} is to have, of 'gone':")
    parts = read(file)
    assert json.loads(parts["status.json"])["state"] == "dead"
    assert json.loads(parts["config.json"]) == "no configuration file"
    assert "mounted %s on %s" in parts["log.txt"]


def test_the_log_of_a_service_is_the_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"log": None, "pid": 4711, "routes": []}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bugreport._log(row) == []
    (tmp_path / "journalctl").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "journalctl").chmod(0o755)
    assert bugreport._log(row) == ["--quiet --output=cat --lines=500 _PID=4711"]


LOG = """\
2026-12-01 07:00:00,001 ERROR vfsd.rules.book:{line}: rules are as before: /SECRET file: wrong
2026-12-01 07:00:00,002 ERROR psycopg.pool:1: SECRET
2026-12-01 07:00:00,003 ERROR SECRET.logger:1: x
2026-12-01 07:00:00,004 ERROR vfsd.rules.book:{line}: a name with a line feed
SECRET
ValueError: SECRET
task vfsd.SECRET
  File "/SECRET/vfsd/x.py", line 1, in SECRET
2026-12-01 07:00:00,005 ERROR vfsd.rules.book:{line}: failed
Traceback (most recent call last):
  File "{source}", line 7, in reload
    SECRET = 1
  File "/SECRET/hook.py", line 8, in SECRET
ValueError: SECRET
SECRETError: x
2026-12-01 07:00:00,006 INFO vfsd.process.logs:{stacks}: all stacks:
task vfsd.daemon.Daemon._serve
  {source}:9 in reload
  /SECRET/hook.py:8 in make
thread MainThread
2026-12-01 07:00:00 SECRET of another form
"""

KEPT = """\
2026-12-01 07:00:00,001 ERROR vfsd.rules.book:{line} rules are as before: %s
2026-12-01 07:00:00,002 ERROR (not ours)
2026-12-01 07:00:00,003 ERROR (not ours)
2026-12-01 07:00:00,004 ERROR vfsd.rules.book:{line} rules are as before: %s
  (4 lines left out)
2026-12-01 07:00:00,005 ERROR vfsd.rules.book:{line} rules are as before: %s
  Traceback
  vfsd/rules/book.py:7 in reload
  (a place that is not ours)
  ValueError
  (2 lines left out)
2026-12-01 07:00:00,006 INFO vfsd.process.logs:{stacks} all stacks:\\n%s
  task vfsd.daemon.Daemon._serve
  vfsd/rules/book.py:9 in reload
  (a place that is not ours)
  thread MainThread
  (1 lines left out)
"""


def places() -> dict[str, object]:
    import vfsd.process.logs
    import vfsd.rules.book

    def line(module: str, text: str) -> int:
        return next(n for n, one in enumerate(Path(module).read_text().splitlines(), 1) if text in one)

    book, logs = vfsd.rules.book.__file__, vfsd.process.logs.__file__
    return {"source": book, "line": line(book, "rules are as before"), "stacks": line(logs, '"all stacks:')}


def test_of_a_log_only_what_the_source_says() -> None:
    at = places()
    assert list(redacted.log(LOG.format(**at).splitlines())) == KEPT.format(**at).splitlines()


def test_the_same_of_json() -> None:
    at = places()
    entries = [
        {"time": "2026-12-01T07:00:00.001+00:00", "level": "error", "logger": "vfsd.rules.book", "line": at["line"],
         "message": "rules are as before: SECRET\nSECRET",
         "exception": f'Traceback (most recent call last):\n  File "{at["source"]}", line 7, in reload\nOSError: x'},
        {"level": "SECRET"},
    ]  # fmt: skip
    assert list(redacted.log([json.dumps(entry) for entry in entries])) == [
        f"2026-12-01 07:00:00,001 ERROR vfsd.rules.book:{at['line']} rules are as before: %s",
        "  Traceback",
        "  vfsd/rules/book.py:7 in reload",
        "  OSError",
        "  (2 lines left out)",
    ]


def test_of_a_configuration_what_nobody_knows_is_left_out() -> None:
    table = {"SECRET": 1, "name": "a b SECRET", "mode": ["x"], "metrics": {"socket": "SECRET", "port": 1}}
    assert redacted.config(table) == {
        redacted.HIDDEN: 1,
        "name": redacted.HIDDEN,
        "mode": ["x"],
        "metrics": {"socket": redacted.HIDDEN, "port": 1},
    }
