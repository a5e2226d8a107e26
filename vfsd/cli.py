"""The command ``vfsd``: argparse, one function a command, errors as one sentence and an exit code.

Exit codes: 0 done, 1 not done (a sentence on standard error says why), 2 wrong usage. The work is in the modules the
commands call; the ones that only ``mount`` needs are imported there.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vfsd import __version__, config
from vfsd.commands import archive as commands_archive
from vfsd.commands import audit as commands_audit
from vfsd.commands import checkpoint as commands_checkpoint
from vfsd.commands import control as commands_control
from vfsd.commands import routes as commands_routes
from vfsd.commands import rules as commands_rules
from vfsd.commands import service as commands_service
from vfsd.commands.output import say, size_text, tell
from vfsd.commands.parsing import add_mount, add_thread, command, settle_mount, surplus_word
from vfsd.doors.engines import abort, unmount
from vfsd.doors.rpc import ignored_variables
from vfsd.executeconfig import PROFILES
from vfsd.process import mountpoint, registry
from vfsd.process.control import Failure, find, go_on, log_of, state_of, thread_of

UMOUNT_SECONDS = 60.0
"""How long ``umount`` waits for the last bytes to be written."""

SAY_SECONDS = 2.0
"""After which it says what it waits for."""

BUSY_SECONDS = 0.5
"""How long ``umount`` tries again when it can't see who keeps the mount busy."""

SOCKET_PATH_MAX = 107
"""Bytes of a socket's path (unix(7): sun_path has 108, one of them the NUL)."""

FORCE_SECONDS = 5.0
"""How long ``umount --force`` lets the daemon try by itself."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    # Closed by who called us (>&-): what is said then goes nowhere, and not into the next file that is opened.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    args, surplus = _parser().parse_known_args(argv)
    if surplus:
        say(f"{surplus_word(surplus)}: see vfsd COMMAND --help")
        return 2
    try:
        if args.system:
            _as_system()
        for sentence in ignored_variables("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
            say(sentence)
        settle_mount(args)
        _check_words(args)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except config.UsageError as exc:
        say(str(exc))
        return 2
    except (Failure, config.ConfigError, mountpoint.MountpointError) as exc:
        say(str(exc))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        say(f"{where}{exc.strerror or exc}")
    except KeyboardInterrupt:
        return 130
    return 1


def _as_system() -> None:
    """The directories of root's services, whatever those of the person at the terminal are."""
    if os.geteuid() != 0:
        raise config.UsageError("--system is for root: the mounts that root's services made")
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.environ |= {"XDG_STATE_HOME": "/var/lib", "XDG_CONFIG_HOME": "/etc"}


