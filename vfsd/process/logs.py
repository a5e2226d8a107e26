"""What the daemon's log looks like, as text or as JSON, and the stacks of all its tasks and threads.

Owns the format, which programs read (``log_format = "json"``), and SIGUSR1. Must not know where the log goes. A line
names the place in the source that wrote it, so that it can be told of without the names of files in its message.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from types import CoroutineType, FrameType
from typing import Any

import trio

log = logging.getLogger(__name__)

TEXT = "%(asctime)s %(levelname)s %(name)s:%(lineno)d: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, line (of its source), message, perhaps exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "line": record.lineno,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


FORMATS: dict[str, type[logging.Formatter]] = {"text": logging.Formatter, "json": JsonFormatter}


def use(name: str) -> None:
    """From now on the log is written in format ``name``, a key of FORMATS."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(FORMATS[name](TEXT))


def dump_on_signal() -> None:
    """Have SIGUSR1 write the stacks into the log, and a crash, or a service manager's SIGABRT, those of threads."""
    if sys.stderr is not None:  # as when whoever started us had closed it
        faulthandler.enable()
    signal.signal(signal.SIGUSR1, _dump)


def _dump(number: int, frame: FrameType | None) -> None:
    """Also while the loop is kept from running: a handler runs in the midst of whatever does that."""
    # Whatever the level is, for somebody asked. On a thread: this one may be writing to the log at this moment.
    here = sys._getframe().f_lineno
    record = log.makeRecord(log.name, logging.INFO, __file__, here, "all stacks:\n%s", (stacks(frame),), None)
    threading.Thread(target=log.handle, args=(record,), name="vfsd-stacks").start()


def stacks(frame: FrameType | None = None) -> str:
    """Where each task and each thread is; ``frame``: where the calling thread was. Places in the source, no values."""
    lines: list[str] = []
    try:
        root = trio.lowlevel.current_root_task()
    except RuntimeError:
        root = None
    for depth, task in _tasks(root, 0):
        indent = "  " * depth
        lines.append(f"{indent}task {task.name}")
        for one in _await_frames(task.coro):
            lines.append(f"{indent}  {one.f_code.co_filename}:{one.f_lineno} in {one.f_code.co_name}")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    for ident, top in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}")
        for place in traceback.extract_stack(frame if ident == here and frame is not None else top):
            lines.append(f"  {place.filename}:{place.lineno} in {place.name}")
    return "\n".join(lines)


def _tasks(task: trio.lowlevel.Task | None, depth: int) -> Iterator[tuple[int, trio.lowlevel.Task]]:
    if task is None:
        return
    yield depth, task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tasks(child, depth + 1)


def _await_frames(coro: Any) -> Iterator[FrameType]:
    """The frames of a coroutine that waits, outermost first."""
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None) or getattr(coro, "ag_frame", None)
        if frame is None:
            return
        yield frame
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None) or getattr(coro, "ag_await", None)
        if coro is None and isinstance(request := frame.f_locals.get("request"), CoroutineType):
            # The tool door runs a request by hand at first (rpc._carry_on), so nothing awaits it.
            coro = request
