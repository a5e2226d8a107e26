"""Plans by errno: what each operation refuses, and that no plan, refused or not, changes anything."""

from __future__ import annotations

import copy
import errno
import stat
from collections.abc import Callable
from typing import Any

import pytest

from vfsd.core import plans, xattrs
from vfsd.core.changes import Change, Drop, Put, Reserve, Write, Zero
from vfsd.core.tree import Node, Tree
from vfsd.core.types import FILE_MAX, LINK_MAX, NAME_MAX, Caller, NotLoaded, SetAttr

ME = Caller(1000, 1000)
DIR, FILE, LINK, FIFO = 0o40755, 0o100644, 0o120777, 0o10644


def grown() -> Tree:
    """The tree all cases start from::

    /d (dir)  /d/sub (dir)  /d/file  /empty (dir)  /f (3 bytes)  /hard = /f  /link -> f  /fifo  /sg (setgid dir)
    /gone: a directory removed while a handle holds it; /unloaded: a directory whose entries are not in memory
    """
    tree = Tree(0)
    tree.apply([Put(1, DIR, 2, 0, 0, 0, 0, 0, 0, 0)])
    root = tree.nodes[1]

    def add(parent: Node, name: bytes, mode: int, **more: Any) -> Node:
        number = tree.next_node
        tree.apply(plans.make(tree, parent, name, mode, ME, 10, **more))
        return tree.nodes[number]

    d = add(root, b"d", DIR)
    add(d, b"sub", DIR)
    add(d, b"file", FILE)
    add(root, b"empty", DIR)
    f = add(root, b"f", FILE)
    tree.apply(plans.write(f, 0, b"abc", 11, clear_suid=False))
    tree.apply(plans.link(tree, f, root, b"hard", 12))
    add(root, b"link", LINK, target=b"f")
    add(root, b"fifo", FIFO)
    sg = add(root, b"sg", DIR)
    tree.apply(plans.setattr(sg, SetAttr(perm=0o2775, gid=77), 13))
    gone = add(root, b"gone", DIR)
    gone.pins += 1
    tree.apply(plans.rmdir(tree, root, b"gone", 14))
    add(root, b"unloaded", DIR).children = None
    return tree


def at(tree: Tree, path: str) -> Node:
    if path == "gone":
        return next(n for n in tree.nodes.values() if n.pins)
    node = tree.nodes[1]
    for name in path.split("/"):
        if name:
            assert node.children is not None
            node = node.children[name.encode()]
    return node


def frozen(tree: Tree) -> Any:
    """A deep copy of all a tree is, as plain values."""
    return copy.deepcopy(
        (
            tree.next_node,
            {
                number: tuple(
                    [(k, v.id) for k, v in value.items()] if isinstance(value, dict)
                    else value.id if isinstance(value, Node)
                    else value
                    for value in (getattr(node, slot) for slot in Node.__slots__)
                )
                for number, node in tree.nodes.items()
            },
        )
    )  # fmt: skip


def untouched(tree: Tree, plan: Callable[[], list[Change]]) -> list[Change]:
    """Run a plan and hold it to changing nothing, whether it succeeds or raises."""
    before = frozen(tree)
    try:
        return plan()
    finally:
        assert frozen(tree) == before


Case = Callable[[Tree], list[Change]]
_P = plans
LONG = b"x" * (NAME_MAX + 1)

