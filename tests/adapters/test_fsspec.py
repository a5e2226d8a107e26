"""The tree as an fsspec file system: fsspec's own suites, what is particular to it, and the libraries that use it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")

import fsspec
from fsspec.tests import abstract
from tool_server import serving

from agenttools import tool_call
from agenttools.client import Client, VfsdUnavailable
from agenttools.fsspec import VfsFileSystem


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("fsspec") / "s"
    with serving(path, b"/other/"):
        yield str(path)


@pytest.fixture
def tree(socket: str) -> Iterator[Any]:
    fs = fsspec.filesystem("vfsd", socket=socket)
    yield fs
    for path in fs.ls("/", detail=False):
        for below in fs.ls(path, detail=False) if path == "/other" else [path]:
            fs.rm(below, recursive=True)


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, tree: Any) -> Any:
        return tree

    @pytest.fixture
    def fs_path(self, tree: Any) -> str:
        tree.mkdir("/suite")
        return "/suite"

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(parts)


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


def test_it_is_registered_by_its_entry_point(socket: str) -> None:
    code = (
        f"import fsspec; print(type(fsspec.filesystem('vfsd', socket={socket!r})), fsspec.open('vfsd://w/x').fs.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "<class 'agenttools.fsspec.VfsFileSystem'> w\n"


def test_urls(tree: Any) -> None:
    fs, path = fsspec.core.url_to_fs("vfsd://work/a/b.csv")
    assert (fs.name, path, fs.unstrip_protocol(path)) == ("work", "/a/b.csv", "vfsd://work/a/b.csv")
    fs, path = fsspec.core.url_to_fs("vfsd:///a/b/")
    assert (fs.name, path) == (None, "/a/b")
    spelled = {"a": "/a", "/a/": "/a", "vfsd://": "/", "vfsd:///": "/", "vfsd://w": "/", "vfsd://w/b": "/b"}
    assert {given: tree._strip_protocol(given) for given in spelled} == spelled


def test_it_follows_the_environment(tree: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default = fsspec.filesystem("vfsd")
    tree.pipe("/f", b"here")
    monkeypatch.setenv("VFSD_SOCKET", tree.socket)
    assert default.cat("/f") == b"here"
    monkeypatch.setenv("VFSD_SOCKET", str(tmp_path / "none"))
    for ask in (default.exists, default.isdir, default.isfile, default.lexists, default.ls, default.info):
        with pytest.raises(VfsdUnavailable):
            ask("/f")


def test_files(tree: Any) -> None:
    with tree.open("/d/f", "wb") as f:
        assert (f.write(b"one\ntwo\n"), f.tell(), f.writable(), f.readable()) == (8, 8, True, False)
    with tree.open("/d/f", "ab") as f:
        assert f.tell() == 8
        f.write(b"three\n")
    with tree.open("/d/f", "r+b") as f:
        f.seek(4)
        f.write(b"TWO")
        f.seek(0)
        assert f.read(8) == b"one\nTWO\n"
    with tree.open("/d/f", "w+b") as f:
        f.write(b"abcdef")
        f.truncate(4)
        f.seek(-2, 2)
        assert f.read() == b"cd"
    with tree.open("/d/f") as f:
        assert (f.size, f.path, f.mode, f.full_name, f.details["size"]) == (4, "/d/f", "rb", "vfsd:///d/f", 4)
    with tree.open("/d/t", "w", encoding="utf-8", newline="") as f:
        f.write("ä\r\n")
    assert tree.read_text("/d/t", encoding="utf-8", newline="") == "ä\r\n"
    with tree.open("/d/z.gz", "wb", compression="infer") as f:
        f.write(b"z" * 1000)
    with tree.open("/d/z.gz", "rb", compression="infer") as f:
        assert f.read() == b"z" * 1000


def test_large_files(tree: Any) -> None:
    data = bytes(range(256)) * 80_000  # more than two of the largest pieces
    with tree.open("/big", "wb") as f:
        f.write(data)
    tree.pipe("/big2", data)
    assert tree.size("/big") == tree.size("/big2") == len(data)
    assert tree.cat("/big") == tree.cat("/big2") == data
    for start, end in (
        (0, 10),
        (-5, None),
        (None, -5),
        (9_000_000, 9_000_300),
        (5, None),
        (7, 7),
        (20_479_990, 20_480_100),
    ):
        assert tree.cat_file("/big", start, end) == data[start:end]
    assert tree.cat_ranges(["/big"] * 2, [0, 1000], [4, 1004]) == [data[:4], data[1000:1004]]
    tree.cp("/big", "/other/big3")
    assert tree.cat("/other/big3") == data


def test_a_file_stays_the_one_that_was_opened(tree: Any) -> None:
    tree.pipe("/f", b"old")
    with tree.open("/f") as f:
        tree.pipe("/g", b"new!")
        tree.mv("/g", "/f")
        assert (f.read(), tree.cat("/f")) == (b"old", b"new!")
        tree.rm("/f")
        assert (f.seek(0), f.read()) == (0, b"old")


def test_errors_are_those_of_os(tree: Any) -> None:
    tree.makedirs("/d/e")
    tree.pipe("/f", b"")
    for error, ask in (
        (FileNotFoundError, lambda: tree.open("/n")),
        (FileNotFoundError, lambda: tree.cat("/n")),
        (FileNotFoundError, lambda: tree.info("/n")),
        (FileNotFoundError, lambda: tree.ls("/n")),
        (FileNotFoundError, lambda: tree.rm("/n")),
        (FileNotFoundError, lambda: tree.mkdir("/n/m", create_parents=False)),
        (FileExistsError, lambda: tree.mkdir("/d")),
        (FileExistsError, lambda: tree.makedirs("/d/e")),
        (IsADirectoryError, lambda: tree.open("/d")),
        (IsADirectoryError, lambda: tree.open("/d", "wb")),
        (IsADirectoryError, lambda: tree.rm("/d")),
        (NotADirectoryError, lambda: tree.info("/f/x")),
        (OSError, lambda: tree.rmdir("/d")),
        (ValueError, lambda: tree.open("/f", "q")),
    ):
        with pytest.raises(error):
            ask()
    assert not tree.exists("/f/x") and tree.exists("/d") and tree.isdir("/d/e") and not tree.isfile("/d")
    assert tree.ls("/f", detail=False) == ["/f"]


def test_links(tree: Any) -> None:
    tree.pipe("/d/f", b"12345")
    tree.symlink("f", "/d/link")
    tree.symlink("nowhere", "/d/dangling")
    tree.symlink("/d", "/dir")
    assert tree.cat("/d/link") == b"12345"
    info = tree.info("/d/link")
    assert (info["type"], info["size"], info["islink"], info["destination"]) == ("file", 5, True, "f")
    assert {e["name"]: e["type"] for e in tree.ls("/d")} == {"/d/f": "file", "/d/link": "file", "/d/dangling": "other"}
    assert tree.isdir("/dir") and tree.islink("/dir") and not tree.exists("/d/dangling") and tree.lexists("/d/dangling")
    tree.rm("/dir", recursive=True)
    tree.rm("/d/dangling")
    assert tree.cat("/d/f") == b"12345" and tree.ls("/d", detail=False) == ["/d/f", "/d/link"]
    tree.link("/d/f", "/d/hard")
    assert tree.info("/d/hard")["ino"] == tree.info("/d/f")["ino"]
    tree.chmod("/d/f", 0o600)
    assert tree.info("/d/f")["mode"] & 0o777 == 0o600


def test_moves(tree: Any) -> None:
    tree.pipe({"/a/x": b"1", "/a/y/z": b"2"})
    ino = tree.info("/a/x")["ino"]
    tree.mv("/a", "/b/c", recursive=True)
    assert tree.find("/b") == ["/b/c/x", "/b/c/y/z"] and tree.info("/b/c/x")["ino"] == ino
    tree.mkdir("/into")
    tree.mv("/b/c/x", "/into/")
    assert tree.find("/into") == ["/into/x"]
    tree.mv("/b", "/other/b", recursive=True)  # another route: a rename does not get there
    assert tree.find("/other") == ["/other/b/c/y/z"] and not tree.exists("/b")
    tree.mv("/into/*", "/flat/")
    assert tree.find("/flat") == ["/flat/x"]
    tree.rm("/flat/*")
    assert tree.find("/flat") == []


def test_transactions(tree: Any) -> None:
    tree.pipe("/f", b"before")
    tree.chmod("/f", 0o640)
    with tree.transaction:
        tree.pipe("/f", b"after")
        tree.pipe("/new", b"n")
        assert tree.cat("/f") == b"before" and not tree.exists("/new")
    assert (tree.cat("/f"), tree.cat("/new"), tree.info("/f")["mode"] & 0o777) == (b"after", b"n", 0o640)
    with pytest.raises(ZeroDivisionError), tree.transaction:
        tree.pipe("/f", b"never")
        raise ZeroDivisionError
    assert tree.cat("/f") == b"after" and tree.ls("/", detail=False).count("/f") == 1
    assert [path for path in tree.ls("/", detail=False) if "partial" in path] == []


def test_it_may_be_sent_to_other_processes_and_used_by_threads(tree: Any) -> None:
    again = pickle.loads(pickle.dumps(tree))
    again.pipe("/f", b"x" * 100_000)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: tree.cat("/f"), range(64))) == {b"x" * 100_000}


def test_names_that_are_no_text(tree: Any) -> None:
    Client(socket=tree.socket).call("write", path=b"/d/\xff", data=b"x")
    (name,) = tree.ls("/d", detail=False)
    assert tree.cat(name) == b"x" and tree.glob("/d/*") == [name]


def test_the_ids_of_tool_calls_go_with_the_requests(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []
    call = Client.call

    def noting(self: Client, op: str, /, **params: Any) -> Any:
        if params.get("tool") == "fsspec":
            asked.append((op, params.get("call_id")))
        return call(self, op, **params)

    monkeypatch.setattr(Client, "call", noting)
    with tool_call("toolu_01"):
        tree.pipe("/f", b"x")
        with tree.open("/f", "wb") as f:
            f.write(b"y")
    tree.rm("/f")
    assert asked == [
        ("write", "toolu_01"),
        ("mkdir", "toolu_01"),
        ("open", "toolu_01"),
        ("pwrite", "toolu_01"),
        ("unlink", None),
    ]


# ---------------------------------------------------------------------- the libraries it is for


@pytest.fixture
def named(tree: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """URLs without a name mean this tree."""
    monkeypatch.setenv("VFSD_SOCKET", tree.socket)
    return tree


def test_pandas(named: Any) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(10_000), "b": [f"row {i}" for i in range(10_000)]})
    frame.to_csv("vfsd:///data/t.csv", index=False)
    assert named.head("/data/t.csv", 4) == b"a,b\n"
    assert pandas.read_csv("vfsd:///data/t.csv").equals(frame)
    pytest.importorskip("pyarrow")
    frame.to_parquet("vfsd:///data/t.parquet")
    assert pandas.read_parquet("vfsd:///data/t.parquet", columns=["b"]).equals(frame[["b"]])


def test_pyarrow(named: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    dataset = pytest.importorskip("pyarrow.dataset")
    table = pyarrow.table({"part": [i % 3 for i in range(3000)], "value": list(range(3000))})
    dataset.write_dataset(table, "/set", filesystem=named, format="parquet", partitioning=["part"])
    assert len(named.find("/set")) == 3
    again = dataset.dataset("/set", filesystem=named, format="parquet", partitioning=["part"])
    assert again.to_table(filter=dataset.field("part") == 1).num_rows == 1000
    assert sorted(again.to_table()["value"].to_pylist()) == list(range(3000))


def test_duckdb(named: Any) -> None:
    duckdb = pytest.importorskip("duckdb")
    named.pipe({"/q/one.csv": b"a,b\n1,x\n2,y\n", "/q/two.csv": b"a,b\n3,z\n"})
    with duckdb.connect() as connection:
        connection.register_filesystem(named)
        assert connection.execute("SELECT sum(a) FROM 'vfsd:///q/one.csv'").fetchall() == [(3,)]
        assert connection.execute("SELECT sum(a) FROM read_csv('vfsd:///q/*.csv')").fetchall() == [(6,)]
        connection.execute("COPY (SELECT range AS n FROM range(1000)) TO 'vfsd:///q/n.parquet' (FORMAT parquet)")
        assert connection.execute("SELECT sum(n) FROM 'vfsd:///q/n.parquet'").fetchall() == [(499_500,)]


def test_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(VfsdUnavailable, match="start one with: vfsd mount"):
        VfsFileSystem(socket=str(tmp_path / "s")).ls("/")
