"""VfsBackend: a Deep Agents backend whose files are the daemon's tree and whose commands run in it.

Owns which daemon a call goes to. What a tool does is in ``agenttools.tools``, how its result looks to Deep Agents in
``answers``. Nothing here raises for what the tree, the daemon or the caller's values do: each result has ``error``.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from deepagents.backends.protocol import (
    DeleteResult,
    EditResult,
    ExecuteOffloadResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
    GlobResult,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)
from deepagents.backends.sandbox import BaseSandbox

from agenttools import results, runs, tools
from agenttools.arguments import check
from agenttools.client import Client
from agenttools.daemons import ThreadClient
from agenttools.deepagents import answers
from agenttools.deepagents.answers import aanswered, answered
from agenttools.deepagents.door import Door
from agenttools.deepagents.rules import request_of, same
from agenttools.deepagents.timetravel import TimeTravel
from agenttools.steps import arun, run
from agenttools.views import Profile, View, check_choice

MAX_OUTPUT = 10 << 20
"""Bytes of a command's output that are returned or kept in a file (as many as BaseSandbox captures)."""

_PROGRAM = "deepagents"


class _Nobody:
    """Stands for a daemon that is not to be had: whatever is asked of it fails as ``reason`` says."""

    def __init__(self, reason: OSError) -> None:
        self._reason = reason

    @property
    def hello(self) -> NoReturn:
        raise self._reason

    def call(self, op: str, /, **params: Any) -> NoReturn:
        raise self._reason

    async def ahello(self) -> NoReturn:
        raise self._reason

    async def acall(self, op: str, /, **params: Any) -> NoReturn:
        raise self._reason


