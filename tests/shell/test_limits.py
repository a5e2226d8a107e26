"""Which group limits are kept by: the rules of cgroups(7), on directories made to look like some."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agenttools import limits
from agenttools.limits import Limits, LimitsUnavailable


def lay(root: Path, path: str, control: str | None) -> Path:
    """A group with ``control`` switched on for those below it; None: it cannot have any."""
    place = root / path
    place.mkdir(parents=True, exist_ok=True)
    (place / "cgroup.procs").touch()
    if control is not None:
        (place / "cgroup.subtree_control").write_text(control)
    return place


def own(tmp_path: Path, path: str) -> str:
    file = tmp_path / "own"
    file.write_text(f"0::/{path}\n")
    return str(file)


def test_the_nearest_group_that_can_have_groups(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    slice_ = lay(root, "user.slice", "memory pids")
    service = lay(root, "user.slice/user@1.service", "cpu memory pids")
    lay(root, "user.slice/user@1.service/app.scope", None)
    file = own(tmp_path, "user.slice/user@1.service/app.scope")
    assert limits.parent_group(str(root), file) == str(service)
    (service / "cgroup.subtree_control").unlink()
    assert limits.parent_group(str(root), file) == str(slice_)
    (slice_ / "cgroup.procs").unlink()
    assert limits.parent_group(str(root), file) is None


def test_controllers_are_switched_on(tmp_path: Path) -> None:
    place = lay(tmp_path / "cgroup", "mine", "cpu")
    assert limits.parent_group(str(tmp_path / "cgroup"), own(tmp_path, "mine")) == str(place)
    assert (place / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_no_cgroup_v2(tmp_path: Path) -> None:
    file = tmp_path / "own"
    file.write_text("4:memory:/\n8:pids:/\n")
    assert limits.parent_group(str(tmp_path), str(file)) is None
    assert limits.parent_group(str(tmp_path), str(tmp_path / "nothing")) is None


def test_what_a_group_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = lay(tmp_path, "mine", "memory pids")
    monkeypatch.setattr(limits, "parent_group", lambda root: str(place))
    path = limits.group(Limits(memory=1 << 30), "key", str(tmp_path))
    assert path is not None
    assert (Path(path) / "memory.max").read_text() == str(1 << 30)
    assert (Path(path) / "pids.max").read_text() == "max"
    assert limits.group(Limits(cpu_seconds=1), "key", str(tmp_path)) is None


def test_what_a_group_did_is_told(tmp_path: Path) -> None:
    def events(killed: int, refused: int) -> None:
        (tmp_path / "memory.events").write_text(f"low 0\noom 7\noom_kill {killed}\noom_group_kill 0\n")
        (tmp_path / "pids.events").write_text(f"max {refused}\n")

    events(1, 2)
    watch = limits.Watch(Limits(memory=1 << 30, processes=9), str(tmp_path))
    assert watch.notices(137) == []
    events(2, 5)
    assert watch.notices(137) == [
        "The limit of 1073741824 bytes of memory was reached (processes killed: 1)",
        "The limit of 9 processes was reached (more were refused: 3)",
    ]
    assert limits.Watch(Limits(memory=9), str(tmp_path / "nothing")).notices(137) == []


def test_a_group_that_was_removed_since_is_made_again(tmp_path: Path) -> None:
    """The last of those who were in it may end at any time, and it is removed then."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        limits.apply(Limits(memory=1 << 30), process.pid, str(tmp_path / "gone"))
        process.communicate()
    assert (tmp_path / "gone/cgroup.procs").read_text() == str(process.pid)
    assert (tmp_path / "gone/memory.max").read_text() == str(1 << 30)


def test_root_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(LimitsUnavailable, match="takes a cgroup"):
        limits.check(Limits(processes=9), None)
    limits.check(Limits(processes=9), "/a/group")
    limits.check(Limits(memory=9), None)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    limits.check(Limits(processes=9), None)
