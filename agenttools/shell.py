"""execute: run one shell command in the tree, where the caller is, and give back what it printed.

Owns the choice of the view and the ways to call (sync, async, on a terminal); the views are in ``views``, the
command's life is in ``command``. Must not know how a model is told (``tools`` words it).

Invariants: a call returns when the shell ends, whatever its background children do, and they live on. A call that
times out, is cancelled or raises, or whose caller is killed, leaves none of the command's processes. A command is
started at most once. Output is read in bounded memory. Safe from many threads at once. Needs Linux 5.3 (pidfd_open).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from errno import EACCES, ENOENT, ENOTDIR, EOPNOTSUPP
from typing import Any, TypeVar

from agenttools import confinement as confine
from agenttools.capture import Output
from agenttools.command import TIMED_OUT, Cancellation, Cancelled, Child, ExecuteResult, SetupFailed
from agenttools.command import run as run_command
from agenttools.confinement import Confinement, Profile
from agenttools.denials import denials
from agenttools.keeper import KeeperFailed
from agenttools.limits import Limits, LimitsUnavailable
from agenttools.views import (
    CALL,
    Launch,
    TreeClient,
    View,
    ViewUnavailable,
    absolute,
    check_choice,
    mount_view,
    mountpoint_of,
    need_bwrap,
    of_call,
    root_view,
    user_shell,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "MAX_OUTPUT",
    "TIMED_OUT",
    "Cancellation",
    "Cancelled",
    "ExecuteResult",
    "Limits",
    "Profile",
    "View",
    "ViewUnavailable",
    "aexecute",
    "execute",
    "run_interactive",
]

DEFAULT_TIMEOUT = 120.0
"""Seconds (as Deep Agents' LocalShellBackend)."""

MAX_OUTPUT = 100_000
"""Bytes of output in a result (as Deep Agents' LocalShellBackend)."""

MAX_COMMAND = 131_071
"""Bytes of a command: Linux's MAX_ARG_STRLEN less the NUL."""

RESULTS = "/large_tool_results"

_Result = TypeVar("_Result")

_root_view_works: bool = False
_root_view_fails: str = ""
"""Why the root view cannot be had: found out once in a process, so that ``auto`` does not change views midway."""


def execute(
    client: TreeClient,
    command: str,
    *,
    timeout: float | None = None,
    view: View = "auto",
    profile: Profile | None = None,
    limits: Limits | None = None,
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    call_id: str | None = None,
    max_output: int = MAX_OUTPUT,
    output_file: str | None = None,
    max_file: int | None = None,
    mountpoint: str | None = None,
    cancellation: Cancellation | None = None,
    on_output: Callable[[bytes], object] | None = None,
) -> ExecuteResult:
    """Run ``/bin/sh -c command`` in the tree with nothing on stdin, and wait for the shell to end.

    ``timeout`` in seconds, None for DEFAULT_TIMEOUT, 0 for none. ``profile``: what the command is kept from, open, tree
    or offline (``docs/security.md``), and ``limits``, which need a profile other than open; None for both: what the
    daemon's configuration says, else tree and no limits. ``view`` auto: root where it can be had, else mount if the
    profile is open; the others need root. ``cwd``: a tree path. ``env`` is added to the few variables that pass
    (``views.PASSED``, and what the daemon's configuration names). ``call_id`` names the file
    that keeps an output of more than ``max_output`` bytes, unless ``output_file``, a tree path, does; it gets at most
    ``max_file`` bytes (None: 1 GiB). ``mountpoint``: where the tree is mounted as the caller sees it, if not where the
    daemon says. ``on_output`` gets what is printed as it comes, in the thread that waits for the command.

    Raises ValueError for a timeout below 0, an unknown view or profile, limits with the profile open, a command that
    holds NUL or is longer than MAX_COMMAND; ViewUnavailable (an OSError) when the view, the profile or a limit cannot
    be had or the tree is not mounted here: nothing has run then; FileNotFoundError,
    NotADirectoryError or PermissionError for ``cwd``; ConnectionError without a daemon; Cancelled. Whatever the
    command itself does is a result.
    """
    limit = DEFAULT_TIMEOUT if timeout is None else timeout
    if not 0 <= limit < math.inf:
        raise ValueError(f"timeout must be a number of seconds, or 0 for none, not {timeout}")
    if "\0" in command:
        raise ValueError("a command cannot hold a NUL character")
    if len(os.fsencode(command)) > MAX_COMMAND:
        raise ValueError(f"the command is longer than {MAX_COMMAND} bytes; write it to a file and run that")
    call = secrets.token_hex(8)

    def run(launch: Launch) -> ExecuteResult:
        name = absolute(output_file or f"{RESULTS}/{_file_name(call_id or f'execute_{call}')}")
        output = Output(max_output, launch.mountpoint, name, max_file, on_output)
        with _told(client, command, call, of_call(call_id).get(CALL)):
            ran = run_command(launch, command, call, limit, output, name, cancellation)
        reasons = denials(client, call) if ran.exit_code else []
        return replace(ran, notices=(*ran.notices, *reasons)) if reasons else ran

    given = {**_configured(client), **(env or {}), **of_call(call_id)}
    return _in_view(client, view, profile, limits, cwd, given, call, mountpoint, run)


def _configured(client: TreeClient) -> dict[str, str]:
    """The variables that the daemon's configuration gives to commands, or lets pass from the caller."""
    settings = client.hello.get("execute") or {}
    passed = {name: os.environ[name] for name in settings.get("pass_env", ()) if name in os.environ}
    return {**passed, **settings.get("env", {})}


@contextlib.contextmanager
def _told(client: TreeClient, command: str, call: str, call_id: str | None) -> Iterator[None]:
    """Tell a daemon that wants to know when the command begins and ends: it may take a checkpoint before.

    Told when the view is made, so that what the view needs in the tree does not count as the command's.
    """
    if not client.hello.get("executes"):
        yield
        return
    tags = {"call": call, "tool": "execute"} | ({} if call_id is None else {"call_id": call_id})
    client.call("execute_begin", command=os.fsencode(command), **tags)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the command has run, whatever has become of the daemon
            client.call("execute_end", **tags)


async def aexecute(client: TreeClient, command: str, **options: Any) -> ExecuteResult:
    """``execute`` for asyncio and trio, in a thread of its own. Cancelling it ends the command's processes first."""
    cancellation = Cancellation()
    outcome: list[ExecuteResult | BaseException] = []
    done, post, shield = _event()

    def work() -> None:
        try:
            outcome.append(execute(client, command, cancellation=cancellation, **options))
        except BaseException as error:  # raised again in the caller's task
            outcome.append(error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed under us
            post(done.set)

    threading.Thread(target=work, name="execute", daemon=True).start()
    try:
        await done.wait()
    except GeneratorExit:
        cancellation.cancel()
        raise
    except BaseException:
        cancellation.cancel()
        with shield:
            await done.wait()
        raise
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _event() -> tuple[Any, Callable[[Callable[[], object]], object], contextlib.AbstractContextManager[Any]]:
    """An event of the running loop, how to call something on that loop, and what shields a wait from cancellation."""
    trio = sys.modules.get("trio")
    if trio is not None:
        with contextlib.suppress(RuntimeError):  # trio is loaded, but this is not one of its tasks
            token = trio.lowlevel.current_trio_token()
            return trio.Event(), token.run_sync_soon, trio.CancelScope(shield=True)
    import asyncio  # here, since it takes longer to import than all of agenttools

    # A scope of anyio's that was cancelled cancels every further wait in it too, unless that is shielded.
    anyio = sys.modules.get("anyio")
    shield = contextlib.nullcontext() if anyio is None else anyio.CancelScope(shield=True)
    return asyncio.Event(), asyncio.get_running_loop().call_soon_threadsafe, shield


def run_interactive(
    client: TreeClient,
    argv: Sequence[str] = (),
    *,
    view: View = "auto",
    profile: Profile | None = "open",
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    mountpoint: str | None = None,
    remark: Callable[[str], object] | None = None,
) -> int:
    """Run a program, or the user's shell, in the tree on the caller's own terminal; return its exit code.

    There is no time limit, and ^C goes to the program. 126 or 127: it could not be started. ``profile``: a person who
    sits at the terminal has their own rights unless they say otherwise. ``remark`` is told, before it begins, that the
    view ``auto`` could not be the root view, and why. Raises what ``execute`` raises for the view,
    the profile and ``cwd``.
    """
    if not stat.S_ISDIR(client.call("stat", path=os.fsencode(absolute(cwd)))["attr"]["mode"]):
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), cwd)

    def run(launch: Launch) -> int:
        if launch.notice and remark is not None:
            remark(f"runs{launch.notice.removeprefix('Ran')}")
        return _run_interactive(launch, tuple(argv) or (user_shell(),))

    given = {**_configured(client), **(env or {})}
    return _in_view(client, view, profile, None, cwd, given, secrets.token_hex(8), mountpoint, run)


