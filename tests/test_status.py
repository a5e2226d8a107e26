"""What ``vfsd status`` tells a person."""

from __future__ import annotations

import subprocess

import pytest
from cli_world import SECONDS, World

pytestmark = pytest.mark.mount


def test_status_is_in_words(world: World) -> None:
    file = world.base / "vfsd.toml"
    file.write_text(
        '[routes."/"]\nkind = "memory"\n[[rules]]\npaths = ["/ask/**"]\noperations = ["write"]\nmode = "interrupt"\n'
    )
    world.vfsd("mount", world.mp, "--config", file)
    (world.mp / "ask").mkdir()
    (world.mp / "f").write_bytes(b"x" * 5000)
    waiting = subprocess.Popen(["touch", world.mp / "ask/x"], stderr=subprocess.DEVNULL)
    world.wait(lambda: world.status()["approvals"] == 1)
    said = world.vfsd("status").stdout
    assert f"  config {file}\n" in said and f"  log {world.status()['log']}\n" in said
    assert (
        "  3 files and directories, " in said and " looks, " in said and "audit_" not in said and "path_fds" not in said
    )
    assert "  waiting for a yes: 1; see vfsd approvals --name default\n" in said
    world.vfsd("reject", "1")
    waiting.wait(SECONDS)
    assert "see vfsd status" in world.vfsd("status", "nonesuch", code=1).stderr
