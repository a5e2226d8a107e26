"""Glob patterns as regular expressions: wcmatch's meaning, in time that is bounded whatever the path."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wcmatch import glob as wcglob

from vfsd.core.globs import matches

SEGMENTS = ["**", "**", "*", "a", "b", ".a", ".*", "b*", "a?", "[ab]", "{a,.b}", "{a/**,b}", "a**b"]
NAMES = ["a", "b", "ab", "aa", ".a", ".b"]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=7), st.lists(st.sampled_from(NAMES), max_size=8))
def test_the_meaning_is_that_of_wcmatch(segments: list[str], names: list[str]) -> None:
    pattern, path = "/" + "/".join(segments), "/" + "/".join(names)
    assert matches(path, pattern) == wcglob.globmatch(path, pattern, flags=wcglob.BRACE | wcglob.GLOBSTAR)


@pytest.mark.parametrize(
    "pattern", ["/**/a/**/a/**/a/**/a/**/x", "/**/a*/**/a?/**/*a/**/b/x", "/a/**/a/**/*/**/*/**/*.c"]
)
def test_a_deep_path_takes_no_longer_for_more_of_it(pattern: str) -> None:
    """With backtracking these took longer than anybody lives, on the loop."""
    path = "/a" * 1000
    assert not matches(path, pattern)
    assert matches(path + "/x", "/**/a/**/a/**/a/**/a/**/x")
