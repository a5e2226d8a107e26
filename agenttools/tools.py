"""The eight tools as plain functions over a client: each makes its requests and returns a typed result.

    with Client() as client:
        tools.read(client, "/plan.md").content          # and in asyncio or trio: await tools.aread(client, "/plan.md")

Owns what a tool does and says. Must not know sockets, vfsd or any agent framework. No function raises for what the
tree, the daemon or the arguments' values do: the result's ``error`` says it. A value of a wrong type is a TypeError
that names it. Each tool is written once, as ``steps``, and has two names: ``ls`` waits, ``await als`` is for asyncio
and trio.

Paths: ``/x``, ``x`` and ``MOUNTPOINT/x`` are the same file; a ``..`` component is refused. Results name a file as the
caller did, whole.
"""

from __future__ import annotations

import base64
import errno
import os
import stat
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import xxhash

from agenttools.arguments import FAULTS, mistaken
from agenttools.calls import current_call, tags
from agenttools.results import (
    DeleteResult,
    EditResult,
    Entry,
    ExecuteResult,
    GlobResult,
    GrepResult,
    LsResult,
    Match,
    OutputMode,
    ReadResult,
    WriteResult,
)
from agenttools.steps import FAILURES, HELLO, Request, Steps, both
from agenttools.text import (
    EMPTY_OLD,
    MAX_BINARY_BYTES,
    NotText,
    Pager,
    Refused,
    Window,
    past_end_sentence,
    replace,
    window,
)
from agenttools.wire import MAX_PIECE, PIECE

READ_LIMIT = 100
"""Lines a read returns when nothing is said."""

MAX_MATCHES = 1000
"""Lines a grep returns when nothing is said."""

MAX_COUNTED = 64 << 20
"""Bytes of a file that are read to tell how many lines it has; of a larger one a page comes without a total."""

EDIT_TRIES = 100
"""How often an edit starts over because the file changed under it. Each time another writer got on."""


class BadPath(ValueError):
    """A path the tools refuse; says why."""


@lru_cache(maxsize=1024)
def tree_path(path: str, mountpoint: bytes = b"") -> tuple[bytes, bytes]:
    """The path in the tree that ``path`` means, and what to put before tree paths to name them as the caller does.

    The second is ``mountpoint`` when ``path`` goes through it, else empty. Raises BadPath.
    """
    parts = path.split("/")
    if ".." in parts or path.startswith("~"):
        raise BadPath(f"Path traversal not allowed: {path}")
    if path[1:2] == ":" and path[0].isascii() and path[0].isalpha():
        raise BadPath(
            f"Windows absolute paths are not supported: {path}. "
            "Please use virtual paths starting with / (e.g., /workspace/file.txt)"
        )
    try:
        whole = ("/" + "/".join(part for part in parts if part not in ("", "."))).encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise BadPath(f"Path is not valid Unicode text: {path!r}") from None
    if b"\0" in whole:
        raise BadPath(f"Path holds a NUL character: {path!r}")
    if len(mountpoint) > 1 and path.startswith("/") and (whole + b"/").startswith(mountpoint + b"/"):
        return whole[len(mountpoint) :] or b"/", mountpoint
    return whole, b""


def locate(path: str) -> Steps[tuple[bytes, bytes]]:
    """``tree_path`` of ``path`` for the daemon's mountpoint."""
    return tree_path(path, (yield HELLO).get("mountpoint") or b"")


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


_CODES = {
    errno.ENOENT: "file_not_found",
    errno.ENOTDIR: "file_not_found",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.ELOOP: "invalid_path",
}


def why(exc: Exception, **codes: str) -> str:
    """A code callers know (Deep Agents' literals) or the system's words; ``codes`` by errno name come first."""
    if isinstance(exc, OSError) and exc.errno is not None and not isinstance(exc, ConnectionError):
        name = errno.errorcode.get(exc.errno, "")
        if name == "EACCES" and name not in codes and exc.strerror not in (None, os.strerror(errno.EACCES)):
            return str(exc.strerror)  # a rule's own sentence
        return codes.get(name) or _CODES.get(exc.errno) or exc.strerror or str(exc)
    return str(exc) or type(exc).__name__


