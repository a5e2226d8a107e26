"""Power loss at any moment of a session: what was synced is there whole, every checkpoint is exact, and all is sound.

The session runs on a disk that records (``disk``); from the recording come images of what may be left at each moment,
with what no sync had made safe kept, lost or garbled. Each image is opened as a start would.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from checkpointed import ME, Mount, State
from disk import Disk, Image, Op, fates
from faults import failing

from vfsd.backends import database, freespace, history, journal
from vfsd.backends.extents import ExtentFile
from vfsd.backends.freespace import BLOCK
from vfsd.backends.history import NOW
from vfsd.backends.journal import Journal
from vfsd.backends.sqlite import SqliteBackend
from vfsd.check import check_volume
from vfsd.core.changes import Content, Reserve, Write, Zero
from vfsd.core.types import SetAttr
from vfsd.feed import Commit

pytestmark = [
    pytest.mark.mount,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]

STRIDE = int(os.environ.get("VFSD_POWER_STRIDE", "3"))
"""Power is lost after every such operation of the disk."""

Act = Callable[[Mount], Awaitable[object]]


class Step(NamedTuple):
    """One change, or one promise: after a ``durable`` step has returned, all before it survives."""

    act: Act
    durable: bool = False


def now(act: Callable[[Mount], object], durable: bool = False) -> Step:
    async def run(mount: Mount) -> None:
        act(mount)

    return Step(run, durable)


def write(path: str, data: bytes) -> Step:
    """A tool's write: the whole file in one commit."""
    return now(lambda m: m.write(path, data))


def lay(path: str, *pieces: bytes) -> Step:
    """The same of large content, whose blocks are written before the commit."""

    async def act(mount: Mount) -> None:
        async with mount.root.laying(pieces) as content:
            try:
                mount.root.replace(mount.find(path).ino, content, ME)
            except FileNotFoundError:
                mount.root.create_file(mount.root.root_ino, path[1:].encode(), 0o644, content, ME)

    return Step(act)


def pwrite(path: str, offset: int, data: bytes) -> Step:
    return now(lambda m: m.root.write(m.find(path).ino, 0, offset, data, ME))


def unlink(path: str) -> Step:
    above, _, name = path.rpartition("/")
    return now(lambda m: m.root.unlink(m.find(above).ino if above else m.root.root_ino, name.encode(), ME))


def truncate(path: str, size: int) -> Step:
    return now(lambda m: m.root.setattr(m.find(path).ino, SetAttr(size=size), ME))


def rename(name: str, new: str) -> Step:
    return now(lambda m: m.root.rename(m.root.root_ino, name.encode(), m.root.root_ino, new.encode(), 0, ME))


def mark_of(mount: Mount, label: str) -> str:
    return next(mark.id for mark in mount.checkpoints.all() if mark.label == label)


def create(label: str) -> Step:
    return Step(lambda m: m.checkpoints.create(label, ME), durable=True)


def restore(label: str) -> Step:
    return Step(lambda m: m.checkpoints.restore(mark_of(m, label), ME))


def drop(label: str) -> Step:
    return Step(lambda m: m.checkpoints.drop([mark_of(m, label)], ME), durable=True)


def drop_while_writing(label: str, path: str, data: bytes) -> Step:
    """What the checkpoint holds is written to while the thread that drops it works."""

    async def act(mount: Mount) -> None:
        begun, written = threading.Event(), threading.Event()
        real = history.drop

        def waiting(*args: Any) -> Any:
            begun.set()
            assert written.wait(10)
            return real(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(history, "drop", waiting)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mount.checkpoints.drop, [mark_of(mount, label)], ME)
                while not begun.is_set():
                    await trio.sleep(0.001)
                mount.root.write(mount.find(path).ino, 0, 0, data, ME)
                written.set()

    return Step(act)


async def _fold_in_vain(mount: Mount) -> None:
    with failing(journal, "ftruncate", code=errno.EIO):
        await mount.root.maintain()


