"""The eight tools as plain functions over a client: each makes its requests and returns a typed result.

Owns what a tool does and says. Must not know sockets, vfsd or any agent framework. No function raises for what the
tree, the daemon or the arguments' values do: the result's ``error`` says it.

Paths: ``/x``, ``x`` and ``MOUNTPOINT/x`` are the same file; a ``..`` component is refused. Results name a file as the
caller did, whole.
"""

from __future__ import annotations

import base64
import errno
import stat
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, Protocol

import xxhash

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
from agenttools.wire import MAX_PIECE, PIECE, WireError

READ_LIMIT = 100
"""Lines a read returns when nothing is said."""

MAX_MATCHES = 1000
"""Lines a grep returns when nothing is said."""

MAX_COUNTED = 64 << 20
"""Bytes of a file that are read to tell how many lines it has; of a larger one a page comes without a total."""

EDIT_TRIES = 100
"""How often an edit starts over because the file changed under it. Each time another writer got on."""

_FAILURES = (OSError, WireError)


class Client(Protocol):
    """What the tools need of ``agenttools.client.Client``."""

    @property
    def hello(self) -> dict[str, Any]: ...
    def call(self, op: str, /, **params: Any) -> dict[str, Any]: ...


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


def _locate(client: Client, path: str) -> tuple[bytes, bytes]:
    return tree_path(path, client.hello.get("mountpoint") or b"")


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


_CODES = {
    errno.ENOENT: "file_not_found",
    errno.ENOTDIR: "file_not_found",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.ELOOP: "invalid_path",
}


def _why(exc: Exception, **codes: str) -> str:
    """A code callers know (Deep Agents' literals) or the system's words; ``codes`` by errno name come first."""
    if isinstance(exc, OSError) and exc.errno is not None and not isinstance(exc, ConnectionError):
        name = errno.errorcode.get(exc.errno, "")
        return codes.get(name) or _CODES.get(exc.errno) or exc.strerror or str(exc)
    return str(exc) or type(exc).__name__


def _tags(tool: str, call_id: str | None) -> dict[str, str]:
    return {"tool": tool} if call_id is None else {"tool": tool, "call_id": call_id}


def ls(client: Client, path: str = "/", *, slash: bool = False) -> LsResult:
    """The files and directories in directory ``path``; with ``slash`` the paths of directories end with one."""
    try:
        tree, prefix = _locate(client, path)
        top = _shown(prefix + (b"" if tree == b"/" else tree)) + "/"
        reply = client.call("list", path=tree)
        listed = reply["entries"]
        while reply.get("more"):
            reply = client.call("list", path=tree, **{"continue": reply["continue"]})
            listed += reply["entries"]
    except BadPath as exc:
        return LsResult(error=str(exc))
    except _FAILURES as exc:
        return LsResult(error=f"Path '{path}': {_why(exc, ENOENT='path_not_found', ENOTDIR='not_a_directory')}")
    entries = []
    for name, mode, size, mtime_ns in listed:
        full = top + name.decode("utf-8", "surrogateescape")
        if stat.S_ISDIR(mode):
            entries.append(Entry(full + "/" if slash else full, True, 0, mtime_ns))
        else:
            entries.append(Entry(full, False, size, mtime_ns))
    entries.sort()
    return LsResult(entries)


def read(client: Client, path: str, offset: int = 0, limit: int = READ_LIMIT) -> ReadResult:
    """At most ``limit`` lines of a text file after the first ``offset``; a binary file whole, in base64."""
    try:
        tree, _ = _locate(client, path)
        reply = client.call("read", path=tree, offset=0, length=PIECE)
        data, size = reply["data"], reply["size"]
        if not stat.S_ISREG(reply["mode"]):
            return ReadResult(path, error=f"File '{path}': not_a_file")
        try:
            if size <= len(data):
                view = window(data, offset, limit)
            else:
                view = _page(client, tree, data, size, offset, limit)
        except NotText:
            if size > MAX_BINARY_BYTES:
                limit_text = f"Binary file exceeds maximum preview size of {MAX_BINARY_BYTES} bytes"
                return ReadResult(path, size=size, error=f"File '{path}': {limit_text}")
            return ReadResult(path, base64.b64encode(data).decode(), "base64", size)
    except BadPath as exc:
        return ReadResult(path, error=str(exc))
    except _FAILURES as exc:
        return ReadResult(path, error=f"File '{path}': {_why(exc, EISDIR='not_a_file')}")
    if view.past_end:
        sentence = past_end_sentence(offset, view.total_lines or 0)
        return ReadResult(path, size=size, error=f"File '{path}': {sentence}")
    notice = ""
    if offset < 0 and view.start_line is not None:
        notice = f"[There is no offset {offset}; this is from line 1 on.]"
    content, start, end, total, onward, cut, _ = view
    nothing = start is None and limit <= 0 and size > 0
    return ReadResult(path, content, "utf-8", size, start, end, total, onward, cut, nothing, notice)


