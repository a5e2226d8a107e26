"""Random sessions through both doors under rules, held against a tree without rules and a reference judge.

The judge reads the names of the whole tree and asks wcmatch of each, with nothing of ours. What it denies must fail and
change nothing; what it allows must do what it does without rules. So neither a way round nor a wrong no goes unseen.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cli_world import World
from drivers import Driver, HostDriver, RpcDriver, VfsDriver, read_file, write_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makers import close_vfs, dump, open_vfs, without_times
from rpc_server import Server
from wcmatch import glob as wcglob

from agenttools.client import Client
from vfsd.core.policy import Policy, check_rule
from vfsd.rules.approvals import Approvals
from vfsd.rules.guard import Guard
from vfsd.rules.hooks import Hooks
from vfsd.rules.verdicts import Layer

EXAMPLES = int(os.environ.get("VFSD_EXAMPLES", "25")) * 4

ERRNOS = set(errno.errorcode.values()) - {"EACCES"}
Rule = tuple[list[str], list[str], str]
RULE_SETS: list[list[Rule]] = [
    [(["read", "write"], ["/a/**"], "deny")],
    [(["read"], ["/a/**", "/a"], "deny"), (["write"], ["/b/*", "/**/s"], "deny")],
    [(["write"], ["/a/b/**"], "allow"), (["write"], ["/a/**"], "deny"), (["read"], ["/*/*/s"], "deny")],
    [(["read"], ["/**/s"], "deny")],
    [(["write"], ["/{a,b}"], "deny"), (["read"], ["/b/**"], "allow"), (["read"], ["/*/[ab]"], "deny")],
]
NAMES = st.sampled_from(["a", "b", "s"])
ANY = st.builds(lambda names: "/" + "/".join(names), st.lists(NAMES, min_size=1, max_size=3))
PATHS = st.sampled_from(["/a", "/a/b", "/a/s", "/a/b/s", "/b", "/b/s", "/b/a", "/s", "/x", "/x/s", "/l", "/x/l"]) | ANY
TARGETS = PATHS | NAMES | st.just("..") | st.just("../a")
OPS = st.one_of(
    st.tuples(st.sampled_from(["mkdir", "read", "unlink", "rmdir", "truncate", "chmod", "readlink", "list"]), PATHS),
    st.tuples(st.sampled_from(["setxattr", "getxattr", "tree", "create", "write", "put"]), PATHS),
    st.tuples(st.sampled_from(["rename", "rename", "exchange", "noreplace", "link", "link"]), PATHS, PATHS),
    st.tuples(st.just("symlink"), TARGETS, PATHS),
)


class File(NamedTuple):
    ino: int
    kind: int
    target: str


class Judge:
    """The rules over the tree ``fs`` as it stands."""

    def __init__(self, rules: list[Rule], fs: Driver) -> None:
        self.rules = rules
        self.files: dict[str, File] = {}
        todo = [""]
        while todo:
            path = todo.pop()
            found = fs.lstat(path or "/")
            link = fs.readlink(path).decode() if stat.S_ISLNK(found.mode) else ""
            self.files[path or "/"] = File(found.ino, stat.S_IFMT(found.mode), link)
            if stat.S_ISDIR(found.mode):
                todo += [f"{path}/{os.fsdecode(name)}" for name in fs.listdir(path or "/")]

    def denies(self, operation: str, path: str) -> bool:
        for operations, patterns, mode in self.rules:
            if operation in operations and wcglob.globmatch(path, patterns, flags=wcglob.BRACE | wcglob.GLOBSTAR):
                return mode == "deny"
        return False

    def walk(self, path: str, follow: bool) -> str | None:
        """Where a path leads, be there something or not; None when it leads nowhere. PermissionError by a link."""
        at, todo, links = "", [part for part in path.split("/") if part], 0
        while todo:
            part = todo.pop(0)
            if self.files.get(at or "/", File(0, 0, "")).kind != stat.S_IFDIR:
                return None
            if part == "..":
                at = at.rpartition("/")[0]
                continue
            found = self.files.get(f"{at}/{part}")
            if found is None:
                return None if todo else f"{at}/{part}"
            if found.kind == stat.S_IFLNK and (todo or follow):
                links += 1
                if self.any(f"{at}/{part}", "read"):
                    raise PermissionError
                if links > 40:
                    return None
                todo[:0] = [one for one in found.target.split("/") if one]
                at = "" if found.target.startswith("/") else at
                continue
            at = f"{at}/{part}"
        return at or "/"

    def any(self, path: str, operation: str) -> bool:
        """Whether one of the names of what is there is denied."""
        found = self.files.get(path)
        if found is None:
            return self.denies(operation, path)
        return any(self.denies(operation, name) for name, other in self.files.items() if other.ino == found.ino)

    def loosens(self, old: str, new: str) -> bool:
        return self.denies("read", old) and not self.denies("read", new)

    def move(self, old: str, new: str) -> bool:
        """Whether any path that a move changes is denied."""
        for path in [old, *(path for path in self.files if path.startswith(old + "/"))]:
            after = new + path[len(old) :]
            if self.denies("write", path) or self.denies("write", after) or self.loosens(path, after):
                return True
        return False

    def denied(self, op: str, *paths: str) -> bool:
        """Whether the operation must fail."""
        try:
            return self._denied(op, *paths)
        except PermissionError:
            return True

    def _denied(self, op: str, *paths: str) -> bool:
        if op == "symlink":
            paths = paths[1:]
        follows = op in ("read", "truncate", "chmod", "list", "setxattr", "getxattr", "tree", "create", "write", "put")
        at = [self.walk(path, follows) for path in paths]
        if None in at:
            return False
        first = str(at[0])
        if op in ("read", "getxattr", "list", "tree"):
            return self.any(first, "read")
        if op == "readlink":
            return self.any(first, "read")
        if op in ("truncate", "chmod", "setxattr", "write", "put", "create"):
            return self.any(first, "write")
        if op in ("mkdir", "unlink", "rmdir", "symlink"):
            return self.denies("write", first)
        second = str(at[1])
        if op == "link":
            names = [
                name for name, one in self.files.items() if first in self.files and one.ino == self.files[first].ino
            ]
            return any(self.denies("write", one) or self.loosens(one, second) for one in names) or self.denies(
                "write", second
            )
        if first not in self.files:
            return False
        return self.move(first, second) or (op == "exchange" and second in self.files and self.move(second, first))


def act(fs: Driver, op: str, *paths: str) -> Any:
    """The operation by a driver; every result is one that can be compared."""
    path = paths[0]
    match op:
        case "mkdir" | "unlink" | "rmdir" | "readlink":
            return getattr(fs, op)(path)
        case "link" | "rename" | "symlink":
            return getattr(fs, op)(*paths)
        case "noreplace" | "exchange":
            return fs.rename(*paths, 1 if op == "noreplace" else 2)
        case "read":
            return read_file(fs, path)
        case "put":
            return write_file(fs, path, b"put")
        case "write" | "create":
            fh = fs.open(path, os.O_WRONLY | (os.O_CREAT if op == "create" else os.O_APPEND))
            try:
                return fs.pwrite(fh, b"written", 0)
            finally:
                fs.close(fh)
        case "truncate":
            return fs.truncate(path, 3)
        case "chmod":
            return fs.chmod(path, 0o700)
        case "setxattr":
            return fs.setxattr(path, "user.a", b"1")
        case "getxattr":
            return fs.getxattr(path, "user.a")
        case _:
            return fs.listdir(path)


def outcome(fs: Driver, op: tuple[str, ...]) -> Any:
    try:
        return act(fs, *op)
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]


def furnish(fs: Driver) -> None:
    for path in ("/a", "/a/b", "/b"):
        fs.mkdir(path)
    for path in ("/a/s", "/a/b/s", "/b/s", "/b/a", "/s"):
        write_file(fs, path, f"content of {path}".encode())
    fs.link("/a/b/s", "/l")


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.sampled_from(RULE_SETS), st.lists(st.tuples(st.booleans(), OPS), min_size=1, max_size=25))
def test_no_way_round(tmp_path: Path, rules: list[Rule], session: list[tuple[bool, tuple[str, ...]]]) -> None:
    vfs, free = open_vfs({"/": ("memory", tmp_path)}), open_vfs({"/": ("memory", tmp_path)})
    try:
        plain, inner = VfsDriver(free), VfsDriver(vfs)
        furnish(plain)
        furnish(inner)
        guard = Guard(vfs, Approvals())
        with Server(tmp_path / "s.sock", vfs) as server, Client(server.path) as client:
            guard.install({"test": Layer(Policy(check_rule(*rule) for rule in rules))}, Hooks(), {})
            outer = RpcDriver(client)
            for by_socket, op in session:
                denied = Judge(rules, plain).denied(*op)
                before = tree(vfs)
                found = outcome(outer if by_socket else inner, op)
                if denied:
                    assert isinstance(found, str), op
                    assert tree(vfs) == before
                else:
                    expected = outcome(plain, op)
                    # The doors differ in which of several reasons comes first; a rule is none here.
                    assert found == expected or (isinstance(expected, str) and found in ERRNOS), op
                    assert tree(vfs) == tree(free)
    finally:
        close_vfs(vfs)
        close_vfs(free)


def tree(vfs: Any) -> Any:
    """What stands in the tree, seen past the rules."""
    return without_times(dump(vfs.table.volumes[0], inos=False))


@pytest.mark.mount
@pytest.mark.parametrize("engine", ["native", "pyfuse3"])
def test_no_way_round_in_a_mount(engine: str, tmp_path: Path) -> None:
    """What was denied is as it was in the end, and its content was never seen, whatever the kernel had cached."""
    world = World(tmp_path)
    try:
        world.vfsd("mount", "--engine", engine, "--route", "/=memory", world.mp)
        with Client(socket=world.run_dir / "vfsd/default.sock") as client:
            shell, tool = HostDriver(str(world.mp)), RpcDriver(client)
            for seed in range(4):
                session(random.Random(seed), shell, tool, client)
    finally:
        world.clean()


def session(rng: random.Random, shell: HostDriver, tool: RpcDriver, client: Client) -> None:
    top = f"/t{rng.random()}"
    shell.mkdir(top)
    for name in ("deny", "lock", "open"):
        shell.mkdir(f"{top}/{name}")
        shell.mkdir(f"{top}/{name}/d")
        for path in (f"{top}/{name}/f", f"{top}/{name}/d/f"):
            write_file(shell, path, b"SECRET" if name == "deny" else name.encode())
            assert read_file(shell, path)
    held = shell.open(f"{top}/lock/f", os.O_RDONLY)
    rules = [
        {"operations": ["read"], "paths": [f"{top}/deny/**"], "mode": "deny"},
        {"operations": ["write"], "paths": [f"{top}/lock/**"], "mode": "deny"},
    ]
    client.call("rules_set", owner="test", rules=rules)
    places = [top + place for place in ("/deny", "/lock", "/open", "/x", "/open/d", "/open/x", "/deny/d", "/lock/d")]
    paths = places + [f"{place}/{name}" for place in places for name in ("f", "g")]
    verbs = ["mkdir", "read", "unlink", "truncate", "chmod", "put", "write", "create", "list", "setxattr", "readlink"]
    pairs = ["rename", "rename", "link", "link", "exchange", "symlink"]
    for _ in range(400):
        op = rng.choice(verbs + pairs)
        arguments = [rng.choice(paths) for _ in range(2 if op in pairs else 1)]
        found = outcome(rng.choice((shell, tool)), (op, *arguments))
        assert found != b"SECRET", (op, arguments)
    assert shell.pread(held, 10, 0) == b"lock"
    shell.close(held)
    client.call("rules_set", owner="test", rules=[])
    assert read_file(shell, f"{top}/lock/f") == read_file(shell, f"{top}/lock/d/f") == b"lock"
    assert shell.listdir(f"{top}/lock") == [b"d", b"f"] and shell.listdir(f"{top}/lock/d") == [b"f"]
    assert shell.stat(f"{top}/lock/f").nlink == 1


def test_the_judge_itself(tmp_path: Path) -> None:
    vfs = open_vfs({"/": ("memory", tmp_path)})
    try:
        fs = VfsDriver(vfs)
        furnish(fs)
        fs.symlink("a/s", "/t")
        fs.link("/b/a", "/b/h")
        judge = Judge([(["read", "write"], ["/a/**", "/b/a"], "deny")], fs)
        assert judge.denied("read", "/a/s") and judge.denied("read", "/t") and judge.denied("write", "/b/h")
        assert judge.denied("rename", "/a", "/c") and judge.denied("link", "/b/h", "/c")
        assert not judge.denied("read", "/s") and not judge.denied("rename", "/s", "/c")
    finally:
        close_vfs(vfs)