sync = Step(lambda m: m.root.syncfs(), durable=True)
maintain = Step(lambda m: m.root.maintain(), durable=True)
gc = Step(lambda m: m.checkpoints.collect(), durable=True)
fold_in_vain = Step(_fold_in_vain)
fold_again = Step(lambda m: m.root.maintain())
"""After a fold in vain: it folds what that one should have, and no more."""

FILES: list[Step] = [
    write("/a", b"a" * 10_000),
    now(lambda m: m.root.mkdir(m.root.root_ino, b"d", 0o755, ME)),
    write("/d/b", b"b" * 50_000),
    sync,
    pwrite("/a", 100, b"in place"),
    now(lambda m: m.root.write(m.find("/a").ino, 0, 0, b"appended" * 700, ME, True)),
    write("/d/b", b"B" * 50_000),
    maintain,
    unlink("/d/b"),
    write("/c", b"c" * 110_000),
    sync,
    write("/e", b"e" * 50_000),
    truncate("/a", 5000),
    truncate("/a", 9000),
    rename("c", "f"),
    now(lambda m: m.root.setxattr(m.find("/f").ino, b"user.x", b"1", 0, ME)),
    sync,
    write("/f", b"F" * 50_000),
    fold_in_vain,
    unlink("/e"),
    fold_again,
    write("/g", b"g" * 90_000),
    write("/h", b"h" * 90_000),
    rename("g", "f"),
    now(lambda m: m.root.fallocate(m.find("/h").ino, 0, 3, 8192, 40_960, ME)),
    write("/i", b"i" * 45_000),
    sync,
    unlink("/h"),
    unlink("/f"),
    write("/j", b"j" * 300_000),
    maintain,
    write("/c2", b"c" * 10),
    pwrite("/j", 400_000, b"far"),
    now(lambda m: m.root.fallocate(m.find("/i").ino, 0, 0, 45_000, 100_000, ME)),
    truncate("/c2", 100_000),
    sync,
    pwrite("/c2", 50_000, b"in a hole"),
    pwrite("/c2", 5_000, b"in a hole before it"),
    pwrite("/c2", 5_010, b"in place"),
    now(lambda m: m.root.symlink(m.root.root_ino, b"l", b"j", ME)),
]

PAST: list[Step] = [
    write("/a", b"a" * 30_000),
    write("/b", b"b" * 30_000),
    create("one"),
    pwrite("/a", 5000, b"A" * 5000),
    write("/b", b"B" * 30_000),
    create("two"),
    pwrite("/a", 100, b"second"),
    write("/c", b"c" * 60_000),
    unlink("/b"),
    restore("one"),
    write("/d", b"d" * 60_000),
    pwrite("/a", 9000, b"third"),
    restore("two"),
    pwrite("/b", 0, b"fourth" * 1000),
    drop("one"),
    write("/e", b"e" * 60_000),
    gc,
    create("three"),
    drop_while_writing("three", "/e", b"E" * 20_000),
    unlink("/e"),
    maintain,
    write("/f", b"f" * 60_000),
    create("four"),
    unlink("/f"),
    drop("four"),
    write("/g", b"g" * 60_000),
    restore("two"),
    drop("two"),
    write("/h", b"h" * 60_000),
]

LAID: list[Step] = [
    write("/a", b"a" * 30_000),
    lay("/b", b"b" * 20_001, b"B" * 20_000),
    sync,
    create("one"),
    pwrite("/a", 5000, b"in a block of its own"),
    pwrite("/a", 20_000, b"in another"),
    unlink("/a"),
    sync,
    lay("/c", b"c" * 30_000, b"C" * 10),
    lay("/b", b"new" * 20_000),
    sync,
    lay("/c", b"d" * 50_000),
    restore("one"),
    lay("/b", b"e" * 100_000),
    maintain,
    unlink("/b"),
    drop("one"),
    lay("/f", b"f" * 60_000),
]
"""Among them: blocks that the journal has bytes of, free again before it is emptied, taken by what is laid."""

Ranges = dict[int, list[tuple[int, int]]]