def _check_words(args: argparse.Namespace) -> None:
    """UsageError for a name or thread that can't be one."""
    for what in ("name", "thread"):
        value = getattr(args, what, None)
        if value is None or (what == "name" and args.run is _umount):  # which looks there for what is mounted
            continue
        try:
            config.check_word(f"--{what}", value)
        except config.ConfigError as exc:
            raise config.UsageError(str(exc)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vfsd", description="One file tree with two doors: a mount and a socket.")
    parser.add_argument("--version", action="version", version=f"vfsd {__version__}")
    parser.add_argument(
        "--system",
        action="store_true",
        help="root's services: /etc/vfsd, /var/lib/vfsd and /run/vfsd, not the user's own",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    p = command(commands, "mount", "mount a tree on a directory; returns when it answers")
    p.add_argument("mountpoint", metavar="MOUNTPOINT", help="an empty directory")
    p.add_argument("--foreground", action="store_true", help="stay here, log to standard error")
    p.add_argument("--config", type=Path, metavar="FILE", help="a vfsd.toml")
    p.add_argument("--name", help="the mount's name, also its socket's (default: default)")
    p.add_argument("--thread", help="whose state it is (default: default)")
    p.add_argument(
        "--route", action="append", default=[], metavar="PREFIX=KIND[:LOCATION][#NAMESPACE]",
        help=f"kind is one of {', '.join(config.KINDS)}; repeatable",
    )  # fmt: skip
    p.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="values",
        help="what {NAME} in the namespace of a store stands for; repeatable",
    )  # fmt: skip
    p.add_argument("--engine", choices=config.ENGINES, help="what speaks to the kernel (default: auto)")
    p.add_argument("--read-only", action="store_true", default=None, help="refuse every change, by either door")
    p.add_argument("--allow-other", action="store_true", default=None, help="let other users into the mount")
    p.add_argument("--root-squash", action="store_true", default=None, help="root is nobody here, by either door")
    for what in ("uid", "gid"):
        p.add_argument(
            f"--map-{what}", action="append", metavar="HOST:TREE[:COUNT]",
            help=f"{what}s from HOST on are those from TREE on in the tree; all others are nobody's; repeatable",
        )  # fmt: skip
    p.add_argument("--log-level", choices=config.LOG_LEVELS, help="(default: info)")
    p.add_argument("--log-format", choices=config.LOG_FORMATS, help="(default: text)")
    p.set_defaults(run=_mount)

    p = command(commands, "umount", "write everything, unmount, end the daemon")
    add_mount(p, None, said="none", alone=True)
    how = p.add_mutually_exclusive_group()
    how.add_argument("--lazy", action="store_true", help="detach now, end when the last program has left")
    how.add_argument("--force", action="store_true", help="cut off the programs that still use it")
    p.set_defaults(run=_umount)

    p = command(commands, "status", "the running mounts")
    add_mount(p, None, said="all", alone=True)
    p.add_argument("--json", action="store_true", help="a list of objects, for programs")
    p.set_defaults(run=_status)

    p = command(commands, "run", "a command, or a shell, whose / is the tree")
    add_mount(p)
    p.add_argument("--view", choices=("auto", "root", "mount"), default="auto", help="what its / is (default: auto)")
    p.add_argument("--profile", choices=PROFILES, default="open", help="what it is kept from (default: nothing, open)")
    p.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="(default: your shell)")
    p.set_defaults(run=_run)

    commands_checkpoint.add(commands)
    commands_audit.add(commands)
    commands_rules.add(commands)
    commands_routes.add(commands)
    commands_archive.add(commands)
    commands_control.add(commands)
    commands_service.add(commands)
    commands_service.add_helper(commands).set_defaults(run=_mount_helper)

    p = command(commands, "check", "fsck: is what is stored consistent?")
    add_mount(p, alone=True)
    add_thread(p)
    p.add_argument("--location", type=Path, metavar="DIR", help="one state volume's directory")
    p.set_defaults(run=_check)

    p = command(commands, "doctor", "is FUSE usable here, and what to type if not")
    p.set_defaults(run=_doctor)
    commands_checkpoint.add_gc(commands)
    return parser


# -- mount


def _mount(args: argparse.Namespace) -> int:
    from vfsd.process import doctor, launch, supervisor

    base = config.load(args.config) if args.config else config.Config()
    wanted = config.complete(
        base,
        [config.parse_route(text) for text in args.route],
        dict(map(config.parse_set, args.values)),
        name=args.name,
        thread=args.thread,
        engine=args.engine,
        read_only=args.read_only,
        allow_other=args.allow_other,
        root_squash=args.root_squash,
        uid_map=args.map_uid,
        gid_map=args.map_gid,
        log_level=args.log_level,
        log_format=args.log_format,
    )
    path = mountpoint.resolve(args.mountpoint)
    _refuse_rivals(wanted.name, path)
    for message in mountpoint.prepare(path):
        say(message)
    mountpoint.check_places(wanted.routes, path)
    problem = doctor.fuse_problem(allow_other=wanted.allow_other)
    if problem is not None:
        raise Failure(problem)
    try:
        # A daemon in the background is no child of the manager's that it could watch.
        manager = supervisor.take(os.environ) if args.foreground else supervisor.Supervisor()
    except ValueError as exc:
        raise Failure(str(exc)) from None
    try:
        entry = launch.start(wanted, path, foreground=args.foreground, manager=manager)
    except launch.StartError as exc:
        raise Failure(str(exc)) from None
    if entry is not None:
        silence = mountpoint.answers(path)
        if silence is not None:
            raise Failure(f"{path} is mounted but does not answer ({silence.strerror}): see {log_of(entry)}")
        for route in entry["routes"]:
            if "problem" in route:
                say(f"route {route['prefix']} ({route['kind']} {route['location']}) does not work: {route['problem']}")
            if "notice" in route:
                say(f"route {route['prefix']} ({route['kind']} {route['location']}) is {route['notice']}")
        tell(f"mounted {entry['name']} on {path} (pid {entry['pid']}, socket {entry['socket']})")
    return 0