class VfsBackend(BaseSandbox):
    """Files and commands of a vfsd mount, for ``create_deep_agent(backend=VfsBackend())``.

    Which daemon: the one on ``socket``; or the mount called ``name`` (by default ``VFSD_SOCKET``, else "default"). With
    ``thread`` one daemon a thread, started when there is none: ``"auto"`` is the ``thread_id`` of the LangGraph run
    that calls, anything else names the thread. These daemons are called ``NAME@THREAD``; ``config`` is their vfsd.toml.

    ``view``: what ``/`` is for commands (``agenttools.shell``). ``profile``: what commands are kept from, open, tree or
    offline (``docs/security.md``; None: as the daemon's configuration says, else tree). ``ls_trailing_slash``: end the
    paths of directories in ``ls`` with a slash, which is all that a model sees of their kind. ``timeout``: seconds a
    command may take when the call does not say (None: 120; 0: no limit).

    ``permissions``: FilesystemPermission rules that the daemon enforces for tools and commands alike, on the whole
    mount, as long as it runs. What is matched are the tree's paths, links resolved. In a graph, a tool call that meets
    an ``interrupt`` rule (also one of vfsd.toml) is LangGraph's human-in-the-loop; a command is denied.

    Safe from many threads and event loops at once. Can be pickled; the copy makes its own connections.
    """

    enable_capture_offload = True

    travel: TimeTravel | None = None
    """Set by the TimeTravel that ties the tree to the graph's checkpoints."""

    def __init__(
        self,
        name: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        thread: str | None = None,
        *,
        view: View = "auto",
        profile: Profile | None = None,
        ls_trailing_slash: bool = False,
        timeout: float | None = None,
        config: str | os.PathLike[str] | None = None,
        permissions: Sequence[Any] = (),
    ) -> None:
        given = {"name": name, "socket": socket, "thread": thread, "timeout": timeout, "config": config}
        check(VfsBackend.__init__, {**given, "permissions": permissions})
        if socket is not None and (name is not None or thread is not None):
            raise ValueError("socket= is one daemon already; name= and thread= choose one")
        check_choice(view, profile)
        if timeout is not None and not 0 <= timeout < math.inf:
            raise ValueError(f"timeout must be a number of seconds, or 0 for none, not {timeout}")
        if config is not None and thread is None:
            raise ValueError("config= is for the daemons that thread= starts")
        self._options: dict[str, Any] = {
            "name": name,
            "socket": None if socket is None else os.fspath(socket),
            "thread": thread,
            "view": view,
            "profile": profile,
            "ls_trailing_slash": ls_trailing_slash,
            "timeout": timeout,
            "config": None if config is None else os.fspath(config),
            "permissions": list(permissions),
        }
        self._name, self._thread, self._slash = name, thread, ls_trailing_slash
        self._where: dict[str, Any] = {"view": view, "profile": profile}
        self._timeout, self.config = timeout, self._options["config"]
        self._lock = threading.Lock()
        self._connect()

    def _connect(self) -> None:
        name, socket = self._options["name"], self._options["socket"]
        # On every connection before all else: a daemon that was started anew knows nothing of a client's rules.
        self._client_options: dict[str, Any] = {"client": _PROGRAM, "first": request_of(self._options["permissions"])}
        self._one = None if self._thread is not None else Client(socket=socket, name=name, **self._client_options)
        self._threads: dict[str, ThreadClient] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self._options

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self._options.items() if value not in (None, []))
        return f"VfsBackend({given})"

    @property
    def id(self) -> str:
        """The daemon's socket, or the thread it is chosen by."""
        return f"vfsd:{self._name or 'default'}@{self._thread}" if self._one is None else f"vfsd:{self._one.socket}"

    def close(self) -> None:
        """Close the connections. The daemons go on; so may the backend, with new ones."""
        with self._lock:
            clients = [*([self._one] if self._one else []), *self._threads.values()]
        for client in clients:
            client.close()

    def __del__(self) -> None:
        # Nothing in Deep Agents closes a backend, and sockets left to the interpreter make it warn.
        if "_threads" in vars(self):
            self.close()

    def permit(self, permissions: Sequence[Any]) -> None:
        """Have these rules from now on. ValueError when there are others already."""
        if self._options["permissions"] and not same(self._options["permissions"], permissions):
            raise ValueError("this VfsBackend has other permissions already; give them in one place")
        self.close()
        self._options["permissions"] = list(permissions)
        self._connect()

    # ------------------------------------------------------------------ which daemon

    def _client(self) -> Client | Door | _Nobody:
        thread = runs.thread_id()
        if self._one is None and self._thread == "auto" and thread is None:
            return _Nobody(
                ConnectionError(
                    "thread='auto' is the thread_id of a LangGraph run, and this is none: "
                    "run the agent with config={'configurable': {'thread_id': ...}}, or name the thread"
                )
            )
        try:
            client = self.client_of(thread or "")
        except (OSError, ValueError) as exc:
            return _Nobody(exc if isinstance(exc, OSError) else ConnectionError(str(exc)))
        return Door(client, self.travel) if runs.inside() else client

    def client_of(self, thread: str) -> Client:
        """The client of the daemon that serves the LangGraph thread ``thread``. Raises OSError, ValueError."""
        if self._one is not None:
            return self._one
        named = thread if self._thread == "auto" or self._thread is None else self._thread
        client = self._threads.get(named)
        if client is None:
            with self._lock:
                made = ThreadClient(named, self._name, self.config, **self._client_options)
                client = self._threads.setdefault(named, made)
        return client

    # ------------------------------------------------------------------ files

    @answered(lambda error: LsResult(error=error))
    def ls(self, path: str) -> LsResult:
        """The entries of a directory, by path."""
        return answers.ls(tools.ls(self._client(), path, slash=self._slash, call_id=runs.call_id()))

    @aanswered(lambda error: LsResult(error=error))
    async def als(self, path: str) -> LsResult:
        return answers.ls(await tools.als(self._client(), path, slash=self._slash, call_id=runs.call_id()))

    @answered(lambda error: ReadResult(error=error))
    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """A page of a text file, or a whole binary file in base64."""
        media = answers.is_media(file_path)
        return answers.read(tools.read(self._client(), file_path, offset, limit, binary=media, call_id=runs.call_id()))

    @aanswered(lambda error: ReadResult(error=error))
    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        media = answers.is_media(file_path)
        return answers.read(
            await tools.aread(self._client(), file_path, offset, limit, binary=media, call_id=runs.call_id())
        )

    @answered(lambda error: WriteResult(error=error))
    def write(self, file_path: str, content: str) -> WriteResult:
        """Make or overwrite a file."""
        return answers.write(tools.write(self._client(), file_path, content, call_id=runs.call_id()))

    @aanswered(lambda error: WriteResult(error=error))
    async def awrite(self, file_path: str, content: str) -> WriteResult:
        return answers.write(await tools.awrite(self._client(), file_path, content, call_id=runs.call_id()))

    @answered(lambda error: EditResult(error=error))
    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replace a text in a file; a change by someone else meanwhile is never lost."""
        return answers.edit(
            tools.edit(self._client(), file_path, old_string, new_string, replace_all, call_id=runs.call_id())
        )

    @aanswered(lambda error: EditResult(error=error))
    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return answers.edit(
            await tools.aedit(self._client(), file_path, old_string, new_string, replace_all, call_id=runs.call_id())
        )

    @answered(lambda error: DeleteResult(error=error))
    def delete(self, file_path: str) -> DeleteResult:
        """Remove a file, a link (not its target), or a directory with all in it."""
        return answers.delete(tools.delete(self._client(), file_path, call_id=runs.call_id()))

    @aanswered(lambda error: DeleteResult(error=error))
    async def adelete(self, file_path: str) -> DeleteResult:
        return answers.delete(await tools.adelete(self._client(), file_path, call_id=runs.call_id()))

    @answered(lambda error: GlobResult(error=error))
    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        """The regular files below ``path`` whose names match."""
        return answers.glob(tools.glob(self._client(), pattern, path or "/", call_id=runs.call_id()))

    @aanswered(lambda error: GlobResult(error=error))
    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        return answers.glob(await tools.aglob(self._client(), pattern, path or "/", call_id=runs.call_id()))

    @answered(lambda error: GrepResult(error=error))
    def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        """The lines that hold the text ``pattern``."""
        return answers.grep(
            tools.grep(self._client(), pattern, path or "/", glob, max_count=max_count, call_id=runs.call_id())
        )

    @aanswered(lambda error: GrepResult(error=error))
    async def agrep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        return answers.grep(
            await tools.agrep(self._client(), pattern, path or "/", glob, max_count=max_count, call_id=runs.call_id())
        )

    @answered(lambda error: [FileUploadResponse(path="", error=error)])
    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write each file; an answer for each, in order."""
        return run(self._client(), answers.upload(files, _call()))

    @aanswered(lambda error: [FileUploadResponse(path="", error=error)])
    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return await arun(self._client(), answers.upload(files, _call()))

    @answered(lambda error: [FileDownloadResponse(path="", error=error)])
    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read each file whole; an answer for each, in order."""
        return run(self._client(), answers.download(paths, _call()))

    @aanswered(lambda error: [FileDownloadResponse(path="", error=error)])
    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await arun(self._client(), answers.download(paths, _call()))

    # ------------------------------------------------------------------ commands

    @answered(answers.not_executed)
    def execute(self, command: str, *, timeout: float | None = None) -> ExecuteResponse:
        """Run a shell command in the tree. Exit code 124 when its time was up, 1 when it could not be run."""
        return answers.execute(self._run(command, timeout, max_output=MAX_OUTPUT))

    @aanswered(answers.not_executed)
    async def aexecute(self, command: str, *, timeout: float | None = None) -> ExecuteResponse:
        return answers.execute(await self._arun(command, timeout, max_output=MAX_OUTPUT))

    @answered(answers.not_offloaded)
    def execute_with_offload(
        self,
        command: str,
        capture_path: str,
        *,
        max_inline_bytes: int,
        max_capture_bytes: int | None = None,
        timeout: float | None = None,
    ) -> ExecuteOffloadResult:
        """``execute``, with an output of more than ``max_inline_bytes`` left in ``capture_path`` and shown in part."""
        if not self.enable_capture_offload:
            return ExecuteOffloadResult(offloaded=False, response=self.execute(command, timeout=timeout))
        place = _place(capture_path, max_inline_bytes, max_capture_bytes)
        return answers.offload(self._run(command, timeout, **place))

    @aanswered(answers.not_offloaded)
    async def aexecute_with_offload(
        self,
        command: str,
        capture_path: str,
        *,
        max_inline_bytes: int,
        max_capture_bytes: int | None = None,
        timeout: float | None = None,
    ) -> ExecuteOffloadResult:
        if not self.enable_capture_offload:
            return ExecuteOffloadResult(offloaded=False, response=await self.aexecute(command, timeout=timeout))
        place = _place(capture_path, max_inline_bytes, max_capture_bytes)
        return answers.offload(await self._arun(command, timeout, **place))

    def _run(self, command: str, timeout: float | None, **options: Any) -> results.ExecuteResult:
        limit = self._timeout if timeout is None else timeout
        return tools.execute(self._client(), command, limit, call_id=runs.call_id(), **self._where, **options)

    def _arun(self, command: str, timeout: float | None, **options: Any) -> Coroutine[Any, Any, results.ExecuteResult]:
        limit = self._timeout if timeout is None else timeout
        return tools.aexecute(self._client(), command, limit, call_id=runs.call_id(), **self._where, **options)


def _call() -> dict[str, str]:
    call_id = runs.call_id()
    return {} if call_id is None else {"call_id": call_id}


def _place(path: str, inline: int, cap: int | None) -> dict[str, Any]:
    return {"max_output": inline, "output_file": path, "max_file": MAX_OUTPUT if cap is None else cap}