def _page(client: Client, tree: bytes, data: bytes, size: int, offset: int, limit: int) -> Window:
    """The window of a file that comes in pieces, of which ``data`` is the first."""
    pager = Pager(offset, limit)
    at = 0
    while data:
        pager.feed(data)
        at += len(data)
        if pager.full and size > MAX_COUNTED:
            return pager.finish(complete=False)
        data = client.call("read", path=tree, offset=at, length=PIECE)["data"]
    return pager.finish()


def write(client: Client, path: str, content: str | bytes, *, call_id: str | None = None) -> WriteResult:
    """Make or overwrite the file at ``path`` with exactly ``content``; missing directories are made."""
    try:
        data = content.encode() if isinstance(content, str) else content
        tree, _ = _locate(client, path)
        reply = client.call("write", path=tree, data=data, **_tags("write", call_id))
    except UnicodeEncodeError as exc:
        why = f"content is not valid Unicode text (character {exc.start})"
        return WriteResult(path, error=f"Failed to write file '{path}': {why}")
    except BadPath as exc:
        return WriteResult(path, error=f"Error: {exc}")
    except _FAILURES as exc:
        why = _why(exc, EISDIR="is_directory", ENOTDIR="invalid_path")
        return WriteResult(path, error=f"Failed to write file '{path}': {why}")
    return WriteResult(path, reply["created"], len(data))


def edit(
    client: Client,
    path: str,
    old_string: str,
    new_string: str,
    replace_all: bool = False,
    *,
    call_id: str | None = None,
) -> EditResult:
    """Replace the text ``old_string``, which must be there once unless ``replace_all``, with ``new_string``.

    What others write at the same time is never lost: then the edit starts over from what they wrote.
    """
    if not old_string:
        return EditResult(path, error=EMPTY_OLD)
    try:
        tree, _ = _locate(client, path)
        for _ in range(EDIT_TRIES):
            reply = client.call("read", path=tree, offset=0, length=PIECE)
            if not stat.S_ISREG(reply["mode"]):
                return EditResult(path, error=f"Error: '{path}' is not a regular file")
            data = reply["data"]
            if reply["size"] > len(data):
                data = _whole(client, tree, data)
            changed, count = replace(data, old_string, new_string, replace_all)
            if changed == data:
                return EditResult(path, count)
            try:
                client.call(
                    "write",
                    path=tree,
                    data=changed,
                    expect=xxhash.xxh3_64_intdigest(data),
                    **_tags("edit", call_id),
                )
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
    except _FAILURES as exc:
        return EditResult(path, error=_edit_failure(path, exc))
    return EditResult(path, error=f"Error: File '{path}' kept changing while it was edited; read it and try again.")


def _whole(client: Client, tree: bytes, data: bytes) -> bytes:
    """All of a file of which ``data`` is the beginning. A change meanwhile shows when it is written back."""
    parts = [data]
    at = len(data)
    while data:
        data = client.call("read", path=tree, offset=at, length=MAX_PIECE)["data"]
        parts.append(data)
        at += len(data)
    return b"".join(parts)


def _edit_failure(path: str, exc: Exception) -> str:
    number = exc.errno if isinstance(exc, OSError) and not isinstance(exc, ConnectionError) else None
    if number in (errno.ENOENT, errno.ENOTDIR):
        return f"Error: File '{path}' not found"
    if number in (errno.EACCES, errno.EPERM):
        return f"Error: Permission denied editing file '{path}'"
    if number == errno.EISDIR:
        return f"Error: '{path}' is not a regular file"
    return f"Error editing file '{path}': {_why(exc)}"


