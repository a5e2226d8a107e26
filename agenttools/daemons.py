"""Start the daemon of a thread when its client finds none: one daemon is one mount is one thread.

Owns how a thread's daemon is called and where it is mounted. Runs the ``vfsd`` command, and must not import vfsd.
The daemon outlives who started it; ``vfsd umount NAME`` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from typing import Any

from agenttools import wire
from agenttools.client import Client, VfsdUnavailable

START_S = 60.0
"""Seconds to wait for a mount: a tree left by a killed daemon is recovered first."""

_TURN_S = 0.02
"""Seconds between looks whether somebody else is done with starting the daemon."""

_LATE = f"no answer from it within {START_S:g} seconds"

_LONGEST = 32
"""Characters of a thread in a name: the socket's whole path has room for 108 bytes (unix(7))."""


def thread_word(thread: str) -> str:
    """``thread`` if it can be a name of vfsd's, else a digest of it: thread ids may be any text."""
    plain = thread.isascii() and all(c.isalnum() or c in "._-" for c in thread) and thread[:1] not in ("", ".", "-")
    if plain and len(thread) <= _LONGEST:
        return thread
    return hashlib.sha256(thread.encode(errors="surrogatepass")).hexdigest()[:_LONGEST]


def mount_name(thread: str, name: str = "default") -> str:
    """What the daemon of ``thread`` is called, of all that belong to ``name``."""
    return f"{name}@{thread_word(thread)}"


class ThreadClient(Client):
    """A client of the daemon of ``thread``, which is started when there is none, now or later.

    ``config``: a vfsd.toml for the daemon, if it is started from here. What keeps it from starting is raised as
    VfsdUnavailable. Async calls are for asyncio only.
    """

    def __init__(self, thread: str, name: str | None = None, config: str | None = None, **options: Any) -> None:
        self.thread = thread_word(thread)
        self.mount = mount_name(thread, name or "default")
        self._config = None if config is None else os.path.abspath(config)
        super().__init__(name=self.mount, **options)

    def call(self, op: str, /, **params: Any) -> wire.Message:
        try:
            return super().call(op, **params)
        except VfsdUnavailable:  # so the request was not sent
            self._begin()
        return super().call(op, **params)

    async def acall(self, op: str, /, **params: Any) -> wire.Message:
        try:
            return await super().acall(op, **params)
        except VfsdUnavailable:
            # Whoever is cancelled leaves a daemon that has begun to start, and others who wait for it, alone.
            start = asyncio.ensure_future(self._abegin())
            start.add_done_callback(_retrieved)
            await asyncio.shield(start)
        return await super().acall(op, **params)

    def _begin(self) -> None:
        """Have the daemon running. One at a time, in whichever process: a second ``vfsd mount`` would be refused."""
        turn = self._lock_file()
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not self._answers():
                self._mount()
        finally:
            os.close(turn)

    async def _abegin(self) -> None:
        """The same without holding up the event loop, or a thread."""
        turn = self._lock_file()
        try:
            while not _locked(turn):
                await asyncio.sleep(_TURN_S)
            if not await self._aanswers():
                await self._amount()
        finally:
            os.close(turn)

    @property
    def _home(self) -> str:
        """Where the mountpoints of threads are."""
        return os.path.join(wire.runtime_dir(), "mnt")

    def _lock_file(self) -> int:
        """What is locked while the daemon starts, open."""
        try:
            wire.make_runtime_dir()
            os.makedirs(self._home, mode=0o700, exist_ok=True)
            path = os.path.join(self._home, f"{self.mount}.lock")
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise self._failed(f"{exc.filename}: {exc.strerror}") from None

    def _failed(self, why: str) -> VfsdUnavailable:
        return VfsdUnavailable(f"the daemon of thread {self.thread!r} did not start: {why}")

    def _answers(self) -> bool:
        try:
            with Client(socket=self.socket, timeout=START_S) as probe:
                probe.call("status")
        except OSError:
            return False
        return True

    async def _aanswers(self) -> bool:
        try:
            async with asyncio.timeout(START_S), Client(socket=self.socket) as probe:
                await probe.acall("status")
        except OSError:
            return False
        return True

    def _mount(self) -> None:
        command = self._command()
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise self._failed(_LATE) from None
        except OSError as exc:
            raise self._failed(f"{command[0]}: {exc.strerror}") from None
        self._check(done.returncode, done.stderr)

    async def _amount(self) -> None:
        command = self._command()
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=pipe)
        except OSError as exc:
            raise self._failed(f"{command[0]}: {exc.strerror}") from None
        try:
            async with asyncio.timeout(START_S):
                _, said = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise self._failed(_LATE) from None
        assert process.returncode is not None
        self._check(process.returncode, said.decode(errors="replace"))

    def _command(self) -> list[str]:
        """What mounts the thread's tree."""
        program = _vfsd()
        if program is None:
            raise self._failed("there is no vfsd command here; pip install vfsd")
        point = os.path.join(self._home, self.mount)
        with contextlib.suppress(OSError):  # what its daemon left there, dead, is for vfsd to clear away
            os.mkdir(point, 0o700)
        config = [] if self._config is None else ["--config", self._config]
        return [program, "mount", "--name", self.mount, "--thread", self.thread, *config, point]

    def _check(self, returncode: int, said: str) -> None:
        if returncode:
            raise self._failed(said.strip().removeprefix("vfsd: ") or "no reason was given")


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _retrieved(start: asyncio.Future[None]) -> None:
    """Whether anybody still waits for it or not."""
    if not start.cancelled():
        start.exception()


def _vfsd() -> str | None:
    """The ``vfsd`` command: beside this Python, or on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "vfsd")
    return beside if os.access(beside, os.X_OK) else shutil.which("vfsd")