REFUSED: list[tuple[str, int, Case]] = [
    ("make exists", errno.EEXIST, lambda t: _P.make(t, at(t, "/"), b"f", FILE, ME, 1)),
    ("make dot", errno.EEXIST, lambda t: _P.make(t, at(t, "/"), b".", DIR, ME, 1)),
    ("make dotdot", errno.EEXIST, lambda t: _P.make(t, at(t, "/"), b"..", DIR, ME, 1)),
    ("make empty name", errno.EINVAL, lambda t: _P.make(t, at(t, "/"), b"", FILE, ME, 1)),
    ("make slash", errno.EINVAL, lambda t: _P.make(t, at(t, "/"), b"a/b", FILE, ME, 1)),
    ("make nul", errno.EINVAL, lambda t: _P.make(t, at(t, "/"), b"a\0b", FILE, ME, 1)),
    ("make long name", errno.ENAMETOOLONG, lambda t: _P.make(t, at(t, "/"), LONG, FILE, ME, 1)),
    ("make in file", errno.ENOTDIR, lambda t: _P.make(t, at(t, "/f"), b"n", FILE, ME, 1)),
    ("make in removed", errno.ENOENT, lambda t: _P.make(t, at(t, "gone"), b"n", FILE, ME, 1)),
    ("symlink empty", errno.ENOENT, lambda t: _P.make(t, at(t, "/"), b"n", LINK, ME, 1, target=b"")),
    ("symlink long", errno.ENAMETOOLONG, lambda t: _P.make(t, at(t, "/"), b"n", LINK, ME, 1, target=b"x" * 4096)),
    ("tmpfile in file", errno.ENOTDIR, lambda t: _P.make_unlinked(t, at(t, "/f"), FILE, ME, 1)),
    ("link dir", errno.EPERM, lambda t: _P.link(t, at(t, "/d"), at(t, "/"), b"n", 1)),
    ("link exists", errno.EEXIST, lambda t: _P.link(t, at(t, "/f"), at(t, "/"), b"link", 1)),
    ("link long", errno.ENAMETOOLONG, lambda t: _P.link(t, at(t, "/f"), at(t, "/"), LONG, 1)),
    ("link into removed", errno.ENOENT, lambda t: _P.link(t, at(t, "/f"), at(t, "gone"), b"n", 1)),
    ("unlink none", errno.ENOENT, lambda t: _P.unlink(t, at(t, "/"), b"nope", 1)),
    ("unlink dir", errno.EISDIR, lambda t: _P.unlink(t, at(t, "/"), b"d", 1)),
    ("unlink in file", errno.ENOTDIR, lambda t: _P.unlink(t, at(t, "/f"), b"n", 1)),
    ("rmdir none", errno.ENOENT, lambda t: _P.rmdir(t, at(t, "/"), b"nope", 1)),
    ("rmdir file", errno.ENOTDIR, lambda t: _P.rmdir(t, at(t, "/"), b"f", 1)),
    ("rmdir link", errno.ENOTDIR, lambda t: _P.rmdir(t, at(t, "/"), b"link", 1)),
    ("rmdir full", errno.ENOTEMPTY, lambda t: _P.rmdir(t, at(t, "/"), b"d", 1)),
    ("rmdir dot", errno.EINVAL, lambda t: _P.rmdir(t, at(t, "/d"), b".", 1)),
    ("rmdir dotdot", errno.ENOTEMPTY, lambda t: _P.rmdir(t, at(t, "/d"), b"..", 1)),
    ("rename none", errno.ENOENT, lambda t: _P.rename(t, at(t, "/"), b"no", at(t, "/"), b"n", 0, 1)),
    ("rename flags", errno.EINVAL, lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/"), b"n", 3, 1)),
    ("rename whiteout", errno.EINVAL, lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/"), b"n", 6, 1)),
    ("rename dot", errno.EBUSY, lambda t: _P.rename(t, at(t, "/d"), b".", at(t, "/"), b"n", 0, 1)),
    ("rename to dotdot", errno.EBUSY, lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/d"), b"..", 0, 1)),
    ("rename long", errno.ENAMETOOLONG, lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/"), LONG, 0, 1)),
    ("rename noreplace", errno.EEXIST, lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/"), b"link", 1, 1)),
    ("noreplace same file", errno.EEXIST, lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/"), b"hard", 1, 1)),
    ("exchange none", errno.ENOENT, lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/"), b"no", 2, 1)),
    ("rename into itself", errno.EINVAL, lambda t: _P.rename(t, at(t, "/"), b"d", at(t, "/d"), b"n", 0, 1)),
    ("rename into child", errno.EINVAL, lambda t: _P.rename(t, at(t, "/"), b"d", at(t, "/d/sub"), b"n", 0, 1)),
    ("exchange into child", errno.EINVAL, lambda t: _P.rename(t, at(t, "/"), b"d", at(t, "/d"), b"sub", 2, 1)),
    ("exchange with parent", errno.EINVAL, lambda t: _P.rename(t, at(t, "/d"), b"sub", at(t, "/"), b"d", 2, 1)),
    ("rename over parent", errno.ENOTEMPTY, lambda t: _P.rename(t, at(t, "/d"), b"sub", at(t, "/"), b"d", 0, 1)),
    ("file over dir", errno.EISDIR, lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/"), b"empty", 0, 1)),
    ("dir over file", errno.ENOTDIR, lambda t: _P.rename(t, at(t, "/"), b"d", at(t, "/"), b"f", 0, 1)),
    ("dir over full dir", errno.ENOTEMPTY, lambda t: _P.rename(t, at(t, "/"), b"empty", at(t, "/"), b"d", 0, 1)),
    ("rename from removed", errno.ENOENT, lambda t: _P.rename(t, at(t, "gone"), b"f", at(t, "/"), b"n", 0, 1)),
    ("rename to removed", errno.ENOENT, lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "gone"), b"n", 0, 1)),
    ("truncate dir", errno.EISDIR, lambda t: _P.setattr(at(t, "/d"), SetAttr(size=0), 1)),
    ("truncate fifo", errno.EINVAL, lambda t: _P.setattr(at(t, "/fifo"), SetAttr(size=0), 1)),
    ("truncate negative", errno.EINVAL, lambda t: _P.setattr(at(t, "/f"), SetAttr(size=-1), 1)),
    ("truncate absurd", errno.EFBIG, lambda t: _P.setattr(at(t, "/f"), SetAttr(size=FILE_MAX + 1), 1)),
    ("write too far", errno.EFBIG, lambda t: _P.write(at(t, "/f"), FILE_MAX, b"x", 1, clear_suid=False)),
    ("replace dir", errno.EISDIR, lambda t: _P.replace(at(t, "/d"), b"x", 1)),
    ("replace fifo", errno.EINVAL, lambda t: _P.replace(at(t, "/fifo"), b"x", 1)),
    ("fallocate dir", errno.ENODEV, lambda t: _P.fallocate(at(t, "/d"), 0, 0, 1, 1)),
    ("fallocate nothing", errno.EINVAL, lambda t: _P.fallocate(at(t, "/f"), 0, 0, 0, 1)),
    ("fallocate negative", errno.EINVAL, lambda t: _P.fallocate(at(t, "/f"), 0, -1, 1, 1)),
    ("fallocate absurd", errno.EFBIG, lambda t: _P.fallocate(at(t, "/f"), 0, FILE_MAX, 1, 1)),
    ("collapse", errno.EOPNOTSUPP, lambda t: _P.fallocate(at(t, "/f"), 8, 0, 4096, 1)),
    ("punch and grow", errno.EOPNOTSUPP, lambda t: _P.fallocate(at(t, "/f"), 2, 0, 4096, 1)),
    ("punch and zero", errno.EOPNOTSUPP, lambda t: _P.fallocate(at(t, "/f"), 0x13, 0, 4096, 1)),
    ("xattr nameless", errno.ERANGE, lambda t: xattrs.setxattr(at(t, "/f"), {}, b"", b"", 0, 1)),
    ("xattr long name", errno.ERANGE, lambda t: xattrs.setxattr(at(t, "/f"), {}, LONG, b"", 0, 1)),
    ("xattr large", errno.E2BIG, lambda t: xattrs.setxattr(at(t, "/f"), {}, b"user.a", bytes(65537), 0, 1)),
    ("xattr flags", errno.EINVAL, lambda t: xattrs.setxattr(at(t, "/f"), {}, b"user.a", b"", 4, 1)),
    ("xattr create", errno.EEXIST, lambda t: xattrs.setxattr(at(t, "/f"), {b"user.a": b""}, b"user.a", b"", 1, 1)),
    ("xattr replace", errno.ENODATA, lambda t: xattrs.setxattr(at(t, "/f"), {}, b"user.a", b"", 2, 1)),
    ("removexattr", errno.ENODATA, lambda t: xattrs.removexattr(at(t, "/f"), {}, b"user.a", 1)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "case"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_with_errno_and_nothing_changed(code: int, case: Case) -> None:
    tree = grown()
    with pytest.raises(OSError) as caught:
        untouched(tree, lambda: case(tree))
    assert errno.errorcode[caught.value.errno] == errno.errorcode[code]


ALLOWED: list[tuple[str, Case]] = [
    ("make file", lambda t: _P.make(t, at(t, "/d"), b"new", FILE, ME, 20)),
    ("make dir", lambda t: _P.make(t, at(t, "/d"), b"new", DIR, ME, 20)),
    ("longest name", lambda t: _P.make(t, at(t, "/"), LONG[1:], FILE, ME, 20)),
    ("make symlink", lambda t: _P.make(t, at(t, "/"), b"new", LINK, ME, 20, target=b"x" * 4095)),
    ("tmpfile", lambda t: _P.make_unlinked(t, at(t, "/"), FILE, ME, 20)),
    ("link", lambda t: _P.link(t, at(t, "/f"), at(t, "/d"), b"new", 20)),
    ("unlink one of two", lambda t: _P.unlink(t, at(t, "/"), b"hard", 20)),
    ("unlink last", lambda t: _P.unlink(t, at(t, "/d"), b"file", 20)),
    ("rmdir", lambda t: _P.rmdir(t, at(t, "/d"), b"sub", 20)),
    ("rename", lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/d"), b"new", 0, 20)),
    ("rename over", lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/d"), b"file", 0, 20)),
    ("rename same file", lambda t: _P.rename(t, at(t, "/"), b"f", at(t, "/"), b"hard", 0, 20)),
    ("rename dir over empty", lambda t: _P.rename(t, at(t, "/"), b"d", at(t, "/"), b"empty", 0, 20)),
    ("rename dir down", lambda t: _P.rename(t, at(t, "/"), b"empty", at(t, "/d/sub"), b"new", 0, 20)),
    ("rename dir up", lambda t: _P.rename(t, at(t, "/d"), b"sub", at(t, "/"), b"new", 1, 20)),
    ("exchange dir and file", lambda t: _P.rename(t, at(t, "/d"), b"sub", at(t, "/"), b"f", 2, 20)),
    ("exchange in one dir", lambda t: _P.rename(t, at(t, "/"), b"empty", at(t, "/"), b"f", 2, 20)),
    ("exchange same file", lambda t: _P.rename(t, at(t, "/"), b"hard", at(t, "/"), b"f", 2, 20)),
    ("chmod", lambda t: _P.setattr(at(t, "/f"), SetAttr(perm=0o4711), 20)),
    ("truncate", lambda t: _P.setattr(at(t, "/f"), SetAttr(size=1), 20)),
    ("write past end", lambda t: _P.write(at(t, "/f"), 100, b"x", 20, clear_suid=True)),
    ("replace", lambda t: _P.replace(at(t, "/f"), b"xyz", 20)),
    ("fallocate", lambda t: _P.fallocate(at(t, "/f"), 0, 0, 9000, 20)),
    ("punch", lambda t: _P.fallocate(at(t, "/f"), 3, 0, 2, 20)),
    ("setxattr", lambda t: xattrs.setxattr(at(t, "/f"), {}, b"user.a", b"v", 0, 20)),
]  # fmt: skip


@pytest.mark.parametrize("case", [row[1] for row in ALLOWED], ids=[row[0] for row in ALLOWED])
def test_a_plan_changes_nothing_and_its_changes_keep_the_tree_sound(case: Case) -> None:
    tree = grown()
    changes = untouched(tree, lambda: case(tree))
    tree.apply(changes)
    once = frozen(tree)
    sound(tree)
    tree.apply(changes)
    assert frozen(tree) == once


def sound(tree: Tree) -> None:
    """Every link count is what the entries make it, and every node in an entry exists."""
    links: dict[int, int] = {}
    subdirs: dict[int, int] = {}
    for node in tree.nodes.values():
        for child in (node.children or {}).values():
            assert tree.nodes[child.id] is child
            links[child.id] = links.get(child.id, 0) + 1
            if child.is_dir:
                assert child.parent is node
                subdirs[node.id] = subdirs.get(node.id, 0) + 1
    for node in tree.nodes.values():
        if node.children is None:
            continue
        if node.is_dir:
            assert node.nlink == (2 + subdirs.get(node.id, 0) if node.id == 1 or node.id in links else 0)
        else:
            assert node.nlink == links.get(node.id, 0)


@pytest.mark.parametrize(
    "case",
    [
        lambda t: plans.make(t, at(t, "/unloaded"), b"n", FILE, ME, 1),
        lambda t: plans.rename(t, at(t, "/"), b"empty", at(t, "/"), b"unloaded", 0, 1),
        lambda t: plans.rmdir(t, at(t, "/"), b"unloaded", 1),
        lambda t: plans.unlink(t, at(t, "/unloaded"), b"n", 1),
        lambda t: plans.link(t, at(t, "/f"), at(t, "/unloaded"), b"n", 1),
    ],
)
def test_a_directory_not_in_memory_is_asked_for(case: Case) -> None:
    tree = grown()
    with pytest.raises(NotLoaded) as caught:
        untouched(tree, lambda: case(tree))
    assert caught.value.node == at(tree, "/unloaded").id


def test_link_counts_have_a_limit() -> None:
    tree = grown()
    at(tree, "/f").nlink = at(tree, "/d").nlink = LINK_MAX
    for case in (
        lambda: plans.link(tree, at(tree, "/f"), at(tree, "/"), b"n", 1),
        lambda: plans.make(tree, at(tree, "/d"), b"n", DIR, ME, 1),
        lambda: plans.rename(tree, at(tree, "/"), b"empty", at(tree, "/d"), b"n", 0, 1),
    ):
        with pytest.raises(OSError) as caught:
            untouched(tree, case)
        assert caught.value.errno == errno.EMLINK
    assert plans.make(tree, at(tree, "/d"), b"n", FILE, ME, 1)


def put_of(changes: list[Change], node: int) -> Put:
    return next(c for c in changes if isinstance(c, Put) and c.node == node)


def test_new_nodes_take_owner_and_group_by_the_rules() -> None:
    tree = grown()
    plain = put_of(plans.make(tree, at(tree, "/d"), b"n", FILE, ME, 20), tree.next_node)
    assert (plain.uid, plain.gid, plain.mode, plain.nlink) == (1000, 1000, FILE, 1)
    inherited = put_of(plans.make(tree, at(tree, "/sg"), b"n", FILE, ME, 20), tree.next_node)
    assert (inherited.gid, inherited.mode) == (77, FILE)
    below = put_of(plans.make(tree, at(tree, "/sg"), b"n", DIR, ME, 20), tree.next_node)
    assert (below.gid, below.mode, below.nlink) == (77, DIR | stat.S_ISGID, 2)
    assert plans.make_unlinked(tree, at(tree, "/sg"), FILE, ME, 20)[0][4] == 77


def test_times_follow_posix() -> None:
    tree = grown()
    f, root = at(tree, "/f"), at(tree, "/")

    def times(changes: list[Change], node: Node) -> tuple[int, int]:
        p = put_of(changes, node.id)
        return p.mtime_ns, p.ctime_ns

    assert times(plans.link(tree, f, root, b"n", 50), f) == (11, 50)
    assert times(plans.unlink(tree, root, b"hard", 50), f) == (11, 50)
    assert times(plans.rename(tree, root, b"f", root, b"n", 0, 50), f) == (11, 50)
    assert times(plans.unlink(tree, root, b"hard", 50), root) == (50, 50)
    assert times(plans.setattr(f, SetAttr(perm=0o600), 50), f) == (11, 50)
    assert times(plans.setattr(f, SetAttr(size=3), 50), f) == (50, 50)
    assert times(plans.write(f, 0, b"x", 50, clear_suid=False), f) == (50, 50)
    assert times(plans.setattr(f, SetAttr(mtime_ns=-5, atime_ns=-(1 << 70)), 50), f) == (-5, 50)
    assert put_of(plans.setattr(f, SetAttr(atime_ns=-(1 << 70)), 50), f.id).atime_ns == -(1 << 63)


def test_setuid_and_setgid_go_when_they_must() -> None:
    tree = grown()
    f = at(tree, "/f")
    for perm, after in ((0o6755, 0o755), (0o4755, 0o755), (0o2644, 0o2644), (0o6644, 0o2644)):
        f.mode = stat.S_IFREG | perm
        assert put_of(plans.setattr(f, SetAttr(uid=5), 50), f.id).mode & 0o7777 == after
        assert put_of(plans.write(f, 0, b"x", 50, clear_suid=True), f.id).mode & 0o7777 == after
        assert put_of(plans.write(f, 0, b"x", 50, clear_suid=False), f.id).mode & 0o7777 == perm
        assert put_of(plans.setattr(f, SetAttr(uid=5, perm=0o4711), 50), f.id).mode & 0o7777 == 0o4711
    assert put_of(plans.setattr(at(tree, "/sg"), SetAttr(gid=5), 50), at(tree, "/sg").id).mode & 0o7777 == 0o2775


def test_unlinked_nodes_stay_while_something_holds_them() -> None:
    tree = grown()
    held = at(tree, "/d/file")
    assert Drop(held.id) in plans.unlink(tree, at(tree, "/d"), b"file", 50)
    held.pins = 1
    changes = plans.unlink(tree, at(tree, "/d"), b"file", 50)
    assert Drop(held.id) not in changes
    assert put_of(changes, held.id).nlink == 0
    tree.apply(changes)
    assert plans.forget([at(tree, "/f"), held]) == [Drop(held.id)]


def test_contents_that_become_readable_are_zeroed_first() -> None:
    tree = grown()
    f = at(tree, "/f")
    assert plans.write(f, 10, b"x", 50, clear_suid=False)[:2] == [Zero(f.id, 3, 10), Write(f.id, 10, b"x")]
    assert plans.setattr(f, SetAttr(size=10), 50)[0] == Zero(f.id, 3, 10)
    assert plans.setattr(f, SetAttr(size=1), 50)[0] == Zero(f.id, 1, None)
    assert plans.fallocate(f, 0, 0, 10, 50)[:2] == [Zero(f.id, 3, 10), Reserve(f.id, 0, 10)]
    assert put_of(plans.fallocate(f, plans.FALLOC_KEEP_SIZE, 0, 10, 50), f.id).size == 3