def delete(client: Client, path: str, *, call_id: str | None = None) -> DeleteResult:
    """Remove a file, a link (not its target), or a directory with all that is in it."""
    try:
        tree, _ = _locate(client, path)
        client.call("delete", path=tree, **_tags("delete", call_id))
    except BadPath as exc:
        return DeleteResult(path, error=f"Error: {exc}")
    except _FAILURES as exc:
        if isinstance(exc, FileNotFoundError | NotADirectoryError):
            return DeleteResult(path, error=f"Error: '{path}' not found")
        return DeleteResult(path, error=f"Error deleting file '{path}': {_why(exc)}")
    return DeleteResult(path)


def glob(client: Client, pattern: str, path: str = "/") -> GlobResult:
    """The regular files below directory ``path`` that ``pattern`` matches."""
    try:
        tree, prefix = _locate(client, path)
        reply = client.call("glob", pattern=pattern, path=tree)
    except BadPath as exc:
        return GlobResult(error=str(exc))
    except _FAILURES as exc:
        if isinstance(exc, OSError) and exc.errno == errno.EINVAL:
            return GlobResult(error=exc.strerror)
        return GlobResult(error=f"Path '{path}': {_why(exc, ENOENT='path_not_found', ENOTDIR='not_a_directory')}")
    top = _shown(prefix)
    matches = [
        Entry(top + found.decode("utf-8", "surrogateescape"), False, size, mtime_ns)
        for found, size, mtime_ns in reply["matches"]
    ]
    return GlobResult(matches, reply["truncated"], reply.get("reason"))


def grep(
    client: Client,
    pattern: str,
    path: str = "/",
    glob: str | None = None,
    *,
    max_count: int | None = MAX_MATCHES,
    output_mode: OutputMode = "files_with_matches",
) -> GrepResult:
    """The lines that contain the text ``pattern`` in the text files at or below ``path``.

    ``glob`` narrows the files; at most ``max_count`` lines in all come back, None for no limit.
    """
    if max_count is not None and max_count < 1:
        return GrepResult(pattern, error="Error: max_count must be at least 1.")
    try:
        tree, prefix = _locate(client, path)
        wanted: dict[str, Any] = {} if glob is None else {"glob": glob}
        if max_count is not None:
            wanted["max_count"] = max_count
        reply = client.call("grep", pattern=pattern.encode(), path=tree, **wanted)
    except UnicodeEncodeError as exc:
        return GrepResult(pattern, error=f"Error: pattern is not valid Unicode text (character {exc.start}).")
    except BadPath as exc:
        return GrepResult(pattern, error=f"Error: {exc}")
    except _FAILURES as exc:
        if isinstance(exc, FileNotFoundError | NotADirectoryError):
            return GrepResult(pattern, [], output_mode=output_mode)
        if isinstance(exc, OSError) and exc.errno == errno.EINVAL:
            return GrepResult(pattern, error=exc.strerror)
        return GrepResult(pattern, error=f"Error searching '{path}': {_why(exc)}")
    matches = [
        Match(_shown(prefix + found), line, text.decode(errors="replace")) for found, line, text in reply["matches"]
    ]
    return GrepResult(pattern, matches, reply["truncated"], output_mode)


def execute(
    client: Any,
    command: str,
    timeout: float | None = None,
    *,
    view: Literal["auto", "root", "mount"] = "auto",
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    call_id: str | None = None,
) -> ExecuteResult:
    """Run one shell command in the tree; ``timeout`` in seconds, None for the default, 0 for none."""
    from agenttools import shell  # most clients never run a command; it would double what an import takes

    try:
        ran = shell.execute(client, command, timeout=timeout, view=view, cwd=cwd, env=env, call_id=call_id)
    except ValueError as exc:
        return ExecuteResult(error=f"Error: Invalid parameter. {exc}")
    except _FAILURES as exc:
        return ExecuteResult(
            error=f"Error executing command: {exc.strerror or exc if isinstance(exc, OSError) else exc}"
        )
    return ExecuteResult(
        ran.output,
        ran.exit_code,
        ran.view,
        ran.truncated,
        ran.output_file,
        ran.timed_out,
        ran.duration,
        ran.notices,
    )