# ---------------------------------------------------------------------- the view


def _in_view(
    client: TreeClient,
    view: View,
    profile: str | None,
    limits: Limits | None,
    cwd: str,
    env: Mapping[str, str],
    call: str,
    mountpoint: str | None,
    run: Callable[[Launch], _Result],
) -> _Result:
    """``run`` in the view asked for. That bubblewrap can do its work here is learnt from the first command itself: when
    it fails, the command has not been started, and can be started in the mount view, if it need not be confined."""
    global _root_view_fails, _root_view_works
    check_choice(view, profile)
    settings = client.hello.get("execute") or {}
    chosen = confine.choose(profile, settings)
    place = mountpoint_of(client, mountpoint)
    if chosen != "open":
        wanted = Limits.of(settings.get("limits", {})) if limits is None else limits
        return _confined(client, view, chosen, wanted, place, cwd, env, call, run)
    if limits:
        raise ValueError("limits need a profile that confines: tree or offline")
    if place != "/" and (view == "root" or (view == "auto" and not _root_view_fails)):
        try:
            result = run(root_view(client, place, cwd, env, call))
            _root_view_works = True
            return result
        except ViewUnavailable as error:  # no bubblewrap
            if view == "root":
                raise
            _root_view_fails = str(error.strerror)
        except SetupFailed as error:
            said = str(error)
            if "Can't chdir" in said:
                raise _no_directory(said, cwd) from None
            if view == "root" or _root_view_works:
                raise ViewUnavailable(EOPNOTSUPP, f"the root view cannot be made here: {said}") from None
            _root_view_fails = said
    return run(mount_view(place, cwd, env, call, _root_view_fails if view == "auto" and place != "/" else ""))


