"""What the ``local`` volume costs above the system calls it makes: ``python tests/bench_local.py [DIRECTORY]``."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vfsd.backends.local import LocalVolume
from vfsd.core.types import Caller, SetAttr
from vfsd.feed import Feed

N = 2000
ME = Caller(os.geteuid(), os.getegid())


def timed(call: Callable[[int], object]) -> float:
    """Microseconds a call, the best of three rounds of N."""
    best = float("inf")
    for round_ in range(3):
        start = time.perf_counter()
        for i in range(round_ * N, round_ * N + N):
            call(i)
        best = min(best, time.perf_counter() - start)
    return best / N * 1e6


def main() -> None:
    """Print each operation through the volume, by bare system calls, and the ratio."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        top = Path(name)
        vol = LocalVolume(0, top, Feed())
        d = vol.mkdir(1, b"d", 0o755, ME).ino
        e = vol.mkdir(1, b"e", 0o755, ME).ino
        dir_fd, other_fd = os.open(top / "d", os.O_PATH), os.open(top / "e", os.O_PATH)
        f = vol.create_file(d, b"f", 0o644, b"x" * 4096, ME).ino
        vol.remember(f, 1)
        fh = vol.open(f, os.O_RDWR, ME)
        fd = os.open(b"f", os.O_RDWR, dir_fd=dir_fd)
        for i in range(N):
            vol.create_file(e, b"l%d" % i, 0o644, b"", ME)
        data = b"y" * 4096

        def made(volume: bool) -> Callable[[int], object]:
            def by_volume(i: int) -> None:
                attr, handle = vol.create(d, b"c%d" % i, 0o644, os.O_WRONLY, ME)
                vol.release(attr.ino, handle)

            def bare(i: int) -> None:
                os.close(os.open(b"b%d" % i, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644, dir_fd=dir_fd))

            return by_volume if volume else bare

        def list_bare(i: int) -> None:
            for entry in os.listdir(b"/proc/self/fd/%d" % other_fd):
                os.stat(entry, dir_fd=other_fd, follow_symlinks=False)

        def opened(i: int) -> None:
            vol.release(f, vol.open(f, os.O_RDONLY, ME))

        for what, ours, theirs in (
            ("getattr", lambda i: vol.getattr(f), lambda i: os.fstat(fd)),
            ("lookup", lambda i: vol.lookup(d, b"f"), lambda i: os.stat(b"f", dir_fd=dir_fd, follow_symlinks=False)),
            ("open+close", opened, lambda i: os.close(os.open(b"f", os.O_RDONLY, dir_fd=dir_fd))),
            ("read 4 KiB", lambda i: vol.read(f, fh, 0, 4096), lambda i: os.pread(fd, 4096, 0)),
            ("write 4 KiB", lambda i: vol.write(f, fh, 0, data, ME), lambda i: os.pwrite(fd, data, 0)),
            ("chmod", lambda i: vol.setattr(f, SetAttr(perm=0o600), ME), lambda i: os.fchmod(fd, 0o600)),
            ("create+close", made(True), made(False)),
            (
                "rename",
                lambda i: vol.rename(d, b"c%d" % i, e, b"c%d" % i, 0, ME),
                lambda i: os.rename(b"b%d" % i, b"b%d" % i, src_dir_fd=dir_fd, dst_dir_fd=other_fd),
            ),
            ("unlink", lambda i: vol.unlink(e, b"c%d" % i, ME), lambda i: os.unlink(b"b%d" % i, dir_fd=other_fd)),
        ):
            a, b = timed(ours), timed(theirs)
            print(f"{what:12} {a:7.2f} us  bare {b:7.2f} us  ratio {a / b:4.1f}")
        start = time.perf_counter()
        count = sum(1 for entry in vol.readdir(e, 0, 0) if stat.S_ISREG(entry.attr.mode))
        middle = time.perf_counter()
        list_bare(0)
        a, b = (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3
        print(f"list {count}    {a:7.2f} ms  bare {b:7.2f} ms  ratio {a / b:4.1f}")
        os.close(dir_fd)
        os.close(other_fd)
        os.close(fd)
        vol.close()


if __name__ == "__main__":
    main()
