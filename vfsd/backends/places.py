"""Whether the files of an open volume are still where they were, and as long: somebody may have taken them away."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vfsd.backends.durable import Durable

_NAMES = ("tree.db", "tree.db-wal", "tree.db-shm", "data", "journal.0", "journal.1", "lock")


class Places:
    """The files of a volume's directory as they are now."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known = self._files()

    def _files(self) -> dict[str, tuple[int, int]]:
        found = {}
        for name in _NAMES:
            with contextlib.suppress(OSError):
                st = os.stat(self._directory / name)
                found[name] = (st.st_dev, st.st_ino)
        return found

    def wrong(self, data: Durable) -> tuple[str, str] | None:
        """Why what is written from now on would be lost, and what to do; None when all is well."""
        now = self._files()
        for name, file in self._known.items():
            if now.get(name) != file:
                save = "save what is still here (vfsd export) before you unmount it"
                return f"its file {name} has been removed or replaced", save
        if not data.is_whole():
            return "its data file has been cut off", "what is lost gives EIO; save the rest (vfsd export)"
        return None