class Moment(NamedTuple):
    """What a user saw after a step: the tree with the node of each path, the labelled checkpoints, and which bytes of
    which nodes the step had changed."""

    tree: State
    nodes: dict[bytes, int]
    held: dict[str, State]
    touched: Ranges


def look(mount: Mount, touched: Ranges) -> Moment:
    tree = mount.state()
    nodes = {path: mount.find(os.fsdecode(path)).ino for path in tree}
    held = {mark.label: mount.past_state(mark.id) for mark in mount.checkpoints.all() if mark.cause == "user"}
    return Moment(tree, nodes, held, touched)


class Session:
    """A session played on a disk that recorded it."""

    def __init__(self, base: Path, steps: list[Step]) -> None:
        self.steps = steps
        self.moments: list[Moment] = []
        touched: Ranges = {}

        def note(commit: Commit) -> None:
            for c in commit.changes:
                if isinstance(c, (Write, Zero, Reserve, Content)):
                    start = 0 if isinstance(c, Content) else c.offset
                    end = start + len(c.data) if isinstance(c, Write) else None if isinstance(c, Content) else c.end
                    touched.setdefault(c.node, []).append((start, NOW if end is None else end))

        async def play(mount: Mount, disk: Disk) -> None:
            for step in [now(lambda m: None), *steps]:
                await step.act(mount)
                self.moments.append(look(mount, dict(touched)))
                touched.clear()
                disk.mark()

        with Disk(base) as disk, pytest.MonkeyPatch.context() as patch:
            # Without room set aside for small files, so that what is free is used at once.
            patch.setattr(freespace, "_WINDOW", BLOCK)
            mount = Mount(disk.point / "home")
            mount.feed.subscribe(note)
            trio.run(play, mount, disk)
            mount.close()
        self.ops = disk.ops()

    def cuts(self) -> Iterator[tuple[int, int]]:
        """(operations done, the step that had returned by then), from when the volume was there."""
        returned, shared = -1, {op[3] for op in self.ops if op[0] == "name" and op[2].endswith("-shm")}
        for at, op in enumerate(self.ops):
            if op[0] == "mark":
                returned += 1
            elif returned >= 0 and op[1] not in shared:
                yield at, returned

    def durable(self, returned: int) -> int:
        return max((i for i in range(1, returned + 1) if self.steps[i - 1].durable), default=0)


def without_content(tree: State) -> State:
    return {path: (*seen[:5], seen[6]) for path, seen in tree.items()}


def judge(place: Path, session: Session, returned: int, whole: bool) -> None:
    """``whole``: nothing was lost, as when only the daemon is killed."""
    volume = place / "home/main/root"
    assert check_volume(volume) == []
    mount = Mount(place / "home")
    found, last = look(mount, {}), min(returned + 1, len(session.moments) - 1)
    since = returned if whole else session.durable(returned)
    if since or whole:
        allowed = session.moments[since : last + 1]
        assert without_content(found.tree) in [without_content(m.tree) for m in allowed]
        assert found.held in [m.held for m in session.moments[returned : last + 1]]
        _contents(found, session.moments[since], [m.touched for m in session.moments[since + 1 : last + 1]])
    _use(mount)
    mount.close()
    assert check_volume(volume) == []


def _contents(found: Moment, promised: Moment, touched: list[Ranges]) -> None:
    """The bytes of every synced file that nobody has written to since."""
    by_node = {node: path for path, node in promised.nodes.items()}
    for path, node in found.nodes.items():
        if node not in by_node or found.tree[path][0] >> 12 != 8:
            continue
        there, then = bytearray(found.tree[path][5]), bytearray(promised.tree[by_node[node]][5])
        common = min(len(there), len(then))
        for ranges in touched:
            for start, end in ranges.get(node, ()):
                start, end = min(start, common), min(end, common)
                there[start:end] = then[start:end] = bytes(end - start)
        assert there[:common] == then[:common], path


