"""Access control lists by themselves; what the host makes of them is in tests/mount/test_posix_acl.py."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfsd.core import acl

NONE = 0xFFFFFFFF
PERM = st.integers(0, 7)
NAMED = st.dictionaries(st.integers(0, 5), PERM, max_size=3)


@st.composite
def lists(draw: st.DrawFn) -> list[acl.Entry]:
    users, groups = draw(NAMED), draw(NAMED)
    entries = [(acl.USER_OBJ, draw(PERM), NONE), *((acl.USER, p, who) for who, p in users.items())]
    entries += [(acl.GROUP_OBJ, draw(PERM), NONE), *((acl.GROUP, p, who) for who, p in groups.items())]
    if users or groups or draw(st.booleans()):
        entries.append((acl.MASK, draw(PERM), NONE))
    return [*entries, (acl.OTHER, draw(PERM), NONE)]


@given(lists(), st.integers(0, 0o7777))
def test_a_list_and_the_mode_say_the_same(entries: list[acl.Entry], mode: int) -> None:
    value = acl.pack(entries)
    assert acl.parse(value) == entries
    assert acl.mode_of(acl.parse(acl.changed(value, mode)), 0) == mode & 0o777
    assert acl.mode_of(entries, mode) & 0o7000 == mode & 0o7000


@given(lists(), st.integers(0, 0o7777))
def test_what_is_inherited_is_never_more_than_asked_for(entries: list[acl.Entry], mode: int) -> None:
    made, access = acl.inherited(acl.pack(entries), mode)
    assert made & ~mode == 0
    assert made == acl.mode_of(acl.parse(access) if access else entries, mode) & made
    if access:
        assert acl.mode_of(acl.parse(access), made) == made


@given(lists(), st.integers(0, 6), st.integers(0, 6), st.integers(1, 7))
def test_nobody_but_the_owner_and_others_gets_past_the_mask(
    entries: list[acl.Entry], uid: int, gid: int, bits: int
) -> None:
    owner, group = 6, 6
    masked = acl.changed(acl.pack(entries), 0)
    assert not acl.grants(masked, uid, gid, owner, group, bits)
    plain = acl.pack([(acl.USER_OBJ, 6, NONE), (acl.GROUP_OBJ, 4, NONE), (acl.OTHER, 1, NONE)])
    perm = 6 if uid == owner else 4 if gid == group else 1
    assert acl.grants(plain, uid, gid, owner, group, bits) == (perm & bits == bits)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_list_or_refused(value: bytes) -> None:
    for one in (value, struct.pack("<I", 2) + value):
        try:
            assert acl.pack(acl.parse(one)) == one or one[4:]
        except OSError:
            continue


def test_two_masks_are_refused() -> None:
    entries = [(acl.USER_OBJ, 7, NONE), (acl.GROUP_OBJ, 7, NONE), (acl.MASK, 7, NONE), (acl.MASK, 7, NONE)]
    with pytest.raises(OSError, match="Invalid"):
        acl.parse(acl.pack([*entries, (acl.OTHER, 7, NONE)]))
