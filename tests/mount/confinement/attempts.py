"""Where attempts to get out of ``execute`` are made: as whoever runs the tests, or as an ordinary user."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agenttools.shell import ExecuteResult, execute

NOBODY = 65534


def as_nobody(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, or raises, in a process of an ordinary user."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.chdir("/")
            answer = work()
        except BaseException as error:
            answer = error
        finally:
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(answer, pipe)
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pickle.load(pipe)
    os.waitpid(child, 0)
    if isinstance(answer, BaseException):
        raise answer
    return answer


class Place:
    """Where attempts are made. ``root``: the tree as the host sees it."""

    def __init__(self, client: Any, root: Path, python: str, nobody: bool) -> None:
        self.client, self.root, self.python, self.nobody = client, root, python, nobody

    def run(self, command: str, **options: Any) -> ExecuteResult:
        options = {"timeout": 20} | options
        if not self.nobody:
            return execute(self.client, command, **options)
        result: ExecuteResult = as_nobody(lambda: execute(self.client, command, **options))
        return result

    def code(self, source: str, **options: Any) -> ExecuteResult:
        """Run a Python program."""
        (self.root / "attempt.py").write_text(source)
        return self.run(f"{self.python} /attempt.py", **options)
