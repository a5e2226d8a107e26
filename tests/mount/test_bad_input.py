"""What goes wrong where the kernel is part of it: a full disk, names and sizes beyond all bounds."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import EXPECTED_WARNINGS, Daemon
from trees import ENGINES, watched

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=True, timeout=20)
    yield disk
    subprocess.run(["umount", disk], check=True, timeout=20)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_disk(engine: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC, nothing lost, and it works again after space is made, which can be done from inside the mount."""
    daemon = Daemon(tmp_path / "d", engine)
    daemon.command[daemon.command.index(f"/=state:{daemon.volume}")] = f"/=state:{small}/volume"
    daemon.volume = small / "volume"
    try:
        daemon.start()
        with watched(daemon.point):
            (daemon.point / "kept").write_bytes(b"k" * 300_000)
            written = 0
            with pytest.raises(OSError, match="No space left"), open(daemon.point / "big", "wb", buffering=0) as file:
                while written < 64 << 20:
                    written += file.write(b"b" * 65536)
            assert 8 << 20 < written < 24 << 20
            with pytest.raises(OSError, match="No space left"):
                for i in range(100_000):
                    (daemon.point / f"small{i}").write_bytes(b"s" * 4096)
            with pytest.raises(OSError) as caught:
                daemon.client.call("write", path=b"/tool", data=b"t" * 100_000)
            assert caught.value.errno == errno.ENOSPC
            assert (daemon.point / "kept").read_bytes() == b"k" * 300_000
            assert os.stat(daemon.point / "big").st_size == written
            usage = os.statvfs(daemon.point)
            assert usage.f_bavail * usage.f_frsize < 6 << 20

            os.unlink(daemon.point / "big")
            (daemon.point / "again").write_bytes(b"a" * (4 << 20))
            daemon.client.call("write", path=b"/tool", data=b"t" * 100_000)
            assert (daemon.point / "again").read_bytes() == b"a" * (4 << 20)
            names = sorted(os.listdir(daemon.point))
        monkeypatch.setattr("daemons.EXPECTED_WARNINGS", (*EXPECTED_WARNINGS, "No space left on device"))
        daemon.stop()
        daemon.start()
        with watched(daemon.point):
            assert sorted(os.listdir(daemon.point)) == names
            assert (daemon.point / "kept").read_bytes() == b"k" * 300_000
        daemon.stop()
    finally:
        daemon.abort()


@pytest.mark.parametrize("engine", ENGINES)
def test_beyond_all_bounds(engine: str, tmp_path: Path) -> None:
    """The errno POSIX has for each, and the daemon lives on, no larger than before."""
    daemon = Daemon(tmp_path / "d", engine)
    try:
        daemon.start()
        with watched(daemon.point):
            point = daemon.point
            path = point / "f"
            path.write_bytes(b"x")
            pid = daemon.client.hello["pid"]
            before = _resident(pid)
            fd = os.open(path, os.O_RDWR)
            cases = [
                (errno.ENAMETOOLONG, lambda: os.mkdir(point / ("n" * 256))),
                (errno.ENAMETOOLONG, lambda: os.stat(f"{point}/{'d/' * 2100}")),
                (errno.ENAMETOOLONG, lambda: os.symlink("x" * 4097, point / "l")),
                (errno.EFBIG, lambda: os.ftruncate(fd, (1 << 63) - 1)),
                (errno.EFBIG, lambda: os.truncate(path, 1 << 50)),
                (errno.EFBIG, lambda: os.pwrite(fd, b"x", (1 << 63) - 2)),
                (errno.EINVAL, lambda: os.ftruncate(fd, -1)),
                (errno.EINVAL, lambda: os.pread(fd, 1, -1)),
                (errno.E2BIG, lambda: os.setxattr(path, "user.a", bytes(65_537))),
                (errno.ERANGE, lambda: os.setxattr(path, "user." + "n" * 256, b"")),
                (errno.ENOTDIR, lambda: os.listdir(path)),
                (errno.EXDEV, lambda: os.link("/etc/passwd", point / "h")),
            ]  # fmt: skip
            for code, case in cases:
                with pytest.raises(OSError) as caught:
                    case()
                assert errno.errorcode[caught.value.errno or 0] == errno.errorcode[code], cases.index((code, case))
            os.close(fd)
            os.truncate(path, (1 << 44) - 4096)
            assert os.stat(path).st_size == (1 << 44) - 4096
            assert os.stat(path).st_blocks <= 8
            with open(path, "rb") as file:
                file.seek(-10, os.SEEK_END)
                assert file.read() == bytes(10)
            assert _resident(pid) < before + (32 << 20)
        daemon.stop()
    finally:
        daemon.abort()


def _resident(pid: int) -> int:
    """Bytes of memory a process takes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
