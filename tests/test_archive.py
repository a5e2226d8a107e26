"""Trees to tar archives and back: GNU tar and Python read what we write, we read what GNU tar writes."""

from __future__ import annotations

import errno
import io
import os
import pty
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vfsd.archive import tarstream
from vfsd.archive.archive import Export, Import, Part
from vfsd.archive.atrest import Tree, Volume, with_tree
from vfsd.archive.tarstream import Run
from vfsd.check import check_volume

ROOT = os.geteuid() == 0


class Place:
    """A volume at rest, and the sentences that were said of its files."""

    def __init__(self, path: Path) -> None:
        self.volumes = [Volume("/", path)]
        self.said: list[str] = []

    def use(self, do: Callable[[Tree], object]) -> None:
        with_tree(self.volumes, do)

    def export(self) -> bytes:
        out = io.BytesIO()
        parts = [Part(v.prefix.encode(), v.prefix.encode()) for v in self.volumes]
        self.use(lambda tree: Export(tree, out, self.said.append, lambda files, size: None).write(parts))
        return out.getvalue()

    def import_(self, archive: bytes, into: bytes = b"/") -> None:
        file = io.BytesIO(archive)
        self.use(lambda tree: Import(tree, into, self.said.append, lambda files, size: None, own=True).read(file))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "volume")


def fill(tree: Tree) -> None:
    """One of everything."""
    call = tree.call
    call("mkdir", path=b"/dir/empty", parents=True)
    call("write", path=b"/dir/file", data=b"content\n")
    call("write", path=b"/empty", data=b"")
    call("write", path="/n\u00e4me \udcff".encode(errors="surrogateescape"), data=b"not UTF-8")
    call("write", path=b"/" + b"long/" * 40 + b"x" * 120, data=b"deep")
    call("symlink", path=b"/link", target=b"dir/file")
    call("symlink", path=b"/long link", target=b"t" * 300)
    call("link", old=b"/dir/file", new=b"/hard")
    call("mknod", path=b"/fifo", mode=stat.S_IFIFO | 0o640)
    call("chmod", path=b"/dir/file", perm=0o4751)
    call("setxattr", path=b"/dir/file", name=b"user.text", value=b"value")
    call("setxattr", path=b"/dir/file", name=b"user.binary", value=bytes(range(256)))
    call("setxattr", path=b"/dir", name=b"user.of=dir%3D", value=b"")
    fh = call("open", path=b"/sparse", flags=os.O_RDWR | os.O_CREAT)["fh"]
    call("pwrite", fh=fh, offset=1 << 20, data=b"in the middle")
    call("pwrite", fh=fh, offset=3 << 20, data=b"x" * 5000)
    call("ftruncate", fh=fh, size=10 << 20)
    call("close", fh=fh)
    call("open", path=b"/all hole", flags=os.O_RDWR | os.O_CREAT)
    call("truncate", path=b"/all hole", size=5 << 20)
    call("write", path=b"/large", data=bytes(range(256)) * 12_000)
    call("utime", path=b"/dir/file", atime_ns=1_000_000_001, mtime_ns=1_600_000_000_123_456_789)
    call("utime", path=b"/empty", atime_ns=0, mtime_ns=-1_500_000_000)
    call("utime", path=b"/dir", atime_ns=5, mtime_ns=7_000_000_000)


def seen(tree: Tree) -> dict[bytes, object]:
    """All that must survive, by path."""
    found: dict[bytes, object] = {}

    def walk(path: bytes) -> None:
        for name, mode, size, mtime in tree.call("list", path=path or b"/")["entries"]:
            below = path + b"/" + name
            attr = tree.call("stat", path=below, follow=False)["attr"]
            names = tree.call("listxattr", path=below, follow=False)["names"]
            xattrs = {n: tree.call("getxattr", path=below, name=n, follow=False)["value"] for n in sorted(names)}
            content: object = None
            if stat.S_ISREG(mode):
                content = tree.call("read", path=below, length=8 << 20)["data"], attr["blocks"] * 512 < size
            elif stat.S_ISLNK(mode):
                content = tree.call("readlink", path=below)["target"]
            links = None if stat.S_ISDIR(mode) else attr["nlink"]
            kept = tuple(attr[key] for key in ("mode", "uid", "gid", "atime_ns"))
            found[below] = (kept, links, None if stat.S_ISDIR(mode) else size, mtime, xattrs, content)
            if stat.S_ISDIR(mode):
                walk(below)

    walk(b"")
    return found


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return opened.getnames()


