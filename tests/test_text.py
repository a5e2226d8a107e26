"""Line windows, exact replacement and result sizes, on plain bytes."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttools import text
from agenttools.text import NotText, Pager, Refused, Window, is_text, replace, show_list, show_window, window

ENDINGS = re.compile("\r\n|\n|\r")
LINES = st.text(alphabet="ab \r\n\u00e9\u20ac\U0001f600\ufeff\u2028\x0c", max_size=40)


def lines_of(content: str) -> list[str]:
    """The lines of a text by the rule, one by one: the model the windows are compared with."""
    shown = ENDINGS.sub("\n", content.removeprefix("\ufeff"))
    return re.findall(r"[^\n]*\n|[^\n]+", shown)


@pytest.mark.parametrize(
    ("data", "offset", "limit", "expected"),
    [
        (b"a\nb\nc\n", 0, 100, Window("a\nb\nc\n", 1, 3, 3)),
        (b"a\nb\nc", 0, 100, Window("a\nb\nc", 1, 3, 3)),
        (b"a\nb\nc\n", 0, 2, Window("a\nb\n", 1, 2, 3, 2)),
        (b"a\nb\nc\n", 2, 2, Window("c\n", 3, 3, 3)),
        (b"a\nb\nc\n", 3, 2, Window("", total_lines=3, past_end=True)),
        (b"a\nb\nc\n", -5, 1, Window("a\n", 1, 1, 3, 1)),
        (b"a\r\nb\rc\n\nd", 0, 10, Window("a\nb\nc\n\nd", 1, 5, 5, converted=True)),
        (b"\xef\xbb\xbfa\n", 0, 10, Window("a\n", 1, 1, 1)),
        (b"\n\n\n", 1, 1, Window("\n", 2, 2, 3, 2)),
        ("x\u2028y\x0cz\x85w\n".encode(), 0, 10, Window("x\u2028y\x0cz\x85w\n", 1, 1, 1)),
        (b"", 0, 10, Window("")),
        (b"\xef\xbb\xbf", 0, 10, Window("")),
        (b"a\n", 0, 0, Window("")),
        (b"a\n", 9, -1, Window("")),
    ],
)
def test_window(data: bytes, offset: int, limit: int, expected: Window) -> None:
    assert window(data, offset, limit) == expected
    pager = Pager(offset, limit)
    for i in range(len(data)):
        pager.feed(data[i : i + 1])
    assert pager.finish() == expected


@pytest.mark.parametrize("data", [b"\0", b"a\0b", b"\xff", "\u20ac".encode()[:2], b"caf\xe9\n", "a\n".encode("utf-16")])
def test_binary_is_told_by_content(data: bytes) -> None:
    assert not is_text(data)
    with pytest.raises(NotText):
        window(data, 0, 10)
    with pytest.raises(NotText):
        pager = Pager(0, 10)
        pager.feed(data)
        pager.finish()
    with pytest.raises(NotText):
        replace(data, "a", "b")


@given(LINES, st.integers(-2, 8), st.integers(-1, 6), st.lists(st.integers(0, 90), max_size=6))
def test_windows_by_pieces_and_whole_agree_with_the_lines(
    content: str, offset: int, limit: int, cuts: list[int]
) -> None:
    data = content.encode()
    whole = window(data, offset, limit)
    pager = Pager(offset, limit)
    marks = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for start, end in itertools.pairwise(marks):
        pager.feed(data[start:end])
    assert pager.finish() == whole
    lines = lines_of(content)
    start = max(offset, 0)
    if limit <= 0 or not lines:
        assert whole == Window("")
    elif start >= len(lines):
        assert whole.past_end and whole.total_lines == len(lines)
    else:
        shown = lines[start : start + limit]
        assert whole.content == "".join(shown)
        assert (whole.start_line, whole.end_line, whole.total_lines) == (start + 1, start + len(shown), len(lines))
        assert whole.next_offset == (whole.end_line if start + limit < len(lines) else None)


def test_pages_follow_each_other_to_the_end() -> None:
    data = "".join(f"line {i} \u20ac\n" for i in range(1000)).encode()
    offset: int | None = 0
    shown = ""
    while offset is not None:
        view = window(data, offset, 37)
        shown += view.content
        offset = view.next_offset
    assert shown == data.decode()


def test_large_page_is_cut_on_a_character_and_goes_on_at_the_cut_line() -> None:
    line = "\u20ac" * 1000 + "\n"
    data = (line * 300).encode()
    view = window(data, 0, 300)
    assert view.cut and view.content.endswith(text.PAGE_CUT)
    assert len(view.content.encode()) <= text.MAX_PAGE_BYTES
    body = view.content.removesuffix(text.PAGE_CUT)
    assert data.decode().startswith(body)
    assert view.end_line == view.next_offset == body.count("\n")
    assert view.total_lines == 300
    rest = window(data, view.next_offset or 0, 300)
    assert rest.content == line * (300 - (view.next_offset or 0))


def test_line_longer_than_a_page_makes_progress() -> None:
    data = b"x" * 600_000 + b"\nlast\n"
    view = window(data, 0, 10)
    assert (view.start_line, view.end_line, view.next_offset, view.total_lines) == (1, 1, 1, 2)
    assert window(data, 1, 10).content == "last\n"


def test_pager_is_full_before_the_end_and_then_forgives_stray_bytes() -> None:
    pager = Pager(1, 2)
    pager.feed(b"a\nb\nc\n")
    assert pager.full
    pager.feed(b"\xff\0\nlast \xe2")
    assert pager.finish() == Window("b\nc\n", 2, 3, 5, 3)
    pager = Pager(0, 1)
    pager.feed(b"a\nb\n")
    assert pager.finish(complete=False) == Window("a\n", 1, 1, None, 1)


@pytest.mark.parametrize(
    ("data", "old", "new", "expected"),
    [
        (b"one two\n", "two", "2", b"one 2\n"),
        (b"a\r\nb\r\nc\r\n", "a\nb\n", "A\nB\n", b"A\r\nB\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "b", "b1\nb2", b"a\r\nb1\r\nb2\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "a\r\nb", "x", b"x\r\nc\r\n"),
        (b"a\nb\n", "a\r\nb", "x\r\ny", b"x\ny\n"),
        (b"a\rb\rc", "a\nb", "x\ny", b"x\ry\rc"),
        (b"unix\nwin\r\nunix2\nold mac\rend\n", "unix2", "UNIX2", b"unix\nwin\r\nUNIX2\nold mac\rend\n"),
        (b"u\nwin\r\nu2\nmac\rend\n", "win\nu2\nmac\nend", "win\nU\nmac\nend", b"u\nwin\r\nU\nmac\rend\n"),
        (b"u\nw\r\nx\r\ny", "u\nw\nx", "u\nw\nnew\nx", b"u\nw\r\nnew\r\nx\r\ny"),
        (b"\xef\xbb\xbfa\r\nb\r\n", "a\nb\n", "c\n", b"\xef\xbb\xbfc\r\n"),
        ("caf\u00e9 \u20ac\n".encode(), "\u00e9", "e", "cafe \u20ac\n".encode()),
        (b"a\n", "a\n", "", b""),
        (b"same\n", "same", "same", b"same\n"),
    ],
)
def test_replace(data: bytes, old: str, new: str, expected: bytes) -> None:
    assert replace(data, old, new) == (expected, 1)


def test_replace_all_counts_and_keeps_each_ending() -> None:
    assert replace(b"aXbXc", "X", "-", replace_all=True) == (b"a-b-c", 2)
    assert replace(b"p\nq\n--\np\r\nq\r\n", "p\nq\n", "r\ns\n", replace_all=True) == (b"r\ns\n--\nr\r\ns\r\n", 2)


@pytest.mark.parametrize(
    ("data", "old", "sentence"),
    [
        (b"x", "", "Error: old_string cannot be empty. Provide the exact text to replace."),
        (b"x", "y", "Error: String not found in file: 'y'"),
        (b"x", "\ud800", "Error: String not found in file: '\ud800'"),
        (
            b"x x",
            "x",
            "Error: String 'x' appears multiple times. Use replace_all=True to replace all occurrences. "
            "It appears 2 times in file; or provide a more specific string with surrounding context.",
        ),
        (
            b"a\nb",
            "b\n",
            "Error: old_string ends with a newline, but the file does not end with a newline. Retry with the trailing "
            "newline removed from old_string (and from new_string if it also ends with a newline).",
        ),
        (
            b"b\nb",
            "b\n\n",
            "Error: String not found in file: 'b\n\n'",
        ),
        (
            b"b-b",
            "b\n",
            "Error: old_string ends with a newline, but the file does not end with a newline. With the trailing "
            "newline removed, old_string would appear 2 times in the file. Retry with the trailing newline removed and "
            "add surrounding context so the match is unique.",
        ),
    ],
)
def test_refusals(data: bytes, old: str, sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        replace(data, old, "new")
    assert str(refused.value) == sentence


def test_same_lines_with_different_endings_are_not_told_apart_silently() -> None:
    with pytest.raises(Refused, match="appears multiple times"):
        replace(b"p\nq\n--\np\r\nq\r\n", "p\nq", "x")


def test_new_string_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(Refused, match="new_string is not valid Unicode"):
        replace(b"x", "x", "a\ud83d")


def test_a_long_old_string_does_not_fill_the_error() -> None:
    with pytest.raises(Refused) as refused:
        replace(b"x", "y" * 100_000, "")
    assert len(str(refused.value)) < 2200


@given(LINES, st.data())
@settings(max_examples=200)
def test_what_a_window_shows_can_be_edited_and_the_rest_stays(content: str, data: st.DataObject) -> None:
    raw = content.encode()
    lines = lines_of(content)
    if not lines:
        return
    first = data.draw(st.integers(0, len(lines) - 1))
    count = data.draw(st.integers(1, len(lines) - first))
    shown = window(raw, first, count).content
    changed, places = replace(raw, shown, shown, replace_all=True)
    assert places >= 1
    assert changed == raw
    try:
        changed, _ = replace(raw, shown, f"[{shown}]")
    except Refused as refused:
        assert "multiple" in str(refused)
    else:
        assert len(changed) == len(raw) + 2
        assert sorted(changed) == sorted([*raw, *b"[]"])


def test_show_window() -> None:
    assert show_window(window(b"a\nb\nc\n", 0, 2)) == "@@ lines 1-2 of 3 | next offset 2 @@\na\nb"
    assert show_window(window(b"a\nb\nc\n", 1, 9)) == "@@ lines 2-3 of 3 @@\nb\nc"
    assert show_window(Window("a\n\n", 1, 2, None, 2), "[note]") == "[note]\n@@ lines 1-2 | next offset 2 @@\na\n"


def test_show_window_drops_whole_lines_and_moves_the_offset_back() -> None:
    data = ("y" * 99 + "\n").encode() * 2000
    shown = show_window(window(data, 100, 1500))
    assert len(shown) <= text.MAX_RESULT_CHARS
    header, body = shown.split("\n", 1)
    last = 100 + body.count("\n") + 1
    assert header == f"@@ lines 101-{last} of 2000 | next offset {last} @@"
    assert set(body.split("\n")) == {"y" * 99}
    long = show_window(window(b"z" * 200_000 + b"\nend\n", 0, 5))
    assert len(long) <= text.MAX_RESULT_CHARS
    assert long.startswith("@@ lines 1-1 of 2 | next offset 1 | truncated mid-line, ")


def test_show_list() -> None:
    assert show_list([]) == "No files found"
    assert show_list(["/a", "/it's"]) == "['/a', \"/it's\"]"
    many = show_list([f"/dir/file{i:06}" for i in range(10_000)])
    assert len(many) <= text.MAX_RESULT_CHARS
    assert many.endswith(f", '{text.LIST_CUT}']")
