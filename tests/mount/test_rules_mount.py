"""Rules in a real mount: what they deny can't be had by any way round, by the shell or by tools."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import World

from agenttools.client import Client

RULES = """
[[rules]]
operations = ["read", "write"]
paths = ["/secrets/**", "/deep/*/secret*"]
mode = "deny"

[[rules]]
operations = ["write"]
paths = ["/policies/**", "/mem/fixed/**"]
mode = "deny"
"""
one_engine = pytest.mark.parametrize("engine", ["native"], indirect=True)
"""For what the commands say of a file, whatever serves the mount."""

_libc = ctypes.CDLL(None, use_errno=True)
EXCHANGE = 2


class Ruled:
    """A mount whose files were made before its rules came into force."""

    def __init__(self, world: World, engine: str) -> None:
        self.world = world
        self.mp = world.mp
        self.file = world.base / "vfsd.toml"
        self.engine = engine
        self.client = Client(socket=world.run_dir / "vfsd/default.sock")
        self.mount("")

    def mount(self, rules: str) -> None:
        self.write(rules)
        self.world.vfsd("mount", "--config", self.file, "--engine", self.engine, self.mp)

    def write(self, rules: str) -> None:
        head = 'opens = "heard"\n[routes."/mem/"]\nkind = "memory"\n'
        head += f'[routes."/"]\nkind = "state"\nlocation = "{self.world.base}/root"\n'
        self.file.write_text(head + rules)

    def rule(self, rules: str = RULES) -> list[str]:
        """Have these rules, and return what is odd about them."""
        self.write(rules)
        warnings: list[str] = self.client.call("rules_reload")["warnings"]
        return warnings

    def reset(self) -> None:
        """The tree as every test begins, without rules."""
        self.rule("")
        for owner in ("agent", "other"):
            self.client.call("rules_set", owner=owner, rules=[])
        for entry in os.scandir(self.mp):
            if entry.name != "mem":
                shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
        for entry in os.scandir(self.mp / "mem"):
            shutil.rmtree(entry) if entry.is_dir() else os.unlink(entry)
        for name in ("secrets", "policies", "deep/a", "open", "mem/fixed", "secrets/sub"):
            (self.mp / name).mkdir(parents=True)
        for name in ("secrets/key", "secrets/sub/key", "policies/p", "deep/a/secret1", "open/f", "mem/fixed/f"):
            (self.mp / name).write_text(f"content of {name}")
        os.symlink("key", self.mp / "secrets/link")
        os.setxattr(self.mp / "secrets/key", "user.a", b"v")

    def __truediv__(self, name: str) -> Path:
        return self.mp / name

    def denials(self) -> list[dict[str, Any]]:
        lines = (self.mp / ".vfsd/errors.ndjson").read_text().splitlines()
        return [one for one in map(json.loads, lines) if one["result"] == "EACCES"]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ruled]]:
    made: dict[str, Ruled] = {}
    with contextlib.ExitStack() as stack:

        def world(engine: str) -> Ruled:
            if engine not in made:
                world = World(tmp_path_factory.mktemp(engine))
                stack.callback(world.clean)
                made[engine] = Ruled(world, engine)
                stack.callback(made[engine].client.close)
            return made[engine]

        yield world


@pytest.fixture
def ruled(engine: str, worlds: Callable[[str], Ruled]) -> Ruled:
    found = worlds(engine)
    found.reset()
    return found


def denied(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(PermissionError) as caught:
        call(*args, **kwargs)
    assert caught.value.errno == errno.EACCES


def exchange(a: Path, b: Path) -> None:
    if _libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def test_a_denied_file_cannot_be_read(ruled: Ruled) -> None:
    ruled.rule()
    key = ruled / "secrets/key"
    denied(key.read_text)
    denied((ruled / "deep/a/secret1").read_text)
    denied(os.getxattr, key, "user.a")
    denied(os.listxattr, key)
    denied(os.readlink, ruled / "secrets/link")
    assert subprocess.run(["grep", "-r", "content", str(ruled / "secrets")], capture_output=True).stdout == b""
    assert (ruled / "open/f").read_text() == "content of open/f"
    assert (ruled / "policies/p").read_text() == "content of policies/p"
    assert sorted(os.listdir(ruled / "secrets")) == ["key", "link", "sub"]
    assert key.stat().st_size == len("content of secrets/key")


def test_spellings_of_a_path(ruled: Ruled) -> None:
    ruled.rule()
    top = str(ruled.mp)
    for path in ("//secrets//key", "/open/../secrets/key", "/./secrets/./key", "/secrets/sub/../key"):
        denied(open, top + path)
        denied(ruled.client.call, "read", path=path.encode())
    for path in ("/Secrets/key", "/secrets/KEY"):
        with pytest.raises(FileNotFoundError):
            os.stat(top + path)
    directory = os.open(ruled / "secrets", os.O_PATH)
    try:
        denied(os.open, "key", os.O_RDONLY, dir_fd=directory)
        denied(open, f"/proc/self/fd/{directory}/key")
    finally:
        os.close(directory)


def test_a_denied_file_cannot_be_changed(ruled: Ruled) -> None:
    ruled.rule()
    p = ruled / "policies/p"
    append, cut = os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_TRUNC
    for flags in (os.O_WRONLY, os.O_RDWR, append, cut, os.O_RDONLY | os.O_TRUNC):
        denied(os.open, p, flags)
    for call, args in (
        (os.truncate, (p, 0)), (os.chmod, (p, 0o600)), (os.utime, (p, (1, 1))), (os.unlink, (p,)),
        (os.setxattr, (p, "user.b", b"x")), (os.mkdir, (ruled / "policies/d",)), (os.symlink, ("x", p.with_name("l"))),
        (os.mknod, (ruled / "policies/n",)), (os.link, (ruled / "open/f", ruled / "policies/n")),
        (os.rename, (p, ruled / "open/p")), (os.rename, (ruled / "open/f", p)), (exchange, (p, ruled / "open/f")),
        (os.open, (ruled / "policies/new", os.O_CREAT | os.O_WRONLY)),
    ):  # fmt: skip
        denied(call, *args)
    assert p.read_text() == "content of policies/p"
    assert os.listdir(ruled / "policies") == ["p"]


def test_no_other_name_for_a_denied_file(ruled: Ruled) -> None:
    os.link(ruled / "secrets/key", ruled / "open/alias")
    os.link(ruled / "policies/p", ruled / "open/p2")
    os.symlink("../secrets/key", ruled / "open/symlink")
    os.symlink("../secrets", ruled / "open/dir")
    ruled.rule()
    for name in ("open/alias", "open/symlink", "open/dir/key"):
        denied((ruled / name).read_text)
        denied(ruled.client.call, "read", path=b"/" + name.encode())
    denied((ruled / "open/p2").write_text, "changed")
    denied(os.link, ruled / "secrets/key", ruled / "open/more")
    fd = os.open(ruled / "secrets/key", os.O_PATH)
    try:
        denied(open, f"/proc/self/fd/{fd}")
        # With a descriptor os.link calls linkat(2), which can follow links.
        denied(os.link, f"/proc/self/fd/{fd}", ruled / "open/more", src_dir_fd=fd, follow_symlinks=True)
    finally:
        os.close(fd)


@pytest.mark.parametrize("where, way", [
    ("", "unlink"), ("", "rename over"), ("", "delete"), ("", "go back"), ("mem/", "unlink"), ("mem/", "rename over"),
])  # fmt: skip
def test_what_may_not_be_read_may_not_be_read_without_a_name_either(ruled: Ruled, where: str, way: str) -> None:
    """Where writing is allowed, a file can be removed; who holds on to it must not read it then."""
    made = ruled.client.call("checkpoint", action="create", label="before")["result"]["id"]
    (ruled / where / "box").mkdir()
    (ruled / where / "box/key").write_text("content")
    ruled.rule(f'[[rules]]\noperations = ["read"]\npaths = ["/{where}box/**"]\nmode = "deny"\n')
    path, fd = ruled / where / "box/key", os.open(ruled / where / "box/key", os.O_PATH)
    try:
        denied(open, f"/proc/self/fd/{fd}")
        if way == "unlink":
            path.unlink()
        elif way == "rename over":
            path.with_name("new").touch()
            path.with_name("new").rename(path)
        elif way == "delete":
            ruled.client.call("delete", path=f"/{where}box".encode())
        else:
            denied(ruled.client.call, "checkpoint", action="restore", ref=made)
        denied(open, f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def test_links_are_found_after_a_restart(ruled: Ruled) -> None:
    os.link(ruled / "secrets/sub/key", ruled / "open/alias")
    ruled.world.vfsd("umount", "default")
    ruled.mount(RULES)
    denied((ruled / "open/alias").read_text)


def test_directories_keep_what_rules_say_of_what_is_in_them(ruled: Ruled) -> None:
    ruled.rule()
    for old, new in (
        ("secrets", "s2"),
        ("policies", "p2"),
        ("deep", "d2"),
        ("deep/a", "deep/a2"),
        ("secrets/sub", "s"),
    ):
        denied(os.rename, ruled / old, ruled / new)
    denied(exchange, ruled / "secrets", ruled / "open")
    denied(exchange, ruled / "open", ruled / "secrets")
    denied(os.rename, ruled / "deep/a/secret1", ruled / "open/s")
    (ruled / "deep/b/c").mkdir(parents=True)
    os.rename(ruled / "deep/b", ruled / "b")
    (ruled / "b/secret9").write_text("not there yet")
    denied(os.rename, ruled / "b", ruled / "deep/b")
    assert (ruled / "b/secret9").exists()
    denied(ruled.client.call, "delete", path=b"/policies")
    denied(ruled.client.call, "delete", path=b"/deep")
    assert (ruled / "policies/p").exists() and (ruled / "b/c").exists()


def test_a_route_below(ruled: Ruled) -> None:
    ruled.rule()
    denied((ruled / "mem/fixed/f").write_text, "x")
    denied(os.rename, ruled / "mem/fixed", ruled / "mem/loose")
    (ruled / "mem/other").write_text("fine")


def test_mappings_and_descriptors_of_before(ruled: Ruled) -> None:
    """What was open stays open, but what the kernel has not in memory is asked for, and refused."""
    (ruled / "secrets/big").write_bytes(b"x" * (1 << 20))
    with open(ruled / "secrets/big", "rb", buffering=0) as file, open(ruled / "policies/p", "r+b", buffering=0) as out:
        assert file.read(10) == b"x" * 10
        ruled.rule()
        denied(os.pread, file.fileno(), 10, 0)
        denied(os.pread, file.fileno(), 10, 1 << 19)
        denied(out.write, b"y")
        denied(os.ftruncate, out.fileno(), 0)
        denied(open, f"/proc/self/fd/{file.fileno()}", "rb")
    assert (ruled / "policies/p").read_text() == "content of policies/p"
    with open(ruled / "policies/p", "rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert view[:7] == b"content"
        with contextlib.suppress(PermissionError):
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_WRITE)
            pytest.fail("a shared mapping for writing needs a descriptor for writing")


@pytest.mark.skipif(os.getuid() != 0, reason="binds a directory")
def test_a_bind_mount(ruled: Ruled) -> None:
    ruled.rule()
    place = ruled.world.directory("bound")
    subprocess.run(["mount", "--bind", str(ruled / "secrets"), str(place)], check=True)
    try:
        denied((place / "key").read_text)
        denied((place / "new").write_text, "x")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_checkpoint_shows_no_more_than_the_tree(ruled: Ruled) -> None:
    made = json.loads(ruled.world.vfsd("checkpoint", "create", "--json").stdout)
    ruled.rule()
    past = ruled.mp / made["path"].strip("/")
    assert (past / "open/f").read_text() == "content of open/f"
    denied((past / "secrets/key").read_text)


def test_tools_are_told_the_rule_and_so_is_the_record(ruled: Ruled) -> None:
    ruled.rule()
    with pytest.raises(
        PermissionError, match=r"permission denied for write on /policies/x: rule \[deny write /policies"
    ):
        ruled.client.call("write", path=b"/policies/x", data=b"")
    denied((ruled / "secrets/key").read_text)
    errors = [one["error"] for one in ruled.denials()]
    assert any("deny write /policies/** /mem/fixed/** (vfsd.toml:" in error for error in errors)
    assert any("on /secrets/key: rule [deny read,write" in error for error in errors)


def test_searches_pass_by_what_is_denied(ruled: Ruled) -> None:
    ruled.rule()
    found = ruled.client.call("grep", pattern=b"content", path=b"/")["matches"]
    assert {path for path, _, _ in found} == {b"/open/f", b"/policies/p", b"/mem/fixed/f"}
    denied(ruled.client.call, "grep", pattern=b"content", path=b"/secrets/key")


def test_listings_hide_when_told_to(ruled: Ruled) -> None:
    assert "key" in os.listdir(ruled / "secrets")
    ruled.rule(RULES + "[rules_options]\nhide = true\n")
    assert os.listdir(ruled / "secrets") == []
    assert ruled.client.call("list", path=b"/secrets")["entries"] == []
    assert ruled.client.call("glob", pattern="**/*key*")["matches"] == []
    denied((ruled / "secrets/key").read_text)
    ruled.rule("")
    assert sorted(os.listdir(ruled / "secrets")) == ["key", "link", "sub"]
    assert (ruled / "secrets/key").read_text() == "content of secrets/key"


def test_what_the_kernel_has_is_dropped_at_once(ruled: Ruled) -> None:
    for _ in range(20):
        assert (ruled / "secrets/key").read_text() == "content of secrets/key"
        ruled.rule()
        denied((ruled / "secrets/key").read_text)
        ruled.rule("")


@one_engine
def test_a_malformed_file_changes_nothing(ruled: Ruled) -> None:
    ruled.rule()
    ruled.write(RULES + '[[rules]]\noperations = ["read"]\npaths = ["relative"]\n')
    said = ruled.world.refused("rules", "reload")
    assert "vfsd.toml:19: rule 3: pattern 'relative' must start with '/'" in said and "stay in force" in said
    denied((ruled / "secrets/key").read_text)
    ruled.file.write_text("[[rules]\n")
    ruled.world.refused("rules", "reload")
    denied((ruled / "secrets/key").read_text)


@one_engine
def test_odd_rules_are_told(ruled: Ruled) -> None:
    warnings = ruled.rule(
        '[[rules]]\noperations = ["write"]\npaths = ["/**"]\n'
        '[[rules]]\noperations = ["write"]\npaths = ["/policies/p", "/nowhere/x"]\nmode = "deny"\n'
    )
    assert warnings == [
        "conflicting rules: '/policies/p' of [deny write /policies/p /nowhere/x (vfsd.toml:10)] never decides a write, "
        "for [allow write /** (vfsd.toml:7)] matches first",
        "conflicting rules: '/nowhere/x' of [deny write /policies/p /nowhere/x (vfsd.toml:10)] never decides a write, "
        "for [allow write /** (vfsd.toml:7)] matches first",
        "pattern '/nowhere/x' of [deny write /policies/p /nowhere/x (vfsd.toml:10)] matches nothing that is there now",
    ]
    assert ruled.world.vfsd("rules", "reload").stderr.splitlines() == [f"vfsd: warning: {one}" for one in warnings]
    assert "2 warnings" in ruled.world.vfsd("rules", "check", ruled.file).stdout
    listed = ruled.world.vfsd("rules", "list").stdout.splitlines()
    assert listed[1].split() == ["deny", "write", "/policies/p", "/nowhere/x", "(vfsd.toml:10)"]


def test_clients_have_rules_too(ruled: Ruled) -> None:
    rules = [{"operations": ["write"], "paths": ["/open/**"], "mode": "deny"}]
    ruled.client.call("rules_set", owner="agent", rules=rules)
    denied((ruled / "open/f").write_text, "x")
    ruled.client.call("rules_set", owner="other", rules=[{"operations": ["write"], "paths": ["/**"], "mode": "allow"}])
    denied((ruled / "open/f").write_text, "x")
    ruled.client.call("rules_set", owner="agent", rules=[])
    (ruled / "open/f").write_text("changed")


INTERRUPT = """
[[rules]]
operations = ["write"]
paths = ["/open/**"]
mode = "interrupt"
[rules_options]
approval_seconds = 2
"""


def shell(ruled: Ruled, command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", command], cwd=ruled.mp, stderr=subprocess.PIPE)


def pending(ruled: Ruled) -> dict[str, Any]:
    (question,) = ruled.client.call("approvals", wait=5)["pending"]
    assert isinstance(question, dict)
    return question


def test_an_interrupt_waits_for_a_yes(ruled: Ruled) -> None:
    ruled.rule(INTERRUPT.replace("= 2", "= 20"))
    with shell(ruled, "echo changed > open/f") as child:
        question = pending(ruled)
        assert question["paths"] == [b"/open/f"] and "interrupt write /open/**" in question["rule"]
        began = time.monotonic()
        assert (ruled / "policies/p").read_text() == "content of policies/p"
        (ruled / "other").write_text("others go on")
        assert ruled.client.call("stat", path=b"/open/f")["attr"]["size"] == len("content of open/f")
        assert time.monotonic() - began < 1
        assert " /open/f  by pid " in ruled.world.vfsd("approvals").stdout
        ruled.world.vfsd("approve", question["id"])
        assert child.wait(5) == 0
    assert (ruled / "open/f").read_text() == "changed\n"


def test_an_interrupt_and_a_no(ruled: Ruled) -> None:
    ruled.rule(INTERRUPT.replace("= 2", "= 20"))
    with shell(ruled, "echo changed > open/f") as child:
        ruled.world.vfsd("reject", pending(ruled)["id"], "--reason", "not today")
        assert child.wait(5) != 0
    assert (ruled / "open/f").read_text() == "content of open/f"
    assert "rejected: not today" in ruled.denials()[-1]["error"]
    assert "nothing waits for approval as '99'" in ruled.world.refused("approve", "99")


def test_nobody_says_anything(ruled: Ruled) -> None:
    ruled.rule(INTERRUPT)
    began = time.monotonic()
    denied((ruled / "open/new").write_text, "x")
    assert 1.5 < time.monotonic() - began < 5
    with pytest.raises(PermissionError, match="nobody approved it in 2 s"):
        ruled.client.call("write", path=b"/open/new", data=b"")


def test_who_waits_can_be_killed(ruled: Ruled) -> None:
    if ruled.engine == "pyfuse3":
        pytest.skip("pyfuse3 does not hand on that a request was interrupted")
    ruled.rule(INTERRUPT.replace("= 2", "= 60"))
    with shell(ruled, "echo changed > open/f") as child:
        pending(ruled)
        began = time.monotonic()
        child.send_signal(signal.SIGKILL)
        child.wait(5)
        assert time.monotonic() - began < 2
    assert ruled.client.call("approvals")["pending"] == []
    assert (ruled / "open/f").read_text() == "content of open/f"


def test_a_quota(ruled: Ruled) -> None:
    ruled.rule('[quotas."/mem/"]\nbytes = "1M"\nfiles = 10\n')
    (ruled / "mem/a").write_bytes(bytes(900 << 10))
    with pytest.raises(OSError) as caught:
        (ruled / "mem/b").write_bytes(bytes(200 << 10))
    assert caught.value.errno == errno.EDQUOT
    with pytest.raises(OSError) as caught:
        ruled.client.call("write", path=b"/mem/c", data=bytes(200 << 10))
    assert caught.value.errno == errno.EDQUOT and "/mem/" in str(caught.value)
    (ruled / "mem/a").write_bytes(bytes(800 << 10))
    (ruled / "mem/a").unlink()
    (ruled / "mem/b").write_bytes(bytes(900 << 10))
    with pytest.raises(OSError) as caught:
        for i in range(10):
            (ruled / f"mem/n{i}").touch()
    assert caught.value.errno == errno.EDQUOT
    assert "no such route" in ruled_refusal(ruled, '[quotas."/none/"]\nbytes = 1\n')


def ruled_refusal(ruled: Ruled, rules: str) -> str:
    ruled.write(rules)
    return ruled.world.refused("rules", "reload")


HOOKS = """
import time
def scan():
    def look(m):
        if m.data and b"AKIA" in m.data:
            return "it has a key in it"
        if any(p.endswith("slow") for p in m.paths):
            time.sleep(5)
        if any(p.endswith("broken") for p in m.paths):
            raise ValueError("oops")
    return look
"""


def test_hooks(ruled: Ruled) -> None:
    (ruled.world.base / "scanning.py").write_text(HOOKS)
    ruled.rule('[[hooks]]\ncall = "factory:scanning:scan"\nseconds = 0.5\n')
    (ruled / "fine").write_text("x")
    denied((ruled / "bad").write_text, "AKIA1234")
    with pytest.raises(PermissionError, match="refused by factory:scanning:scan: it has a key in it"):
        ruled.client.call("write", path=b"/bad2", data=b"AKIA")
    began = time.monotonic()
    denied((ruled / "slow").write_text, "x")
    denied((ruled / "broken").write_text, "x")
    assert time.monotonic() - began < 3
    assert (ruled / "fine").read_text() == "x"
    assert "no attribute 'none'" in ruled_refusal(ruled, '[[hooks]]\ncall = "factory:scanning:none"\n')