def test_what_goes_out_comes_in(place: Place, tmp_path: Path) -> None:
    place.use(fill)
    archive = place.export()
    other = Place(tmp_path / "other")
    other.import_(archive)
    states: list[dict[bytes, object]] = []
    for one in (place, other):
        one.use(lambda tree: states.append(seen(tree)))
    assert states[0] == states[1]
    assert len(states[0]) > 50
    assert other.export() == archive
    assert place.said == other.said == []
    assert check_volume(tmp_path / "other") == []
    # Holes are left out of it.
    assert len(archive) < 5 << 20


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
def test_gnu_tar_reads_it(place: Place, tmp_path: Path) -> None:
    place.use(fill)
    archive = tmp_path / "x.tar"
    archive.write_bytes(place.export())
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        ["tar", "--xattrs", "--xattrs-include=user.*", "-xpf", archive, "-C", out], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "implausibly old time stamp" not in line] == []
    file = out / "dir/file"
    assert file.read_text() == "content\n" and file.samefile(out / "hard")
    assert file.stat().st_mtime_ns == 1_600_000_000_123_456_789
    assert stat.S_IMODE(file.stat().st_mode) == (0o4751 if ROOT else 0o751)
    assert os.getxattr(file, "user.binary") == bytes(range(256))
    assert os.readlink(out / "link") == "dir/file" and os.readlink(out / "long link") == "t" * 300
    assert stat.S_ISFIFO((out / "fifo").stat().st_mode)
    assert (out / "empty").stat().st_mtime_ns == -1_500_000_000
    assert (out / "dir").stat().st_mtime_ns == 7_000_000_000
    assert os.listdir(out / "dir/empty") == []
    assert os.path.exists(os.fsencode(out) + "/n\u00e4me ".encode() + b"\xff")
    sparse = (out / "sparse").read_bytes()
    assert len(sparse) == 10 << 20
    assert sparse[1 << 20 : (1 << 20) + 13] == b"in the middle" and sparse.count(b"x") == 5000
    assert (out / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (out / "all hole").stat().st_size == 5 << 20
    # It finds nothing that differs, either.
    assert subprocess.run(["tar", "-df", archive, "-C", out], capture_output=True).stdout == b""


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
@pytest.mark.parametrize(
    "options", [["--format=gnu", "-S"], ["--format=pax", "--xattrs", "-S"], ["--format=ustar", "-z"], ["-SJ"]]
)
def test_what_gnu_tar_writes_is_read(place: Place, tmp_path: Path, options: list[str]) -> None:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d/file").write_text("content")
    (source / "d/file").chmod(0o640)
    os.link(source / "d/file", source / "hard")
    (source / "link").symlink_to("d/file")
    with open(source / "sparse", "wb") as sparse:
        sparse.seek(1 << 20)
        sparse.write(b"end")
    if "--xattrs" in options:
        os.setxattr(source / "d/file", "user.k", b"v\0\xff")
    done = subprocess.run(["tar", *options, "-cf", "-", "-C", source, "."], capture_output=True, check=True)
    place.import_(done.stdout, b"/in")
    found: dict[bytes, object] = {}

    def look(tree: Tree) -> None:
        found.update(seen(tree))
        assert tree.call("read", path=b"/in/hard")["data"] == b"content"
        attr = tree.call("stat", path=b"/in/d/file")["attr"]
        assert (attr["mode"] & 0o7777, attr["nlink"]) == (0o640, 2)
        assert tree.call("stat", path=b"/in/sparse")["attr"]["size"] == (1 << 20) + 3
        assert tree.call("stat", path=b"/in/sparse")["attr"]["blocks"] < 64 or "-z" in options
        if "--xattrs" in options:
            assert tree.call("getxattr", path=b"/in/d/file", name=b"user.k")["value"] == b"v\0\xff"

    place.use(look)
    assert set(found) == {b"/in" + p for p in (b"", b"/d", b"/d/file", b"/hard", b"/link", b"/sparse")}
    assert place.said == []


def test_what_is_there_is_replaced_and_directories_are_kept(place: Place) -> None:
    place.use(lambda tree: tree.call("write", path=b"/dir/old", data=b"old"))
    place.use(lambda tree: tree.call("write", path=b"/dir/kept", data=b"kept"))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("dir/old")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"new"))
        archive.addfile(tarfile.TarInfo("fresh/way/down"))
    place.import_(out.getvalue())

    def look(tree: Tree) -> None:
        assert tree.call("read", path=b"/dir/old")["data"] == b"new"
        assert tree.call("read", path=b"/dir/kept")["data"] == b"kept"
        assert tree.call("stat", path=b"/fresh/way/down")["attr"]["size"] == 0

    place.use(look)


