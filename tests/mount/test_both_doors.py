"""A real daemon, the real tools and the shell at once: what one has been told is done, the other sees."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import Daemon
from trees import MOUNTED, Mounts

from agenttools import tools
from agenttools.client import Client

pytestmark = pytest.mark.timeout(90)
ROUNDS = 40


class Both:
    """One directory, by its path for tools and by its path for the shell."""

    def __init__(self, daemon: Daemon, path: str) -> None:
        self.daemon = daemon
        self.client = daemon.client
        self.path = path
        self.point = Path(f"{daemon.point}{path}")

    def write(self, name: str, text: str, client: Client | None = None) -> None:
        result = tools.write(client or self.client, f"{self.path}/{name}", text)
        assert result.error is None, result.text

    def read(self, name: str, client: Client | None = None) -> bytes:
        found = (client or self.client).call("read", path=os.fsencode(f"{self.path}/{name}"), length=1 << 20)
        data: bytes = found["data"]
        return data


@pytest.fixture(params=MOUNTED)
def both(request: pytest.FixtureRequest, mounts: Mounts) -> Iterator[Both]:
    with mounts.directory(request.param) as (daemon, path):
        yield Both(daemon, path)


def test_the_shell_sees_what_a_tool_has_done(both: Both) -> None:
    point = both.point
    both.write("f", "-" * 8192)
    with open(point / "f", "rb", buffering=0) as held, mmap.mmap(held.fileno(), 8192, prot=mmap.PROT_READ) as mapped:
        for i in range(ROUNDS):
            assert not (point / f"new{i}").exists()
            assert f"new{i}" not in os.listdir(point)
            both.write(f"new{i}", f"{i}")
            assert (point / f"new{i}").read_text() == f"{i}"
            assert f"new{i}" in os.listdir(point)

            text = f"{i:08}" * 1024
            both.write("f", text)
            assert os.stat(point / "f").st_size == 8192
            assert (point / "f").read_text() == text
            held.seek(0)
            assert held.read() == text.encode()
            assert mapped[:] == text.encode()

            result = tools.edit(both.client, f"{both.path}/f", f"{i:08}", "x" * (i % 5 + 6), replace_all=True)
            assert result.error is None, result.text
            edited = "x" * (i % 5 + 6) * 1024
            assert os.stat(point / "f").st_size == len(edited)
            assert (point / "f").read_text() == edited
            assert os.fstat(held.fileno()).st_size == len(edited)
            both.write("f", "-" * 8192)

            tools.delete(both.client, f"{both.path}/new{i}")
            assert not (point / f"new{i}").exists()
            assert f"new{i}" not in os.listdir(point)


def test_a_tool_sees_what_the_shell_has_written_before_it_closes(both: Both) -> None:
    point = both.point
    (point / "map").write_bytes(bytes(4096))
    with (
        open(point / "f", "wb", buffering=0) as file,
        open(point / "map", "r+b") as mapping,
        mmap.mmap(mapping.fileno(), 4096) as mapped,
    ):
        for i in range(ROUNDS):
            file.write(b"%d\n" % i)
            assert both.read("f").endswith(b"%d\n" % i)
            found = tools.grep(both.client, f"{i}", both.path, glob="f")
            assert found.error is None
            mapped[:8] = b"%08d" % i
            mapped.flush()
            assert both.read("map")[:8] == b"%08d" % i
            os.rename(point / "f", point / "g")
            with pytest.raises(FileNotFoundError):
                both.read("f")
            assert both.read("g").startswith(b"0\n")
            os.rename(point / "g", point / "f")


def test_an_append_follows_what_the_other_door_appended(both: Both) -> None:
    """Also where the kernel has not heard of it yet and asks for the old end: at 0, and at a page's edge."""
    for name, start in (("empty", b""), ("page", b"x" * 4096)):
        (both.point / name).write_bytes(start)
        tool = both.client.call("open", path=os.fsencode(f"{both.path}/{name}"), flags=os.O_WRONLY | os.O_APPEND)["fh"]
        with open(both.point / name, "ab", buffering=0) as shell:
            for _ in range(3):
                both.client.call("pwrite", fh=tool, offset=0, data=b"tool \n")
                shell.write(b"shell\n")
        both.client.call("close", fh=tool)
        assert (both.point / name).read_bytes() == start + b"tool \nshell\n" * 3


