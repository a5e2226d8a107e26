"""Text as the tools show and change it: line windows, exact replacement, and fitting a result to a model.

Owns what a line is, what counts as text and how line endings survive an edit. Pure: must not know sockets, paths or
the daemon. Offsets count lines from 0, line numbers start at 1, sizes are bytes unless a name says ``chars``.

A line ends with ``\\n``, ``\\r\\n`` or a lone ``\\r``; a window shows every ending as ``\\n``. A file is text when
it is UTF-8 without NUL. A leading byte-order mark is kept in the file and never shown.
"""

from __future__ import annotations

import codecs
import io
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_PAGE_BYTES = 500 * 1024
"""Most text one read returns (Deep Agents' sandbox ``MAX_OUTPUT_BYTES``), the sentinel included."""

MAX_BINARY_BYTES = 500 * 1024
"""Largest binary file returned as base64 (Deep Agents' sandbox ``MAX_BINARY_BYTES``)."""

MAX_RESULT_CHARS = 80_000
"""Longest result text handed to a model (Deep Agents' 20,000 tokens of 4 characters)."""

PAGE_CUT = (
    "\n\n[Output was truncated due to size limits. The page was cut here; read on from the next offset, "
    "or ask for fewer lines.]"
)
EMPTY_REMINDER = "System reminder: File exists but has empty contents"
EMPTY_OLD = "Error: old_string cannot be empty. Provide the exact text to replace."
LIST_CUT = "... [more results left out; narrow the path or the pattern]"

_BOM = codecs.BOM_UTF8
_ENDING = re.compile(rb"\r\n|\n|\r")
_QUOTED_CHARS = 2000


class NotText(ValueError):
    """The bytes are not UTF-8, or hold a NUL."""


class Refused(ValueError):
    """A replacement was refused; the message is the sentence for the model."""


class Window(NamedTuple):
    """Lines ``start_line`` to ``end_line`` of a text.

    ``start_line`` is None when no line was returned: the file is empty, no line was asked for (``limit`` <= 0), or
    the offset is past the end (then ``past_end``). ``total_lines`` is None when the end was not looked at;
    ``next_offset`` is the offset to go on from, None at the end; ``cut`` says the page was cut for its size,
    ``converted`` that some line of the file ends with ``\\r\\n`` or ``\\r``.
    """

    content: str
    start_line: int | None = None
    end_line: int | None = None
    total_lines: int | None = None
    next_offset: int | None = None
    cut: bool = False
    past_end: bool = False
    converted: bool = False


def is_text(data: bytes) -> bool:
    """Whether ``data``, a whole file, is text."""
    if b"\0" in data:
        return False
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def window(data: bytes, offset: int, limit: int) -> Window:
    """At most ``limit`` lines of the whole file ``data`` after the first ``offset``; NotText when it is binary.

    A negative offset is read as 0.
    """
    if b"\0" in data:
        raise NotText
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise NotText from None
    if text.startswith("\ufeff"):
        text = text[1:]
    if not text or limit <= 0:
        return Window("")
    converted = "\r" in text
    if converted:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if len(data) <= MAX_PAGE_BYTES:
        offset = max(offset, 0)
        total = text.count("\n") + (not text.endswith("\n"))
        if offset >= total:
            return Window("", total_lines=total, past_end=True)
        if offset:
            text = text.split("\n", offset)[offset]
        end = total
        if total - offset > limit:
            text = text[: len(text) - len(text.split("\n", limit)[limit])]
            end = offset + limit
        return Window(text, offset + 1, end, total, end if end < total else None, converted=converted)
    pager = Pager(offset, limit)
    pager.feed(data)
    return pager.finish()


