"""Factories that routes of the tests name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any


def nonsense() -> Any:
    return object()


def nothing() -> None:
    return None


async def later() -> Any:
    return object()


def raises() -> Any:
    raise RuntimeError("made to fail")


def memory() -> Any:
    from langgraph.store.memory import InMemoryStore

    return InMemoryStore()


def filesystem() -> Any:
    """Deep Agents' own, confined to the directory the test made."""
    from deepagents.backends import FilesystemBackend

    return FilesystemBackend(root_dir=os.environ["VFSD_TEST_DIRECTORY"], virtual_mode=True)


class Dict:
    """A custom backend as the documentation of Deep Agents has one: a dict, results with error strings."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {"/hello.txt": "hello\n", "/sub/inner.txt": "inner\n"}
        self.broken = False

    def ls(self, path: str) -> Any:
        if self._may_fail():
            return None
        prefix = path.rstrip("/") + "/"
        below = [p for p in self.files if p.startswith(prefix)]
        entries: list[dict[str, Any]] = [
            {"path": p, "size": len(self.files[p])} for p in below if "/" not in p[len(prefix) :]
        ]
        dirs = {prefix + p[len(prefix) :].split("/")[0] + "/" for p in below if "/" in p[len(prefix) :]}
        entries += [{"path": d, "is_dir": True} for d in dirs]
        return {"error": None, "entries": entries}

    def read(self, path: str, offset: int = 0, limit: int = 2000) -> Any:
        if self._may_fail():
            return None
        if path not in self.files:
            return {"error": f"File '{path}' not found"}
        return {"file_data": {"content": self.files[path], "encoding": "utf-8"}}

    def write(self, path: str, content: str) -> Any:
        self._may_fail()
        if path.startswith("/locked"):
            return {"error": f"Error: permission denied for {path}"}
        self.files[path] = content
        return {"path": path}

    def _may_fail(self) -> bool:
        """True: it answers with nothing."""
        broken = Path(os.environ.get("VFSD_TEST_DIRECTORY", "/nowhere"), "broken")
        how = broken.read_text() if broken.exists() else ""
        if how == "raises":
            raise RuntimeError("the backend blew up")
        if how == "exits":
            sys.exit("the backend blew up")
        return how == "says nothing"


def custom() -> Any:
    return Dict()


class HubClient:
    """What of langsmith's Client a ContextHubBackend uses: commits with a parent, which must be the latest.

    Kept in a file, so that the test can commit beside the backend.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {"n": 0, "files": {}}
        return state

    def pull_agent(self, identifier: str, **kwargs: Any) -> Any:
        from langsmith.schemas import AgentContext, FileEntry
        from langsmith.utils import LangSmithNotFoundError

        state = self._state()
        if not state["n"]:
            raise LangSmithNotFoundError("no such repo")
        files = {path: FileEntry(content=content) for path, content in state["files"].items()}
        return AgentContext(commit_id=uuid.UUID(int=state["n"]), commit_hash=f"{state['n']:08x}", files=files)

    def push_agent(self, identifier: str, *, files: dict[str, Any], parent_commit: str | None = None) -> str:
        from langsmith.utils import LangSmithConflictError

        state = self._state()
        latest = f"{state['n']:08x}" if state["n"] else None
        if parent_commit != latest:
            raise LangSmithConflictError(f"parent {parent_commit} is not the latest, {latest}")
        for path, entry in files.items():
            if entry is None:
                state["files"].pop(path, None)
            else:
                state["files"][path] = entry.content
        state["n"] += 1
        self.path.write_text(json.dumps(state))
        return f"https://hub.example/hub/-/notes:{state['n']:08x}"


def hub() -> Any:
    from deepagents.backends import ContextHubBackend

    return ContextHubBackend("-/notes", client=HubClient(_directory() / "hub.json"))  # type: ignore[arg-type]


def sandbox() -> Any:
    """A sandbox that runs its commands in a directory of this machine."""
    from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
    from deepagents.backends.sandbox import BaseSandbox

    home = _directory() / "box"
    home.mkdir(exist_ok=True)

    class Box(BaseSandbox):
        @property
        def id(self) -> str:
            return "box"

        def execute(self, command: str, *, timeout: int | None = None) -> Any:
            # Its paths are absolute; the box is a directory, so they are made to lie in it.
            done = subprocess.run(
                ["bwrap", "--bind", str(home), "/", *_SYSTEM, "--dev", "/dev", "sh", "-c", command],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            return ExecuteResponse(output=done.stdout + done.stderr, exit_code=done.returncode)

        def upload_files(self, files: list[tuple[str, bytes]]) -> Any:
            for path, data in files:
                at = home / path.lstrip("/")
                at.parent.mkdir(parents=True, exist_ok=True)
                at.write_bytes(data)
            return [FileUploadResponse(path=path) for path, _ in files]

        def download_files(self, paths: list[str]) -> Any:
            answers = []
            for path in paths:
                at = home / path.lstrip("/")
                if at.is_file():
                    answers.append(FileDownloadResponse(path=path, content=at.read_bytes()))
                else:
                    answers.append(FileDownloadResponse(path=path, content=None, error="file_not_found"))
            return answers

    return Box()


_SYSTEM = [part for name in ("usr", "bin", "lib", "lib64", "etc") for part in ("--ro-bind-try", f"/{name}", f"/{name}")]


class PolicyWrapper:
    """The wrapper of the documentation: writes below some prefixes are refused, the rest is handed on."""

    def __init__(self, inner: Any, deny_prefixes: list[str]) -> None:
        self.inner = inner
        self.deny = [prefix.rstrip("/") + "/" for prefix in deny_prefixes]

    def _denied(self, path: str) -> bool:
        return any(path.startswith(prefix) for prefix in self.deny)

    def ls(self, path: str) -> Any:
        return self.inner.ls(path)

    def read(self, path: str, offset: int = 0, limit: int = 2000) -> Any:
        return self.inner.read(path, offset, limit)

    def write(self, path: str, content: str) -> Any:
        if self._denied(path):
            return {"error": f"Writes are not allowed under {path}"}
        return self.inner.write(path, content)


def policy() -> Any:
    return PolicyWrapper(Dict(), ["/secret"])


def _directory() -> Path:
    return Path(os.environ["VFSD_TEST_DIRECTORY"])
