"""The guard over a tree without a kernel: verdicts that follow moves, links in directories not looked at, waiting."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from drivers import VfsDriver, read_file, write_file
from makers import ME, close_vfs, done, open_vfs

from vfsd.core.policy import Policy, check_rule
from vfsd.core.types import Caller
from vfsd.rules.approvals import Approvals, Refused
from vfsd.rules.book import Rulebook
from vfsd.rules.config import RulesSpec
from vfsd.rules.guard import Denied, Guard
from vfsd.rules.hooks import Hooks, HookSpec, Mutation
from vfsd.rules.unmatched import unmatched
from vfsd.rules.verdicts import Layer
from vfsd.vfs import Vfs

KINDS = ("memory", "state", "local")


@pytest.fixture(params=KINDS)
def vfs(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = open_vfs({"/": (request.param, tmp_path / "volume")})
    yield made
    close_vfs(made)


def rule(vfs: Vfs, operations: str, *paths: str, mode: str = "deny") -> Guard:
    guard = Guard(vfs, Approvals(5))
    guard.install({"t": Layer(Policy([check_rule(operations.split(), list(paths), mode)]))}, Hooks(), {})
    return guard


def denied(call: Any, *args: Any) -> Denied:
    with pytest.raises(PermissionError) as caught:
        call(*args)
    assert isinstance(caught.value, Denied)
    return caught.value


def test_verdicts_follow_moves(vfs: Vfs) -> None:
    fs = VfsDriver(vfs)
    for path in ("/open", "/open/d", "/shut"):
        fs.mkdir(path)
    write_file(fs, "/open/f", b"f")
    write_file(fs, "/open/d/f", b"df")
    rule(vfs, "read", "/shut/**")
    for path in ("/open/f", "/open/d/f"):
        assert read_file(fs, path)
    fs.rename("/open/f", "/shut/f")
    denied(read_file, fs, "/shut/f")
    fs.rename("/open/d", "/shut/d")
    denied(read_file, fs, "/shut/d/f")
    denied(fs.listdir, "/shut/d")
    denied(fs.rename, "/shut/d", "/open/d")
    denied(fs.link, "/shut/f", "/open/f")
    fs.rename("/shut/d", "/shut/e")
    fs.unlink("/shut/f")
    write_file(fs, "/open/f", b"new")
    assert read_file(fs, "/open/f") == b"new"


def test_one_look_at_the_tree_tells_which_of_many_patterns_match_nothing(vfs: Vfs, looked: list[int]) -> None:
    fs = VfsDriver(vfs)
    for i in range(10):
        fs.mkdir(f"/d{i}")
    write_file(fs, "/d7/kept3", b"")
    guard = rule(vfs, "write", "/nothing")
    patterns = [f"/*/kept{i}" for i in range(50)] + ["/d7/kept3", "/d6/kept3", "/d?", "/**"]
    idle = trio.run(unmatched, guard, patterns)
    assert idle == {f"/*/kept{i}" for i in range(50) if i != 3} | {"/d6/kept3"}
    assert len(looked) < 20


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The directories whose entries a guard was asked for."""
    asked: list[int] = []
    everything_in = Guard.everything_in

    async def counted(guard: Guard, ino: int) -> Any:
        asked.append(ino)
        return await everything_in(guard, ino)

    monkeypatch.setattr(Guard, "everything_in", counted)
    return asked


def test_one_name_less_is_one_reason_less(vfs: Vfs) -> None:
    fs = VfsDriver(vfs)
    fs.mkdir("/shut")
    write_file(fs, "/shut/f", b"f")
    fs.link("/shut/f", "/g")
    rule(vfs, "read", "/shut/**")
    denied(read_file, fs, "/g")
    fs.unlink("/shut/f")
    assert read_file(fs, "/g") == b"f"


def test_a_name_that_may_not_be_written_stays_a_reason(vfs: Vfs) -> None:
    fs = VfsDriver(vfs)
    fs.mkdir("/shut")
    write_file(fs, "/shut/f", b"f")
    write_file(fs, "/h", b"h")
    fs.link("/shut/f", "/g")
    rule(vfs, "read write", "/shut/**")
    denied(fs.unlink, "/shut/f")
    denied(fs.rename, "/h", "/shut/f")
    denied(fs.rename, "/shut/f", "/shut/e")
    denied(read_file, fs, "/g")


def test_links_in_directories_not_looked_at(tmp_path: Path) -> None:
    routes = {"/": ("state", tmp_path / "volume")}
    first = open_vfs(routes)
    fs = VfsDriver(first)
    fs.mkdir("/deep")
    fs.mkdir("/deep/shut")
    write_file(fs, "/deep/shut/f", b"f")
    fs.link("/deep/shut/f", "/g")
    close_vfs(first)
    again = open_vfs(routes)
    rule(again, "read write", "/deep/shut/**")
    error = denied(read_file, VfsDriver(again), "/g")
    assert error.filename == "/deep/shut/f" and "deny read,write /deep/shut/**" in error.rule
    close_vfs(again)