def _mount_helper(args: argparse.Namespace) -> int:
    # As root all is as for a service, so that it is the same at boot and from any terminal.
    system = ["--system"] if os.geteuid() == 0 else []
    if system:
        _as_system()
    words = [*system, *commands_service.mount_arguments(args)]
    if args.fake:
        return 0
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(sys.stdout if args.verbose else null):
        return main(words)


def _refuse_rivals(name: str, path: str) -> None:
    """Failure when ``name`` or ``path`` belongs to a running daemon; a dead one of that name is cleaned up."""
    socket = str(registry.socket_path(name))
    if len(os.fsencode(socket)) > SOCKET_PATH_MAX:
        raise Failure(
            f"{socket} is too long for a socket's path (at most {SOCKET_PATH_MAX} bytes): set XDG_RUNTIME_DIR to a "
            "shorter directory, or choose a shorter --name"
        )
    for entry in registry.entries():
        _end_killed(entry)
        if entry["alive"] and entry["mountpoint"] == path:
            raise Failure(
                f"{path} is already mounted by {entry['name']!r} (pid {entry['pid']}): vfsd umount {entry['name']}"
            )
        if entry["alive"] and entry["name"] == name:
            raise Failure(
                f"{name!r} already runs on {entry['mountpoint']} (pid {entry['pid']}): "
                f"vfsd umount {name}, or give this one another --name"
            )
        if not entry["alive"] and entry["name"] == name and entry["mountpoint"] != path:
            _clean_dead(entry)


# -- umount


def _umount(args: argparse.Namespace) -> int:
    if args.name is None:
        raise config.UsageError("which mount: vfsd umount NAME")
    entry = find(args.name)
    if entry is None:
        return _umount_unknown(args.name, lazy=args.lazy or args.force)
    _end_killed(entry)
    if not entry["alive"]:
        _clean_dead(entry)
        return 0
    path, name, pid = entry["mountpoint"], entry["name"], entry["pid"]
    if not registry.is_daemon(pid, name) and registry.holder(registry.lock_path(name)) is not None:
        raise Failure(f"{name!r} runs in a container, as pid {pid} there: end it there, or end the container")
    mount = mountpoint.mount_at(path)
    dev = mount.dev if mount is not None and mount.ours else None
    if not args.force and registry.stopped(pid):
        raise Failure(f"{name!r} (pid {pid}) is stopped: {path} is still mounted; {go_on(entry)}")
    # Typed in a shell that stands in the mount, this very command would keep it busy.
    os.chdir("/")
    if args.force or dev is None:
        # The daemon's own way out: it unmounts, and cuts off who is still there. Also where the mount can't be seen.
        os.kill(pid, signal.SIGTERM)
        if args.force and not registry.wait_gone(name, FORCE_SECONDS):
            # It hangs. What it acknowledged is safe from a kill, and a cut connection lets its callers go.
            with contextlib.suppress(OSError):
                abort(path)
            os.kill(pid, signal.SIGKILL)
            registry.wait_gone(name, FORCE_SECONDS)
            _forget_dead(entry)
            say(f"{name!r} (pid {pid}) did not end within {FORCE_SECONDS:.0f} s: killed; what it acknowledged is kept")
            return 0
    else:
        _umount_seen(path, lazy=args.lazy)
    if args.lazy:
        tell(f"detached {path}; {name!r} ends when the last program has left")
        return 0
    if not _wait_gone(entry, dev):
        if registry.stopped(pid):
            raise Failure(f"{path} is unmounted but {name!r} (pid {pid}) is stopped; {go_on(entry)}")
        raise Failure(f"{path} is unmounted but {name!r} (pid {pid}) has not ended: {_why_not_gone(path, dev)}")
    tell(f"unmounted {path}")
    return 0


