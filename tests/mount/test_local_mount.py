"""A ``local`` route in a real mount, while the host changes the same directory."""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vfsd.doors import engines

pytestmark = pytest.mark.mount

SECONDS = 20.0
BELIEVED = 1.1
"""A little over the time the kernel may believe what it knows of a host file."""


@pytest.fixture
def local(engine: str, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(host directory, mountpoint)."""
    host, point = tmp_path / "host", tmp_path / "mnt"
    host.mkdir()
    point.mkdir()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "vfsd", "mount", "--foreground", "--engine", engine, "--route", f"/=local:{host}"]
    daemon = subprocess.Popen([*command, str(point)], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + SECONDS
        while not os.path.ismount(point):
            assert daemon.poll() is None, daemon.communicate()[1]
            assert time.monotonic() < end, "not mounted in time"
            time.sleep(0.02)
        yield host, point
        assert daemon.poll() is None
    finally:
        if subprocess.run(["umount", point], timeout=SECONDS, check=False, capture_output=True).returncode:
            subprocess.run(["umount", "-l", point], timeout=SECONDS, check=False, capture_output=True)
            daemon.kill()
        try:
            log = daemon.communicate(timeout=SECONDS)[1]
        except subprocess.TimeoutExpired:
            daemon.kill()
            engines.abort(str(point))
            log = daemon.communicate(timeout=SECONDS)[1]
    assert "Traceback" not in log
    assert " ERROR " not in log


def test_regression_an_open_descriptor_reads_what_the_host_appends(local: tuple[Path, Path]) -> None:
    host, point = local
    (host / "log").write_bytes(b"one\n")
    fd = os.open(point / "log", os.O_RDONLY)
    assert os.pread(fd, 100, 0) == b"one\n"
    expected = b"one\n"
    for i in range(3):
        with (host / "log").open("ab") as f:
            f.write(b"line %d\n" % i)
        expected += b"line %d\n" % i
        time.sleep(BELIEVED)
        assert os.fstat(fd).st_size == len(expected)
        assert os.pread(fd, 100, 0) == expected
    os.close(fd)


def test_an_open_descriptor_sees_a_change_of_the_same_size(local: tuple[Path, Path]) -> None:
    host, point = local
    (host / "f").write_bytes(b"1111")
    fd = os.open(point / "f", os.O_RDONLY)
    with mmap.mmap(fd, 4, access=mmap.ACCESS_READ) as mapped:
        assert (os.pread(fd, 4, 0), mapped[:]) == (b"1111", b"1111")
        with (host / "f").open("r+b") as f:
            f.write(b"2222")
        assert (point / "f").read_bytes() == b"2222", "each open reads anew"
        time.sleep(BELIEVED)
        assert os.pread(fd, 4, 0) == b"2222"
        assert mapped[:] == b"2222"
    os.close(fd)


def test_names_follow_the_host(local: tuple[Path, Path]) -> None:
    host, point = local
    assert not (point / "new").exists()
    (host / "new").write_bytes(b"x")
    time.sleep(BELIEVED)
    assert (point / "new").read_bytes() == b"x"
    (host / "new").unlink()
    (host / "new").mkdir()
    (host / "new/f").touch()
    time.sleep(BELIEVED)
    assert os.listdir(point / "new") == ["f"]
    (host / "new").rename(host / "other")
    time.sleep(BELIEVED)
    assert os.listdir(point) == ["other"]
    assert (point / "other/f").exists()


def test_the_mount_writes_to_the_host_at_once(local: tuple[Path, Path]) -> None:
    host, point = local
    with (point / "f").open("wb", buffering=0) as f:
        f.write(b"seen before close")
        assert (host / "f").read_bytes() == b"seen before close"
        (point / "f").unlink()
        f.write(b"!")
        assert os.fstat(f.fileno()).st_nlink == 0
        assert Path(f"/proc/self/fd/{f.fileno()}").read_bytes() == b"seen before close!"
    assert not list(host.iterdir())
    os.mkfifo(point / "p", 0o640)
    assert stat.S_ISFIFO((host / "p").lstat().st_mode)
    (point / "a").symlink_to("/nowhere")
    assert os.readlink(host / "a") == "/nowhere"
    assert (point / "p").stat().st_ino == (host / "p").stat().st_ino


def test_a_git_index_is_good_on_both_sides(local: tuple[Path, Path]) -> None:
    host, point = local
    if not subprocess.run(["git", "--version"], capture_output=True).stdout:
        pytest.skip("no git")

    def git(where: Path, *arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "safe.directory=*", *arguments]
        return subprocess.run(command, cwd=where, check=True, capture_output=True, text=True, timeout=SECONDS).stdout

    git(point, "init", "-q", ".")
    for i in range(20):
        (point / f"f{i}").write_text(str(i))
    git(point, "add", ".")
    git(point, "commit", "-qm", "first")
    time.sleep(BELIEVED)
    # diff-files believes the index's stat data and does not look into files.
    assert git(host, "diff-files") == ""
    (host / "f1").write_text("changed")
    assert git(host, "status", "--porcelain") == " M f1\n"
    time.sleep(BELIEVED)
    assert git(point, "status", "--porcelain") == " M f1\n"
    assert git(point, "diff-files", "--name-only") == "f1\n"