class Pager:
    """A window over a file that comes in pieces: feed() them in order, then finish(). Holds at most one page.

    ``full`` turns true once nothing more can enter the window; pieces fed after that are only counted, and may
    hold any bytes. Before, a piece that is not text raises NotText. Pieces may be cut anywhere.
    """

    def __init__(self, offset: int, limit: int) -> None:
        self._skip = max(offset, 0)
        self._offset = self._skip
        self._want = max(limit, 0)
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._decoder = io.IncrementalNewlineDecoder(self._utf8, translate=True)
        self._parts: list[str] = []
        self._size = 0
        self._ends = 0
        self._open = False
        self.full = self._want == 0

    def feed(self, piece: bytes, final: bool = False) -> None:
        """Take the next bytes of the file; NotText when they are not text and may belong to the window."""
        if not self.full and b"\0" in piece:
            raise NotText
        try:
            text = self._decoder.decode(piece, final)
        except UnicodeDecodeError:
            raise NotText from None
        if not text:
            return
        count = text.count("\n")
        self._ends += count
        self._open = not text.endswith("\n")
        if not self.full:
            self._collect(text, count)

    def _collect(self, text: str, count: int) -> None:
        if self._skip:
            if count < self._skip:
                self._skip -= count
                return
            text = text.split("\n", self._skip)[self._skip]
            count -= self._skip
            self._skip = 0
        if count >= self._want:
            text = text[: len(text) - len(text.split("\n", self._want)[self._want])]
            count = self._want
        self._want -= count
        self._parts.append(text)
        self._size += len(text.encode())
        if self._want == 0 or self._size > MAX_PAGE_BYTES:
            self.full = True
            # What follows is counted, not shown: a stray byte far below must not make this page unreadable.
            self._utf8.errors = "replace"

    def finish(self, complete: bool = True) -> Window:
        """The window. ``complete`` is False when pieces are left that were not fed: then there is no total."""
        if complete:
            self.feed(b"", final=True)
        seen = self._ends + self._open
        total = seen if complete else None
        content = "".join(self._parts)
        if not content:
            past_end = 0 < seen <= self._offset and not self.full
            return Window("", total_lines=total if past_end else None, past_end=past_end)
        lines = content.count("\n") + (not content.endswith("\n"))
        cut = self._size > MAX_PAGE_BYTES
        if cut:
            room = MAX_PAGE_BYTES - len(PAGE_CUT)
            content = content.encode()[:room].decode(errors="ignore")
            # At least one line of progress, though no offset reaches the rest of a line longer than a page.
            lines = content.count("\n") or 1
            content += PAGE_CUT
        end = self._offset + lines
        onward = end if total is None or end < total else None
        converted = self._decoder.newlines not in (None, "\n")
        return Window(content, self._offset + 1, end, total, onward, cut, converted=converted)


def past_end_sentence(offset: int, total: int) -> str:
    """What to say when a read starts behind the last line."""
    return f"Line offset {offset} exceeds file length ({total} lines)"


def replace(data: bytes, old: str, new: str, replace_all: bool = False) -> tuple[bytes, int]:
    """``data`` with ``old`` replaced by ``new``, and how many places that were; other bytes stay as they are.

    ``old`` as a window shows it (``\\n`` only) matches whatever endings the file has there, and the new lines take
    them over. ``old`` with a ``\\r`` is first tried exactly as given. Raises NotText for a binary file, Refused
    when ``old`` is empty, is nowhere, or is in more than one place and ``replace_all`` is false.
    """
    if not old:
        raise Refused(EMPTY_OLD)
    if not is_text(data):
        raise NotText
    try:
        old_bytes = old.encode()
    except UnicodeEncodeError:
        raise Refused(_not_found(old)) from None
    try:
        new_bytes = new.encode()
    except UnicodeEncodeError as err:
        raise Refused(f"Error: new_string is not valid Unicode text (character {err.start}).") from None
    if b"\r" not in data and b"\r" not in old_bytes:
        result, count = data, data.count(old_bytes)
        if count == 1 or (count and replace_all):
            result = data.replace(old_bytes, new_bytes)
    else:
        result, count = _replace_endings(data, old_bytes, new_bytes)
    if not count:
        raise Refused(_missing(_normal(data), old))
    if count > 1 and not replace_all:
        raise Refused(
            f"Error: String '{_quote(old)}' appears multiple times. Use replace_all=True to replace all occurrences. "
            f"It appears {count} times in file; or provide a more specific string with surrounding context."
        )
    return result, count


