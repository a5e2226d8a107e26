"""Real programs in the mount, and what they say of the result."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon
from trees import Mounts, watched

from vfsd.check import check_volume

pytestmark = pytest.mark.timeout(180)

GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "protocol.file.allow", "GIT_CONFIG_VALUE_1": "always",
}  # fmt: skip


def run(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    """Its output; it must succeed, or fail when ``fails``."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **GIT}, timeout=120, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


@pytest.fixture(params=["mount-native-state", "mount-native-local", "mount-pyfuse3-state"])
def there(request: pytest.FixtureRequest, mounts: Mounts) -> Iterator[Path]:
    """A directory in a mount."""
    with mounts.directory(request.param) as (daemon, path):
        yield Path(f"{daemon.point}{path}")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 files in 60 directories, with history, links and an executable."""
    place = tmp_path_factory.mktemp("origin")
    noise = random.Random(1)
    run("git", "init", "-q", "-b", "main", ".", cwd=place)
    for commit in range(3):
        for d in range(60):
            directory = place / f"d{d % 12}" / f"e{d}"
            directory.mkdir(parents=True, exist_ok=True)
            for f in range(10):
                if commit == 0 or noise.random() < 0.2:
                    (directory / f"f{f}.txt").write_bytes(noise.randbytes(noise.randrange(4000)))
        if commit == 0:
            (place / "link").symlink_to("d0/e0/f0.txt")
            (place / "run.sh").write_text("#!/bin/sh\n")
            (place / "run.sh").chmod(0o755)
        run("git", "add", "-A", cwd=place)
        run("git", "commit", "-q", "-m", f"commit {commit}", cwd=place)
    return place


@needs("git")
def test_git(there: Path, repository: Path) -> None:
    run("git", "clone", "-q", f"file://{repository}", "clone", cwd=there)
    clone = there / "clone"
    assert run("git", "status", "--porcelain", cwd=clone) == ""
    assert os.readlink(clone / "link") == "d0/e0/f0.txt"
    assert os.access(clone / "run.sh", os.X_OK)
    (clone / "new").write_text("new\n")
    (clone / "d0/e0/f0.txt").unlink()
    os.rename(clone / "d1", clone / "moved")
    assert "?? new" in run("git", "status", "--porcelain", cwd=clone)
    run("git", "add", "-A", cwd=clone)
    run("git", "commit", "-q", "-m", "here", cwd=clone)
    run("git", "checkout", "-q", "-b", "other", "HEAD~2", cwd=clone)
    run("git", "stash", "list", cwd=clone)
    run("git", "checkout", "-q", "main", cwd=clone)
    run("git", "repack", "-a", "-d", "-q", cwd=clone)
    run("git", "gc", "-q", "--prune=now", cwd=clone)
    assert "error" not in run("git", "fsck", "--full", "--strict", cwd=clone)
    run("git", "worktree", "add", "-q", "../tree", "other", cwd=clone)
    assert run("git", "status", "--porcelain", cwd=there / "tree") == ""
    assert run("git", "diff", "HEAD", "--stat", cwd=clone) == ""
    shutil.rmtree(clone)
    assert sorted(os.listdir(there)) == ["tree"]


def wheel(directory: Path) -> Path:
    """A wheel made by hand (PEP 427)."""
    files = {
        "hello_tree/__init__.py": b"def main():\n    print('hello from', __file__)\n",
        "hello_tree-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: hello-tree\nVersion: 1.0\n",
        "hello_tree-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "hello_tree-1.0.dist-info/entry_points.txt": b"[console_scripts]\nhello-tree = hello_tree:main\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files["hello_tree-1.0.dist-info/RECORD"] = (record + "hello_tree-1.0.dist-info/RECORD,,\n").encode()
    path = directory / "hello_tree-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("there", ["mount-native-state"], indirect=True)
def test_pip_in_a_venv(there: Path) -> None:
    run(sys.executable, "-m", "venv", "env", cwd=there)
    python = there / "env/bin/python"
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-cache-dir", wheel(there), cwd=there)
    assert f"hello from {there}/env/lib" in run(there / "env/bin/hello-tree", cwd=there)
    assert "hello-tree" in run(python, "-m", "pip", "list", "--disable-pip-version-check", cwd=there)
    run(python, "-m", "pip", "check", "--disable-pip-version-check", cwd=there)
    run(python, "-m", "pip", "uninstall", "-q", "-y", "hello-tree", cwd=there)
    assert not (there / "env/bin/hello-tree").exists()


@needs("make")
@needs("gcc")
def test_a_c_build(there: Path) -> None:
    (there / "Makefile").write_text(
        "OBJECTS = main.o $(patsubst %,part%.o,1 2 3 4 5 6 7 8)\n"
        "program: $(OBJECTS)\n\tgcc -o $@ $^\n%.o: %.c part.h\n\tgcc -O1 -g -c -o $@ $<\n"
    )
    (there / "part.h").write_text("#define BASE 100\n" + "".join(f"int part{i}(void);\n" for i in range(1, 9)))
    for i in range(1, 9):
        (there / f"part{i}.c").write_text(f'#include "part.h"\nint part{i}(void) {{ return BASE + {i}; }}\n')
    total = " + ".join(f"part{i}()" for i in range(1, 9))
    (there / "main.c").write_text(
        f'#include <stdio.h>\n#include "part.h"\nint main(void) {{ printf("%d\\n", {total}); return 0; }}\n'
    )
    run("make", "-j4", cwd=there)
    assert run(there / "program", cwd=there) == "836\n"
    assert "up to date" in run("make", cwd=there)
    (there / "part.h").write_text((there / "part.h").read_text().replace("100", "200"))
    run("make", "-j4", cwd=there)
    assert run(there / "program", cwd=there) == "1636\n"
    assert "up to date" in run("make", cwd=there)


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_sqlite(there: Path, mode: str) -> None:
    """Four processes at once; in WAL mode they share memory through a mapped file."""
    db = sqlite3.connect(there / "test.db")
    assert db.execute(f"PRAGMA journal_mode={mode}").fetchone() == (mode,)
    db.execute("CREATE TABLE t (who INTEGER, n INTEGER)")
    db.commit()
    program = (
        "import sqlite3, sys\n"
        "db = sqlite3.connect('test.db', timeout=60, isolation_level=None)\n"
        "for i in range(50):\n"
        "    db.execute('BEGIN IMMEDIATE')\n"
        "    db.execute('INSERT INTO t VALUES (?, ?)', (int(sys.argv[1]), i))\n"
        "    db.execute('COMMIT')\n"
        "    db.execute('SELECT count(*) FROM t').fetchone()\n"
        "db.close()\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(n)], cwd=there) for n in range(4)]
    assert [writer.wait(90) for writer in writers] == [0] * 4
    assert db.execute("SELECT count(*), count(DISTINCT who) FROM t").fetchone() == (200, 4)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.execute("VACUUM")
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    assert sorted(os.listdir(there)) == ["test.db"]


@needs("rsync")
def test_rsync(there: Path, repository: Path) -> None:
    command = ("rsync", "-aH", "--exclude=.git", "--delete", "--out-format=%n")
    run(*command, f"{repository}/", f"{there}/copy/", cwd=there)
    assert run(*command, f"{repository}/", f"{there}/copy/", cwd=there) == ""
    assert run(*command, "-c", f"{repository}/", f"{there}/copy/", cwd=there) == ""
    (there / "copy/run.sh").write_text("changed")
    (there / "copy/more").write_text("")
    changed = run(*command, f"{repository}/", f"{there}/copy/", cwd=there).splitlines()
    assert {"deleting more", "run.sh"} <= set(changed)
    assert run(*command, "-c", f"{repository}/", f"{there}/copy/", cwd=there) == ""


def test_tar_and_cp(there: Path, repository: Path) -> None:
    run("tar", "-C", repository, "--exclude=.git", "-cf", "all.tar", ".", cwd=there)
    (there / "out").mkdir()
    run("tar", "-xpf", "all.tar", "-C", "out", cwd=there)
    run("diff", "-r", "--exclude=.git", repository, "out", cwd=there)
    run("cp", "-a", "out", "copy", cwd=there)
    run("tar", "-df", "all.tar", "-C", "copy", cwd=there)
    run("rm", "-r", "out", "copy", "all.tar", cwd=there)
    assert os.listdir(there) == []


@needs("git")
def test_killed_in_the_middle_of_a_clone(repository: Path, tmp_path: Path) -> None:
    """kill -9 of the daemon at several moments; it starts again on the dead mountpoint, sound and usable."""
    daemon = Daemon(tmp_path / "d")
    try:
        for seconds in (0.05, 0.15, 0.4):
            daemon.start()
            with watched(daemon.point):
                shutil.rmtree(daemon.point / "clone", ignore_errors=True)
                before = sorted(os.listdir(daemon.point))
                (daemon.point / f"synced{seconds}").write_text(f"{seconds}")
                clone = subprocess.Popen(
                    ["git", "clone", "-q", f"file://{repository}", "clone"], cwd=daemon.point,
                    env={**os.environ, **GIT}, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                )  # fmt: skip
                time.sleep(seconds)
                daemon.kill()
                clone.wait(60)
                with pytest.raises(OSError, match="Transport endpoint is not connected"):
                    os.listdir(daemon.point)
            checked = daemon.vfsd("check", "--location", str(daemon.volume))
            assert checked.returncode == 0, checked.stdout
            assert "clean" in checked.stdout
            daemon.start()
            with watched(daemon.point):
                assert (daemon.point / f"synced{seconds}").read_text() == f"{seconds}"
                assert set(before) <= set(os.listdir(daemon.point))
            daemon.stop()
        daemon.start()
        with watched(daemon.point):
            shutil.rmtree(daemon.point / "clone", ignore_errors=True)
            run("git", "clone", "-q", f"file://{repository}", "clone", cwd=daemon.point)
            run("git", "fsck", "--full", "--strict", cwd=daemon.point / "clone")
        daemon.stop()
        assert check_volume(daemon.volume) == []
    finally:
        daemon.abort()
