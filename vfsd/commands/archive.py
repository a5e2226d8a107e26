"""The commands ``vfsd export`` and ``vfsd import``: a tree to a tar archive and back.

Owns which tree is meant, the files on this side, and the progress bar. A mounted tree is asked through its daemon, its
state routes as of one checkpoint that is dropped afterwards; one that is not mounted is opened by this process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, BinaryIO

from vfsd.archive.archive import Export, Import, Part
from vfsd.archive.atrest import Tree, Volume, volumes_of, with_tree
from vfsd.backends.base import VolumeError
from vfsd.commands.output import say
from vfsd.commands.parsing import add_mount, add_thread, command
from vfsd.config import thread_home
from vfsd.process.control import Control, Failure, running, thread_of

_WIDTH = 30
_EVERY = 0.1
"""Characters of the bar, and seconds between two of its states."""


def add(commands: Any) -> None:
    """Put the commands into the parser's ``commands``."""
    p = command(commands, "export", "the tree as a tar archive")
    p.add_argument("file", metavar="FILE", nargs="?", default="-", help="(default: standard output)")
    _common(p, _export)
    p = command(commands, "import", "put the files of a tar archive into the tree")
    p.add_argument("file", metavar="FILE", nargs="?", default="-", help="plain or compressed (default: standard input)")
    p.add_argument("--into", default="/", metavar="PATH", help="a directory of the tree (default: /)")
    _common(p, _import)


def _common(p: argparse.ArgumentParser, run: Any) -> None:
    add_mount(p)
    add_thread(p)
    p.add_argument("--location", type=Path, metavar="DIR", help="one state volume's directory, not mounted")
    p.set_defaults(run=run)