def _normal(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def _replace_endings(data: bytes, old: bytes, new: bytes) -> tuple[bytes, int]:
    """Replace all of ``old`` in ``data`` where one of them has a carriage return."""
    if b"\r" in old:
        count = data.count(old)
        if count:
            return data.replace(old, new), count
        old, new = _normal(old), _normal(new)
    style = _style(data)
    if style is not None:
        # One ending throughout, or none in what is sought: every match has the same bytes.
        old = old.replace(b"\n", style)
        if b"\r" not in new:
            new = new.replace(b"\n", style)
        return data.replace(old, new), data.count(old)
    if b"\n" not in old:
        return data.replace(old, new), data.count(old)
    return _replace_mixed(data, old, _normal(new))


def _style(data: bytes) -> bytes | None:
    """The one line ending of ``data`` (``\\n`` when it has none), or None when it mixes them."""
    pairs, lf, cr = data.count(b"\r\n"), data.count(b"\n"), data.count(b"\r")
    if not cr:
        return b"\n"
    if pairs == lf == cr:
        return b"\r\n"
    return b"\r" if not lf else None


def _replace_mixed(data: bytes, old: bytes, new: bytes) -> tuple[bytes, int]:
    """Find ``old`` in ``data`` with its endings made ``\\n``, and put ``new`` there with the endings it had."""
    normal = _normal(data)
    # Where each CRLF stands in `normal`: the bytes before a place there are its own plus one for each of them.
    pairs = [match.start() - i for i, match in enumerate(re.finditer(rb"\r\n", data))]
    out: list[bytes] = []
    done = count = 0
    at = normal.find(old)
    while at >= 0:
        count += 1
        stop = at + len(old)
        start, end = at + bisect_left(pairs, at), stop + bisect_left(pairs, stop)
        out += (data[done:start], _with_endings(old, new, _ENDING.findall(data[start:end])))
        done = end
        at = normal.find(old, stop)
    out.append(data[done:])
    return b"".join(out), count


def _with_endings(old: bytes, new: bytes, endings: list[bytes]) -> bytes:
    """``new`` with the ``endings`` of ``old``, line for line if they have as many, else on the lines both have.

    Lines only ``new`` has get the ending that is usual in ``old``.
    """
    before, after = old.split(b"\n"), new.split(b"\n")
    shortest = min(len(before), len(after))
    head = shortest if len(before) == len(after) else 0
    while head < shortest and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < shortest - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    usual = Counter(endings).most_common(1)[0][0]
    last = len(after) - 1
    out = [after[0]]
    for i, line in enumerate(after[1:]):
        if i < head and i < len(endings):
            ending = endings[i]
        elif last - i <= min(tail, len(endings)):
            ending = endings[len(endings) - (last - i)]
        else:
            ending = usual
        out += (ending, line)
    return b"".join(out)


def _quote(old: str) -> str:
    if len(old) <= _QUOTED_CHARS:
        return old
    return f"{old[:_QUOTED_CHARS]}... [{len(old) - _QUOTED_CHARS} more characters]"


def _not_found(old: str) -> str:
    return f"Error: String not found in file: '{_quote(old)}'"


def _missing(normal: bytes, old: str) -> str:
    """The sentence for an ``old`` that is nowhere, with a hint when only the file's missing last newline differs."""
    bare = _normal(old.encode()).removesuffix(b"\n")
    if not old.endswith("\n") or not bare or not normal.endswith(bare):
        return _not_found(old)
    lead = "Error: old_string ends with a newline, but the file does not end with a newline. "
    count = normal.count(bare)
    if count == 1:
        return (
            f"{lead}Retry with the trailing newline removed from old_string "
            "(and from new_string if it also ends with a newline)."
        )
    return (
        f"{lead}With the trailing newline removed, old_string would appear {count} times in the file. "
        "Retry with the trailing newline removed and add surrounding context so the match is unique."
    )


def _header(start: int, end: int, total: int | None, next_offset: int | None, *more: str) -> str:
    fields = [f"lines {start}-{end}" + ("" if total is None else f" of {total}")]
    if next_offset is not None:
        fields.append(f"next offset {next_offset}")
    return f"@@ {' | '.join((*fields, *more))} @@"


def show_window(view: Window, notice: str = "") -> str:
    """The text of a read for a model: a header line, then the lines as they are, within MAX_RESULT_CHARS.

    What does not fit is dropped in whole lines and the header's next offset goes back to the first dropped one.
    ``notice`` is a sentence to put above the header.
    """
    assert view.start_line is not None and view.end_line is not None
    top = f"{notice}\n" if notice else ""
    body = view.content.removesuffix("\n")
    header = _header(view.start_line, view.end_line, view.total_lines, view.next_offset)
    if len(top) + len(header) + 1 + len(body) <= MAX_RESULT_CHARS:
        return f"{top}{header}\n{body}"
    # 200: room for the header, whose numbers change with the cut.
    room = MAX_RESULT_CHARS - 200 - len(top)
    fits = body.rfind("\n", 0, room)
    if fits >= 0:
        body = body[:fits]
        end = view.start_line + body.count("\n")
        return f"{top}{_header(view.start_line, end, view.total_lines, end)}\n{body}"
    line = body.split("\n", 1)[0]
    onward = view.start_line if view.total_lines is None or view.start_line < view.total_lines else None
    shown = f"truncated mid-line, {room} of {len(line)} chars"
    return f"{top}{_header(view.start_line, view.start_line, view.total_lines, onward, shown)}\n{line[:room]}"


def show_list(paths: Sequence[str]) -> str:
    """Paths for a model: a Python list literal within MAX_RESULT_CHARS, or ``No files found``."""
    if not paths:
        return "No files found"
    literal = str(list(paths))
    if len(literal) <= MAX_RESULT_CHARS:
        return literal
    room = MAX_RESULT_CHARS - len(repr(LIST_CUT)) - 2
    kept = 0
    for path in paths:
        room -= len(repr(path)) + 2
        if room < 0:
            break
        kept += 1
    return str([*paths[:kept], LIST_CUT])


def clip(text: str) -> str:
    """``text``, or its beginning with a note when it is longer than MAX_RESULT_CHARS."""
    if len(text) <= MAX_RESULT_CHARS:
        return text
    return f"{text[: MAX_RESULT_CHARS - len(LIST_CUT) - 1]}\n{LIST_CUT}"


def printable(text: str) -> str:
    """``text`` with the bytes of a name that is no UTF-8 (lone surrogates) written as ``\\udcXX``."""
    if text.isascii():
        return text
    return text.encode(errors="backslashreplace").decode()
