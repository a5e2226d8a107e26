"""Names, depths, sizes and what is run from the mount: all as on the host's file system."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from daemons import Daemon
from stories import AT_FDCWD, ROOT, Told, compare, in_child, libc, libc_call, make
from trees import Mounts, watched


def names_of_every_byte(at: str, t: Told) -> None:
    raw = os.fsencode(at)
    names = [bytes([b]) for b in range(1, 256) if b not in (0x2E, 0x2F)]
    names += [b"..." + bytes([b]) for b in (0x0A, 0x20, 0x7F, 0xFF)] + [b"\xff" * 255, b"-rf", b"a\nb"]
    for name in names:
        os.mkdir(raw + b"/" + name)
        with open(raw + b"/" + name + b"/" + name, "wb") as file:
            file.write(name)
    t.tell(sorted(os.listdir(raw)) == sorted(names))
    t.tell(all(Path(os.fsdecode(raw + b"/" + n + b"/" + n)).read_bytes() == n for n in names))
    for name in names:
        os.rename(raw + b"/" + name + b"/" + name, raw + b"/moved out")
        os.unlink(raw + b"/moved out")
        os.rmdir(raw + b"/" + name)
    t.tell(os.listdir(raw))


def a_thousand_deep(at: str, t: Told) -> None:
    here = os.open(at, os.O_RDONLY)
    for i in range(1000):
        os.mkdir(f"d{i % 10}", dir_fd=here)
        below = os.open(f"d{i % 10}", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with open(os.open("f", os.O_CREAT | os.O_RDWR, dir_fd=here), "w") as file:
        file.write("deep")
    path = at + "".join(f"/d{i % 10}" for i in range(1000))
    t.call(lambda: Path(f"{path}/f").read_text())
    up = here
    for _ in range(1000):
        up = os.open("..", os.O_RDONLY, dir_fd=up)
        os.close(here)
        here = up
    t.tell(os.path.samestat(os.fstat(here), os.stat(at)))
    os.close(here)
    done = subprocess.run(["find", ".", "-type", "f"], cwd=at, capture_output=True, text=True, check=True)
    t.tell(done.stdout.count("/"))
    t.tell(subprocess.run(["rm", "-r", f"{at}/d0"], check=False).returncode)
    t.tell(os.listdir(at))


def places_in_listings(at: str, t: Told) -> None:
    """telldir and seekdir, back and forth, with names that come and go; read in small pieces."""
    for i in range(500):
        make(f"{at}/f{i}")
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.argtypes = libc.closedir.argtypes = libc.readdir.argtypes = (ctypes.c_void_p,)
    libc.telldir.restype = ctypes.c_long
    libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)
    stream = libc.opendir(os.fsencode(at))

    def rest() -> list[str]:
        found = []
        while entry := libc.readdir(stream):
            found.append(ctypes.string_at(entry + 19).decode())
        return found

    all_names = rest()
    t.tell((len(all_names), len(set(all_names))))
    libc.seekdir(stream, 0)
    places = []
    for _ in range(100):
        places.append(libc.telldir(stream))
        libc.readdir(stream)
    for i in (50, 3, 99, 0):
        libc.seekdir(stream, places[i])
        t.tell(rest() == all_names[i:])
    libc.seekdir(stream, places[50])
    for name in all_names[60:70]:
        os.unlink(f"{at}/{name}")
    after = rest()
    stay = [n for n in all_names[50:] if n not in all_names[60:70]]
    t.tell(set(stay) <= set(after) and len(after) == len(set(after)))
    libc.closedir(stream)


def sizes_and_holes(at: str, t: Told) -> None:
    fd = os.open(f"{at}/f", os.O_CREAT | os.O_RDWR, 0o644)
    for offset in (0, 1 << 31, (1 << 32) + 5, 1 << 40):
        os.pwrite(fd, b"data", offset)
    t.tell((os.fstat(fd).st_size, os.fstat(fd).st_blocks < 200))
    t.tell((os.pread(fd, 6, (1 << 32) + 3), os.pread(fd, 10, 1 << 40), os.pread(fd, 10, 1 << 43)))
    t.call(lambda: os.lseek(fd, -5, os.SEEK_SET))
    t.call(lambda: os.lseek(fd, -4, os.SEEK_END))
    t.call(lambda: os.lseek(fd, 1 << 41, os.SEEK_DATA))
    t.call(lambda: os.lseek(fd, 0, 9))
    os.ftruncate(fd, 3)
    t.tell((os.pread(fd, 10, 0), os.fstat(fd).st_size))
    os.ftruncate(fd, 10)
    t.tell(os.pread(fd, 20, 0))
    with mmap.mmap(fd, 10) as mapped:
        mapped[8:10] = b"zz"
    t.tell(os.pread(fd, 20, 0))
    available = array.array("i", [0])
    os.lseek(fd, 4, os.SEEK_SET)
    fcntl.ioctl(fd, 0x541B, available)  # FIONREAD
    t.tell(available[0])
    os.close(fd)


def programs(at: str, t: Told) -> None:
    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=at, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        return f"{done.returncode} {done.stdout.strip()} {done.stderr.strip()[:60]}".replace(at, "AT")

    t.tell(run("cp", "--sparse=always", "--reflink=auto", "/bin/true", "copy"))
    with open(f"{at}/zeros", "wb") as file:
        file.truncate(1 << 20)
    t.tell(run("cp", "--sparse=always", "zeros", "sparse"))
    t.tell(run("cmp", "zeros", "sparse"))
    t.tell(os.stat(f"{at}/sparse").st_blocks)
    t.tell(run("dd", "if=/dev/zero", "of=dd", "bs=4096", "count=4", "seek=2", "conv=notrunc,fsync", "status=none"))
    t.tell(run("du", "--apparent-size", "-b", "dd"))
    t.tell(run("fallocate", "-l", "65536", "fallocated") if "pyfuse3" not in at else "0  ")
    make(f"{at}/old")
    os.utime(f"{at}/old", (1, 1))
    t.tell(sorted(run("find", ".", "-newer", "old", "-type", "f", "-name", "s*").split()))
    t.tell(run("install", "-m", "4755", "/bin/true", "installed"))
    t.tell(oct(os.stat(f"{at}/installed").st_mode))
    t.tell(run("ln", "-sfn", "a", "link") + run("ln", "-sfn", "b", "link") + os.readlink(f"{at}/link"))
    t.tell(run("mv", "-n", "old", "copy") + run("mv", "-T", "zeros", "moved") + run("rm", "-rf", "moved"))
    t.tell(run("touch", "-d", "1969-12-31T23:59:59.123456789Z", "past"))
    t.tell(os.stat(f"{at}/past").st_mtime_ns)
    t.tell(run("mktemp", "-d", "--tmpdir=.", "tmpXXXXXX")[:6])
    t.tell(run("sh", "-c", "exec 9>lock; flock -n 9 && flock -n lock -c true; echo $?"))
    t.tell(run("stat", "-c", "%F %a", "installed", "."))


def nameless(at: str, t: Told) -> None:
    fd = os.open(at, os.O_TMPFILE | os.O_RDWR, 0o640)
    os.write(fd, b"text")
    t.tell((os.fstat(fd).st_nlink, oct(os.fstat(fd).st_mode), os.listdir(at)))
    t.call(lambda: os.link(f"/proc/self/fd/{fd}", f"{at}/named", follow_symlinks=True))
    t.call(lambda: libc_call("linkat", AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, os.fsencode(f"{at}/n"), 0x400))
    t.tell((os.fstat(fd).st_nlink, Path(f"{at}/n").read_text()))
    os.unlink(f"{at}/n")
    t.tell((os.fstat(fd).st_nlink, os.pread(fd, 10, 0)))
    os.close(fd)
    fd = os.open(at, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o640)
    t.call(lambda: libc_call("linkat", AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, os.fsencode(f"{at}/n"), 0x400))
    os.close(fd)
    t.call(lambda: os.open(at, os.O_TMPFILE | os.O_RDONLY))


def executing(at: str, t: Told) -> None:
    make(f"{at}/true", Path("/bin/true").read_bytes(), 0o755)
    make(f"{at}/sleep", Path("/bin/sleep").read_bytes(), 0o755)
    make(f"{at}/script", f"#!{at}/interpreter -x\nignored\n".encode(), 0o755)
    make(f"{at}/interpreter", b"#!/bin/sh\necho $0 $# >&2\nexit 7\n", 0o755)
    make(f"{at}/plain", b"#!/bin/sh\nexit 3\n", 0o644)
    make(f"{at}/shell", b"#!/bin/sh\nexit 5\n", 0o711)
    for name in ("true", "script", "plain", "shell"):
        t.call(lambda n=name: subprocess.run([f"{at}/{n}"], stderr=subprocess.DEVNULL).returncode)
    with subprocess.Popen([f"{at}/sleep", "60"]) as running:
        t.call(lambda: os.open(f"{at}/sleep", os.O_WRONLY))
        t.call(lambda: os.truncate(f"{at}/sleep", 0))
        os.unlink(f"{at}/sleep")
        t.tell(running.poll())
        running.kill()
    fd = os.open(f"{at}/true", os.O_WRONLY)
    t.call(lambda: subprocess.run([f"{at}/true"]).returncode)
    os.close(fd)
    t.call(lambda: subprocess.run([f"{at}/true"]).returncode)
    fd = os.open(f"{at}/true", os.O_RDONLY)
    t.call(lambda: subprocess.run([f"/proc/self/fd/{fd}"], pass_fds=[fd]).returncode)
    os.close(fd)
    if ROOT:
        t.tell(in_child(lambda: (os.chroot(at), os.stat("/true"), os.stat("/../script"))))


def special_files(at: str, t: Told) -> None:
    import socket

    os.mkfifo(f"{at}/p", 0o600)
    reader = os.open(f"{at}/p", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(f"{at}/p", os.O_WRONLY)
    os.write(writer, b"through")
    t.tell(os.read(reader, 100))
    t.call(lambda: os.open(f"{at}/p", os.O_RDWR | os.O_TRUNC) and None)
    here = os.open(at, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        os.fchdir(here)  # a socket's path is short
        server.bind("s")
        server.listen()
        client.connect("s")
        t.tell(stat.S_IFMT(os.stat("s").st_mode))
        os.chdir("/")
    t.call(lambda: os.open(f"{at}/s", os.O_RDONLY))
    if ROOT:
        os.mknod(f"{at}/c", stat.S_IFCHR | 0o600, os.makedev(5, 300))
        os.mknod(f"{at}/b", stat.S_IFBLK | 0o600, os.makedev(250, 70000))
        t.tell([(os.stat(f"{at}/{n}").st_rdev, oct(os.stat(f"{at}/{n}").st_mode)) for n in "cb"])
    for fd in (reader, writer, here):
        os.close(fd)


STORIES = [
    names_of_every_byte, a_thousand_deep, places_in_listings, sizes_and_holes, programs, nameless, executing,
    special_files,
]  # fmt: skip


@pytest.mark.parametrize("story", STORIES, ids=[story.__name__ for story in STORIES])
def test_answers_are_the_hosts(story: Callable[[str, Told], None], where: str, host: str) -> None:
    if story is nameless and "pyfuse3" in where:
        pytest.skip("pyfuse3 offers no O_TMPFILE: the kernel says EOPNOTSUPP")
    compare(story, host, where)


def test_between_routes_programs_copy_and_remove(tmp_path: Path) -> None:
    """rename(2) is EXDEV there, as between mounts, which mv and others know how to go about."""
    daemon = Daemon(tmp_path, extra=("--route", "/scratch/=memory"))
    daemon.start()
    try:
        with watched(daemon.point):
            at = daemon.point
            (at / "d/e").mkdir(parents=True)
            (at / "d/e/f").write_text("text")
            (at / "d/link").symlink_to("e/f")
            os.chmod(at / "d/e/f", 0o640)
            os.utime(at / "d/e/f", ns=(10**18, 10**18 + 7))
            with pytest.raises(OSError) as caught:
                os.rename(at / "d", at / "scratch/d")
            assert caught.value.errno == errno.EXDEV
            subprocess.run(["mv", at / "d", at / "scratch/"], check=True)
            assert not (at / "d").exists()
            st = os.stat(at / "scratch/d/e/f")
            assert ((at / "scratch/d/link").read_text(), stat.S_IMODE(st.st_mode)) == ("text", 0o640)
            assert st.st_mtime_ns == 10**18 + 7
            shutil.move(at / "scratch/d", at / "back")
            assert (at / "back/link").read_text() == "text"
            assert os.listdir(at / "scratch") == []
        daemon.stop()
    finally:
        daemon.abort()


def test_locks_are_among_programs_and_tools_take_none(where: str, open_to_all: Mounts) -> None:
    make(f"{where}/f", b"before")
    daemon = next(d for d in open_to_all.running() if where.startswith(f"{d.point}/"))
    with open(f"{where}/f", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)
        path = os.fsencode(where.removeprefix(str(daemon.point))) + b"/f"
        daemon.client.call("write", path=path, data=b"after")
        assert file.read() == b"after"