class Progress:
    """A bar on standard error when that is a terminal; ``total`` of what is counted, 0 for unknown."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.done = 0
        self.files = self.bytes = 0
        self._shown = 0.0
        self._began = time.monotonic()
        self._bar = sys.stderr.isatty()
        self.warnings = 0

    def step(self, files: int, size: int) -> None:
        """So many files and bytes more."""
        self.files += files
        self.bytes += size
        now = time.monotonic()
        if self._bar and now - self._shown >= _EVERY:
            self._shown = now
            self._show(self.done if self.done else self.files)

    def _show(self, done: int) -> None:
        share = ""
        if self.total:
            part = min(1.0, done / self.total)
            filled = int(part * _WIDTH)
            share = f"[{'#' * filled}{'-' * (_WIDTH - filled)}] {part:4.0%}  "
        rate = self.bytes / max(1e-3, time.monotonic() - self._began) / 2**20
        text = f"\r{share}{self.files} files  {self.bytes / 2**20:.1f} MiB  {rate:.1f} MiB/s"
        sys.stderr.write(text + "\033[K")
        sys.stderr.flush()

    def warn(self, sentence: str) -> None:
        """Tell of a file that was passed over."""
        self.warnings += 1
        self.note(sentence)

    def note(self, sentence: str) -> None:
        """Tell of something else."""
        if self._bar:
            sys.stderr.write("\r\033[K")
        say(sentence)

    def end(self) -> int:
        """The last state of the bar; the exit code."""
        if self._bar:
            self._show(self.total or self.files)
            sys.stderr.write("\n")
        return 1 if self.warnings else 0


def _volumes(args: argparse.Namespace) -> list[Volume]:
    if args.location:
        return [Volume("/", args.location)]
    return volumes_of(args.name, thread_of(args.name, args.thread))


# -- export


def _export(args: argparse.Namespace) -> int:
    if args.file == "-" and sys.stdout.isatty():
        raise Failure("an archive is nothing for a terminal: give a FILE, or send it into a pipe")
    progress = Progress()
    entry = None if args.location else running(args.name, args.thread)
    if entry is None:
        volumes = _volumes(args)
        for volume in volumes:
            if not (volume.location / "tree.db").exists():
                raise Failure(f"{volume.location} holds no volume (no tree.db)")
    if Path(args.file).is_dir():
        raise Failure(f"{args.file} is a directory: name the archive in it")
    # Only a whole archive gets the name asked for; what is no file, as a pipe or /dev/null, stays what it is.
    direct = args.file == "-" or (os.path.exists(args.file) and not os.path.isfile(args.file))
    fresh = None if direct else Path(f"{args.file}.part")
    try:
        out: BinaryIO = sys.stdout.buffer if args.file == "-" else open(fresh or args.file, "wb")  # noqa: SIM115
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, args.file) from None
    try:
        if entry is not None:
            with Control(entry["socket"]) as control:
                _export_mounted(control, out, progress)
        else:
            parts = [
                Part(v.prefix.encode(errors="surrogateescape"), v.prefix.encode(errors="surrogateescape"))
                for v in volumes
            ]
            _with(volumes, lambda tree: Export(tree, out, progress.warn, progress.step).write(parts))
        out.flush()
        if args.file != "-":
            out.close()
        if fresh is not None:
            os.replace(fresh, args.file)
    except BaseException:
        if args.file != "-":
            out.close()
        if fresh is not None:
            fresh.unlink(missing_ok=True)
        raise
    return progress.end()


def _with(volumes: list[Volume], use: Any) -> None:
    try:
        with_tree(volumes, use)
    except VolumeError as exc:
        raise Failure(str(exc)) from None


def _export_mounted(control: Control, out: BinaryIO, progress: Progress) -> None:
    routes = [(os.fsencode(r["prefix"]), r["kind"]) for r in control.call("status")["routes"]]
    shown = [prefix for prefix, kind in routes if kind != "system"]
    held, where, inside = "", b"", set[bytes]()
    try:
        made = control.call("checkpoint", action="create", label="vfsd export")["result"]
        held, where, inside = made["id"], made["path"].encode(), set(made["routes"])
        counted = control.call("checkpoint", action="show", ref=held)["result"]
        progress.total = counted["files"] + counted["directories"]
    except OSError as exc:
        # A read-only mount stays as it is anyway, and one without state routes has no moment to hold.
        if held:
            raise
        progress.note(f"exported as it is, which may change meanwhile: {exc.strerror}")
    try:
        parts = [Part(p, where + p.rstrip(b"/") if p in inside else p) for p in shown]
        Export(control, out, progress.warn, progress.step).write(parts)
    finally:
        if held:
            control.call("checkpoint", action="drop", refs=[held])


# -- import


def _import(args: argparse.Namespace) -> int:
    if args.file == "-" and sys.stdin.isatty():
        raise Failure("give the archive as FILE, or on standard input")
    file: BinaryIO = sys.stdin.buffer if args.file == "-" else open(args.file, "rb")  # noqa: SIM115
    into = os.fsencode("/" + args.into.strip("/"))
    progress = Progress(0 if args.file == "-" else os.fstat(file.fileno()).st_size)
    own = os.geteuid() == 0

    def read(tree: Tree) -> None:
        def step(files: int, size: int) -> None:
            progress.done = file.tell() if progress.total else 0
            progress.step(files, size)

        if into != b"/":
            tree.call("mkdir", path=into, parents=True)
        Import(tree, into, progress.warn, step, own=own).read(file)
        tree.call("sync")

    try:
        entry = None if args.location else running(args.name, args.thread)
        if entry is not None:
            with Control(entry["socket"]) as control:
                read(control)
        else:
            _with(_places(args), read)
    except tarfile.TarError as exc:
        what = "standard input" if args.file == "-" else args.file
        raise Failure(f"{what}: not a tar archive that can be read: {exc}") from None
    return progress.end()


def _places(args: argparse.Namespace) -> list[Volume]:
    """The volumes to import into; a thread that has none gets one."""
    try:
        return _volumes(args)
    except Failure:
        return [Volume("/", thread_home(args.name, thread_of(args.name, args.thread)) / "root")]
