"""Every operation of the socket with every parameter wrong in every way: refused, without an error of the daemon's."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon

from agenttools.wire import WireError

pytestmark = pytest.mark.slow

GOOD: dict[str, dict[str, Any]] = {
    "approvals": {"wait": 0},
    "approve": {"question": "1"},
    "cancel": {"target": 1},
    "checkpoint": {"action": "diff", "a": "1", "b": "2", "patch": True, "operator": True},
    "chmod": {"path": b"/a", "perm": 0o644, "follow": True},
    "chown": {"path": b"/a", "uid": 0, "gid": 0, "follow": True},
    "close": {"fh": 1},
    "delete": {"path": b"/none", "recursive": True},
    "edit": {"path": b"/a", "old_text": b"a", "new_text": b"a", "all": True},
    "execute_begin": {"command": b"true", "call": "c"},
    "execute_end": {"call": "c"},
    "fallocate": {"fh": 1, "mode": 0, "offset": 0, "length": 1},
    "fstat": {"fh": 1},
    "fsync": {"fh": 1, "datasync": True},
    "ftruncate": {"fh": 1, "size": 1},
    "gc": {},
    "getxattr": {"path": b"/a", "name": b"user.a", "follow": True},
    "glob": {"pattern": "*", "path": b"/d"},
    "grep": {"pattern": b"a", "path": b"/d", "glob": "*", "max_count": 1},
    "hello": {"version": 1, "client": "c"},
    "link": {"old": b"/a", "new": b"/d/link"},
    "list": {"path": b"/d", "continue": b"a"},
    "listxattr": {"path": b"/a", "follow": True},
    "log_level": {"level": "info"},
    "mkdir": {"path": b"/d/made", "perm": 0o755, "parents": True},
    "mknod": {"path": b"/d/node", "mode": stat.S_IFREG | 0o644, "rdev": 0},
    "open": {"path": b"/a", "flags": 0, "mode": 0o644},
    "pread": {"fh": 1, "offset": 0, "length": 1},
    "pwrite": {"fh": 1, "offset": 0, "data": b"x"},
    "read": {"path": b"/a", "offset": 0, "length": 1},
    "readlink": {"path": b"/l"},
    "reject": {"question": "1", "reason": "r"},
    "reload": {},
    "removexattr": {"path": b"/a", "name": b"user.a", "follow": True},
    "rename": {"old": b"/none", "new": b"/d/n", "flags": 0},
    "rmdir": {"path": b"/none"},
    "route": {"action": "add", "route": "/r/=store:memory:#{user}", "cwd": "/", "values": {}},
    "rules": {},
    "rules_check": {},
    "rules_reload": {},
    "rules_set": {"owner": "o", "rules": [], "hide": True, "waits": True},
    "seek": {"fh": 1, "offset": 0, "whence": 3},
    "setxattr": {"path": b"/a", "name": b"user.a", "value": b"v", "flags": 0, "follow": True},
    "stat": {"path": b"/a", "follow": True},
    "statfs": {"path": b"/a"},
    "status": {},
    "stub": {"paths": [b"/d/stub"]},
    "symlink": {"target": b"t", "path": b"/d/symlink"},
    "sync": {},
    "truncate": {"path": b"/a", "size": 1},
    "undo": {"operator": True},
    "unlink": {"path": b"/none"},
    "upload_begin": {},
    "upload_commit": {"upload": 1, "path": b"/d/up", "parents": True, "mode": 0o644, "exclusive": False},
    "upload_piece": {"upload": 1, "data": b"x"},
    "utime": {"path": b"/a", "atime_ns": 1, "mtime_ns": 1, "follow": True},
    "write": {"path": b"/d/w", "data": b"x", "parents": True, "expect": 1, "mode": 0o644, "exclusive": False},
}  # fmt: skip

WRONG: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 1.5, float("nan"),
    b"", b"\0", b"/\0", b"/" + b"n" * 300, b"/" + b"d/" * 5000, b"\xff", b"/../..", "", "\0", "/", "..", "x" * 70000,
    "/x/=local:/\0", "/x/=store:sqlite:/\0", "/x/=local:relative", "=",
    [], {}, [1], [b""], [b"/\0"], ["x"], [[]], [{}], {"a": 1}, {"a": {}}, {"user": 1},
    [{"operations": [[]], "paths": [{}], "mode": []}], [{"operations": ["read"], "paths": ["x"]}],
    [{"operations": ["read"], "paths": ["/" + "{a,b}" * 30]}],
)  # fmt: skip


@pytest.fixture(params=["state", "memory", "local"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, root=request.param)
    daemon.start()
    yield daemon
    daemon.abort()


def test_every_parameter_wrong_in_every_way(daemon: Daemon) -> None:
    client, top = daemon.client, daemon.point
    assert sorted(GOOD) == sorted({*client.call("hello", version=1)["ops"]} - {"shutdown"})
    (top / "a").write_bytes(b"content")
    (top / "l").symlink_to("a")
    (top / "d").mkdir()
    for op, good in GOOD.items():
        for key in good:
            for wrong in WRONG:
                request = good | {key: wrong}
                if "fh" in good and key != "fh":
                    request["fh"] = client.call("open", path=b"/d/h", flags=0o102)["fh"]
                if "upload" in good and key != "upload":
                    request["upload"] = client.call("upload_begin")["upload"]
                if op == "approvals" and type(wrong) is int and wrong > 0:
                    continue  # it would wait so long
                with contextlib.suppress(OSError, WireError, OverflowError, TypeError):
                    client.call(op, **request)
                if "fh" in request and key != "fh" and op != "close":
                    client.call("close", fh=request["fh"])
                if op == "upload_piece" and key != "upload":
                    client.call("upload_commit", upload=request["upload"], path=b"/d/u")
    client.call("rules_set", owner="o", rules=[])
    assert {"a", "d", "l"} <= {path.name for path in top.iterdir()}
    # What a handler did not foresee is an error with a traceback there.
    assert [line for line in daemon.log().splitlines() if " ERROR " in line or "Traceback" in line] == []