def _use(mount: Mount) -> None:
    """All goes on: what is held can be gone back to and dropped, files are made and kept."""

    async def use() -> None:
        await mount.checkpoints.maintain()
        for mark in mount.checkpoints.all():
            await mount.checkpoints.restore(mark.id, ME)
            assert mount.state() == mount.past_state(mark.id)
        mount.write("/afterwards", b"x" * 100_000)
        await mount.checkpoints.drop([mark.id for mark in mount.checkpoints.all()], ME)
        await mount.root.syncfs()

    before = mount.state()
    marks = mount.checkpoints.all()
    trio.run(use)
    after = mount.state()
    assert after.pop(b"/afterwards")[5] == b"x" * 100_000
    if not marks:
        assert after == before


def cut_power(session: Session, stride: int, seed: int) -> int:
    """Judge images of the disk at every ``stride``-th operation; how many there were."""
    rng = random.Random(seed)
    variants: list[tuple[str, Callable[[Op], str]]] = [
        ("lost", lambda op: "lost"),
        ("some", fates(rng, 0.6, 0.3)),
        ("few", fates(rng, 0.2, 0.6)),
        ("most", fates(rng, 0.9, 0.1)),
        ("kept", lambda op: "kept"),
    ]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    base = Path(tempfile.mkdtemp(prefix="vfsd-", dir=memory))
    done = 0
    try:
        for turn, (at, returned) in enumerate(session.cuts()):
            if turn % stride and stride > 1:
                continue
            name, fate = variants[(turn // stride) % len(variants)]
            place = base / "image"
            Image(session.ops[: at + 1], fate, rng).write_to(place)
            try:
                judge(place, session, returned, name == "kept")
            except BaseException as error:
                error.add_note(f"power lost after operation {at}, step {returned} had returned; {name}, seed {seed}")
                raise
            shutil.rmtree(place)
            done += 1
    finally:
        shutil.rmtree(base)
    return done


@pytest.fixture(scope="module", params=["files", "past", "laid"])
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    steps = {"files": FILES, "past": PAST, "laid": LAID}[request.param]
    return Session(tmp_path_factory.mktemp("power"), steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_power_lost_at_any_moment(session: Session, seed: int) -> None:
    assert cut_power(session, STRIDE, seed) > 100 // STRIDE


def _release_at_once(patch: pytest.MonkeyPatch) -> None:
    end = ExtentFile.end

    def ended(self: ExtentFile, ok: bool) -> None:
        end(self, ok)
        self.release(self.drain())

    patch.setattr(ExtentFile, "end", ended)


def _fold_before_the_data(patch: pytest.MonkeyPatch) -> None:
    real = SqliteBackend._fdatasync
    patch.setattr(SqliteBackend, "_fdatasync", lambda self, journal=True: real(self) if journal else None)


def _empty_the_journal_early(patch: pytest.MonkeyPatch) -> None:
    connect = database.connect_again

    def careless(directory: Path) -> Any:
        db = connect(directory)
        db.execute("PRAGMA synchronous=OFF")
        return db

    patch.setattr(database, "connect_again", careless)


def _sync_the_data_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "sync", lambda self: None)


def _log_no_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(database, "_patch", lambda batch, directory: None)


def _forget_the_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(database, "sync_directory", lambda directory: None)


def _thaw_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExtentFile, "begin_thaw", ExtentFile.freeze)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "steps"),
    [
        (_release_at_once, FILES),
        (_fold_before_the_data, FILES),
        (_empty_the_journal_early, FILES),
        (_sync_the_data_only, FILES),
        (_forget_the_names, FILES),
        (_log_no_bytes, PAST),
        (_thaw_at_once, PAST),
    ],
)
def test_the_judge_finds_it(fault: Callable[[pytest.MonkeyPatch], None], steps: list[Step], tmp_path: Path) -> None:
    """A volume that breaks one of its rules does not pass."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        session = Session(tmp_path, steps)
        with pytest.raises(AssertionError):
            for seed in range(2, 7):  # what is kept and lost is drawn, and one draw may hide a fault
                cut_power(session, 1, seed)
