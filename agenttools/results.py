"""What the tools give back: typed results for programs, and ``text``, the same for a model.

Owns the wording of results. Must not know how they came about. Every result has ``error``, a sentence or None; with an
error the other fields mean nothing unless they say otherwise. Sizes are bytes, times nanoseconds since the epoch.
Names that are no UTF-8 are in paths as surrogate escapes, and written ``\\udcXX`` in ``text``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from agenttools.text import EMPTY_REMINDER, Window, clip, printable, show_list, show_window

OutputMode = Literal["files_with_matches", "content", "count"]

_LOOKS_LIKE_REGEX = re.compile(r"\||\.[*+]|\\[.wWdDsSbB(){}\[\]|+*?^$]")

_GREP_PARTIAL = (
    "Note: there is more than this: the search reached its match limit or its time limit. What is shown is right. "
    "For the rest search a narrower path, for a longer text, or with a higher max_count."
)
_GLOB_PARTIAL = (
    "Note: there may be more than this: the search reached its time or size limit. What is shown is right. "
    "For the rest use a narrower path or pattern."
)
_GLOB_UNREADABLE = (
    "Note: some directories may not be read by this user, and what is in them is missing here. A narrower search "
    "won't show it."
)
_GREP_UNREADABLE = (
    "Note: some files could not be read, for their disk or the place they are kept in fails. What is shown is right; "
    "what is in those files is missing here."
)
_GREP_LITERAL = (
    "Note: the pattern is taken literally, not as a regular expression; `|`, `.*` and `\\.` stand for themselves. "
    "Search for a plain text, once for each alternative."
)


class Entry(NamedTuple):
    """One file of a listing; ``path`` is whole. ``size`` of a directory is 0."""

    path: str
    is_dir: bool
    size: int
    mtime_ns: int


class Match(NamedTuple):
    """A line that a grep found: ``line`` counts from 1, ``text`` has no line ending."""

    path: str
    line: int
    text: str


def _prefixed(error: str) -> str:
    return error if error.startswith("Error") else f"Error: {error}"


@dataclass(frozen=True, slots=True)
class LsResult:
    """The entries of a directory by path."""

    entries: list[Entry] | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        """A list literal of the paths."""
        if self.error is not None:
            return _prefixed(self.error)
        return show_list([entry.path for entry in self.entries or []])


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A page of a text file, or a whole binary file in base64.

    ``content`` keeps the page's last newline. ``start_line`` to ``end_line`` of ``total_lines`` (None: not counted) are
    in it, ``next_offset`` continues after it (None at the end); all are None for an empty or binary file and when no
    line was asked for (``no_lines_requested``). ``cut``: the page was cut for its size. ``converted``: some line of the
    file ends with ``\\r\\n`` or ``\\r``, which ``content`` has as ``\\n``.
    """

    path: str
    content: str = ""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    size: int = 0
    start_line: int | None = None
    end_line: int | None = None
    total_lines: int | None = None
    next_offset: int | None = None
    cut: bool = False
    no_lines_requested: bool = False
    notice: str = ""
    error: str | None = None
    converted: bool = False

    @property
    def text(self) -> str:
        """A header line and the lines as they are; a sentence when there are none."""
        if self.error is not None:
            return printable(_prefixed(self.error))
        if self.encoding == "base64":
            return printable(f"'{self.path}' is a binary file of {self.size} bytes and is not shown as text.")
        if self.no_lines_requested:
            return "System reminder: no lines were read because none were asked for; use a limit of at least 1."
        if self.start_line is None:
            return f"@@ lines 1-1 @@\n{EMPTY_REMINDER}"
        view = Window(self.content, self.start_line, self.end_line, self.total_lines, self.next_offset, self.cut)
        return show_window(view, self.notice)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """``path`` as given; ``created`` when there was no such file before."""

    path: str
    created: bool = False
    size: int = 0
    error: str | None = None

    @property
    def text(self) -> str:
        """One sentence."""
        return printable(self.error if self.error is not None else f"Updated file {self.path}")


