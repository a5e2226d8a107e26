"""Stores known by their interface alone (InMemoryStore), and what the remote of a store does beside a mount."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash
from makers import ME
from waiting import NAMESPACE, open_remote, store_at

from vfsd.backends import items
from vfsd.backends.remote import ABSENT, ANY, Meta, Moved, RemoteError, Source
from vfsd.backends.store import StoreRemote

OWNER = (os.geteuid(), os.getegid())
META = Meta(0o100644, *OWNER, 0, 1000, 1000, 1000)


class Shared(StoreRemote):
    """A remote on a store that the test has too."""

    def __init__(self, store: Any) -> None:
        super().__init__("memory:", NAMESPACE, OWNER)
        self._store = store


@pytest.fixture
def store() -> Any:
    memory = pytest.importorskip("langgraph.store.memory")
    return memory.InMemoryStore()


def tree(volume: Any, ino: int | None = None, prefix: bytes = b"") -> dict[bytes, bytes | None]:
    found: dict[bytes, bytes | None] = {}
    for name, attr in volume.children(volume.root_ino if ino is None else ino):
        path = prefix + b"/" + name
        is_dir = attr.mode & 0o170000 == 0o040000
        found[path] = None if is_dir else bytes(volume.read(attr.ino, 0, 0, attr.size))
        if is_dir:
            found |= tree(volume, attr.ino, path)
    return found


def test_any_store(store: Any) -> None:
    volume = open_remote(Shared(store))
    d = volume.mkdir(volume.root_ino, b"d", 0o755, ME).ino
    for i in range(300):
        volume.create_file(d, b"%d" % i, 0o600, b"%d" % i, ME)
    volume.rename(volume.root_ino, b"d", volume.root_ino, b"e", 0, ME)
    again = open_remote(Shared(store))
    assert tree(again) == tree(volume)
    assert tree(again)[b"/e/299"] == b"299"
    store.put(NAMESPACE, "/e/5", {"content": "other", "encoding": "utf-8"})
    store.delete(NAMESPACE, "/e/6")
    volume.bring_in()
    assert tree(volume)[b"/e/5"] == b"other"
    assert b"/e/6" not in tree(volume)
    volume.replace(volume.lookup(volume.lookup(volume.root_ino, b"e").ino, b"7").ino, b"ours", ME)
    ino = again.lookup(again.lookup(again.root_ino, b"e").ino, b"7").ino
    with pytest.raises(OSError) as refused:
        again.replace(ino, b"lost", ME, xxhash.xxh3_64_intdigest(b"7"))
    assert refused.value.errno == errno.ESTALE
    assert tree(again)[b"/e/7"] == b"ours"  # and it knows now what there is
    with pytest.raises(FileExistsError):
        Shared(store).put(b"/e/7", Source.of(b""), META, ABSENT)


def test_a_rename_that_a_crash_cut_short_is_finished(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Shared(store)
    for i in range(600):
        remote.put(b"/a/%d" % i, Source.of(b"%d" % i), META._replace(mode=0o100600), ANY)
    moves = [Moved(b"/a/%d" % i, b"/b/%d" % i, META._replace(mode=0o100600), True) for i in range(600)]
    done = remote._copy
    calls = []

    def dies(part: Any) -> None:
        calls.append(part)
        if len(calls) == 2:
            raise KeyboardInterrupt
        done(part)

    monkeypatch.setattr(remote, "_copy", dies)
    with pytest.raises(KeyboardInterrupt):
        remote.move(moves)
    found = tree(open_remote(Shared(store)))
    assert found == {b"/b": None} | {b"/b/%d" % i: b"%d" % i for i in range(600)}


def test_a_move_is_all_or_nothing_in_sql(tmp_path: Path) -> None:
    remote = store_at(tmp_path)
    remote.open()
    for name in (b"/a", b"/b"):
        remote.put(name, Source.of(name), META, ANY)
    with pytest.raises(OSError):
        remote.move([Moved(b"/a", b"/x", META, True), Moved(b"/none", b"/y", META, True)])
    assert sorted(f.path for f in remote.scan(b"/")) == [b"/a", b"/b"]
    remote.move([Moved(b"/a", b"/b", META, True), Moved(b"/b", b"/a", META, True)])
    assert [remote.get(b"/a").data, remote.get(b"/b").data] == [b"/b", b"/a"]
    remote.close()


@pytest.mark.parametrize(
    ("template", "made"),
    [(["filesystem"], ("filesystem",)), (["{user}", "a-{user}"], ("me@x", "a-me@x"))],
)
def test_namespaces(template: list[str], made: tuple[str, ...]) -> None:
    assert items.namespace(template, {"user": "me@x"}) == made


@pytest.mark.parametrize("template", [[], [""], ["a b"], ["*"], ["a/b"], ["{no}"], ["a.b"], ["langgraph"], ["!vfsd"]])
def test_refused_namespaces(template: list[str]) -> None:
    with pytest.raises(RemoteError):
        items.namespace(template, {"user": "x"})


@pytest.mark.parametrize("path", [b"/a", "/é/ü".encode(), b"/\xff\x80", b"/\xef\x9e\x80", b"/" + bytes(range(1, 47))])
def test_keys_and_paths(path: bytes) -> None:
    key = items.key_of(path)
    key.encode()
    assert items.path_of(key) == path


@pytest.mark.parametrize("key", ["", "a", "/", "/a/", "//a", "/a/../b", "/.", "/a\0", 5, "/\ud800", "/" + "x" * 256])
def test_keys_that_are_no_paths(key: object) -> None:
    assert items.path_of(key) is None


@pytest.mark.parametrize("ns", [0, 1_234_567_890_123_456_000, -1_500_000_000, 253_402_300_799_000_000_000])
def test_times(ns: int) -> None:
    assert items.ns_of(items.iso(ns)) == ns
