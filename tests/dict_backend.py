"""Somebody's backend as small as one can be that has every method: a dict of contents by path."""

from __future__ import annotations

from typing import Any


class DictBackend:
    """Deep Agents' BackendProtocol with plain dicts as results."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def ls(self, path: str) -> Any:
        below = path.rstrip("/") + "/"
        rest = {p[len(below) :]: data for p, data in list(self.files.items()) if p.startswith(below)}
        files = [{"path": below + name, "size": len(data)} for name, data in rest.items() if "/" not in name]
        directories = {name.partition("/")[0] for name in rest if "/" in name}
        return {"entries": files + [{"path": below + name + "/", "is_dir": True} for name in directories]}

    def upload_files(self, files: list[tuple[str, bytes]]) -> Any:
        self.files.update({path: bytes(data) for path, data in files})
        return [{"path": path} for path, _ in files]

    def download_files(self, paths: list[str]) -> Any:
        missing = {"error": "file_not_found"}
        return [{"path": path} | ({"content": self.files[path]} if path in self.files else missing) for path in paths]

    def delete(self, path: str) -> Any:
        return {"path": path} if self.files.pop(path, None) is not None else {"error": f"File '{path}' not found"}
