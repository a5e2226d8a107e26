"""Rules as pure values: which of them decides, what is malformed, what contradicts; and Deep Agents' own matcher."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfsd.core.policy import (
    ALLOW,
    DENY,
    INTERRUPT,
    MODES,
    OPERATIONS,
    Policy,
    RuleError,
    anchor,
    blind_spot,
    check_rule,
)

BOTH = ["read", "write"]


def policy(*rules: tuple[list[str], list[str], str]) -> Policy:
    return Policy(check_rule(*rule) for rule in rules)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("/p/**", "/p/a", True),
        ("/p/**", "/p/a/b/c", True),
        ("/p/**", "/p", False),
        ("/p/**", "/p/.hidden", False),
        ("/p/**", "/pa", False),
        ("/p/*", "/p/a", True),
        ("/p/*", "/p/a/b", False),
        ("/{a,b}/**", "/b/x", True),
        ("/{a,b}/**", "/c/x", False),
        ("/{a,b{c,d}}", "/bd", True),
        ("/**/*.key", "/x/y/z.key", True),
        ("/**/*.key", "/z.key", True),
        ("/**/.env", "/a/.env", True),
        ("/p/?.txt", "/p/a.txt", True),
        ("/p/[ab]", "/p/b", True),
        ("/P/*", "/p/a", False),
        ("/p/**", "/p/line\nbreak", True),
        ("/p/*", "/p/name\n", True),
        ("/p", "/p", True),
        ("/**", "/", True),
        ("/p/é", "/p/e\u0301", False),
    ],
)
def test_what_a_pattern_matches(pattern: str, path: str, matches: bool) -> None:
    rules = policy((BOTH, [pattern], "deny"))
    assert {rules.judge(operation, path) for operation in OPERATIONS} == {DENY if matches else ALLOW}


def test_bytes_that_are_no_text_match_too() -> None:
    assert policy((BOTH, ["/p/*"], "deny")).judge("read", b"/p/\xff\xfe") == DENY


def test_the_first_rule_that_matches_decides() -> None:
    rules = policy(
        (["write"], ["/work/keep/**"], "deny"),
        (["write"], ["/work/**", "/tmp/**"], "allow"),
        (["read"], ["/work/**"], "interrupt"),
        (["write"], ["/**"], "deny"),
    )
    assert rules.judge("write", "/work/keep/a") == DENY
    assert rules.judge("write", "/work/a") == rules.judge("write", "/tmp/a") == ALLOW
    assert rules.judge("write", "/etc/passwd") == DENY
    assert rules.judge("read", "/work/keep/a") == INTERRUPT
    assert rules.judge("read", "/etc/passwd") == ALLOW
    found = rules.decider("write", "/work/a")
    assert found is not None and found.paths == ("/work/**", "/tmp/**")


def test_no_rules_allow() -> None:
    assert Policy().judge("write", "/x") == ALLOW and Policy().decider("read", "/") is None
    assert not Policy().concerns("read", DENY)


@pytest.mark.parametrize(
    ("operations", "paths", "mode", "says"),
    [
        (["execute"], ["/x"], "deny", "operations must be"),
        ([], ["/x"], "deny", "operations must be"),
        ("read", ["/x"], "deny", "operations must be"),
        (["read"], [], "deny", "paths must be"),
        (["read"], "/x", "deny", "paths must be"),
        (["read"], [7], "deny", "paths must be"),
        (["read"], ["x"], "deny", "must start with '/'"),
        (["read"], ["/a/../b"], "deny", "must not contain"),
        (["read"], ["/a\\..\\b"], "deny", "must not contain"),
        (["read"], ["/~/b"], "deny", "must not contain"),
        (["read"], ["/\0"], "deny", "NUL"),
        (["read"], ["/{1..100000}"], "deny", "malformed"),
        (["read"], ["/x"], "forbid", "mode 'forbid' is unknown"),
        (["read"], ["/x"], None, "is unknown"),
    ],
)
def test_malformed(operations: Any, paths: Any, mode: Any, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        check_rule(operations, paths, mode)


@pytest.mark.parametrize(
    ("pattern", "directory", "overlaps"),
    [
        ("/work/keep/**", "/work", True),
        ("/work/keep/**", "/work/keep", True),
        ("/work/keep/**", "/work/other", False),
        ("/work/*.log", "/work", True),
        ("/work/*.log", "/work/notes", False),
        ("/work/*", "/work/app/child", True),
        ("/**/x", "/anything", True),
        ("/work", "/work/sub", True),
        ("/work/a/b", "/work", True),
        ("/work", "/works", False),
    ],
)
def test_what_could_match_below(pattern: str, directory: str, overlaps: bool) -> None:
    rules = policy((["write"], [pattern], "deny"))
    assert (rules.below("write", directory) is not None) == overlaps
    assert rules.below("read", directory) is None
    assert policy((["write"], [pattern], "allow")).below("write", directory) is None


def test_conflicts_name_both() -> None:
    rules = policy((["write"], ["/**"], "allow"), (["write"], ["/policies/**"], "deny"))
    (conflict,) = rules.conflicts()
    assert "deny write /policies/**" in str(conflict) and "allow write /**" in str(conflict)
    same = policy((BOTH, ["/a/*"], "deny"), (["read"], ["/a/*"], "interrupt"))
    assert [str(c.later) for c in same.conflicts()] == ["interrupt read /a/*"]


@pytest.mark.parametrize(
    "rules",
    [
        [(["write"], ["/policies/**"], "deny"), (["write"], ["/**"], "allow")],
        [(["write"], ["/a/*"], "allow"), (["write"], ["/a/**"], "deny")],
        [(["read"], ["/**"], "allow"), (["write"], ["/a/**"], "deny")],
        [(["write"], ["/**"], "deny"), (["write"], ["/a/**"], "deny")],
    ],
)
def test_no_conflict(rules: list[tuple[list[str], list[str], str]]) -> None:
    assert policy(*rules).conflicts() == []


def test_anchors_and_blind_spots() -> None:
    assert [anchor(p) for p in ("/a/b/**", "/**/x", "/a/*/b", "/a/b")] == ["/a/b", "/", "/a", "/a/b"]
    more = blind_spot("/p/**")
    assert more is not None and blind_spot("/p/a") is None
    rules = policy((["read"], [more], "deny"))
    for path in ("/p/.x", "/p/a/.x", "/p/.d/x", "/p/a/.d/e/x"):
        assert rules.judge("read", path) == DENY, path


def test_a_hundred_rules_are_one_expression() -> None:
    rules = Policy(check_rule(["write"], [f"/d{i}/**", f"/*/e{i}"], "deny", str(i)) for i in range(100))
    found = rules.decider("write", "/x/e99")
    assert found is not None and found.origin == "99"


# -- Deep Agents' own

installed = pytest.mark.skipif(importlib.util.find_spec("deepagents") is None, reason="deepagents is not installed")
PARTS = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        ".h",
        "x.key",
        "**",
        "*",
        "*.key",
        "?",
        "{a,b}",
        "[ab]",
        ".*",
        "a*",
        "{a/b,x}",
        "x.{key,b}",
        "[a/]b",
        "\\\\a",
        "*b",
    ]
)
PATTERNS = st.builds(lambda parts: "/" + "/".join(parts), st.lists(PARTS, min_size=1, max_size=4))
PATHS = st.builds(
    lambda parts: "/" + "/".join(parts), st.lists(st.sampled_from(["a", "b", "ab", ".h", "x.key", "c"]), max_size=4)
)
RULES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(OPERATIONS), min_size=1, unique=True),
        st.lists(PATTERNS, min_size=1, max_size=3),
        st.sampled_from(sorted(MODES)),
    ),
    max_size=5,
)


def theirs(rules: list[tuple[list[str], list[str], str]]) -> Any:
    from deepagents.middleware.filesystem import FilesystemPermission

    return [FilesystemPermission(operations=ops, paths=paths, mode=mode) for ops, paths, mode in rules]


@installed
@given(RULES, PATHS, st.sampled_from(OPERATIONS))
@pytest.mark.slow
def test_verdicts_are_deep_agents_own(rules: list[tuple[list[str], list[str], str]], path: str, operation: str) -> None:
    from deepagents.middleware import filesystem

    check = filesystem._check_fs_permission
    assert policy(*rules).judge(operation, path) == MODES[check(theirs(rules), operation, path)]


@installed
@given(RULES, PATHS.filter(lambda path: path != "/"))
def test_deletes_are_judged_as_deep_agents_does(rules: list[tuple[list[str], list[str], str]], path: str) -> None:
    from deepagents.middleware import filesystem

    denying = filesystem._find_delete_deny_patterns(theirs(rules), path, has_descendants=True)
    assert (policy(*rules).below("write", path) is not None) == bool(denying)


@given(RULES, PATHS.filter(lambda path: path != "/"), st.sampled_from(OPERATIONS))
@pytest.mark.slow
def test_the_rules_of_a_directory_say_the_same_of_its_entries(
    rules: list[tuple[list[str], list[str], str]], path: str, operation: str
) -> None:
    whole = policy(*rules)
    assert whole.among(path.rpartition("/")[0]).judge(operation, path) == whole.judge(operation, path)


def test_a_directory_that_no_rule_speaks_of() -> None:
    rules = policy((["write"], ["/a/b/**", "/c"], "deny"))
    assert not rules.among("/x").rules and not rules.among("/a/c").rules
    assert rules.among("/a/b").rules and rules.among("/").rules[0].paths == ("/c",)
    assert rules.among("/a").rules[0].paths == ("/a/b/**",)
    assert policy((["write"], ["/a\\b/*"], "deny")).among("/x").rules