def test_nothing_gets_out_of_the_directory(place: Place) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a/../../up"))
        link = tarfile.TarInfo("hard")
        link.type, link.linkname = tarfile.LNKTYPE, "../../outside"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("/absolute"))
    place.use(lambda tree: tree.call("write", path=b"/outside", data=b""))
    place.import_(out.getvalue(), b"/in")
    found: set[bytes] = set()
    place.use(lambda tree: found.update(seen(tree)))
    assert found == {b"/outside", b"/in", b"/in/absolute"}
    assert place.said == [
        "a/../../up: a name with '..' in it is left out",
        "hard: a link out of the archive is left out",
    ]


def test_a_socket_is_left_out_and_said(place: Place) -> None:
    place.use(lambda tree: tree.call("mknod", path=b"/sock", mode=stat.S_IFSOCK | 0o600))
    assert names_in(place.export()) == ["."]
    assert place.said == ["/sock: a socket, which a tar can't hold, is left out"]


def test_a_cut_off_archive_is_an_error(place: Place) -> None:
    place.use(lambda tree: tree.call("write", path=b"/a", data=b"x" * 5000))
    archive = place.export()
    with pytest.raises(tarfile.TarError):
        place.import_(archive[:3000])
    with pytest.raises(tarfile.TarError):
        place.import_(b"no tar" * 500)


def test_several_routes_are_one_tree(tmp_path: Path) -> None:
    place = Place(tmp_path / "root")
    place.volumes.append(Volume("/work/", tmp_path / "work"))
    place.use(lambda tree: tree.call("write", path=b"/a", data=b""))
    place.use(lambda tree: tree.call("write", path=b"/work/b", data=b""))
    assert names_in(place.export()) == [".", "./a", "./work", "./work/b"]


@pytest.mark.parametrize("ns", [0, 1, 10**9, 1_600_000_000_123_456_789, -1, -(10**9), -1_500_000_000, -(1 << 63)])
def test_times_to_the_nanosecond(ns: int) -> None:
    assert tarstream.parse_time(tarstream._time(ns).decode()) == ns


def test_numbers_too_large_for_a_header_are_in_records() -> None:
    attr = {
        "mode": 0o100644, "size": 9 << 30, "uid": 1 << 31, "gid": 1 << 30, "rdev": 0, "mtime_ns": 0, "atime_ns": 0,
    }  # fmt: skip
    head = tarstream.header(b"./big", attr)
    with tarfile.open(fileobj=io.BytesIO(head + bytes(1 << 16)), mode="r|") as archive:
        member = archive.next()
    assert member is not None
    assert (member.size, member.uid, member.gid) == (9 << 30, 1 << 31, 1 << 30)


def test_a_sparse_map_ends_at_the_end() -> None:
    assert tarstream._sparse_map([Run(0, 5)], 5).rstrip(b"\0") == b"1\n0\n5\n"
    assert tarstream._sparse_map([], 5).rstrip(b"\0") == b"1\n5\n0\n"


def test_there_is_a_bar_on_a_terminal(place: Place, tmp_path: Path) -> None:
    place.use(fill)
    archive = tmp_path / "x.tar"
    command = [sys.executable, "-m", "vfsd", "export", "--location", str(place.volumes[0].location), str(archive)]
    main, side = pty.openpty()
    subprocess.run(command, stderr=side, check=True, timeout=30)
    os.close(side)
    said = os.read(main, 65536).decode()
    os.close(main)
    assert "files" in said and "MiB/s" in said
    assert subprocess.run(command, stderr=subprocess.PIPE, check=True, timeout=30).stderr == b""
    assert "./dir/file" in names_in(archive.read_bytes())
    assert not list(tmp_path.glob("*.part"))
    # Nothing to export, said in one sentence.
    refused = subprocess.run([*command[:5], str(tmp_path), str(archive)], capture_output=True, text=True, timeout=30)
    assert (refused.returncode, refused.stderr) == (1, f"vfsd: {tmp_path} holds no volume (no tree.db)\n")


def test_what_is_not_there_is_not_removed(place: Place) -> None:
    """A removal that fails is a line in the audit log."""
    asked = []

    class Watching:
        def __init__(self, tree: Tree) -> None:
            self.tree = tree

        def call(self, op: str, /, **params: Any) -> Any:
            asked.append(op)
            return self.tree.call(op, **params)

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a/b"))
    out.seek(0)
    place.use(lambda tree: Import(Watching(tree), b"/copy", print, lambda *_: None, own=False).read(out))
    assert "unlink" not in asked and "open" in asked


def test_an_export_ends_when_nobody_reads_on(place: Place) -> None:
    class Closed(io.BytesIO):
        def write(self, data: Any) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    warned: list[str] = []
    place.use(lambda tree: tree.call("write", path=b"/a", data=b"a"))

    def export(tree: Tree) -> None:
        with pytest.raises(BrokenPipeError):
            Export(tree, Closed(), warned.append, lambda *_: None).write([Part(b"/", b"/")])

    place.use(export)
    assert warned == []
