"""``vfsd gc --blobs``: blobs that nothing on this machine mentions, listed, and with ``--remove`` removed.

A blob is referred to by its digest, wherever it stands: in files, names, links and attributes of any thread's tree, in
checkpoints, in items of stores, in other blobs. Looks into all places that mounts of this user have ever had
(``process.places``). Where one of them can't be looked into nothing is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from vfsd.backends.blob import NAME, BlobDirectory
from vfsd.backends.foreign import ForeignRemote
from vfsd.backends.remote import Remote, RemoteError, check_place
from vfsd.backends.store import StoreRemote
from vfsd.config import NAMESPACE, RouteSpec, state_home
from vfsd.mentions import Mentions
from vfsd.process import registry
from vfsd.process.control import Control, Failure
from vfsd.process.places import Kept, list_file, remembered
from vfsd.remote.choose import remote_of

DAYS = 7
"""Age below which a blob is left alone: who has just put it may not have mentioned it yet."""

_FORGET = "delete its line if no mount has files there"
"""What to do about a place on the list that is none."""

_PASSWORD = re.compile(r":\*\*\*@")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """What ``gc`` takes besides."""
    p.add_argument("--blobs", action="store_true", help="list the blobs that nothing on this machine mentions")
    p.add_argument("--remove", action="store_true", help="with --blobs: remove them")
    p.add_argument(
        "--days", type=float, default=DAYS, metavar="N", help=f"with --blobs: only those older (default: {DAYS})"
    )
    p.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PATH",
        help="with --blobs: a file or directory that may mention blobs too, such as an agent's checkpoints; repeatable",
    )


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Do it; {unmentioned: [{name, size, age}], mentioned, young, removed, problems}."""
    if not args.days >= 0:  # nor no number at all, of which nothing is young
        raise Failure("--days must not be negative")
    running = [entry for entry in registry.entries() if entry["alive"]]
    place = _blobs_of(args.name, running)
    search = _Search(place, running)
    with contextlib.ExitStack() as held:
        for entry in running:
            search.trying(f"the mount {entry['name']}", held.enter_context, _held(entry))
        search.all_places(args.also)
    now, young, removed = time.time(), 0, 0
    unmentioned: list[dict[str, Any]] = []
    for name in sorted(search.names - search.mentions.found):
        with contextlib.suppress(FileNotFoundError):
            st = os.lstat(place / name)
            if now - st.st_mtime < args.days * 86400:
                young += 1
                continue
            unmentioned.append({"name": name, "size": st.st_size, "age": int(now - st.st_mtime)})
    if args.remove and not search.problems and unmentioned:
        blobs = BlobDirectory(str(place), (os.geteuid(), os.getegid()))
        blobs.remove([b"/" + one["name"].encode() for one in unmentioned])
        removed = len(unmentioned)
    return {
        "place": str(place), "unmentioned": unmentioned, "mentioned": len(search.mentions.found), "young": young,
        "removed": removed, "problems": search.problems,
    }  # fmt: skip


def _blobs_of(name: str, running: list[dict[str, Any]]) -> Path:
    """The directory of blobs that is meant."""
    entry = next((entry for entry in running if entry["name"] == name), None)
    found = [str(state_home() / "blobs")]
    if entry is not None:
        found = [route["location"] for route in entry["routes"] if route["kind"] == "blob"]
    if not found:
        raise Failure(f"{name!r} has no route of kind blob")
    if found[0].startswith("s3://"):
        raise Failure(f"{found[0]} is not looked after: other machines may mention what is in it")
    if not Path(found[0]).is_dir():
        raise Failure(f"there are no blobs: {found[0]} does not exist")
    return Path(found[0])


@contextlib.contextmanager
def _held(entry: dict[str, Any]) -> Iterator[None]:
    """Contents stay where they are while we look, whatever becomes of the files."""
    if not any(route["kind"] == "state" for route in entry["routes"]):
        yield
        return
    with Control(entry["socket"]) as control:
        try:
            held = control.call("checkpoint", action="create", label="vfsd gc")["result"]["id"]
        except OSError as exc:
            if exc.errno != errno.EROFS:  # nothing moves there
                raise
            yield
            return
        try:
            yield
        finally:
            control.call("checkpoint", action="drop", refs=[held])


