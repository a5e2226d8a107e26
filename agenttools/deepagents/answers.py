"""The tools' results as Deep Agents' result types, in the dialect of its sandboxes.

Owns what differs between the two. Must not know how a result came about. Where the dialects of Deep Agents' own
backends differ, this is that of ``BaseSandbox``: it is the one with a packaged test suite.
"""

from __future__ import annotations

import contextlib
import os.path
import stat
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from deepagents.backends.protocol import (
    DeleteResult,
    EditResult,
    ExecuteOffloadResult,
    ExecuteResponse,
    FileData,
    FileDownloadResponse,
    FileInfo,
    FileUploadResponse,
    GlobResult,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)

from agenttools import results
from agenttools.arguments import FAULTS, mistaken
from agenttools.steps import FAILURES, Steps
from agenttools.text import EMPTY_REMINDER, printable
from agenttools.tools import BadPath, locate, rest_of, why
from agenttools.wire import PIECE

MEDIA = frozenset(
    {
        *(".png", ".jpeg", ".jpg", ".webp", ".gif", ".heic", ".heif", ".pdf", ".ppt", ".pptx"),
        *(".mp4", ".mpeg", ".mov", ".avi", ".flv", ".mpg", ".webm", ".wmv", ".3gpp", ".mkv"),
        *(".wav", ".mp3", ".aiff", ".aac", ".ogg", ".flac"),
    }
)
"""Extensions of files that Deep Agents hands to a model as media: their content has to be base64, whatever it is."""

FAILED = 1
"""Exit code of a command that could not be run (as LocalShellBackend's)."""

_LINES = 5
_HEAD_BYTES = 2000
"""A preview's lines, and bytes, at each end (as BaseSandbox's)."""


P = ParamSpec("P")
R = TypeVar("R")