def _ls(path: str = "/", *, slash: bool = False, call_id: str | None = None) -> Steps[LsResult]:
    """The files and directories in directory ``path``; with ``slash`` the paths of directories end with one."""
    try:
        tree, prefix = yield from locate(path)
        top = _shown(prefix + (b"" if tree == b"/" else tree)) + "/"
        request = {"path": tree, **tags("ls", call_id)}
        reply = yield "list", request
        listed = reply["entries"]
        while reply.get("more"):
            reply = yield "list", request | {"continue": reply["continue"]}
            listed += reply["entries"]
    except BadPath as exc:
        return LsResult(error=str(exc))
    except FAILURES as exc:
        return LsResult(error=f"Path '{path}': {why(exc, ENOENT='path_not_found', ENOTDIR='not_a_directory')}")
    entries = []
    for name, mode, size, mtime_ns in listed:
        full = top + name.decode("utf-8", "surrogateescape")
        if stat.S_ISDIR(mode):
            entries.append(Entry(full + "/" if slash else full, True, 0, mtime_ns))
        else:
            entries.append(Entry(full, False, size, mtime_ns))
    entries.sort()
    return LsResult(entries)


ls, als = both(_ls)


def _read(
    path: str, offset: int = 0, limit: int = READ_LIMIT, *, binary: bool = False, call_id: str | None = None
) -> Steps[ReadResult]:
    """At most ``limit`` lines of a text file after the first ``offset``; a binary file whole, in base64.

    ``binary``: take any file that is not empty for a binary one, whatever is in it.
    """
    try:
        tree, _ = yield from locate(path)
        request = {"path": tree, "offset": 0, "length": PIECE, **tags("read", call_id)}
        reply = yield "read", request
        data, size = reply["data"], reply["size"]
        if not stat.S_ISREG(reply["mode"]):
            return ReadResult(path, error=f"File '{path}': not_a_file")
        try:
            if binary and size > 0:
                raise NotText
            if size <= len(data):
                view = window(data, offset, limit)
            else:
                view = yield from _page(request, data, size, offset, limit)
        except NotText:
            if size > MAX_BINARY_BYTES:
                limit_text = f"Binary file exceeds maximum preview size of {MAX_BINARY_BYTES} bytes"
                return ReadResult(path, size=size, error=f"File '{path}': {limit_text}")
            return ReadResult(path, base64.b64encode(data).decode(), "base64", size)
    except BadPath as exc:
        return ReadResult(path, error=str(exc))
    except FAILURES as exc:
        return ReadResult(path, error=f"File '{path}': {why(exc, EISDIR='not_a_file')}")
    if view.past_end:
        sentence = past_end_sentence(offset, view.total_lines or 0)
        return ReadResult(path, size=size, error=f"File '{path}': {sentence}")
    notice = ""
    if offset < 0 and view.start_line is not None:
        notice = f"[There is no offset {offset}; this is from line 1 on.]"
    content, start, end, total, onward, cut, _, converted = view
    nothing = start is None and limit <= 0 and size > 0
    return ReadResult(
        path, content, "utf-8", size, start, end, total, onward, cut, nothing, notice, converted=converted
    )


read, aread = both(_read)


def _page(request: dict[str, Any], data: bytes, size: int, offset: int, limit: int) -> Steps[Window]:
    """The window of a file that comes in pieces, of which ``data`` is the first, that of ``request``."""
    pager = Pager(offset, limit)
    at = 0
    while data:
        pager.feed(data)
        at += len(data)
        if pager.full and size > MAX_COUNTED:
            return pager.finish(complete=False)
        data = (yield "read", request | {"offset": at})["data"]
    return pager.finish()


def _write(path: str, content: str | bytes, *, call_id: str | None = None) -> Steps[WriteResult]:
    """Make or overwrite the file at ``path`` with exactly ``content``; missing directories are made."""
    try:
        data = content.encode() if isinstance(content, str) else content
        memoryview(data)  # a TypeError for what has no bytes
        tree, _ = yield from locate(path)
        reply = yield "write", {"path": tree, "data": data, **tags("write", call_id)}
    except UnicodeEncodeError as exc:
        reason = f"content is not valid Unicode text (character {exc.start})"
        return WriteResult(path, error=f"Failed to write file '{path}': {reason}")
    except BadPath as exc:
        return WriteResult(path, error=f"Error: {exc}")
    except FAILURES as exc:
        reason = why(exc, EISDIR="is_directory", ENOTDIR="invalid_path")
        return WriteResult(path, error=f"Failed to write file '{path}': {reason}")
    return WriteResult(path, reply["created"], len(data))


write, awrite = both(_write)


