"""The filter of system calls, run by an interpreter of the kernel's BPF: for both machines, wherever this runs."""

from __future__ import annotations

import struct
from errno import EAFNOSUPPORT, ENOSYS, EPERM

import pytest

from agenttools import seccomp

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003


def judge(machine: str, architecture: int, number: int, *arguments: int) -> int:
    """What the filter answers, as linux/seccomp.h has it."""
    filled = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *filled)
    steps = [*struct.iter_unpack("=HBBI", seccomp.program(machine))]
    at, loaded = 0, 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", data, k)
        elif code == 0x06:
            return k
        else:
            true = {0x15: loaded == k, 0x45: loaded & k != 0, 0x35: loaded >= k}[code]
            at += yes if true else no


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86, 0), ("aarch64", ARM, 1)])
def test_what_is_refused(machine: str, architecture: int, column: int) -> None:
    for numbers in seccomp._REFUSED.values():
        number = numbers[column]
        if number is not None:
            assert judge(machine, architecture, number) == ERRNO | EPERM


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [
        (
            "x86_64",
            X86,
            {"read": 0, "execve": 59, "ptrace": 101, "clone": 56, "unshare": 272, "openat": 257, "kill": 62},
        ),
        ("aarch64", ARM, {"read": 63, "execve": 221, "ptrace": 117, "clone": 220, "unshare": 97, "openat": 56}),
    ],
)
def test_what_is_allowed(machine: str, architecture: int, calls: dict[str, int]) -> None:
    for number in calls.values():
        assert judge(machine, architecture, number, 17) == ALLOW


@pytest.mark.parametrize(
    ("machine", "architecture", "clone", "unshare", "socket", "ioctl"),
    [("x86_64", X86, 56, 272, 41, 16), ("aarch64", ARM, 220, 97, 198, 29)],
)
def test_arguments(machine: str, architecture: int, clone: int, unshare: int, socket: int, ioctl: int) -> None:
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert judge(machine, architecture, clone, bit | 17) == ERRNO | EPERM
        assert judge(machine, architecture, unshare, bit) == ERRNO | EPERM
    assert judge(machine, architecture, unshare, 0x80) == ERRNO | EPERM
    assert judge(machine, architecture, unshare, 0x400) == ALLOW  # CLONE_FILES
    assert judge(machine, architecture, clone, 0x3D0F00) == ALLOW  # a thread
    assert judge(machine, architecture, 435) == ERRNO | ENOSYS
    assert [judge(machine, architecture, socket, family) for family in (1, 2, 10, 16)] == [ALLOW] * 4
    assert judge(machine, architecture, socket, 40) == ERRNO | EAFNOSUPPORT
    # The kernel looks at 32 bits of a request: more of them must not lead past the filter.
    for request in (0x5412, 0x541C, 0x1_0000_5412, 0xFFFF_FFFF_0000_541C):
        assert judge(machine, architecture, ioctl, 1, request) == ERRNO | EPERM
    assert judge(machine, architecture, ioctl, 1, 0x5413) == ALLOW


def test_other_numbers_than_the_machines_own() -> None:
    assert judge("x86_64", I386, 21) == KILL  # mount(2) of a 32-bit program
    assert judge("x86_64", X86, 0x40000000 | 165) == ERRNO | ENOSYS
    assert judge("aarch64", X86, 165) == KILL
    assert seccomp.supported("aarch64")
    assert not seccomp.supported("riscv64")
    with pytest.raises(KeyError):
        seccomp.program("riscv64")