def test_a_very_large_directory_is_not_renamed_from_under_a_doubt(vfs: Vfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vfsd.rules.guard.TREE_MAX", 5)
    fs = VfsDriver(vfs)
    fs.mkdir("/d")
    for i in range(6):
        write_file(fs, f"/d/{i}", b"")
    rule(vfs, "write", "/*/never")
    assert "it could match below" in str(denied(fs.rename, "/d", "/e"))
    fs.unlink("/d/5")
    fs.unlink("/d/4")
    fs.rename("/d", "/e")


def test_nothing_is_judged_without_rules(vfs: Vfs) -> None:
    guard = rule(vfs, "write", "/x")
    assert vfs.guard is guard and not vfs.waits
    guard.install({}, Hooks(), {})
    assert vfs.guard is None


TOOL = Caller(0, 0, 7, "rpc", "write", "call-1")


async def approvals_session() -> None:
    approvals = Approvals(0.2)
    wants = (("write", b"/d", True),)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(approvals.ask, "delete", wants, "a rule", TOOL)
        (question,) = await approvals.some(5)
        assert question.plain()["tool"] == "write" and question.plain()["paths"] == [b"/d"]
        approvals.decide(question.id, approve=True)
    assert approvals.granted(TOOL, "write", b"/d") and approvals.granted(TOOL, "write", b"/d/x")
    assert not approvals.granted(TOOL, "read", b"/d") and not approvals.granted(TOOL, "write", b"/dx")
    assert not approvals.granted(TOOL._replace(pid=8), "write", b"/d")
    approvals.forget()
    assert not approvals.granted(TOOL, "write", b"/d")
    with pytest.raises(Refused, match=r"nobody approved it in 0\.2 s"):
        await approvals.ask("delete", wants, "a rule", TOOL)
    assert await approvals.some(0) == []
    with pytest.raises(KeyError):
        approvals.decide("1", approve=True)


def test_approvals() -> None:
    trio.run(approvals_session)


def made(hook: Any, **spec: Any) -> Hooks:
    hooks = Hooks()
    hooks._hooks = [(HookSpec("factory:m:f", **spec), hook)]
    hooks._threads = trio.CapacityLimiter(2)
    return hooks


def test_hooks_are_bounded() -> None:
    def stuck(mutation: Mutation) -> None:
        time.sleep(1)

    def fails(mutation: Mutation) -> None:
        raise ValueError("oops")

    async def main() -> None:
        change = Mutation("write", ("/x",), ME)
        began = time.monotonic()
        for _ in range(4):
            found = await made(stuck, seconds=0.05).check(change)
            assert found == ("factory:m:f", "the hook failed (no answer in 0.05 s)")
        assert time.monotonic() - began < 0.9
        assert await made(stuck, seconds=0.05, on_failure="allow").check(change) is None
        found = await made(fails).check(change)
        assert found is not None and "ValueError: oops" in found[1]
        found = await made(lambda mutation: sys.exit("bye")).check(change)
        assert found is not None and "SystemExit: bye" in found[1]
        assert await made(lambda mutation: None).check(change) is None
        assert await made(lambda mutation: f"no {mutation.op}").check(change) == ("factory:m:f", "no write")

    trio.run(main)


def test_a_rulebook_keeps_what_it_has_when_it_cannot_read(tmp_path: Path) -> None:
    vfs = open_vfs({"/": ("memory", tmp_path)})
    spec = RulesSpec(rules=(check_rule(["write"], ["/x"], "deny"),))

    def reread() -> RulesSpec:
        raise ValueError("vfsd.toml:3: not like this")

    book = Rulebook(vfs, spec, reread)
    with pytest.raises(OSError, match="not like this; the rules of before stay in force"):
        done(book.reload())
    denied(write_file, VfsDriver(vfs), "/x", b"")
    with pytest.raises(OSError, match="use a name of your own") as caught:
        done(book.set("config", [], hide=False))
    assert caught.value.errno == errno.EINVAL
    close_vfs(vfs)


def test_a_quota_counts_what_is_allocated(tmp_path: Path) -> None:
    for kind in ("memory", "state"):
        vfs = open_vfs({"/": (kind, tmp_path / kind)})
        volume = vfs.table.volumes[0]
        fs = VfsDriver(vfs)
        write_file(fs, "/a", bytes(10_000))
        write_file(fs, "/b", bytes(4096))
        assert volume.used() == (3, 12288 + 4096)
        fh = fs.open("/a", os.O_RDWR)
        fs.ftruncate(fh, 1 << 30)
        fs.unlink("/b")
        assert volume.used() == (2, 12288)
        fs.unlink("/a")
        assert volume.used()[1] == 12288
        fs.close(fh)
        assert volume.used() == (1, 0)
        write_file(fs, "/c", b"x")
        close_vfs(vfs)
        if kind == "state":
            again = open_vfs({"/": (kind, tmp_path / kind)})
            assert again.table.volumes[0].used() == (2, 4096)
            close_vfs(again)