def _edit(
    path: str,
    old_string: str,
    new_string: str,
    replace_all: bool = False,
    *,
    call_id: str | None = None,
) -> Steps[EditResult]:
    """Replace the text ``old_string``, which must be there once unless ``replace_all``, with ``new_string``.

    What others write at the same time is never lost: then the edit starts over from what they wrote.
    """
    if not old_string:
        return EditResult(path, error=EMPTY_OLD)
    try:
        tree, _ = yield from locate(path)
        for _ in range(EDIT_TRIES):
            reply = yield _edit_request(tree, old_string, new_string, replace_all, call_id)
            if "count" in reply:
                return EditResult(path, reply["count"])
            if not stat.S_ISREG(reply["mode"]):
                return EditResult(path, error=f"Error: '{path}' is not a regular file")
            data = reply["data"]
            if reply["size"] > len(data):
                data = yield from rest_of(tree, data, tags("edit", call_id))
            changed, count = replace(data, old_string, new_string, replace_all)
            if changed == data:
                return EditResult(path, count)
            try:
                expect = xxhash.xxh3_64_intdigest(data)
                yield "write", {"path": tree, "data": changed, "expect": expect, **tags("edit", call_id)}
            except OSError as exc:
                if exc.errno != errno.ESTALE:
                    raise
            else:
                return EditResult(path, count)
    except BadPath as exc:
        return EditResult(path, error=f"Error: {exc}")
    except Refused as exc:
        return EditResult(path, error=str(exc))
    except NotText:
        return EditResult(path, error=f"Error: File '{path}' is not a text file")
    except FAILURES as exc:
        return EditResult(path, error=_edit_failure(path, exc))
    return EditResult(path, error=f"Error: File '{path}' kept changing while it was edited; read it and try again.")


edit, aedit = both(_edit)


def _edit_request(tree: bytes, old: str, new: str, replace_all: bool, call_id: str | None) -> Request:
    """What makes a plain edit at once, and else gives the beginning of the file."""
    told = tags("edit", call_id)
    beginning: Request = "read", {"path": tree, "offset": 0, "length": PIECE, **told}
    try:
        texts = {"old_text": old.encode(), "new_text": new.encode()}
    except UnicodeEncodeError:
        return beginning
    if len(texts["old_text"]) > PIECE or len(texts["new_text"]) > MAX_PIECE:
        return beginning
    return "edit", {"path": tree, **texts, "all": replace_all, **told}


def rest_of(tree: bytes, data: bytes, told: dict[str, str]) -> Steps[bytes]:
    """All of a file of which ``data`` is the beginning, asked for with the tags ``told``.

    A change meanwhile shows when it is written back.
    """
    parts = [data]
    at = len(data)
    while data:
        data = (yield "read", {"path": tree, "offset": at, "length": MAX_PIECE, **told})["data"]
        parts.append(data)
        at += len(data)
    return b"".join(parts)


def _edit_failure(path: str, exc: Exception) -> str:
    number = exc.errno if isinstance(exc, OSError) and not isinstance(exc, ConnectionError) else None
    if number in (errno.ENOENT, errno.ENOTDIR):
        return f"Error: File '{path}' not found"
    if number in (errno.EACCES, errno.EPERM) and why(exc) == "permission_denied":
        return f"Error: Permission denied editing file '{path}'"
    if number == errno.EISDIR:
        return f"Error: '{path}' is not a regular file"
    return f"Error editing file '{path}': {why(exc)}"


def _delete(path: str, *, call_id: str | None = None) -> Steps[DeleteResult]:
    """Remove a file, a link (not its target), or a directory with all that is in it."""
    try:
        tree, _ = yield from locate(path)
        yield "delete", {"path": tree, **tags("delete", call_id)}
    except BadPath as exc:
        return DeleteResult(path, error=f"Error: {exc}")
    except FAILURES as exc:
        if isinstance(exc, FileNotFoundError | NotADirectoryError):
            return DeleteResult(path, error=f"Error: '{path}' not found")
        return DeleteResult(path, error=f"Error deleting file '{path}': {why(exc)}")
    return DeleteResult(path)


delete, adelete = both(_delete)


def _glob(pattern: str, path: str = "/", *, call_id: str | None = None) -> Steps[GlobResult]:
    """The regular files below directory ``path`` that ``pattern`` matches."""
    try:
        tree, prefix = yield from locate(path)
        reply = yield "glob", {"pattern": pattern, "path": tree, **tags("glob", call_id)}
    except BadPath as exc:
        return GlobResult(error=str(exc))
    except FAILURES as exc:
        if isinstance(exc, OSError) and exc.errno == errno.EINVAL:
            return GlobResult(error=exc.strerror)
        return GlobResult(error=f"Path '{path}': {why(exc, ENOENT='path_not_found', ENOTDIR='not_a_directory')}")
    top = _shown(prefix)
    matches = [
        Entry(top + found.decode("utf-8", "surrogateescape"), False, size, mtime_ns)
        for found, size, mtime_ns in reply["matches"]
    ]
    return GlobResult(matches, reply["truncated"], reply.get("reason"))


