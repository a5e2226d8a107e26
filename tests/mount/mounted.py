"""One engine serving one tree in a process of its own, driven through its standard input: the other door, for tests.

Run as a program, each line in is a JSON list ``[op, argument...]``; what it changes is committed as a tool would and
answered once the kernel is told. Imported: ``Mounted``, which starts that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import trio

from vfsd.backends.memory import MemoryBackend
from vfsd.backends.sqlite import SqliteBackend
from vfsd.core.types import Caller, SetAttr
from vfsd.doors import engines
from vfsd.doors.fuse import FuseDoor
from vfsd.feed import Feed
from vfsd.routes import Route, RouteTable
from vfsd.system import SystemEntries
from vfsd.vfs import Vfs
from vfsd.volume import TreeVolume

SECONDS = 20.0


class Mounted:
    """A mount for one test. ``tool(op, ...)`` acts through the other door."""

    def __init__(
        self,
        mountpoint: Path,
        engine: str,
        *,
        database: Path | None = None,
        user: int | None = None,
        waiting: bool = False,
    ) -> None:
        self.path = str(mountpoint)
        command = [sys.executable, __file__, self.path, engine, str(database or ""), "waiting" if waiting else ""]
        if user is not None:
            command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by stop)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        first = self._line()
        if first != "started":
            log = self.ended()[1]
            self.stop()
            raise RuntimeError(f"{first}\n{log}")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, *command: Any) -> None:
        """A command whose answer does not matter."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def tool(self, *command: Any) -> Any:
        self.send(*command)
        line = self._line()
        if not line:
            raise RuntimeError(self.ended()[1])
        reply = json.loads(line)
        if "error" in reply:
            raise OSError(*reply["error"])
        return reply["result"]

    def __truediv__(self, name: str) -> str:
        return os.path.join(self.path, name)

    def ended(self) -> tuple[int, str]:
        """(exit status, log) of a process that was told to end or whose mount is gone."""
        self.process.wait(SECONDS)
        self._log.seek(0)
        return self.process.returncode, self._log.read()

    def stop(self) -> None:
        """Unmounts; by force when that does not work, so that no test hangs the next."""
        if self._log.closed:
            return
        if self.process.poll() is None and engines.mounted(self.path) is not None:
            subprocess.run(["umount", self.path], timeout=SECONDS, check=False, capture_output=True)
            try:
                self.process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                if os.getuid() == 0:
                    engines.abort(self.path)
        self.process.kill()
        self.process.wait(SECONDS)
        for stream in (self.process.stdin, self.process.stdout, self._log):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        if engines.mounted(self.path) is not None:
            subprocess.run(["umount", "-l", self.path], timeout=SECONDS, check=False, capture_output=True)


async def _lines() -> AsyncIterator[str]:
    """Standard input, without a thread that could not be called off."""
    rest = b""
    while True:
        await trio.lowlevel.wait_readable(0)
        data = os.read(0, 65536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


async def _commands(vfs: Any, door: Any, engine: Any, serving: trio.CancelScope) -> None:
    tool = Caller(os.getuid(), os.getgid(), os.getpid(), "rpc")
    waits = 0

    async def at(path: str) -> tuple[int, bytes]:
        *above, name = os.fsencode(path).strip(b"/").split(b"/")
        ino = 1
        for part in above:
            ino = (await vfs.lookup(ino, part, tool)).ino
        return ino, name

    async def ino_of(path: str) -> int:
        return int((await vfs.lookup(*await at(path), tool)).ino)

    async def write(path: str, text: str, offset: int = 0, cut: bool = True) -> None:
        parent, name = await at(path)
        try:
            ino = (await vfs.lookup(parent, name, tool)).ino
        except FileNotFoundError:
            ino = (await vfs.mknod(parent, name, 0o100644, 0, tool)).ino
        await vfs.write(ino, 0, offset, text.encode(), tool)
        if cut:
            await vfs.setattr(ino, SetAttr(size=offset + len(text.encode())), tool)

    async def read(path: str) -> str:
        return bytes(await vfs.read(await ino_of(path), 0, 0, 1 << 20)).decode()

    async def mkdir(path: str) -> None:
        await vfs.mkdir(*await at(path), 0o755, tool)

    async def unlink(path: str) -> None:
        await vfs.unlink(*await at(path), tool)

    async def rename(old: str, new: str) -> None:
        await vfs.rename(*await at(old), *await at(new), 0, tool)

    async def chmod(path: str, perm: int) -> None:
        await vfs.setattr(await ino_of(path), SetAttr(perm=perm), tool)

    async def fail(kind: str) -> None:
        """The next getattr from the shell raises."""

        async def broken(*args: Any) -> None:
            door.getattr = whole
            raise {"ValueError": ValueError("made to fail"), "ENOSPC": OSError(28, "made to fail")}[kind]

        whole, door.getattr = door.getattr, broken

    async def slow(request: str, seconds: float) -> None:
        """The next such request waits, under the door."""
        whole = getattr(vfs, request)

        async def waiting(*args: Any) -> Any:
            nonlocal waits
            setattr(vfs, request, whole)
            waits += 1
            try:
                await trio.sleep(seconds)
                return await whole(*args)
            finally:
                waits -= 1

        setattr(vfs, request, waiting)

    async def state() -> dict[str, Any]:
        return {"waiting": waits, "known": len(door.known), "requests": engine.requests, **vfs.counters()}

    async def cancel() -> None:
        serving.cancel()

    async def close(force: bool = False) -> None:
        await engine.close(force=force)

    ops = {f.__name__: f for f in (write, read, mkdir, unlink, rename, chmod, fail, slow, state, cancel, close)}
    async for line in _lines():
        op, *arguments = json.loads(line)
        try:
            result = await ops[op](*arguments)
            await vfs.feed.settled(vfs.feed.seq)
            print(json.dumps({"result": result}), flush=True)
        except OSError as e:
            print(json.dumps({"error": [e.errno, e.strerror]}), flush=True)


def main(mountpoint: str, name: str, database: str, waiting: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    feed, table = Feed(), RouteTable()
    backend = SqliteBackend(Path(database)) if database else MemoryBackend()
    owner = (os.getuid(), os.getgid())
    volume = TreeVolume(0, backend, feed, engines.clock(name), owner=owner)
    table.mount(Route(b"/", volume.kind, "", volume))
    vfs = Vfs(table, feed, SystemEntries(table, feed, time.time_ns))
    door = FuseDoor(vfs)
    if waiting:
        door.is_inline = lambda ino: False
    engine, _ = engines.choose(name)

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            serving = trio.CancelScope()
            nursery.start_soon(_commands, vfs, door, engine, serving)
            options = engines.Options(allow_other=os.getuid() == 0)
            with serving:
                await engine.run(door, mountpoint, options, lambda: print("started", flush=True))
            nursery.cancel_scope.cancel()

    trio.run(serve)
    volume.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
