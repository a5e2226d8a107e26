"""The command line as a person meets it: every way a mount can start, be refused, be looked at and end."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from cli_world import SECONDS, World

import agenttools
from vfsd.cli import _parser
from vfsd.config import parse_route
from vfsd.process.mountpoint import MountpointError, check_places

pytestmark = pytest.mark.mount


# -- a mount and its end


def test_default_mount_and_back(world: World) -> None:
    said = world.vfsd("mount", world.mp).stdout
    assert said.startswith(f"mounted default on {world.mp} (pid ")
    assert sorted(os.listdir(world.mp)) == ["blobs", "memories"]
    (world.mp / "kept").write_text("x")
    row = world.status()
    assert {"name", "pid", "mountpoint", "socket", "thread", "engine", "routes", "uptime", "counters"} <= set(row)
    assert (row["name"], row["thread"], row["mountpoint"]) == ("default", "default", str(world.mp))
    assert row["state"] == "running" and row["counters"]["mutated"] >= 1 and row["uptime"] > 0
    assert row["socket"] == str(world.run_dir / "vfsd/default.sock")
    assert row["routes"][0]["location"] == str(world.base / "state/vfsd/default/threads/default/root")
    assert world.vfsd("umount", "default").stdout == f"unmounted {world.mp}\n"
    assert os.listdir(world.mp) == []
    world.wait(lambda: not Path(f"/proc/{row['pid']}").exists())
    assert world.vfsd("status", "--json").stdout.strip() == "[]"
    world.vfsd("mount", world.mp)
    assert (world.mp / "kept").read_text() == "x"
    world.vfsd("umount", world.mp)


def test_files_of_the_daemon_are_private(world: World) -> None:
    world.vfsd("mount", world.mp)
    made = [p for top in ("state/vfsd", "run/vfsd") for p in (world.base / top).rglob("*")]
    assert len(made) > 5
    assert {
        p.name: oct(p.stat().st_mode) for p in made if p.stat().st_mode & 0o077 and p.parent.stat().st_mode & 0o077
    } == {}
    assert oct((world.run_dir / "vfsd/default.sock").stat().st_mode & 0o777) == "0o600"


def test_daemon_keeps_nothing_of_its_starter_open(world: World) -> None:
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "vfsd", "mount", str(world.mp)]
    subprocess.run(command, env=world.env, pass_fds=[write_end], stdout=subprocess.DEVNULL, timeout=SECONDS, check=True)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b""
    assert os.readlink(f"/proc/{world.status()['pid']}/cwd") == "/"


def test_umask_is_the_callers(world: World) -> None:
    place = world.directory("host")
    world.vfsd("mount", world.mp, "--route", f"/host/=local:{place}")
    subprocess.run(["sh", "-c", "umask 007; touch a host/a; mkdir d host/d"], cwd=world.mp, check=True)
    assert [oct((world.mp / n).stat().st_mode & 0o777) for n in ("a", "host/a", "d", "host/d")] == ["0o660"] * 2 + [
        "0o770"
    ] * 2


def test_threads_and_names_are_apart(world: World) -> None:
    world.vfsd("mount", "--thread", "t1", world.mp)
    (world.mp / "mine").touch()
    other = world.directory("other")
    world.vfsd("mount", "--name", "b", other)
    assert "mine" not in os.listdir(other)
    world.vfsd("umount", "default")
    world.vfsd("mount", "--thread", "t2", world.mp)
    assert "mine" not in os.listdir(world.mp)
    assert world.status()["thread"] == "t2"


def test_config_file_with_routes(world: World) -> None:
    place = world.directory("project")
    (place / "from-host").write_text("h")
    config = world.base / "vfsd.toml"
    config.write_text(
        'name = "cfg"\n[routes."/"]\nkind = "memory"\n[routes."/a/workspace/"]\nkind = "local"\nlocation = "project"\n'
    )
    world.vfsd("mount", "--config", config, world.mp)
    assert os.listdir(world.mp) == ["a"]
    assert (world.mp / "a/workspace/from-host").read_text() == "h"
    (world.mp / "a/workspace/new").write_text("n")
    assert (place / "new").read_text() == "n"
    (world.mp / "forgotten").touch()
    world.vfsd("umount", "cfg")
    world.vfsd("mount", "--config", config, world.mp)
    assert os.listdir(world.mp) == ["a"]
    assert [r["kind"] for r in world.status("cfg")["routes"]][:2] == ["memory", "local"]


def test_read_only(world: World) -> None:
    world.vfsd("mount", world.mp)
    (world.mp / "f").write_text("x")
    world.vfsd("umount", "default")
    world.vfsd("mount", "--read-only", world.mp)
    assert (world.mp / "f").read_text() == "x"
    with pytest.raises(OSError, match="Read-only"):
        (world.mp / "g").touch()


@pytest.mark.parametrize("engine", ["native", "pyfuse3"])
def test_engines_by_name(world: World, engine: str) -> None:
    world.vfsd("mount", "--engine", engine, world.mp)
    (world.mp / "f").write_text("x")
    assert (world.mp / "f").read_text() == "x" and world.status()["engine"] == engine
    world.vfsd("umount", "default")
    assert world.mounts() == []


def test_foreground_ends_at_sigint(world: World) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "vfsd", "mount", "--foreground", str(world.mp)],
        env=world.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("mounted default on ")
        (world.mp / "f").touch()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0 and "unmounted" in said
    finally:
        process.kill()
        process.communicate()


def test_sigterm_unmounts_even_when_busy(world: World) -> None:
    world.vfsd("mount", world.mp)
    pid = world.status()["pid"]
    with (world.mp / "open").open("w") as held:
        held.write("kept")
        held.flush()
        os.kill(pid, signal.SIGTERM)
        world.wait(lambda: not Path(f"/proc/{pid}").exists())
        assert world.mounts() == []
        with pytest.raises(OSError, match="Transport endpoint"):
            os.fstat(held.fileno())
            os.pread(held.fileno(), 1, 0)
    world.vfsd("mount", world.mp)
    assert (world.mp / "open").read_text() == "kept"


# -- refusals at the start


def test_mountpoints_that_are_none(world: World) -> None:
    missing = world.base / "none"
    assert world.refused("mount", missing) == f"mountpoint {missing} does not exist: mkdir -p {missing}"
    file = world.base / "file"
    file.touch()
    assert world.refused("mount", file) == f"mountpoint {file} is not a directory"
    assert world.refused("mount", world.base) == f"mountpoint {world.base} is not empty: choose an empty directory"
    assert not (world.base / "state/vfsd").exists()


def test_a_runtime_directory_too_long_for_a_socket(world: World) -> None:
    world.env["XDG_RUNTIME_DIR"] = str(world.directory("x" * 100))
    said = world.refused("mount", world.mp)
    assert "default.sock is too long for a socket's path (at most 107 bytes): set XDG_RUNTIME_DIR" in said


def test_already_mounted_says_by_whom(world: World) -> None:
    world.vfsd("mount", world.mp)
    pid = world.status()["pid"]
    other = world.directory("other")
    link = world.base / "link"
    link.symlink_to(world.mp)
    for place in (world.mp, link):
        said = world.refused("mount", "--name", "b", place)
        assert said == f"{world.mp} is already mounted by 'default' (pid {pid}): vfsd umount default"
    said = world.refused("mount", other)
    assert said.startswith(f"'default' already runs on {world.mp} (pid {pid}): vfsd umount default")
    world.env["XDG_RUNTIME_DIR"] = str(world.directory("run2"))
    said = world.refused("mount", world.mp)
    assert said.startswith(f"{world.mp} is already mounted by another vfsd: ")
    world.env["XDG_RUNTIME_DIR"] = str(world.run_dir)


def test_second_daemon_on_a_volume(world: World) -> None:
    place = world.base / "volume"
    world.vfsd("mount", "--route", f"/=state:{place}", world.mp)
    pid = world.status()["pid"]
    said = world.refused("mount", "--name", "b", "--route", f"/=state:{place}", world.directory("other"))
    assert str(place) in said and f"pid {pid}" in said
    assert len(world.mounts()) == 1


def test_databases_that_cannot_be_used(world: World) -> None:
    world.vfsd("mount", world.mp)
    database = next((world.base / "state").rglob("tree.db"))
    world.vfsd("umount", "default")
    whole = database.read_bytes()
    with sqlite3.connect(database) as db:
        db.execute("PRAGMA user_version = 9999")
    db.close()
    said = world.refused("mount", world.mp)
    assert "format 9999" in said and str(database.parent) in said
    assert "9999" in world.vfsd("check", code=1).stdout
    database.write_bytes(b"garbage, not SQLite" + whole[19:])
    said = world.refused("mount", world.mp)
    assert "corrupt" in said and str(database.parent) in said
    world.vfsd("check", code=1)
    assert world.mounts() == [] and world.vfsd("status", "--json").stdout.strip() == "[]"


def test_unknown_key_in_config(world: World) -> None:
    config = world.base / "vfsd.toml"
    config.write_text('name = "x"\nsize = 3\n')
    assert world.refused("mount", "--config", config, world.mp).startswith(f"{config}:2: unknown key 'size'")


def test_locations_that_cannot_be_used(world: World) -> None:
    place, file = world.directory("host"), world.base / "file"
    file.touch()
    inside = world.directory("host/inside")

    def refused(location: Path, mountpoint: Path) -> str:
        return world.refused("mount", "--name", "b", "--route", f"/w/=local:{location}", mountpoint)

    missing = world.base / "none"
    assert refused(missing, inside) == f"route /w/: location {missing} does not exist: mkdir -p {missing}"
    assert refused(file, inside) == f"route /w/: location {file} is not a directory"
    assert refused(place, inside) == f"route /w/: the mountpoint {inside} is inside its location {place}"
    assert refused(world.mp, world.mp) == f"route /w/: location {world.mp} is inside the mountpoint {world.mp}"
    world.vfsd("mount", world.mp)
    deep = world.mp / "memories"
    assert refused(deep, inside) == f"route /w/: location {deep} is inside another vfsd mount, {world.mp}"
    said = world.refused("mount", "--name", "b", "--route", f"/=state:{world.mp}/v", inside)
    assert said == f"route /: location {world.mp}/v is inside another vfsd mount, {world.mp}"


def test_a_local_route_that_may_not_be_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    place = world.directory("host")
    spec = parse_route(f"/w/=local:{place}")
    check_places([spec], str(world.mp))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(MountpointError, match=f"route /w/: location {place} is not readable for you: choose another"):
        check_places([spec], str(world.mp))


def test_a_route_that_does_not_work_says_why_in_words(world: World) -> None:
    place = world.directory("host")
    said = world.vfsd("mount", "--route", f"/w/=store:sqlite:{place}", world.mp).stderr
    assert said == f"vfsd: route /w/ (store sqlite:{place}) does not work: {place}: Is a directory\n"


def test_routes_and_rules_that_are_not_there(world: World) -> None:
    world.vfsd("mount", world.mp)
    assert world.refused("route", "remove", "/none") == "there is no route /none/: see vfsd route list"
    assert world.refused("route", "remove", "/") == "the route / can't go: the tree begins there"
    with agenttools.Client(socket=world.run_dir / "vfsd/default.sock") as client:
        assert str(agenttools.delete(client, "/").error).endswith(": it is the root of the tree")
        assert "a route begins there" in str(agenttools.delete(client, "/memories").error)
    said = world.vfsd("route", "add", "/.vfsd=memory", code=2).stderr
    assert said == "vfsd: route prefix '/.vfsd': /.vfsd is vfsd's own: choose another\n"
    assert world.vfsd("rules", "list").stdout == "no rules: everything is allowed\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_full_disk_at_the_start(world: World) -> None:
    small = world.directory("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)], check=True)
    said = world.refused("mount", "--route", f"/=state:{small}/v", world.mp)
    assert str(small) in said and ("full" in said or "No space left" in said)
    subprocess.run(["umount", str(small)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="hides /dev in a mount namespace")
def test_no_fuse_device(world: World) -> None:
    command = f"mount -t tmpfs none /dev && exec {sys.executable} -m vfsd mount {world.mp}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        env=world.env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 1 and done.stderr.startswith("vfsd: /dev/fuse is missing: ")
    assert len(done.stderr.splitlines()) == 1


# -- status, check, run


def test_status_of_nothing(world: World) -> None:
    assert world.vfsd("status").stdout == "no mounts\n"
    assert world.refused("status", "x") == "no mount is called 'x': see vfsd status"
    (world.run_dir / "vfsd").mkdir(mode=0o700, exist_ok=True)
    for content in ("", "[]", '{"name": "other"}', "\0"):
        (world.run_dir / "vfsd/junk.json").write_text(content)
        assert world.vfsd("status", "--json").stdout.strip() == "[]"


def test_status_of_a_daemon_that_hangs(world: World) -> None:
    world.vfsd("mount", world.mp)
    pid = world.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        row = world.status()
        assert row["state"] == "stopped" and time.monotonic() - begin < 30
    finally:
        os.kill(pid, signal.SIGCONT)


def test_stale_socket_is_replaced(world: World) -> None:
    (world.run_dir / "vfsd").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(world.run_dir / "vfsd/default.sock"))
    world.vfsd("mount", world.mp)
    assert world.status()["state"] == "running"


def test_check(world: World) -> None:
    assert "nothing is stored" in world.refused("check")
    world.vfsd("mount", world.mp, "--route", "/extra/=state")
    (world.mp / "f").write_text("x" * 10000)
    assert [line.rpartition(": ")[2] for line in world.vfsd("check").stdout.splitlines()] == ["clean", "clean"]
    world.vfsd("umount", "default")
    database = world.base / "state/vfsd/default/threads/default/root/tree.db"
    db = sqlite3.connect(database, isolation_level=None)
    db.execute("UPDATE node SET nlink = nlink + 7 WHERE id = (SELECT max(id) FROM node)")
    db.close()
    found = world.vfsd("check", code=1).stdout
    assert f"{database.parent}: 1 problems" in found and "nlink" in found
    assert world.vfsd("check", "--location", database.parent.parent / "routes/extra").stdout.endswith("clean\n")


def test_run(world: World) -> None:
    assert "start it with vfsd mount" in world.refused("run", "--", "true")
    world.vfsd("mount", world.mp)
    done = world.vfsd("run", "--", "sh", "-c", "echo hi > /made; pwd; exit 7", code=7)
    assert (world.mp / "made").read_text() == "hi\n"
    assert done.stdout == "/\n"


def test_usage(world: World) -> None:
    for args in ([], ["frobnicate"], ["mount"], ["umount", "--lazy", "--force", "x"], ["mount", "--engine", "x", "y"]):
        assert world.vfsd(*args, code=2).stderr.startswith("usage: vfsd")
    assert world.vfsd("--version").stdout.startswith("vfsd ")


def test_a_word_too_many_is_one_sentence(world: World) -> None:
    said = world.vfsd("status", "a", "b", "c", code=2).stderr
    assert said == "vfsd: 'b' is one word too many: see vfsd COMMAND --help\n"
    said = world.vfsd("route", "list", "--no", code=2).stderr
    assert said == "vfsd: there is no option '--no': see vfsd COMMAND --help\n"


def test_relative_base_directories_are_ignored(world: World) -> None:
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        world.env[variable] = "here"
    world.env["TMPDIR"] = str(world.base)
    done = world.vfsd("check", "nobody-has-this-name", cwd=world.base, code=None)
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        assert f"vfsd: {variable} is ignored: 'here' is not an absolute path\n" in done.stderr
        world.env[variable] = str(world.base / ("state" if "STATE" in variable else "run"))
    assert not (world.base / "here").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_a_runtime_directory_that_cannot_be_used_is_named(world: World) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", str(world.run_dir)], check=True)
    try:
        assert world.refused("mount", world.mp) == (
            f"the directory of sockets {world.run_dir}/vfsd ($XDG_RUNTIME_DIR chooses it) can't be used: "
            "Read-only file system"
        )
        options = "remount,rw,mode=700,size=4k,nr_inodes=3"
        subprocess.run(["mount", "-o", options, str(world.run_dir)], check=True)
        assert str(world.run_dir) in world.refused("mount", world.mp)
    finally:
        subprocess.run(["umount", "-l", str(world.run_dir)], check=True)


def test_closed_output(world: World) -> None:
    for command, code in (("status >&-", 0), ("umount nobody >&- 2>&-", 1)):
        done = subprocess.run(
            ["sh", "-c", f"exec {sys.executable} -m vfsd {command}"], env=world.env, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_wrong_values_are_wrong_usage(world: World) -> None:
    for args in (
        ["mount", "--route", "banana", "x"],
        ["mount", "--route", "/x/=banana", "x"],
        ["mount", "--set", "banana", "x"],
        ["mount", "--name", "a/b", "x"],
        ["log", "--name", "b c"],
        ["route", "add", "banana"],
    ):
        said = world.vfsd(*args, code=2).stderr
        assert said.startswith("vfsd: ") and said.count("\n") == 1, said


def test_every_command_says_what_it_and_its_arguments_are() -> None:
    """All of ``--help``, down to the actions of commands."""
    todo, seen = [_parser()], 0
    while todo:
        parser = todo.pop()
        seen += 1
        assert parser.description, parser.prog
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()
            else:
                assert action.help, (parser.prog, action.dest)
    assert seen > 20


def test_an_export_into_a_pipe_that_closes_is_quiet(world: World) -> None:
    world.vfsd("mount", world.mp)
    for number in range(300):
        (world.mp / f"file{number}").write_text("x" * 5000)
    command = f"{sys.executable} -m vfsd export 2>{world.base}/said | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=world.env, capture_output=True, text=True, timeout=30, check=True
    )
    assert (done.stdout, (world.base / "said").read_text()) == ("1\n", "")


def test_an_export_to_what_is_no_file_leaves_it_what_it_is(world: World) -> None:
    """Were it replaced, root would have a file as /dev/null after an export to that."""
    os.mkfifo(world.base / "fifo")
    world.vfsd("mount", world.mp)
    with subprocess.Popen(["timeout", "20", "cat", world.base / "fifo"], stdout=subprocess.PIPE) as reader:
        world.vfsd("export", world.base / "fifo")
        assert b"ustar" in reader.communicate()[0] and reader.returncode == 0
    assert (world.base / "fifo").is_fifo()


@pytest.mark.parametrize("mounted", [True, False])
def test_an_import_that_cannot_be_done(world: World, mounted: bool) -> None:
    world.vfsd("mount", world.mp)
    (world.mp / "file").write_text("x" * 5000)
    whole, cut, empty = (world.base / name for name in ("whole.tar", "cut.tar", "empty.tar"))
    world.vfsd("export", whole)
    cut.write_bytes(whole.read_bytes()[:3000])
    empty.touch()
    if not mounted:
        world.vfsd("umount", "default")
    for file in (cut, empty):
        assert world.refused("import", file).startswith(f"{file}: not a tar archive that can be read: ")
    assert world.refused("import") == "standard input: not a tar archive that can be read: empty file"
    assert "ot a directory" in world.refused("import", whole, "--into", "/file/x")
    assert world.refused("import", world.base) == f"{world.base}: Is a directory"


def test_an_export_that_cannot_be_written(world: World) -> None:
    world.vfsd("mount", world.mp)
    assert world.refused("export", world.base) == f"{world.base} is a directory: name the archive in it"
    assert world.refused("export", world.base / "no/x.tar") == f"{world.base}/no/x.tar: No such file or directory"


def test_a_thread_that_is_not_the_mounted_one(world: World) -> None:
    """What is asked of one thread is never done with another that happens to be mounted."""
    other, archive = world.directory("other"), world.base / "x.tar"
    for thread in ("t2", "t1"):
        world.vfsd("mount", "--thread", thread, world.mp)
        (world.mp / thread).touch()
        if thread == "t2":
            world.vfsd("umount", "default")
    for words in (["export", archive], ["gc"], ["check"]):
        assert world.refused(*words, "--thread", "t3").startswith("nothing is stored for 'default', thread 't3'")
    for words, found in (([], "t1"), (["--thread", "t1"], "t1"), (["--thread", "t2"], "t2")):
        world.vfsd("export", archive, *words)
        with tarfile.open(archive) as tar:
            assert [name.strip("./") for name in tar.getnames() if name.strip("./").startswith("t")] == [found]
        assert f"/threads/{found}/" in world.vfsd("check", *words).stdout
    world.vfsd("import", archive, "--into", "/in", "--thread", "t3")
    assert not (world.mp / "in").exists()
    world.vfsd("mount", "--name", "b", "--route", f"/={state_of_thread(world, 't3')}", other)
    assert (other / "in/t2").exists()


def state_of_thread(world: World, thread: str) -> str:
    return f"state:{world.base}/state/vfsd/default/threads/{thread}/root"
