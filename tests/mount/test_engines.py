"""Both engines: starting, ending, failing, and what is asked of an engine rather than of the tree."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mounted import Mounted

from vfsd.doors import engines

pytestmark = [pytest.mark.mount, pytest.mark.timeout(60)]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="root only")
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def native(tree: Mounted, engine: str) -> Mounted:
    if engine != "native":
        pytest.skip("pyfuse3 does not offer it")
    return tree


def test_unmounting_ends_the_process_cleanly(tree: Mounted) -> None:
    with open(tree / "f", "w") as file:
        file.write("data")
    subprocess.run(["umount", tree.path], check=True)
    assert tree.ended() == (0, "")
    assert engines.mounted(tree.path) is None


def test_close_refuses_while_something_is_open(tree: Mounted) -> None:
    with open(tree / "f", "w"):
        with pytest.raises(OSError) as caught:
            tree.tool("close")
        assert caught.value.errno == errno.EBUSY
    tree.tool("write", "g", "still served")
    assert os.listdir(tree.path)
    tree.send("close")
    assert tree.ended()[0] == 0


def test_killed_and_mounted_again(mount: Callable[..., Mounted], tmp_path: Path) -> None:
    first = mount(database=tmp_path / "tree.db")
    for i in range(50):
        with open(first / f"f{i}", "w") as file:
            file.write(str(i))
    first.process.send_signal(signal.SIGKILL)
    first.ended()
    assert engines.is_dead(first.path)
    engines.unmount(first.path, lazy=True)
    second = mount(database=tmp_path / "tree.db")
    assert not engines.is_dead(second.path)
    assert sorted(os.listdir(second.path)) == sorted(f"f{i}" for i in range(50))
    for i in range(50):
        with open(second / f"f{i}") as file:
            assert file.read() == str(i)


def test_a_fault_in_a_handler_is_eio_and_the_mount_lives(tree: Mounted) -> None:
    os.mkdir(tree / "d")
    for kind, number in (("ValueError", errno.EIO), ("ENOSPC", errno.ENOSPC)):
        tree.tool("chmod", "d", 0o700)  # so that the kernel asks
        tree.tool("fail", kind)
        with pytest.raises(OSError) as caught:
            os.stat(tree / "d")
        assert caught.value.errno == number
        assert os.stat(tree / "d").st_mode & 0o777 == 0o700
    subprocess.run(["umount", tree.path], check=True)
    status, log = tree.ended()
    assert status == 0
    assert "ValueError: made to fail" in log
    assert log.count("Traceback") == 1  # an OSError is an answer, not a fault


def test_a_waiting_request_lets_others_pass_and_gives_way_to_a_signal(
    mount: Callable[..., Mounted], engine: str
) -> None:
    """On a tree whose requests may have to wait. pyfuse3 knows no interrupts: its reader waits to the end."""
    tree = mount(waiting=True)
    tree.tool("write", "f", "data")
    os.stat(tree / "f")
    tree.tool("chmod", "f", 0o600)  # so that the kernel asks
    # Not a read: those through the page cache or asynchronous are the kernel's own, which it does not interrupt.
    tree.tool("slow", "getattr", 30 if engine == "native" else 3)
    reader = subprocess.Popen(["stat", tree / "f"], stdout=subprocess.DEVNULL)
    try:
        began = time.monotonic()
        while tree.tool("state")["waiting"] == 0:
            assert time.monotonic() < began + 10
        for _ in range(20):
            os.stat(tree.path)
            os.listdir(tree.path)
        tree.tool("write", "g", "other")
        with open(tree / "g") as file:
            assert file.read() == "other"
        assert reader.poll() is None
    finally:
        reader.kill()
        reader.wait(20)
    assert time.monotonic() - began < 15
    with open(tree / "f") as file:
        assert file.read() == "data"
    assert tree.tool("state")["waiting"] == 0


def test_cancelled_while_in_use_it_takes_the_mount_away(tree: Mounted) -> None:
    fd = os.open(tree / "f", os.O_CREAT | os.O_RDWR)
    try:
        os.write(fd, b"data")
        tree.send("cancel")
        assert tree.ended()[0] == 0
        assert engines.mounted(tree.path) is None
        with pytest.raises(OSError):
            os.write(fd, b"more")
    finally:
        with contextlib.suppress(OSError):  # pyfuse3's kernel asks at each close
            os.close(fd)


def test_cancelled_with_a_notification_under_way(mount: Callable[..., Mounted]) -> None:
    """The notification waits in the kernel behind a request that will never be answered."""
    tree = mount(waiting=True)
    tree.tool("write", "f", "data")
    tree.tool("slow", "read", 60)
    reader = subprocess.Popen(["cat", tree / "f"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began = time.monotonic()
    while tree.tool("state")["waiting"] == 0:
        assert time.monotonic() < began + 10
    tree.tool("write", "f", "DATA")  # waits for the page, gives up after two seconds
    tree.send("cancel")
    try:
        status, log = tree.ended()
    finally:
        reader.kill()
    assert status == 0
    assert "has not dropped" in log
    assert reader.wait(20) == 1  # EIO, not our kill
    assert engines.mounted(tree.path) is None


@as_root
def test_a_cut_connection_ends_the_process_and_leaves_no_dead_mount(tree: Mounted) -> None:
    engines.abort(tree.path)
    assert tree.ended()[0] == 0
    assert engines.mounted(tree.path) is None


@as_root
def test_regression_a_forged_file_handle_does_not_end_the_mount(tree: Mounted) -> None:
    """open_by_handle_at(2) lets root make the kernel ask for any inode number, here one of a volume that is not."""
    with open(tree / "f", "w") as file:
        file.write("data")
    handle = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    at_fdcwd = -100
    assert libc.name_to_handle_at(at_fdcwd, os.fsencode(tree / "f"), handle, ctypes.byref(mount_id), 0) == 0
    size, kind = struct.unpack_from("<Ii", handle)
    directory = os.open(tree.path, os.O_RDONLY)
    try:
        fd = libc.open_by_handle_at(directory, handle, os.O_RDONLY)
        assert fd >= 0
        assert os.read(fd, 10) == b"data"
        os.close(fd)
        forged = struct.pack("<Ii", size, kind) + b"\xff\xff\xff\x7f" * (size // 4)
        assert libc.open_by_handle_at(directory, ctypes.create_string_buffer(forged), os.O_RDONLY) == -1
    finally:
        os.close(directory)
    with open(tree / "f") as file:
        assert file.read() == "data"


@as_root
def test_file_handles_outlive_the_mount(mount: Callable[..., Mounted], tmp_path: Path) -> None:
    """name_to_handle_at(2), and open_by_handle_at(2) when nothing of the tree has been looked up."""
    first = mount(database=tmp_path / "db")
    os.mkdir(first / "d")
    handles = []
    for name in ("d/f", "d/gone"):
        with open(first / name, "w") as file:
            file.write("data")
        handle = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0) + bytes(128))
        assert libc.name_to_handle_at(-100, os.fsencode(first / name), handle, ctypes.byref(ctypes.c_int()), 0) == 0
        handles.append(handle)
    os.unlink(first / "d/gone")
    first.stop()
    second = mount(database=tmp_path / "db")
    directory = os.open(second.path, os.O_RDONLY)
    try:
        fd = libc.open_by_handle_at(directory, handles[0], os.O_RDONLY)
        assert fd >= 0, os.strerror(ctypes.get_errno())
        assert os.read(fd, 10) == b"data"
        os.close(fd)
        assert libc.open_by_handle_at(directory, handles[1], os.O_RDONLY) == -1
        assert ctypes.get_errno() == errno.ESTALE
    finally:
        os.close(directory)


def test_lookups_are_given_back(tree: Mounted) -> None:
    os.mkdir(tree / "d")
    for i in range(500):
        with open(tree / f"d/{i}", "w"):
            pass
    os.listdir(tree / "d")
    assert tree.tool("state")["known"] > 500
    for i in range(500):
        os.unlink(tree / f"d/{i}")
    deadline = time.monotonic() + 10
    while tree.tool("state")["known"] > 20 and time.monotonic() < deadline:
        time.sleep(0.1)
    state = tree.tool("state")
    assert state["known"] <= 20
    assert state["nodes"] <= 20
    assert state["open"] == 0


ENTRIES = int(os.environ.get("VFSD_TEST_ENTRIES", "10000"))
"""Files in one directory; a million has been tried."""


@pytest.mark.timeout(60 + ENTRIES / 500)
def test_a_directory_of_many_entries(tree: Mounted) -> None:
    os.mkdir(tree / "d")
    names = {f"{i:07}" for i in range(ENTRIES)}
    for name in names:
        os.close(os.open(tree / f"d/{name}", os.O_CREAT | os.O_WRONLY))
    for _ in range(2):
        listed = os.listdir(tree / "d")
        assert len(listed) == len(names)
        assert set(listed) == names
    out = subprocess.run(["ls", "-afi1", tree / "d"], capture_output=True, text=True, check=True).stdout.split("\n")
    inos = dict(reversed(line.split()) for line in out if line)
    assert int(inos["."]) == os.stat(tree / "d").st_ino
    assert int(inos[".."]) == os.stat(tree.path).st_ino


def test_entries_that_stay_are_listed_once_while_others_come_and_go(tree: Mounted) -> None:
    os.mkdir(tree / "d")
    stay = {f"stay{i}" for i in range(1000)}
    for name in stay:
        os.close(os.open(tree / f"d/{name}", os.O_CREAT))
    for i in range(1000):
        os.close(os.open(tree / f"d/go{i}", os.O_CREAT))
    seen = []
    with os.scandir(tree / "d") as entries:
        for i, entry in enumerate(entries):
            seen.append(entry.name)
            if i % 2 == 0 and os.path.exists(tree / f"d/go{i // 2}"):
                os.unlink(tree / f"d/go{i // 2}")
                tree.tool("write", f"d/new{i}", "")
    assert len(seen) == len(set(seen))
    assert stay <= set(seen)


def test_a_mebibyte_is_one_request(native: Mounted) -> None:
    data = os.urandom(1 << 20)
    fd = os.open(native / "f", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 1 << 20) as aligned:
            aligned[:] = data
            before = native.tool("state")["requests"]
            assert os.write(fd, aligned) == 1 << 20
            assert os.preadv(fd, [aligned], 0) == 1 << 20
            assert native.tool("state")["requests"] - before <= 4
            assert aligned[:] == data
    finally:
        os.close(fd)


def test_a_time_of_birth_is_asked_for_once_and_only_by_who_wants_it(native: Mounted) -> None:
    os.mkdir(native / "d")
    for i in range(50):
        Path(native / f"d/{i}").touch()

    def asked(*command: str) -> int:
        before = native.tool("state")["requests"]
        subprocess.run(["sh", "-c", f'{" ".join(command)} "$0"/* > /dev/null', native / "d"], check=True)
        return int(native.tool("state")["requests"] - before)

    asked("stat -c %s")
    assert asked("stat -c %s") < 20
    assert asked("ls -d --time-style=+%s") < 20
    assert 50 <= asked("stat -c %W") < 70
    assert asked("stat -c %W") < 20


def test_small_file_requests_are_few(native: Mounted) -> None:
    """What the kernel asks, by syscall; three tries, for a machine on which somebody drops the caches."""

    def asked(function: Callable[[str], None], names: list[str], most: int) -> bool:
        before = native.tool("state")["requests"]
        for name in names:
            function(name)
        return bool(native.tool("state")["requests"] - before <= most * len(names) + 20)

    def make(name: str) -> None:
        """LOOKUP, CREATE, GETATTR (Python asks after O_TRUNC), GETXATTR (of the capability), WRITE, RELEASE."""
        with open(name, "wb", buffering=0) as file:
            file.write(b"x" * 4096)

    def read(name: str) -> None:
        """OPEN, RELEASE; the page is there from the write."""
        with open(name, "rb", buffering=0) as file:
            assert len(file.read(8192)) == 4096

    for i in range(3):
        names = [native / f"{i}-{j}" for j in range(100)]
        made = asked(make, names, 6)
        stated = asked(lambda name: [os.stat(name)].clear(), names, 1)  # the write moved the times
        warm = asked(lambda name: [os.stat(name)].clear(), names, 0)
        if made and stated and warm and asked(read, names, 2):
            return
    pytest.fail(f"make {made}, stat {stated}, stat again {warm}")


def test_holes_copies_and_files_without_a_name(native: Mounted) -> None:
    fd = os.open(native / "f", os.O_CREAT | os.O_RDWR)
    os.pwrite(fd, b"end", 1 << 20)
    assert os.lseek(fd, 0, os.SEEK_DATA) > 0
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
    other = os.open(native / "g", os.O_CREAT | os.O_RDWR)
    assert os.copy_file_range(fd, other, 1 << 20, 1 << 20, 0) == 3
    assert os.pread(other, 10, 0) == b"end"
    os.posix_fallocate(other, 0, 1 << 20)
    assert os.fstat(other).st_blocks * 512 >= 1 << 20
    keep_size_and_punch = 3
    assert libc.fallocate(other, keep_size_and_punch, ctypes.c_long(0), ctypes.c_long(1 << 20)) == 0
    assert os.fstat(other).st_blocks * 512 < 1 << 20
    nameless = os.open(native.path, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(nameless, b"no name")
    at_fdcwd, follow = -100, 0x400
    source, target = f"/proc/self/fd/{nameless}".encode(), os.fsencode(native / "named")
    assert libc.linkat(at_fdcwd, source, at_fdcwd, target, follow) == 0
    with open(native / "named") as file:
        assert file.read() == "no name"
    for one in (fd, other, nameless):
        os.close(one)


@as_root
def test_setuid_goes_when_another_user_changes_contents(tree: Mounted) -> None:
    changes = {
        "write": "open(p, 'r+').write('x')",
        "truncate": "os.truncate(p, 1)",
        "open": "open(p, 'w')",
        "fallocate": "os.posix_fallocate(os.open(p, 1), 0, 9999)",
    }
    for name, code in changes.items():
        with open(tree / name, "w") as file:
            file.write("data")
        os.chmod(tree / name, 0o6777)
        command = [sys.executable, "-c", f"import os; p = {tree / name!r}; {code}"]
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert os.stat(tree / name).st_mode & 0o7777 == 0o777, name
    os.chmod(tree / "write", 0o6777)
    with open(tree / "write", "r+") as file:
        file.write("root may")
    assert os.stat(tree / "write").st_mode & 0o7777 == 0o6777
    os.chown(tree / "write", 1, 1)
    assert os.stat(tree / "write").st_mode & 0o7777 == 0o777


def test_mounting_where_it_cannot_be_says_why(engine: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="missing"):
        Mounted(tmp_path / "missing", engine)


@as_root
def test_an_ordinary_user_mounts_through_the_helper(mount: Callable[..., Mounted], engine: str) -> None:
    nobody = 65534
    if os.stat("/dev/fuse").st_mode & 0o006 != 0o006:
        pytest.skip("/dev/fuse is closed to ordinary users here")
    tree = mount(user=nobody)

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        command_line = ["setpriv", f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups", "sh", "-ec", command]
        return subprocess.run(command_line, capture_output=True, text=True, cwd="/", timeout=20)

    done = shell(f"cd {tree.path}; echo data > f; cat f; stat -c '%u %g %a' f; mkdir d; ls; rm -r d; stat -f -c %l .")
    assert (done.stdout, done.stderr) == ("data\n65534 65534 644\nd\nf\n255\n", "")
    tree.tool("write", "f", "tool")
    assert shell(f"cat {tree.path}/f").stdout == "tool"
    with pytest.raises(PermissionError):  # not even root, without allow_other
        os.listdir(tree.path)
    assert shell(f"cd {tree.path}; fusermount3 -u {tree.path}").returncode != 0  # busy
    assert shell(f"fusermount3 -u {tree.path}").returncode == 0
    assert tree.ended()[0] == 0
    assert engines.mounted(tree.path) is None