def _confined(
    client: TreeClient,
    view: View,
    profile: Profile,
    limits: Limits,
    place: str,
    cwd: str,
    env: Mapping[str, str],
    call: str,
    run: Callable[[Launch], _Result],
) -> _Result:
    """``run`` confined, or not at all."""
    if view == "mount":
        raise _refused(profile, "the view 'mount' has no namespaces to confine a command in")
    if place == "/":
        raise _refused(profile, "the tree is the root of this container, and all that is mounted in it would be shown")
    try:
        try:
            return run(_prepared(client, profile, limits, place, cwd, env, call))
        except SetupFailed as error:
            if "--pidns" not in str(error):
                raise
            time.sleep(0.05)  # the keeper was about to end
            return run(_prepared(client, profile, limits, place, cwd, env, call))
    except SetupFailed as error:
        if "Can't chdir" in str(error):
            raise _no_directory(str(error), cwd) from None
        raise _refused(profile, str(error)) from None
    except (ViewUnavailable, KeeperFailed) as error:
        raise _refused(profile, str(error.strerror)) from None
    except LimitsUnavailable as error:
        raise ViewUnavailable(EOPNOTSUPP, str(error.strerror)) from None


def _prepared(
    client: TreeClient, profile: Profile, limits: Limits, place: str, cwd: str, env: Mapping[str, str], call: str
) -> Launch:
    confinement: Confinement = confine.prepare(need_bwrap(), profile, limits, place)
    return root_view(client, place, cwd, env, call, confinement)


def _refused(profile: Profile, why: str) -> ViewUnavailable:
    return ViewUnavailable(
        EOPNOTSUPP,
        f"nothing was run, since a command cannot be confined by the profile '{profile}' here: {why}. `vfsd doctor` "
        "says what this machine lacks. To run commands with your own rights, choose the profile 'open' "
        '(profile = "open" below [execute] in vfsd.toml)',
    )


def _no_directory(said: str, cwd: str) -> OSError:
    code = next((code for code in (ENOTDIR, EACCES) if os.strerror(code) in said), ENOENT)
    return OSError(code, os.strerror(code), cwd)


# ---------------------------------------------------------------------- on a terminal

_STARTER = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""
"""^C goes to all of the terminal's foreground group: bubblewrap must ignore it, and what is ignored stays so in the
program it starts, unless something in between undoes that (a shell may not: POSIX, trap)."""


def _run_interactive(launch: Launch, argv: Sequence[str]) -> int:
    main = threading.current_thread() is threading.main_thread()
    held = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT) if main}
    try:
        child = Child(launch, (sys.executable, "-ISc", _STARTER, *argv), ())
        try:
            with child.passing_on(signal.SIGTERM, signal.SIGHUP) if main else contextlib.nullcontext():
                return child.exit_code()
        except SetupFailed:
            raise SetupFailed("bubblewrap failed; what it said is above") from None
        finally:
            child.close()
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


def _file_name(call_id: str) -> str:
    """The name Deep Agents gives to the file of a tool call's large result, so that one call has one file."""
    name = re.sub(r"[./\\\0]", "_", call_id)
    if len(os.fsencode(name)) <= 128:
        return name
    import hashlib  # here, since few calls need it

    return f"call-{hashlib.sha256(os.fsencode(call_id)).hexdigest()}"
