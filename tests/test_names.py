"""A mount is named in the same way for every command."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
from cli_world import World

from vfsd import cli

ALONE = [
    "status", "check", "reload", "log-level", "undo", "gc", "log", "approvals", "rules list", "rules reload",
    "checkpoint list", "route list",
]  # fmt: skip
"""Commands that need nothing but a mount."""

OTHER = [
    "rules check",
    "checkpoint create",
    "run --view mount -- true",
    "export FILE",
    "blame /f",
    "log-level info",
]


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A mount called work."""
    world = World(tmp_path_factory.mktemp("work"))
    file = world.base / "vfsd.toml"
    file.write_text('name = "work"\n[routes."/"]\nkind = "state"\n')
    try:
        world.vfsd("mount", world.mp, "--config", file)
        (world.mp / "f").write_text("x")
        yield world
    finally:
        world.clean()


@pytest.fixture
def work(mounted: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The same, found by this process too."""
    for name, value in mounted.env.items():
        monkeypatch.setenv(name, value)
    return mounted


def parsers(parser: argparse.ArgumentParser, above: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in found:
        for name, one in action.choices.items():
            yield from parsers(one, f"{above} {name}".strip())
    if not found:
        yield above, parser


@pytest.mark.mount
@pytest.mark.parametrize("command", [*ALONE, *OTHER])
def test_each_way_to_name_a_mount_is_one(work: World, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    words, _, rest = command.replace("FILE", str(work.base / "out.tar")).partition(" -- ")
    tail = ["--", rest] if rest else []
    ways = [["--name", "work"], ["--name", str(work.mp)]]
    if command in ALONE:
        ways += [["work"], [str(work.mp)]]
    for way in ways:
        if rest:
            work.vfsd(*words.split(), *way, *tail)
            continue
        code = cli.main([*words.split(), *way])
        said = capfd.readouterr()
        assert (code, "no mount" in said.err, "is recorded" in said.err) == (int(command == "undo"), False, False), said
    assert cli.main([*words.split(), "--name", "none", *tail]) == 1
    assert cli.main([*words.split(), "--name", str(work.base), *tail]) == 1
    assert f"no vfsd mount is on {work.base}: see vfsd status" in capfd.readouterr().err
    if command in ALONE:
        assert cli.main([*words.split(), "other", "--name", "work"]) == 2
        assert "'other' is one word too many: --name says which mount" in capfd.readouterr().err


def test_umount(world: World) -> None:
    assert world.vfsd("umount", code=2).stderr == "vfsd: which mount: vfsd umount NAME\n"
    for way in (["--name", "work"], ["--name", str(world.mp)]):
        world.vfsd("mount", world.mp, "--name", "work", "--route", "/=memory")
        world.vfsd("umount", *way)
        assert world.mounts() == []


def test_help_says_the_same_everywhere() -> None:
    said: dict[str, set[str]] = {}
    for command, parser in parsers(cli._parser()):
        for action in parser._actions:
            for option in {"--name", "--thread"}.intersection(action.option_strings):
                if command not in ("mount", "checkpoint fork"):  # which make what they name
                    said.setdefault(option, set()).add(str(action.help).partition(" (default: ")[0])
    assert said == {"--name": {"the mount's name, or the directory it is on"}, "--thread": {"whose"}}