def _wait_gone(entry: dict[str, Any], dev: str | None) -> bool:
    """Whether the daemon ended in time; what that takes is said when it takes more than a moment."""
    name, pid, path = entry["name"], entry["pid"], entry["mountpoint"]
    if registry.wait_gone(name, SAY_SECONDS, pid):
        return True
    if registry.stopped(pid):
        return False
    say(f"waiting up to {UMOUNT_SECONDS:.0f} s for {name!r} (pid {pid}) to end: {_why_not_gone(path, dev)}")
    return registry.wait_gone(name, UMOUNT_SECONDS - SAY_SECONDS, pid)


def _why_not_gone(path: str, dev: str | None) -> str:
    users = _holders(path, dev)
    return f"these still use it: {users}" if users else "it is still writing"


def _umount_seen(path: str, *, lazy: bool) -> None:
    """Unmount by the kernel, which alone knows whether the mount is busy; the daemon ends when it is gone."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return unmount(path, lazy=lazy)
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
        # Another mount namespace's copy keeps nobody from unmounting (systemd's services have them).
        users = _holders(path, None)
        inner = [mount.path for mount in mountpoint.mounts() if mount.path.startswith(path + "/")]
        if inner:
            users = ", ".join(filter(None, [users, *(f"{place} is mounted in it" for place in inner)]))
        if users or time.monotonic() > deadline:
            break
        # Nobody is seen: a program had a file open for a moment. (Or it is not ours to see.)
        time.sleep(0.02)
    if not users:
        users = "by programs that come and go" if os.geteuid() == 0 else "by programs that only root can see"
    raise Failure(f"{path} is busy: {users}; end them, or use --lazy or --force")


def _umount_unknown(target: str, *, lazy: bool) -> int:
    """Unmount what no entry tells of: a dead mount, or one of a daemon with another runtime directory."""
    path = mountpoint.resolve(target)
    mount = mountpoint.mount_at(path)
    if mount is None or not mount.ours:
        raise Failure(f"no vfsd mount is called {target!r} or is on {path}: see vfsd status")
    dead = mountpoint.answers(path) is not None
    unmount(path, lazy=lazy or dead)
    tell(f"unmounted {path}" + (" (its daemon was dead)" if dead else ""))
    return 0


def _end_killed(entry: dict[str, Any]) -> None:
    """Let a killed daemon end. Its thread for notifications may wait for a directory that a program holds while it
    waits for an answer of this very daemon; the kernel lets go of neither until the connection is cut."""
    if entry["alive"] and registry.killed(entry["pid"]):
        with contextlib.suppress(OSError):
            abort(entry["mountpoint"])
        entry["alive"] = not registry.wait_gone(entry["name"], FORCE_SECONDS)


def _clean_dead(entry: dict[str, Any]) -> None:
    """Detach what a dead daemon left mounted, forget it, and say so."""
    _forget_dead(entry)
    say(f"{entry['name']!r} (pid {entry['pid']}) had died without unmounting {entry['mountpoint']}: cleaned up")


def _forget_dead(entry: dict[str, Any]) -> None:
    path = entry["mountpoint"]
    mount = mountpoint.mount_at(path)
    if mount is not None and mount.ours and mountpoint.answers(path) is not None:
        unmount(path, lazy=True)
    registry.erase(entry["name"], passed=entry.get("activated", False))


def _holders(path: str, dev: str | None) -> str:
    found = mountpoint.holders(path, dev)
    shown = ", ".join(f"pid {h.pid} ({h.comm}, {h.what})" for h in found[:8])
    return shown + (f" and {len(found) - 8} more" if len(found) > 8 else "")


# -- status


def _status(args: argparse.Namespace) -> int:
    found = [state_of(entry) for entry in registry.entries() if args.name in (None, entry["name"])]
    if args.json:
        print(json.dumps(found, indent=1))
    for row in found if not args.json else []:
        tell(f"{row['name']}: {row['mountpoint']} {row['state']}" + (f": {row['fix']}" if "fix" in row else ""))
        tell(f"  pid {row['pid']}, thread {row['thread']}, engine {row['engine']}, up {row['uptime']:.0f} s")
        if "opens" in row:
            tell(f"  opens {row['opens']}")
        tell(f"  socket {row['socket']}")
        for what in ("log", "config"):
            if row.get(what):
                tell(f"  {what} {row[what]}")
        for route in (route for route in row["routes"] if route["kind"] != "system"):
            tell(f"  {route['prefix']} {route['kind']} {route['location'] or ''}".rstrip())
            if "problem" in route:
                tell(f"    does not work: {route['problem']}")
            if "notice" in route:
                tell(f"    {route['notice']}")
        if row["state"] == "running":
            _tell_numbers(row)
    if not found and args.name is not None:
        raise Failure(f"no mount is called {args.name!r}: see vfsd status")
    if not found and not args.json:
        print("no mounts")
    return 0


def _tell_numbers(row: dict[str, Any]) -> None:
    """The counters that a person wants; ``--json`` has all of them."""
    total = row["counters"]
    stored = [route["counters"] for route in row["routes"] if "nodes" in route.get("counters", {})]
    nodes, size = (sum(counters.get(key, 0) for counters in stored) for key in ("nodes", "bytes"))
    kept = f"{nodes} files and directories, {size_text(size)}"
    print(f"  {kept}; {total['open']} open, {total['checkpoints']} checkpoints")
    print(f"  since the mount: {total['observed']} looks, {total['mutated']} changes, by either door")
    if total["audit_lost"]:
        tell(f"  the audit log lacks {total['audit_lost']} lines that could not be written: see {row['log']}")
    if row["approvals"]:
        print(f"  waiting for a yes: {row['approvals']}; see vfsd approvals --name {row['name']}")


# -- check, doctor, run


def _check(args: argparse.Namespace) -> int:
    from vfsd.archive.atrest import volumes_of
    from vfsd.check import check_volume

    thread = thread_of(args.name, args.thread)
    places = [args.location] if args.location else [v.location for v in volumes_of(args.name, thread)]
    bad = 0
    for place in places:
        if not place.is_dir():
            raise Failure(f"{place} is not a directory")
        problems = check_volume(place)
        bad += bool(problems)
        print(f"{place}: {f'{len(problems)} problems' if problems else 'clean'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if bad else 0


def _doctor(args: argparse.Namespace) -> int:
    from vfsd.process import doctor

    findings = doctor.examine()
    for finding in findings:
        mark = "ok " if finding.ok else "BAD" if finding.fatal else "no "
        print(f"{mark} {finding.what}: {finding.says}")
        if finding.fix:
            print(f"      -> {finding.fix}")
    fatal = any(finding.fatal for finding in findings)
    print("FUSE is not usable here" if fatal else "FUSE is usable here")
    return 1 if fatal else 0


def _run(args: argparse.Namespace) -> int:
    entry = find(args.name)
    if entry is None or not entry["alive"]:
        raise Failure(f"no mount is called {args.name!r}: start it with vfsd mount --name {args.name} MOUNTPOINT")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    # A client like any other, in a program of its own: nothing of vfsd may import agenttools.
    enter = [sys.executable, "-m", "agenttools.enter", entry["socket"], args.view, args.profile]
    os.execv(sys.executable, [*enter, *command])