def answered(failed: Callable[[str], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a method answer with ``failed`` of a sentence where a model, or its framework, gave it a wrong type."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def answering(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except FAULTS as exc:
                return _told(failed, method, exc, args, kwargs)

        return answering

    return decorate


def aanswered(
    failed: Callable[[str], R],
) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]:
    """The same for a coroutine method."""

    def decorate(method: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        @wraps(method)
        async def answering(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return await method(*args, **kwargs)
            except FAULTS as exc:
                return _told(failed, method, exc, args, kwargs)

        return answering

    return decorate


def _told(
    failed: Callable[[str], R],
    method: Callable[..., Any],
    exc: Exception,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> R:
    wrong = mistaken(method, args, kwargs)
    if wrong is None:
        raise exc
    return failed(f"Error: {printable(str(wrong))}")


def not_executed(error: str) -> ExecuteResponse:
    return ExecuteResponse(output=error, exit_code=FAILED)


def not_offloaded(error: str) -> ExecuteOffloadResult:
    return ExecuteOffloadResult(offloaded=False, response=not_executed(error))


def is_media(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in MEDIA


def _error(error: str | None) -> str | None:
    """``error`` with nothing in it that cannot be sent on: it quotes paths, which may be any bytes."""
    return None if error is None else printable(error)


def _info(entry: results.Entry) -> FileInfo:
    info = FileInfo(path=entry.path, is_dir=entry.is_dir, size=entry.size)
    with contextlib.suppress(ValueError, OverflowError, OSError):  # a time that no calendar has
        info["modified_at"] = datetime.fromtimestamp(entry.mtime_ns / 1e9, UTC).isoformat()
    return info


def ls(result: results.LsResult) -> LsResult:
    if result.error is not None:
        return LsResult(error=_error(result.error))
    return LsResult(entries=[_info(entry) for entry in result.entries or []])


def read(result: results.ReadResult) -> ReadResult:
    if result.error is not None:
        return ReadResult(error=_error(result.error))
    if result.encoding == "base64":
        return ReadResult(file_data=FileData(content=result.content, encoding="base64"))
    if result.start_line is None:
        content = "" if result.no_lines_requested else EMPTY_REMINDER
        return ReadResult(
            file_data=FileData(content=content, encoding="utf-8"), no_lines_requested=result.no_lines_requested
        )
    content = result.content
    if result.next_offset is not None and not result.converted:
        # Pages of a file joined by a newline give the file, to which the packaged suite holds a sandbox. The end
        # of a file is shown as it is, so that an edit can name it; line ends that were converted are kept too.
        content = content.removesuffix("\n")
    return ReadResult(
        file_data=FileData(content=content, encoding="utf-8"),
        total_lines=result.total_lines,
        start_line=result.start_line,
        end_line=result.end_line,
        next_offset=result.next_offset,
    )


def write(result: results.WriteResult) -> WriteResult:
    return WriteResult(path=result.path) if result.error is None else WriteResult(error=_error(result.error))


def edit(result: results.EditResult) -> EditResult:
    if result.error is not None:
        return EditResult(error=_error(result.error))
    return EditResult(path=result.path, occurrences=result.occurrences)


def delete(result: results.DeleteResult) -> DeleteResult:
    return DeleteResult(path=result.path) if result.error is None else DeleteResult(error=_error(result.error))


def glob(result: results.GlobResult) -> GlobResult:
    if result.error is not None:
        return GlobResult(error=_error(result.error))
    reason = result.reason if result.reason in ("budget", "unreadable") else None
    return GlobResult(
        matches=[_info(match) for match in result.matches or []],
        truncated=result.truncated,
        truncation_reason=reason,  # type: ignore[arg-type]
    )


def grep(result: results.GrepResult) -> GrepResult:
    if result.error is not None:
        return GrepResult(error=_error(result.error))
    return GrepResult(
        matches=[
            {"path": printable(match.path), "line": match.line, "text": match.text} for match in result.matches or []
        ],
        truncated=result.truncated,
        error="Error: some files could not be read" if result.reason == "unreadable" else None,
    )


# ---------------------------------------------------------------------- whole files

_code = partial(
    why,
    EACCES="permission_denied",
    EISDIR="is_directory",
    ENOTDIR="invalid_path",
    EEXIST="invalid_path",
    EINVAL="invalid_path",
)


def upload(files: Iterable[tuple[str, bytes]], call: dict[str, str]) -> Steps[list[FileUploadResponse]]:
    """Write each file, its directories with it; what fails does not keep the others from being written."""
    answers = []
    for file in files:
        path, content = file if isinstance(file, (tuple, list)) and len(file) == 2 else (file, None)
        answer = FileUploadResponse(path=path if isinstance(path, str) else repr(path))
        fits = isinstance(path, str) and isinstance(content, (bytes, bytearray, memoryview))
        if not fits or not path.startswith("/"):
            answer.error = "invalid_path"
        else:
            try:
                tree, _ = yield from locate(path)
                yield "write", {"path": tree, "data": content, "tool": "upload", **call}
            except BadPath:
                answer.error = "invalid_path"
            except FAILURES as exc:
                answer.error = _error(_code(exc))
        answers.append(answer)
    return answers


def download(paths: Iterable[str], call: dict[str, str]) -> Steps[list[FileDownloadResponse]]:
    """Read each file whole; ``call`` has the tool call's id, if it has one."""
    answers = []
    told = {"tool": "download", **call}
    for path in paths:
        answer = FileDownloadResponse(path=path if isinstance(path, str) else repr(path))
        if not isinstance(path, str) or not path.startswith("/"):
            answer.error = "invalid_path"
        else:
            try:
                tree, _ = yield from locate(path)
                reply = yield "read", {"path": tree, "offset": 0, "length": PIECE, **told}
                if stat.S_ISREG(reply["mode"]):
                    data = reply["data"]
                    answer.content = data if reply["size"] <= len(data) else (yield from rest_of(tree, data, told))
                else:
                    answer.error = "is_directory" if stat.S_ISDIR(reply["mode"]) else "invalid_path"
            except BadPath:
                answer.error = "invalid_path"
            except FAILURES as exc:
                answer.error = _error(_code(exc))
        answers.append(answer)
    return answers


# ---------------------------------------------------------------------- execute


def execute(ran: results.ExecuteResult) -> ExecuteResponse:
    """The output as it is; what a success leaves unsaid (which view it ran in) a failure tells below it."""
    if ran.error is not None:
        return ExecuteResponse(output=printable(ran.error), exit_code=FAILED)
    output = ran.output
    if ran.exit_code != 0 or ran.truncated:
        lines = "".join(f"\n[{printable(notice)}]" for notice in ran.notices)
        output = output.removesuffix("\n") + lines if lines else output
    return ExecuteResponse(output=output, exit_code=ran.exit_code, truncated=ran.truncated)


def offload(ran: results.ExecuteResult) -> ExecuteOffloadResult:
    """``ran`` whole, or a preview of it when its output is in a file."""
    if ran.output_file is None:
        return ExecuteOffloadResult(offloaded=False, response=execute(ran))
    preview, marked = _preview(ran)
    if ran.timed_out:
        preview += "".join(f"\n[{printable(notice)}]" for notice in ran.notices)
    response = ExecuteResponse(output=preview, exit_code=ran.exit_code, truncated=not ran.complete)
    return ExecuteOffloadResult(offloaded=True, response=response, preview_has_truncation_marker=marked)


def _preview(ran: results.ExecuteResult) -> tuple[str, bool]:
    """The ends of the output with a marker between them, or its beginning when it has few lines; whether marked."""
    omitted = ran.lines - 2 * _LINES
    if omitted <= 0:
        head = _first(ran.output, 2 * _HEAD_BYTES)
        return f"{head}\n... [cut here; {ran.size} bytes were printed] ...", False
    begins = ran.output.split("\n", _LINES)
    head = ran.output.removesuffix(begins[-1]) if len(begins) > _LINES else ran.output
    short = _first(head, _HEAD_BYTES)
    ends = ran.tail.removesuffix("\n").split("\n")
    tail = "\n".join(ends[-_LINES:])
    cut = short != head or len(begins) <= _LINES or len(ends) <= _LINES
    gap = "\n... [lines beside this one may be cut] ...\n" if cut else ""
    return f"{short}{gap}... [{omitted} lines truncated] ...\n{tail}", True


def _first(text: str, size: int) -> str:
    return text.encode()[:size].decode(errors="ignore")