class _Search:
    """Looks for mentions of the blobs in ``place``; ``problems`` are sentences about what could not be looked into."""

    def __init__(self, place: Path, running: list[dict[str, Any]]) -> None:
        self.place = place
        self.running = running
        with os.scandir(place) as entries:
            self.names = {e.name for e in entries if NAME.fullmatch(b"/" + os.fsencode(e.name))}
        self.mentions = Mentions(self.names)
        self.problems: list[str] = []
        self._blobs = {os.path.realpath(place)}

    def trying(self, what: str, look: Callable[..., object], *args: Any) -> None:
        """Note why not where it can't be done."""
        try:
            look(*args)
        except Exception as exc:
            reason = getattr(exc, "strerror", None) or str(exc).partition("\n")[0] or type(exc).__name__
            self.problems.append(f"{what} can't be looked into: {reason}")

    def all_places(self, also: Collection[str]) -> None:
        """Everything that may refer to a blob."""
        for entry in self.running:
            for route in entry["routes"]:
                if route["kind"] in ("memory", "backend"):
                    others = [r["prefix"] for r in entry["routes"] if r["prefix"] != route["prefix"]]
                    top, point = route["prefix"].rstrip("/"), entry["mountpoint"].rstrip("/")
                    inside = {point + other.rstrip("/") for other in others}
                    self.trying(f"{point}{top}", self.tree, point + top, inside)
        for database in sorted(state_home().glob("*/threads/**/tree.db")):
            self.trying(str(database.parent), self.volume, database.parent)
        known, odd = remembered()
        kept = {*known, Kept("store", f"sqlite:{state_home() / 'memories.db'}")}
        self.problems += [f"{list_file()} has a line that is no place, {line!r}: {_FORGET}" for line in odd]
        for one in sorted(kept):
            self.trying(f"{one.kind} {one.place} (on the list {list_file()})", self.kept, one)
        for path in also:
            self.trying(path, self.tree if os.path.isdir(path) else self.mentions.read_file, path)
        for name in self.names:
            self.trying(str(self.place / name), self._file, str(self.place / name))

    def volume(self, directory: Path) -> None:
        """A state volume: the files that it is made of hold its contents, names and history as they are."""
        if not (directory / "tree.db").exists():
            raise FileNotFoundError(errno.ENOENT, "there is no volume")
        for path in directory.iterdir():
            if path.is_file():
                self._file(str(path))

    def kept(self, one: Kept) -> None:
        """A place on the list."""
        if one.kind not in ("state", "local", "backend", "store"):
            raise RemoteError(f"{one.kind!r} is no kind of place: {_FORGET}")
        if one.kind in ("backend", "store"):
            try:
                check_place(one.kind, one.place)
            except RemoteError as exc:
                raise RemoteError(f"{exc}, or {_FORGET}") from None
        if one.kind == "state":
            self.volume(Path(one.place))
        elif one.kind == "local":
            os.stat(one.place)
            self.tree(one.place)
        elif one.kind == "backend":
            if not any(r["location"] == one.place for e in self.running for r in e["routes"]):
                self.backend(one)
        elif one.place.startswith("sqlite:"):
            self.sqlite(Path(one.place.partition(":")[2]))
        else:
            self.store(one)

    def sqlite(self, path: Path) -> None:
        if not path.exists():
            if path == state_home() / "memories.db":
                return
            raise FileNotFoundError(errno.ENOENT, "there is no such file")
        # Also what else is in the file, such as LangGraph's checkpoints.
        for file in (path, path.with_name(path.name + "-wal")):
            self._file(str(file))
        self.store(Kept("store", f"sqlite:{path}"))

    def store(self, one: Kept) -> None:
        """All items of a store, whatever their namespace."""
        place, home = _PASSWORD.sub("@", one.place), Path(one.home) if one.home else None
        remote = remote_of(RouteSpec("/", "store", None, place, NAMESPACE, (), home), _owner())
        assert isinstance(remote, StoreRemote)
        try:
            for text in remote.everything():
                self.mentions.look(text)
        finally:
            remote.close()

    def backend(self, one: Kept) -> None:
        """An object that is not mounted now, listed from its root."""
        remote = remote_of(RouteSpec("/", "backend", None, one.place, home=Path(one.home)), _owner())
        if not isinstance(remote, ForeignRemote):
            raise RemoteError("it can't be made")
        remote.open()
        todo = [b"/"]
        while todo:
            for found in remote.scan(todo.pop()):
                self.mentions.look(found.path)
                if found.is_dir:
                    todo.append(found.path)
                else:
                    self._content(remote, found.path)

    def _content(self, remote: Remote, path: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.mentions.look(remote.get(path).data or b"")

    def tree(self, top: str, leave: Collection[str] = ()) -> None:
        """Names, links, attributes and contents below a directory, without the directories of ``leave``."""

        def refuse(exc: OSError) -> None:
            if not isinstance(exc, FileNotFoundError):
                raise exc

        for at, directories, files in os.walk(top, onerror=refuse):
            inside = [d for d in directories if os.path.join(at, d) not in leave]
            directories[:] = [d for d in inside if os.path.realpath(os.path.join(at, d)) not in self._blobs]
            for name in (*directories, *files):
                path = os.path.join(at, name)
                self.mentions.look(os.fsencode(name))
                with contextlib.suppress(FileNotFoundError):
                    self._one(path, os.lstat(path).st_mode)

    def _one(self, path: str, mode: int) -> None:
        if stat.S_ISLNK(mode):
            self.mentions.look(os.fsencode(os.readlink(path)))
            return
        with contextlib.suppress(OSError):
            for name in os.listxattr(path, follow_symlinks=False):
                self.mentions.look(os.fsencode(name) + b" " + os.getxattr(path, name, follow_symlinks=False))
        if stat.S_ISREG(mode):
            self._file(path)

    def _file(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.mentions.read_file(path)


def _owner() -> tuple[int, int]:
    return os.geteuid(), os.getegid()
