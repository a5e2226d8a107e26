"""Containers can be run, or the summary says why they were not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import NoReturn

import pytest
from engine import Podman
from hosts import USER, Host, NoHost

_reasons: set[str] = set()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in sorted(_reasons):
        terminalreporter.write_line(f"CONTAINERS NOT TESTED: {reason}", red=True, bold=True)


def leave_out(reason: str) -> NoReturn:
    """Skips, and says so where nobody overlooks it."""
    _reasons.add(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    if os.geteuid() != 0:
        leave_out("only root can make a host for them")
    try:
        made = Host()
    except NoHost as error:
        leave_out(f"no host for them can be made here: {error}")
    yield made
    made.close()


def _podman(host: Host, user: int, needed: tuple[str, ...]) -> Iterator[Podman]:
    missing = [program for program in needed if shutil.which(program) is None]
    if missing:
        leave_out(f"{' and '.join(missing)} missing (apt-get install podman runc uidmap)")
    made = Podman(host, user)
    tried = made.run(argv=["true"], code=None)
    if tried.returncode:
        who = "an ordinary user's" if user else "root's"
        leave_out(f"{who} do not run here: {tried.stderr.strip().rpartition(chr(10))[2]}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def podman(host: Host) -> Iterator[Podman]:
    """Root's containers."""
    yield from _podman(host, 0, ("podman", "runc"))


@pytest.fixture(scope="module")
def rootless(host: Host) -> Iterator[Podman]:
    """An ordinary user's containers."""
    yield from _podman(host, USER, ("podman", "runc", "newuidmap"))
