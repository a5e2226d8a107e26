"""From a command to a daemon: the process, its log, and one sentence back when it could not start.

Owns fork, session and log file. The daemon itself is ``vfsd.daemon``; it is imported only in the process that
serves.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vfsd.backends.base import VolumeError
from vfsd.config import Config, ConfigError, mount_home
from vfsd.process import logs
from vfsd.process.guard import Guard
from vfsd.process.mountpoint import MountpointError
from vfsd.process.registry import Held
from vfsd.process.supervisor import Supervisor

LOG_BYTES = 8 << 20
"""Size at which the log file is put aside; one older file is kept."""

Ready = Callable[[dict[str, Any]], None]


class StartError(Exception):
    """The daemon did not start; the message is the whole sentence for the user."""


def start(config: Config, mountpoint: str, *, foreground: bool, manager: Supervisor) -> dict[str, Any] | None:
    """Serve ``config`` on ``mountpoint``. In the foreground, perhaps for ``manager``: returns None after the unmount.

    Otherwise returns what the daemon recorded about itself once its mount answers, while it goes on in a process and
    session of its own. Raises StartError with one sentence.
    """
    if foreground:
        _log_to(logging.StreamHandler(), config)
        reason = _serve(config, mountpoint, _announce, manager)
        if reason is not None:
            raise StartError(reason)
        return None
    log = log_file(config)
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _become_daemon(config, mountpoint, log, write_end)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    if not answer:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        raise StartError(f"the daemon ended at its start (status {status}): see {log}")
    reply: dict[str, Any] = json.loads(answer)
    if "error" in reply:
        os.waitpid(pid, 0)
        raise StartError(reply["error"])
    return reply


def log_file(config: Config) -> Path:
    """The log of this mount; its directory is made."""
    home = mount_home(config)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home / "vfsd.log"


def _announce(entry: dict[str, Any]) -> None:
    print(
        f"mounted {entry['name']} on {entry['mountpoint']} (pid {entry['pid']}, socket {entry['socket']})", flush=True
    )


def _become_daemon(config: Config, mountpoint: str, log: Path, pipe: int) -> None:
    """The child's whole life; does not return, and tells the parent exactly once how its start went."""
    told = False

    def tell(message: dict[str, Any]) -> None:
        nonlocal told
        if not told:
            told = True
            os.write(pipe, json.dumps(message).encode())
            os.close(pipe)

    status = 1
    try:
        os.setsid()
        os.chdir("/")
        # What the caller happened to have open must not stay open as long as the mount: a reader of it would wait.
        os.closerange(3, pipe)
        os.closerange(pipe + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        # Owner only, and before the handler makes it: paths of the tree are in it.
        stream = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        handler = logging.handlers.RotatingFileHandler(
            log, maxBytes=LOG_BYTES, backupCount=1, errors="backslashreplace"
        )
        _log_to(handler, config)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        # What a dying interpreter or a C library prints belongs in the log too.
        os.dup2(stream, 2)
        os.close(null)
        os.close(stream)
        reason = _serve(config, mountpoint, tell, Supervisor(), log)
        if reason is None:
            status = 0
        else:
            tell({"error": reason})
    except BaseException as exc:
        traceback.print_exc()
        tell({"error": f"internal error at the daemon's start ({exc!r}): see {log}"})
    finally:
        logging.shutdown()
        os._exit(status)


def _log_to(handler: logging.Handler, config: Config) -> None:
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(config.log_level.upper())
    logs.use(config.log_format)


def _allow_many_descriptors() -> None:
    """A local route holds a descriptor for each file that any program has open, so the limit of one is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = int(Path("/proc/sys/fs/nr_open").read_text())
    for limit in (most, hard):
        if soft < limit:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, max(limit, hard)))
                return
            except (ValueError, PermissionError):  # only root may go past the hard limit
                continue


def _serve(config: Config, mountpoint: str, ready: Ready, manager: Supervisor, log: Path | None = None) -> str | None:
    """Run the daemon to its end; None when it ended in order, else the sentence that says why it did not."""
    guard = Guard()
    from vfsd.daemon import Daemon

    def mounted(entry: dict[str, Any]) -> None:
        guard.arm(mountpoint)
        ready(entry)

    _allow_many_descriptors()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # Ignored, as some programs leave it to theirs, a child's pid would be another process's before we know of its end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    logs.dump_on_signal()
    try:
        Daemon(config, mountpoint, manager, log).run(mounted)
    except BaseException as exc:
        cause = first_cause(exc)
        sentence = sentence_of(cause)
        if sentence is None:
            logging.getLogger(__name__).critical("the daemon failed", exc_info=exc)
            return f"internal error ({cause!r}): see the log"
        logging.getLogger(__name__).error("%s", sentence)
        return sentence
    finally:
        guard.end()
    return None


def first_cause(exc: BaseException) -> BaseException:
    """The first plain exception in (nested) exception groups, which trio's nurseries raise."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


def sentence_of(exc: BaseException) -> str | None:
    """The one sentence for an error that a user can mend, None for a fault of ours."""
    if isinstance(exc, (ConfigError, VolumeError, MountpointError, StartError)):
        return str(exc)
    if isinstance(exc, Held):
        return f"in use by another vfsd (pid {exc.pid})"
    if isinstance(exc, OSError) and exc.strerror:
        where = f"{os.fsdecode(exc.filename)}: " if isinstance(exc.filename, (str, bytes)) else ""
        return f"{where}{exc.strerror}"
    return None
