"""The seccomp filter of a confined command: system calls that reach the host's kernel for nothing a command needs.

Owns the list and its translation into the kernel's classic BPF; pure. Must not know how a filter is loaded
(``confinement`` hands it to bubblewrap).

It refuses and does not kill: a program that tries and goes on without (io_uring, most of all) works. Only a call of
another architecture kills, since its numbers mean other calls; so 32-bit programs do not run confined.
"""

from __future__ import annotations

import functools
import platform
import struct
from collections.abc import Sequence
from errno import EAFNOSUPPORT, ENOSYS, EPERM

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
"""linux/bpf_common.h: ld [k], jeq, jset, jge, ret k."""

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
"""linux/seccomp.h: SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS."""

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; an argument's low half comes first, as both machines are little-endian."""

_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET: what is in a namespace of its own has all
capabilities there, and that is where most of the kernel's holes were reached from."""

_NEW_TIME = 0x80
"""CLONE_NEWTIME, in unshare alone: in clone this bit is part of the signal's number."""

_FAMILIES = (0, 1, 2, 10, 16)
"""AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. The others are seldom tried parts of the kernel, or, as AF_VSOCK
to a virtual machine's host, no part of what a network namespace divides."""

_TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into the caller's terminal."""

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH_* and the column of the numbers below."""

_X32 = 0x40000000
"""The bit of x86_64's second set of numbers; no call of it is listed below, so all of it is refused."""

_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # what is mounted where
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "setns": (308, 268),
    # files by number, past every directory above them
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # another kernel, or code in this one
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # keys are not in any namespace
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # the machine
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    # other processes' inside
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # long out of use
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
}
"""By machine, x86_64 and aarch64: asm/unistd.h."""

_CLONE, _CLONE3, _UNSHARE, _SOCKET, _IOCTL = (56, 220), (435, 435), (272, 97), (41, 198), (16, 29)

Instruction = tuple[int, int, int, int]
"""struct sock_filter: code, jump if true, jump if false, k. A jump counts the instructions it leaves out."""


def supported(machine: str | None = None) -> bool:
    """Whether there is a filter for this machine."""
    return (machine or platform.machine()) in _MACHINES


@functools.cache
def program(machine: str | None = None) -> bytes:
    """The filter as an array of struct sock_filter. KeyError for a machine that it is not known for."""
    architecture, column = _MACHINES[machine or platform.machine()]
    found: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        _answer(_KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if column == 0:
        found += [(_AT_LEAST, 0, 1, _X32), _answer(_ERRNO | ENOSYS)]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            found += [(_EQUAL, 0, 1, number), _answer(_ERRNO | EPERM)]
    # Its flags are in memory, out of a filter's reach. The C libraries take ENOSYS for an older kernel and use clone.
    found += [(_EQUAL, 0, 1, _CLONE3[column]), _answer(_ERRNO | ENOSYS)]
    found += _when(_CLONE[column], 0, [(_ANY_BIT, 0, 1, _NAMESPACES), _answer(_ERRNO | EPERM)])
    found += _when(_UNSHARE[column], 0, [(_ANY_BIT, 0, 1, _NAMESPACES | _NEW_TIME), _answer(_ERRNO | EPERM)])
    # The kernel takes 32 bits of these two arguments, so 32 bits are what has to be compared.
    terminal = [step for request in _TERMINAL for step in ((_EQUAL, 0, 1, request), _answer(_ERRNO | EPERM))]
    found += _when(_IOCTL[column], 1, terminal)
    families = [step for family in _FAMILIES for step in ((_EQUAL, 0, 1, family), _answer(_ALLOW))]
    found += _when(_SOCKET[column], 0, [*families, _answer(_ERRNO | EAFNOSUPPORT)])
    found.append(_answer(_ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in found)


def _answer(value: int) -> Instruction:
    return (_RETURN, 0, 0, value)


def _when(number: int, argument: int, then: Sequence[Instruction]) -> list[Instruction]:
    """``then``, with the low half of ``argument`` loaded, for calls of ``number`` only; allowed if it does not say."""
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *then, _answer(_ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
