"""Rules and limits for operations that wait for a hook side by side."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor

from cli_world import World

from agenttools.client import Client

HOOK = """
import time
def wait():
    def look(m):
        time.sleep(0.2)
    return look
"""
CONFIG = """
[routes."/"]
kind = "memory"
[quotas."/"]
bytes = "1M"
[[hooks]]
call = "factory:waiting_hook:wait"
seconds = 10
"""


def test_who_waits_for_a_hook_is_counted_when_it_goes_on(world: World, engine: str) -> None:
    (world.base / "waiting_hook.py").write_text(HOOK)
    (world.base / "vfsd.toml").write_text(CONFIG)
    world.vfsd("mount", "--config", world.base / "vfsd.toml", "--engine", engine, world.mp)

    def write(number: int) -> bool:
        with Client(socket=world.run_dir / "vfsd/default.sock") as client:
            try:
                client.call("write", path=b"/%d" % number, data=bytes(300 << 10))
            except OSError as exc:
                assert exc.errno == errno.EDQUOT
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(write, range(8))) == 3
