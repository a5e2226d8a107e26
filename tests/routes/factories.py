"""Factories that routes of the tests name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def nonsense() -> Any:
    return object()


def nothing() -> None:
    return None


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
        self._may_fail()
        prefix = path.rstrip("/") + "/"
        below = [p for p in self.files if p.startswith(prefix)]
        entries: list[dict[str, Any]] = [
            {"path": p, "size": len(self.files[p])} for p in below if "/" not in p[len(prefix) :]
        ]
        dirs = {prefix + p[len(prefix) :].split("/")[0] + "/" for p in below if "/" in p[len(prefix) :]}
        entries += [{"path": d, "is_dir": True} for d in dirs]
        return {"error": None, "entries": entries}

    def read(self, path: str, offset: int = 0, limit: int = 2000) -> Any:
        self._may_fail()
        if path not in self.files:
            return {"error": f"File '{path}' not found"}
        return {"file_data": {"content": self.files[path], "encoding": "utf-8"}}

    def write(self, path: str, content: str) -> Any:
        self._may_fail()
        if path.startswith("/locked"):
            return {"error": f"Error: permission denied for {path}"}
        self.files[path] = content
        return {"path": path}

    def _may_fail(self) -> None:
        if Path(os.environ.get("VFSD_TEST_DIRECTORY", "/nowhere"), "broken").exists():
            raise RuntimeError("the backend blew up")


def custom() -> Any:
    return Dict()
