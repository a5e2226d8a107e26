"""What one door changed, the other sees at once: after a tool's reply, every way a shell can look."""

from __future__ import annotations

import mmap
import os
import threading
import time

import pytest
from mounted import Mounted

pytestmark = [pytest.mark.mount, pytest.mark.timeout(60)]
ROUNDS = 100


def content(path: str) -> str:
    with open(path) as file:
        return file.read()


def test_stat_and_content_after_a_tool_write(tree: Mounted) -> None:
    for i in range(ROUNDS):
        text = "x" * (i * 37 % 5000) + str(i)
        tree.tool("write", "f", text)
        assert os.stat(tree / "f").st_size == len(text)
        assert content(tree / "f") == text


def test_an_open_descriptor_and_a_mapping_see_a_tool_write(tree: Mounted) -> None:
    tree.tool("write", "f", "-" * 8192)
    fd = os.open(tree / "f", os.O_RDONLY)
    try:
        with mmap.mmap(fd, 8192, prot=mmap.PROT_READ) as mapped:
            for i in range(ROUNDS):
                text = f"{i:08}" * 1024
                tree.tool("write", "f", text, 0, False)
                assert os.pread(fd, 8192, 0).decode() == text
                assert mapped[:].decode() == text
                assert os.fstat(fd).st_size == 8192
    finally:
        os.close(fd)


def test_a_tool_sees_a_shells_write_before_close(tree: Mounted) -> None:
    with open(tree / "f", "wb", buffering=0) as file:
        for i in range(ROUNDS):
            file.write(b"%d\n" % i)
            assert tree.tool("read", "f").endswith(f"{i}\n")


def test_negative_names(tree: Mounted) -> None:
    for i in range(ROUNDS):
        name = f"n{i}"
        assert not os.path.exists(tree / name)
        assert not os.path.exists(tree / name)
        tree.tool("write", name, "here")
        assert content(tree / name) == "here"
        tree.tool("unlink", name)
        assert not os.path.exists(tree / name)


def test_a_shells_unlink_leaves_a_negative_name_that_a_tool_fills(tree: Mounted) -> None:
    for _ in range(ROUNDS):
        tree.tool("write", "f", "tool")
        assert content(tree / "f") == "tool"
        os.unlink(tree / "f")
        assert not os.path.exists(tree / "f")


def test_listings(tree: Mounted) -> None:
    os.mkdir(tree / "d")
    names: set[str] = set()
    for i in range(ROUNDS):
        assert set(os.listdir(tree / "d")) == names
        tree.tool("write", f"d/{i}", "")
        names.add(str(i))
        if i % 3 == 0:
            assert set(os.listdir(tree / "d")) == names
            assert os.stat(tree / "d").st_nlink == 2
            tree.tool("unlink", f"d/{i}")
            names.remove(str(i))


def test_an_open_directory_read_again_sees_a_new_name(tree: Mounted) -> None:
    """Even one that asks for no attributes, as a program with bare getdents64 does."""
    os.mkdir(tree / "d")
    fd = os.open(tree / "d", os.O_RDONLY)
    try:
        for i in range(ROUNDS):
            tree.tool("write", f"d/{i}", "")
            assert len(os.listdir(fd)) == i + 1
            assert len(os.listdir(fd)) == i + 1
    finally:
        os.close(fd)


def test_rename_over_and_chmod(tree: Mounted) -> None:
    for i in range(ROUNDS):
        tree.tool("write", "a", f"a{i}")
        tree.tool("write", "b", f"b{i}")
        assert (content(tree / "a"), content(tree / "b")) == (f"a{i}", f"b{i}")
        tree.tool("rename", "a", "b")
        assert not os.path.exists(tree / "a")
        assert content(tree / "b") == f"a{i}"
        tree.tool("chmod", "b", 0o600 + i % 8)
        assert os.stat(tree / "b").st_mode & 0o777 == 0o600 + i % 8


def test_a_directory_moved_by_a_tool(tree: Mounted) -> None:
    os.makedirs(tree / "one/deep")
    os.mkdir(tree / "two")
    with open(tree / "one/deep/f", "w") as file:
        file.write("kept")
    tree.tool("rename", "one/deep", "two/deep")
    assert content(tree / "two/deep/f") == "kept"
    assert not os.path.exists(tree / "one/deep")
    assert os.stat(tree / "one").st_nlink == 2
    assert os.stat(tree / "two").st_nlink == 3


def test_writers_on_both_sides_at_once(tree: Mounted) -> None:
    """Four shell threads and a tool append, create and remove in the same directory; nothing hangs or is lost."""
    os.mkdir(tree / "d")
    failures: list[BaseException] = []
    stop = time.monotonic() + 3

    def shell(number: int) -> None:
        try:
            i = 0
            while time.monotonic() < stop:
                path = tree / f"d/s{number}-{i % 50}"
                with open(path, "w") as file:
                    file.write(str(i))
                assert content(path) == str(i)
                os.listdir(tree / "d")
                if i % 7 == 0:
                    os.unlink(path)
                i += 1
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=shell, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    i = 0
    while time.monotonic() < stop:
        name = f"d/t{i % 50}"
        tree.tool("write", name, str(i))
        assert content(tree / name) == str(i)
        tree.tool("rename", name, f"d/u{i % 50}")
        assert os.path.exists(tree / f"d/u{i % 50}")
        assert not os.path.exists(tree / name)
        i += 1
    for thread in threads:
        thread.join(20)
    assert failures == []
    assert i > 50


def test_a_tool_writes_while_the_shell_reads_the_same_file(tree: Mounted) -> None:
    """Whole 4 KiB pages of one digit: a reader may see old or new, never an older page after a newer one."""
    tree.tool("write", "f", "0000" * 1024)
    stop = threading.Event()
    failures: list[str] = []

    def reader() -> None:
        last = 0
        while not stop.is_set():
            with open(tree / "f", "rb") as file:
                seen = int(file.read(4))
            if seen < last:
                failures.append(f"{seen} after {last}")
            last = seen

    threads = [threading.Thread(target=reader) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(300):
        tree.tool("write", "f", f"{i:04}" * 1024, 0, False)
        assert content(tree / "f")[:4] == f"{i:04}"
    stop.set()
    for thread in threads:
        thread.join(20)
    assert failures == []
