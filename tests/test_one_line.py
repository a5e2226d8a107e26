"""A name may have a newline, or what moves a terminal's cursor; a message that has the name is one line even so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_world import World
from tool_server import serving

from agenttools import cli as tools_cli
from vfsd import cli

ODD = "a\nb\x1b[2J\udcff"
TOLD = "a\\nb\\x1b[2J\\udcff"


@pytest.mark.parametrize(
    "command",
    [
        ["mount", f"/none/{ODD}"],
        ["umount", f"/none/{ODD}"],
        ["umount", ODD],
        ["check", "--location", f"/none/{ODD}"],
        ["log", "--name", f"/none/{ODD}"],
        ["export", f"/none/{ODD}", "--location", "/"],
        ["rules", "check", f"/none/{ODD}"],
        ["route", "add", f"{ODD}=memory"],
        ["mount", "--config", f"/none/{ODD}", "/"],
        ["reload", f"--{ODD}"],
    ],
    ids=lambda command: " ".join(command[:2]).replace(ODD, "ODD"),
)
def test_vfsd(
    world: World, command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in world.env.items():
        monkeypatch.setenv(name, value)
    assert cli.main(command) in (1, 2)
    said = capfd.readouterr().err
    assert said.startswith("vfsd: ") and said.count("\n") == 1 and "\x1b" not in said, said


def test_vfsd_on_standard_output(world: World) -> None:
    point = world.directory("a\nb")
    try:
        assert world.vfsd("mount", point, "--route", "/=memory").stdout.startswith(
            f"mounted default on {world.base}/a\\nb ("
        )
        assert f"default: {world.base}/a\\nb running\n" in world.vfsd("status").stdout
    finally:
        said = world.vfsd("umount", "default").stdout
    assert said == f"unmounted {world.base}/a\\nb\n"


def test_agenttools(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "s"):
        for command in (
            ["read", f"/{ODD}"],
            ["ls", f"/{ODD}"],
            ["grep", "x", f"/{ODD}"],
            ["edit", f"/{ODD}", ODD, "x"],
            ["delete", f"/{ODD}"],
            ["glob", "*", f"/../{ODD}"],
            ["ls", f"--{ODD}"],
        ):
            assert tools_cli.main(["--socket", str(tmp_path / "s"), *command]) in (1, 2), command
            said = capfd.readouterr().err
            assert said.startswith("agenttools: ") and said.count("\n") == 1 and "\x1b" not in said, said
    assert tools_cli.main(["--socket", os.fspath(tmp_path / "a\nb"), "ls"]) == 3
    assert f"no daemon on {tmp_path}/a\\nb; " in capfd.readouterr().err