glob, aglob = both(_glob)


def _grep(
    pattern: str,
    path: str = "/",
    glob: str | None = None,
    *,
    max_count: int | None = MAX_MATCHES,
    output_mode: OutputMode = "files_with_matches",
    call_id: str | None = None,
) -> Steps[GrepResult]:
    """The lines that contain the text ``pattern`` in the text files at or below ``path``.

    ``glob`` narrows the files; at most ``max_count`` lines in all come back, None for no limit.
    """
    if max_count is not None and max_count < 1:
        return GrepResult(pattern, error="Error: max_count must be at least 1.")
    try:
        tree, prefix = yield from locate(path)
        wanted: dict[str, Any] = tags("grep", call_id) | ({} if glob is None else {"glob": glob})
        if max_count is not None:
            wanted["max_count"] = max_count
        reply = yield "grep", {"pattern": pattern.encode(), "path": tree, **wanted}
    except UnicodeEncodeError as exc:
        return GrepResult(pattern, error=f"Error: pattern is not valid Unicode text (character {exc.start}).")
    except BadPath as exc:
        return GrepResult(pattern, error=f"Error: {exc}")
    except FAILURES as exc:
        if isinstance(exc, FileNotFoundError | NotADirectoryError):
            return GrepResult(pattern, [], output_mode=output_mode, missing=True)
        if isinstance(exc, OSError) and exc.errno == errno.EINVAL:
            return GrepResult(pattern, error=exc.strerror)
        return GrepResult(pattern, error=f"Error searching '{path}': {why(exc)}")
    matches = [
        Match(_shown(prefix + found), line, text.decode(errors="replace")) for found, line, text in reply["matches"]
    ]
    return GrepResult(pattern, matches, reply["truncated"], output_mode, reason=reply.get("reason"))


grep, agrep = both(_grep)


def execute(
    client: Any,
    command: str,
    timeout: float | None = None,
    *,
    view: Literal["auto", "root", "mount"] = "auto",
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    call_id: str | None = None,
    **options: Any,
) -> ExecuteResult:
    """Run one shell command in the tree; ``timeout`` in seconds, None for the default, 0 for none.

    ``options``: more of ``agenttools.shell.execute``.
    """
    from agenttools import shell  # most clients never run a command; it would double what an import takes

    call_id = current_call() if call_id is None else call_id
    try:
        ran = shell.execute(client, command, timeout=timeout, view=view, cwd=cwd, env=env, call_id=call_id, **options)
    except (ValueError, *FAILURES) as exc:
        return _not_executed(exc)
    except FAULTS as exc:
        raise mistaken(execute, (client, command, timeout), {"cwd": cwd, "env": env, **options}) or exc from None
    return _executed(ran)


async def aexecute(
    client: Any,
    command: str,
    timeout: float | None = None,
    *,
    view: Literal["auto", "root", "mount"] = "auto",
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    call_id: str | None = None,
    **options: Any,
) -> ExecuteResult:
    """``execute`` for asyncio and trio. Cancelling it ends what the command started."""
    from agenttools import shell

    call_id = current_call() if call_id is None else call_id
    try:
        ran = await shell.aexecute(
            client, command, timeout=timeout, view=view, cwd=cwd, env=env, call_id=call_id, **options
        )
    except (ValueError, *FAILURES) as exc:
        return _not_executed(exc)
    except FAULTS as exc:
        raise mistaken(aexecute, (client, command, timeout), {"cwd": cwd, "env": env, **options}) or exc from None
    return _executed(ran)


def _not_executed(exc: Exception) -> ExecuteResult:
    if isinstance(exc, ValueError):
        return ExecuteResult(error=f"Error: Invalid parameter. {exc}")
    return ExecuteResult(error=f"Error executing command: {exc.strerror or exc if isinstance(exc, OSError) else exc}")


def _executed(ran: Any) -> ExecuteResult:
    return ExecuteResult(
        ran.output,
        ran.exit_code,
        ran.view,
        ran.truncated,
        ran.output_file,
        ran.timed_out,
        ran.duration,
        ran.notices,
        ran.size,
        ran.lines,
        ran.tail,
        ran.complete,
    )
