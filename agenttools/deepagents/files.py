"""The graph's ``files`` and the tree: what a caller puts into ``invoke({"files": ...})`` is in the mount, and what the
run changed comes back in the output.

    agent = create_deep_agent(model=..., backend=backend, middleware=[TimeTravel(backend), FilesBridge(backend)])
    agent.invoke({"messages": [...], "files": {"/in.csv": create_file_data("a,b\\n")}})["files"]["/out.csv"]

Owns what is carried over, and when: in at the beginning of a run, out at its end. What changed is the difference to a
checkpoint of the tree, so nothing is missed that a command did. The state remembers what both sides agreed on, so that
a file which the caller did not touch is not written over what people changed between two runs.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

import xxhash
from deepagents.backends.utils import create_file_data
from deepagents.middleware.filesystem import FilesystemState
from langchain.agents.middleware.types import AgentMiddleware, PrivateStateAttr

from agenttools import runs
from agenttools.deepagents.timetravel import files_label

if TYPE_CHECKING:
    from agenttools.deepagents.backend import VfsBackend

log = logging.getLogger(__name__)

_ARTIFACTS = ("/large_tool_results/", "/conversation_history/", "/blobs/")
"""What Deep Agents keeps in the tree for itself."""


class FilesState(FilesystemState):
    """``vfs_files``: ``base``, the checkpoint of the tree at the run's beginning; ``seen``, digests of ``files``."""

    vfs_files: NotRequired[Annotated[dict[str, Any], PrivateStateAttr]]  # type: ignore[valid-type]


class FilesBridge(AgentMiddleware[Any, Any, Any]):
    """Carries ``files`` into the tree of ``backend`` and back; after ``TimeTravel`` in the list, if that is there.

    Out come the files that were in ``files``, and those below ``paths`` that the run changed: regular ones of at most
    ``max_bytes``, at most ``max_files`` of them, none in a directory that begins with a dot (``.git``) unless ``paths``
    name it. What is left out is logged. Only routes of kind ``state`` can tell what changed. A file that cannot be
    written raises OSError in the run.
    """

    state_schema = FilesState

    def __init__(
        self, backend: VfsBackend, *, paths: Sequence[str] = ("/",), max_bytes: int = 1 << 20, max_files: int = 1000
    ) -> None:
        super().__init__()
        self._backend = backend
        self._paths = tuple(path.rstrip("/") + "/" for path in paths)
        self._max_bytes, self._max_files = max_bytes, max_files

    # ------------------------------------------------------------------ in

    def before_agent(self, state: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
        files = state.get("files") or {}
        known = state.get("vfs_files") or {}
        digests = {path: _digest(data) for path, data in files.items()}
        seen = known.get("seen", {})
        new = [(path, _content(data)) for path, data in files.items() if digests[path] != seen.get(path)]
        for answer in self._backend.upload_files(new):
            if answer.error is not None:
                raise OSError(f"files: {answer.path} cannot be put into the tree: {answer.error}")
        for path in seen.keys() - files.keys():
            self._backend.delete(path)
        self._forget(known.get("base"))
        thread = runs.thread_id() or ""
        base = self._checkpoint("create", label=files_label(thread))["id"]
        return {"vfs_files": {"base": base, "seen": digests}}

    async def abefore_agent(self, state: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.before_agent, state, runtime)

    # ------------------------------------------------------------------ out

    def after_agent(self, state: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
        files = state.get("files") or {}
        base = (state.get("vfs_files") or {}).get("base")
        changed = self._changed(base) if base else []
        paths = [*files, *(path for path in changed if path not in files)]
        update: dict[str, Any] = {}
        left: list[str] = []
        for answer in self._backend.download_files(paths):
            path, content, before = answer.path, answer.content, files.get(answer.path)
            if content is not None and len(content) > self._max_bytes:
                left.append(path)
                content = None
            if content is None:
                if before is not None:
                    update[path] = None
                continue
            data = _data(content, before)
            if before is None or _digest(before) != _digest(data):
                update[path] = data
        if left:
            log.warning("files: larger than %d bytes and left out: %s", self._max_bytes, ", ".join(left[:10]))
        self._forget(base)
        now = {path: data for path, data in {**files, **update}.items() if data is not None}
        return {"files": update, "vfs_files": {"base": None, "seen": {path: _digest(d) for path, d in now.items()}}}

    async def aafter_agent(self, state: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.after_agent, state, runtime)

    def _changed(self, base: str) -> list[str]:
        """The regular files that are another than at the beginning, or new, as far as they are wanted."""
        found = self._checkpoint("diff", a=base)
        paths = [
            change["path"].decode("utf-8", "surrogateescape")
            for change in found["changes"]
            if change["type"] == "file" and (change["kind"] in ("added", "renamed") or "content" in change["what"])
        ]
        wanted = [path for path in paths if self._wants(path)]
        more = found["total"] - len(found["changes"]) + max(0, len(wanted) - self._max_files)
        if more:
            log.warning("files: %d changes more than max_files allows (%d), left out", more, self._max_files)
        return wanted[: self._max_files]

    def _wants(self, path: str) -> bool:
        if path.startswith(_ARTIFACTS):
            return False
        below = [path[len(above) :] for above in self._paths if path.startswith(above)]
        return any(not any(part.startswith(".") for part in rest.split("/")[:-1]) for rest in below)

    def _forget(self, base: str | None) -> None:
        # With TimeTravel a run may come back to here; then ``prune`` drops it.
        if base and self._backend.travel is None:
            try:
                self._checkpoint("drop", refs=[base])
            except OSError as exc:
                log.warning("files: checkpoint %s stays: %s", base, exc.strerror)

    def _checkpoint(self, action: str, **params: Any) -> dict[str, Any]:
        client = self._backend.client_of(runs.thread_id() or "")
        result: dict[str, Any] = client.call("checkpoint", action=action, **params)["result"]
        return result


def _content(data: Mapping[str, Any]) -> bytes:
    content = data["content"]
    text = "\n".join(content) if isinstance(content, list) else str(content)
    return base64.b64decode(text) if data.get("encoding") == "base64" else text.encode("utf-8", "surrogateescape")


def _data(content: bytes, before: Mapping[str, Any] | None) -> Any:
    created = None if before is None else before.get("created_at")
    try:
        return create_file_data(content.decode(), created_at=created)
    except UnicodeDecodeError:
        return create_file_data(base64.b64encode(content).decode(), created_at=created, encoding="base64")


def _digest(data: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_content(data))
