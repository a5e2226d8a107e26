"""Going back with rules in force: a tool's restore and undo change nothing that a rule denies, the operator's do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon

from agenttools import checkpoints, tools

pytestmark = pytest.mark.mount

RULE = {"operations": ["write"], "paths": ["/kept/**"], "mode": "deny"}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    daemon.start()
    yield daemon
    daemon.stop()


def rules(daemon: Daemon, *given: dict[str, Any]) -> None:
    daemon.client.call("rules_set", owner="test", rules=list(given))


def write(daemon: Daemon, path: str, content: str) -> None:
    assert tools.write(daemon.client, path, content).error is None


def held(daemon: Daemon) -> str:
    made = checkpoints.create(daemon.client)
    assert made.error is None, made
    return str(made.data["id"])


SENTENCE = (
    "permission denied for write on {}: rule [{} write /kept/** (test rule 1)]: going back would change it, which only "
    "the operator may do: vfsd checkpoint restore, vfsd undo"
)


@pytest.mark.parametrize("mode", ["deny", "interrupt"])
def test_a_tool_does_not_go_back_over_a_rule(daemon: Daemon, mode: str) -> None:
    write(daemon, "/kept/policy", "old")
    write(daemon, "/work", "old")
    mark = held(daemon)
    write(daemon, "/kept/policy", "new")
    write(daemon, "/work", "new")
    rules(daemon, RULE | {"mode": mode})
    assert checkpoints.restore(daemon.client, mark).error == SENTENCE.format("/kept/policy", mode)
    assert (daemon.point / "kept/policy").read_text() == "new"
    assert (daemon.point / "work").read_text() == "new"
    line = daemon.vfsd("log", "--name", "test", "--failed").stdout.splitlines()[-1]
    assert "restore" in line and "/kept/policy" in line
    done = daemon.vfsd("checkpoint", "restore", "--name", "test", mark)
    assert done.returncode == 0 and "2 files changed back" in done.stdout, done
    assert (daemon.point / "kept/policy").read_text() == "old"


def test_what_no_rule_denies_goes_back(daemon: Daemon) -> None:
    write(daemon, "/kept/policy", "old")
    write(daemon, "/work/a", "old")
    rules(daemon, RULE)
    mark = held(daemon)
    write(daemon, "/work/a", "new")
    write(daemon, "/work/b", "new")
    done = checkpoints.restore(daemon.client, mark)
    assert done.error is None and "1 file changed back, 1 file removed" in done.text, done
    assert (daemon.point / "work/a").read_text() == "old"


@pytest.mark.parametrize("change", ["make", "remove", "away", "above", "mode"])
def test_every_way_it_could_differ(daemon: Daemon, change: str) -> None:
    kept, client = daemon.point / "kept", daemon.client
    write(daemon, "/kept/policy", "x")
    mark = held(daemon)
    match change:
        case "make":
            write(daemon, "/kept/more", "x")
        case "remove":
            (kept / "policy").unlink()
        case "away":
            (kept / "policy").rename(daemon.point / "policy")
        case "above":
            kept.rename(daemon.point / "elsewhere")
        case "mode":
            (kept / "policy").chmod(0o600)
    rules(daemon, RULE)
    refused = checkpoints.restore(client, mark).error
    assert refused is not None and "rule [deny write /kept/**" in refused, refused


def test_what_was_done_is_said(daemon: Daemon) -> None:
    for name in ("changed", "other", "gone", "old"):
        write(daemon, f"/{name}", "old")
    mark = held(daemon)
    listed = checkpoints.all_of(daemon.client).text
    assert re.fullmatch(rf"{mark}  \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d  user", listed), listed
    for name in ("changed", "other"):
        write(daemon, f"/{name}", "new")
    (daemon.point / "gone").unlink()
    (daemon.point / "old").rename(daemon.point / "new")
    (daemon.point / "d").mkdir()
    (daemon.point / "link").symlink_to("changed")
    said = "1 directory removed, 1 file brought back, 2 files changed back, 1 file renamed back, 1 link removed"
    done = checkpoints.restore(daemon.client, mark)
    assert done.said.startswith(f"Restored checkpoint {mark}: {said}. "), done.said
    os.utime(daemon.point / "changed", (1, 1))
    assert ": only times were other. " in checkpoints.restore(daemon.client, mark).said
    assert checkpoints.restore(daemon.client, mark).said.startswith("Nothing to restore")


def test_undo_keeps_rules_too(daemon: Daemon) -> None:
    write(daemon, "/kept/policy", "old")
    began = daemon.client.call("execute_begin", command=b"make", call="1")
    assert began["checkpoint"]
    write(daemon, "/kept/policy", "new")
    rules(daemon, RULE)
    assert checkpoints.undo(daemon.client).error == SENTENCE.format("/kept/policy", "deny")
    assert (daemon.point / "kept/policy").read_text() == "new"
    line = daemon.vfsd("log", "--name", "test", "--failed").stdout.splitlines()[-1]
    assert " undo      / EACCES: permission denied for write on /kept/policy" in line
    done = daemon.vfsd("undo", "--name", "test")
    assert done.stdout.startswith("took back execute: make: 1 file changed back\n"), done
    assert (daemon.point / "kept/policy").read_text() == "old"


def test_a_patch_shows_no_more_than_the_tree(daemon: Daemon) -> None:
    write(daemon, "/kept/secret", "old secret\n")
    write(daemon, "/work", "old\n")
    mark = held(daemon)
    write(daemon, "/kept/secret", "new secret\n")
    write(daemon, "/work", "new\n")
    rules(daemon, {"operations": ["read"], "paths": ["/kept/**"], "mode": "deny"})
    shown = checkpoints.diff(daemon.client, mark, patch=True)
    assert "+new\n" in shown.text and "secret\n" not in shown.text
    assert not shown.data["complete"]
    assert [change["path"] for change in shown.data["changes"]] == ["/kept/secret", "/work"]
    assert "+new secret\n" in daemon.vfsd("checkpoint", "diff", "--name", "test", "--patch", mark).stdout


def test_a_confined_command_has_no_door_to_go_back_by(daemon: Daemon) -> None:
    ran = tools.execute(daemon.client, f"test -e {daemon.socket} && echo there; echo $VFSD_SOCKET")
    assert ran.error is None and not ran.output.strip(), ran.output
    ran = tools.execute(daemon.client, f"test -e {daemon.socket} && echo there", view="mount", profile="open")
    assert ran.output == "there\n", "what the test looks for is there for a command that is not confined"


@pytest.mark.parametrize("kept_first", [True, False])
def test_every_name_of_a_file_that_would_change_counts(daemon: Daemon, kept_first: bool) -> None:
    for directory in ("kept", "work") if kept_first else ("work", "kept"):
        (daemon.point / directory).mkdir()
    write(daemon, "/kept/policy", "old")
    os.link(daemon.point / "kept/policy", daemon.point / "work/policy")
    mark = held(daemon)
    write(daemon, "/kept/policy", "new")
    rules(daemon, RULE)
    assert checkpoints.restore(daemon.client, mark).error == SENTENCE.format("/kept/policy", "deny")
    assert (daemon.point / "work/policy").read_text() == "new"


@pytest.mark.parametrize("change", ["content", "linked", "unlinked", "moved along"])
@pytest.mark.parametrize("kept_first", [True, False])
def test_a_patch_shows_no_file_that_may_not_be_read_by_another_name(
    daemon: Daemon, kept_first: bool, change: str
) -> None:
    for directory in ("kept", "work") if kept_first else ("work", "kept"):
        (daemon.point / directory).mkdir()
    kept, work = daemon.point / "kept/secret", daemon.point / "work/secret"
    write(daemon, "/kept/secret", "a secret\n")
    write(daemon, "/kept/in/secret", "a secret\n")
    if change in ("content", "unlinked"):
        os.link(kept, work)
    mark = held(daemon)
    if change == "content":
        write(daemon, "/kept/secret", "another secret\n")
    elif change == "linked":
        os.link(kept, work)
    elif change == "unlinked":
        work.unlink()
    else:
        (kept.parent / "in").rename(work.parent / "in")
        write(daemon, "/work/in/secret", "public\n")
    rules(daemon, {"operations": ["read"], "paths": ["/kept/**"], "mode": "deny"})
    shown = checkpoints.diff(daemon.client, mark, patch=True)
    assert shown.error is None and "secret\n" not in shown.text.replace("/secret\n", ""), shown.text
    assert not shown.data["complete"]
    assert "secret\n" in daemon.vfsd("checkpoint", "diff", "--name", "test", "--patch", mark).stdout