def test_four_shell_writers_and_four_tool_writers_at_once(both: Both) -> None:
    """Each looks through the other door after every write; all append to one log; every tool counts by edits."""
    point = both.point
    both.write("count", "n=0")
    (point / "log").write_bytes(b"")
    (point / "names").mkdir()
    failures: list[str] = []

    def check(found: object, wanted: object, what: str) -> None:
        if found != wanted:
            failures.append(f"{what}: {found!r} instead of {wanted!r}")

    def shell(number: int) -> None:
        with Client(socket=both.daemon.socket) as client, open(point / "log", "ab", buffering=0) as log:
            for i in range(ROUNDS):
                text = f"{number}:{i}\n" * (i * 7 % 900 + 1)
                (point / f"s{number}").write_text(text)
                check(both.read(f"s{number}", client), text.encode(), f"tool's read of s{number}")
                log.write(b"shell %d %d\n" % (number, i))
                name = f"names/s{number}-{i}"
                (point / name).write_bytes(b"")
                os.rename(point / name, point / f"{name}-moved")
                check(both.read(f"{name}-moved", client), b"", name)

    def tool(number: int) -> None:
        with Client(socket=both.daemon.socket) as client:
            log = client.call("open", path=os.fsencode(f"{both.path}/log"), flags=os.O_WRONLY | os.O_APPEND)["fh"]
            for i in range(ROUNDS):
                text = f"{number}:{i}\n" * (i * 7 % 900 + 1)
                both.write(f"t{number}", text, client)
                check((point / f"t{number}").read_text(), text, f"shell's read of t{number}")
                client.call("pwrite", fh=log, offset=0, data=b"tool %d %d\n" % (number, i))
                name = f"names/t{number}-{i}"
                check((point / name).exists(), False, name)
                both.write(name, "", client)
                check((point / name).exists(), True, name)
                count(client)
            client.call("close", fh=log)

    def count(client: Client) -> None:
        """Compare and swap until it holds."""
        while True:
            before = int(both.read("count", client)[2:])
            result = tools.edit(client, f"{both.path}/count", f"n={before}", f"n={before + 1}")
            if result.error is None:
                return

    run([*(lambda n=n: shell(n) for n in range(4)), *(lambda n=n: tool(n) for n in range(4))], failures)
    assert failures == []
    expected = sorted(b"%s %d %d" % (who, n, i) for who in (b"shell", b"tool") for n in range(4) for i in range(ROUNDS))
    for content in ((point / "log").read_bytes(), both.read("log")):
        assert sorted(content.splitlines()) == expected
    assert (point / "count").read_text() == f"n={4 * ROUNDS}"
    listed = both.client.call("list", path=os.fsencode(f"{both.path}/names"))["entries"]
    assert sorted(entry[0] for entry in listed) == sorted(os.listdir(os.fsencode(point / "names")))
    assert len(listed) == 8 * ROUNDS


def run(work: list[Callable[[], None]], failures: list[str]) -> None:
    """All at once, each in a thread."""

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(80)
        assert not thread.is_alive()


def test_one_name_made_and_removed_by_both_doors(both: Both) -> None:
    """Whoever wins, both doors agree on what is there when all are done."""
    failures: list[str] = []

    def shell() -> None:
        for _ in range(ROUNDS * 2):
            with contextlib.suppress(FileNotFoundError):
                (both.point / "x").write_bytes(b"shell")
                os.unlink(both.point / "x")
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.mkdir(both.point / "d")
                os.rmdir(both.point / "d")

    def tool() -> None:
        with Client(socket=both.daemon.socket) as client:
            for _ in range(ROUNDS * 2):
                for op in ("mkdir", "rmdir", "unlink"):
                    name = "x" if op == "unlink" else "d"
                    try:
                        client.call(op, path=os.fsencode(f"{both.path}/{name}"))
                    except OSError as error:
                        assert error.errno in (errno.ENOENT, errno.EEXIST), error

    run([shell, tool, shell, tool], failures)
    assert failures == []
    listed = {entry[0].decode() for entry in both.client.call("list", path=os.fsencode(both.path))["entries"]}
    assert set(os.listdir(both.point)) == listed
    for name in ("x", "d"):
        assert (both.point / name).exists() == (name in listed)
