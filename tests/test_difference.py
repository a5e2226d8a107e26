"""What differs between two checkpoints, as kinds and as a patch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from checkpointed import ME, Mount, changes, create, run

from vfsd.core.types import SetAttr


def test_every_kind_of_difference(mount: Mount) -> None:
    for path in ("/same", "/text", "/gone", "/moved", "/mode", "/owner", "/xattr", "/type"):
        mount.write(path, path.encode() * 100)
    mount.root.symlink(mount.root.root_ino, b"link", b"old", ME)
    mount.write("/dir/inside")
    name = create(mount)
    top = mount.root.root_ino
    mount.write("/same", b"/same" * 100)
    mount.write("/text", b"/TEXT" * 100)
    mount.root.unlink(top, b"gone", ME)
    mount.root.rename(top, b"moved", mount.find("/dir").ino, b"here", 0, ME)
    mount.root.setattr(mount.find("/mode").ino, SetAttr(perm=0o755), ME)
    mount.root.setattr(mount.find("/owner").ino, SetAttr(uid=7), ME)
    mount.root.setxattr(mount.find("/xattr").ino, b"user.k", b"v", 0, ME)
    mount.root.unlink(top, b"link", ME)
    mount.root.symlink(top, b"link", b"new", ME)
    mount.root.unlink(top, b"type", ME)
    mount.root.mkdir(top, b"type", 0o755, ME)
    mount.write("/new")
    found = {c["path"]: c for c in run(mount.checkpoints.diff, name, None, patch=False)["changes"]}
    assert [(kind, path) for kind, path in changes(mount, name)] == [
        ("renamed", b"/dir/here"),
        ("deleted", b"/gone"),
        ("modified", b"/link"),
        ("mode", b"/mode"),
        ("added", b"/new"),
        ("owner", b"/owner"),
        ("modified", b"/text"),
        ("deleted", b"/type"),
        ("added", b"/type"),
        ("xattr", b"/xattr"),
    ]
    assert found[b"/dir/here"]["old_path"] == b"/moved"
    assert (found[b"/mode"]["old_mode"], found[b"/mode"]["new_mode"]) == (0o100644, 0o100755)
    # The other way round, and between a checkpoint and itself.
    other = create(mount)
    back = {path: kind for kind, path in changes(mount, other, name)}
    assert (back[b"/new"], back[b"/gone"], back[b"/moved"]) == ("deleted", "added", "renamed")
    assert changes(mount, other, other) == changes(mount, other) == []


def test_a_renamed_directory_is_one_difference(mount: Mount) -> None:
    mount.write("/d/a")
    mount.write("/d/b/c", b"old")
    name = create(mount)
    mount.root.rename(mount.root.root_ino, b"d", mount.root.root_ino, b"e", 0, ME)
    assert changes(mount, name) == [("renamed", b"/e")]
    mount.write("/e/b/c", b"new")
    assert changes(mount, name) == [("renamed", b"/e"), ("modified", b"/e/b/c")]


def test_an_editors_way_to_save_is_a_modification(mount: Mount) -> None:
    mount.write("/f", b"old")
    name = create(mount)
    mount.write("/f.tmp", b"new")
    mount.root.rename(mount.root.root_ino, b"f.tmp", mount.root.root_ino, b"f", 0, ME)
    assert changes(mount, name) == [("modified", b"/f")]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_takes_the_patch(mount: Mount, tmp_path: Path) -> None:
    texts = {
        "/plain": b"one\ntwo\nthree\n", "/no newline": b"one\ntwo", "/crlf": b"a\r\nb\r\n", "/latin": b"caf\xe9\nx\n",
        "/gone": b"x\n", "/moved": b"".join(b"%d\n" % i for i in range(50)), "/empty": b"", "/mode": b"#!/bin/sh\n",
    }  # fmt: skip
    for path, text in texts.items():
        mount.write(path, text)
    name, top = create(mount), mount.root.root_ino
    before, after = tmp_path / "before", tmp_path / "after"
    _write_out(mount, before)
    mount.write("/plain", b"one\n2\nthree\nfour\n")
    mount.write("/no newline", b"one\nTWO")
    mount.write("/crlf", b"a\r\nc\r\n")
    mount.write("/latin", b"caf\xe9!\nx\n")
    mount.root.unlink(top, b"gone", ME)
    mount.root.rename(top, b"moved", top, b"m\xc3\xb6ved", 0, ME)
    mount.write("/m\u00f6ved", texts["/moved"].replace(b"7\n", b"seven\n"))
    mount.root.setattr(mount.find("/mode").ino, SetAttr(perm=0o755), ME)
    mount.write("/empty", b"no longer")
    mount.write("/new/file", b"new\n")
    mount.write("/new/nothing", b"")
    _write_out(mount, after)
    found = run(mount.checkpoints.diff, name, None, patch=True)
    assert found["complete"]
    subprocess.run(["git", "apply", "-p1", "-"], cwd=before, input=found["patch"], check=True)
    assert subprocess.run(["diff", "-r", before, after]).returncode == 0
    assert (before / "mode").stat().st_mode & 0o111


def _write_out(mount: Mount, place: Path) -> None:
    place.mkdir()
    for path, seen in mount.state().items():
        target = place / os.fsdecode(path[1:])
        if seen[0] >> 12 == 4:
            target.mkdir()
        else:
            target.write_bytes(seen[5])
            target.chmod(seen[0] & 0o777)


def test_a_patch_says_when_it_can_not_tell(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    mount.write("/binary", b"\0\1")
    mount.write("/large", b"x" * ((1 << 20) + 1))
    name = create(mount)
    mount.write("/binary", b"\0\2")
    mount.write("/large", b"y" * ((1 << 20) + 1))
    patch = run(mount.checkpoints.diff, name, None, patch=True)["patch"]
    assert b"Binary files a/binary and b/binary differ\n" in patch
    assert b"Binary files a/large and b/large differ\n" in patch
    monkeypatch.setattr("vfsd.past.spans.PATCH_MAX", 10)
    assert not run(mount.checkpoints.diff, name, None, patch=True)["complete"]


def test_a_diff_leaves_no_checkpoint(mount: Mount) -> None:
    name = create(mount)
    mount.write("/a")
    changes(mount, name)
    assert [c.id for c in mount.root.store.checkpoints()] == [name]