@dataclass(frozen=True, slots=True)
class EditResult:
    """``path`` as given; ``occurrences`` replaced."""

    path: str
    occurrences: int = 0
    error: str | None = None

    @property
    def text(self) -> str:
        """One sentence."""
        if self.error is not None:
            return printable(self.error)
        return printable(f"Successfully replaced {self.occurrences} instance(s) of the string in '{self.path}'")


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """``path`` as given."""

    path: str
    error: str | None = None

    @property
    def text(self) -> str:
        """One sentence."""
        return printable(self.error if self.error is not None else f"Deleted {self.path}")


@dataclass(frozen=True, slots=True)
class GlobResult:
    """Regular files by path. ``reason`` why there may be more: ``budget`` or ``unreadable``."""

    matches: list[Entry] | None = None
    truncated: bool = False
    reason: str | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        """A list literal of the paths, and a note when there may be more."""
        if self.error is not None:
            return printable(_prefixed(self.error))
        shown = show_list([match.path for match in self.matches or []])
        if not self.truncated:
            return shown
        return f"{shown}\n\n{_GLOB_UNREADABLE if self.reason == 'unreadable' else _GLOB_PARTIAL}"


@dataclass(frozen=True, slots=True)
class GrepResult:
    """Lines by path and number. ``truncated``: there are more, or may be. ``output_mode`` is for ``text`` only.

    ``missing``: nothing is at the path to look in. ``reason``: as of GlobResult, where files can't be read.
    """

    pattern: str
    matches: list[Match] | None = None
    truncated: bool = False
    output_mode: OutputMode = "files_with_matches"
    error: str | None = None
    missing: bool = False
    reason: str | None = None

    @property
    def text(self) -> str:
        """The files, their lines or their counts by ``output_mode``, and a note where one helps."""
        if self.error is not None:
            return printable(self.error)
        if not self.matches:
            shown = "No matches found"
            note = _GREP_LITERAL if _LOOKS_LIKE_REGEX.search(self.pattern) else ""
        else:
            shown = clip(printable("\n".join(self._lines(self.matches))))
            note = ""
        if self.truncated:
            note = _GREP_UNREADABLE if self.reason == "unreadable" else _GREP_PARTIAL
        return f"{shown}\n\n{note}" if note else shown

    def _lines(self, matches: list[Match]) -> list[str]:
        files: dict[str, list[Match]] = {}
        for match in matches:
            files.setdefault(match.path, []).append(match)
        if self.output_mode == "files_with_matches":
            return list(files)
        if self.output_mode == "count":
            return [f"{path}: {len(found)}" for path, found in files.items()]
        lines = []
        for path, found in files.items():
            lines.append(f"{path}:")
            lines += [f"  {match.line}: {match.text}" for match in found]
        return lines


@dataclass(frozen=True, slots=True)
class ExecuteResult:
    """What a command did; see ``agenttools.shell.ExecuteResult``. ``exit_code`` is None when nothing ran."""

    output: str = ""
    exit_code: int | None = None
    view: str | None = None
    truncated: bool = False
    output_file: str | None = None
    timed_out: bool = False
    duration: float = 0.0
    notices: tuple[str, ...] = ()
    size: int = 0
    lines: int = 0
    tail: str = ""
    complete: bool = True
    error: str | None = None

    @property
    def text(self) -> str:
        """The output, then what cannot be seen from it and how the command ended, each on a line of its own."""
        if self.error is not None:
            return printable(self.error)
        parts = [self.output or "<no output>"]
        parts += [f"[{notice}]" for notice in self.notices]
        if self.exit_code is not None:
            ended = "succeeded" if self.exit_code == 0 else "failed"
            parts.append(f"[Command {ended} with exit code {self.exit_code}]")
        if self.truncated:
            parts.append("[Output was truncated due to size limits]")
        return "\n".join(parts)


Result = LsResult | ReadResult | WriteResult | EditResult | DeleteResult | GlobResult | GrepResult | ExecuteResult
