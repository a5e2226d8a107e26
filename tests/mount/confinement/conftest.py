"""A daemon, and the places attempts are made in."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attempts import NOBODY, Place
from daemons import Daemon

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shell"))

from shell_world import Attached
from shell_world import Daemon as Directory

SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    base = tmp_path_factory.mktemp("confined")
    config = base / "vfsd.toml"
    config.write_text('[execute]\npass_env = ["PASSED_ON"]\n[execute.env]\nGIVEN = "by the configuration"\n')
    daemon = Daemon(base, extra=("--config", str(config)))
    daemon.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", daemon.environ["XDG_RUNTIME_DIR"])
        patch.setenv("XDG_STATE_HOME", daemon.environ["XDG_STATE_HOME"])
        yield daemon
    daemon.stop()


@pytest.fixture(params=["caller", "nobody"])
def place(request: pytest.FixtureRequest, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "caller":
        yield Place(daemon.client, daemon.point, sys.executable, False)
        return
    if os.geteuid() != 0:
        pytest.skip("the caller is an ordinary user already")
    if not os.path.exists(SYSTEM_PYTHON):
        pytest.skip(f"an ordinary user needs {SYSTEM_PYTHON}")
    base = Path(tempfile.mkdtemp(prefix="vfsd-nobody-", dir="/var/tmp"))
    base.chmod(0o755)
    for name in ("tree", "run", "home"):
        (base / name).mkdir()
        (base / name).chmod(0o700 if name != "tree" else 0o755)
    Directory(base / "tree")
    for path in (base / "tree", *base.glob("*"), *(base / "tree").iterdir()):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "run"))
    monkeypatch.setenv("HOME", str(base / "home"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    try:
        yield Place(Attached(str(base / "tree")), base / "tree", SYSTEM_PYTHON, True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
