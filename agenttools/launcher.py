"""Starts programs that cannot reach abstract sockets of the host: a thread that Landlock has confined starts them.

Owns that thread and the three system calls. Must not know what is started. Landlock restricts one thread and what it
starts, for good: so there is a thread for it, and the caller's program keeps its own rights. That costs no program in
between. The rule set has no rule for files, hence bubblewrap may still mount. (In the namespace of a network of its
own there are no such sockets to reach; Landlock is for the commands that have the host's.)
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""The same numbers on every machine (asm-generic/unistd.h)."""

_GET_VERSION = 1
_SCOPED_SINCE = 6
"""The Landlock ABI, Linux 6.12, that has scopes."""

_ABSTRACT_SOCKETS = 1
_NO_NEW_PRIVS = 38
_LIBC = ctypes.CDLL(None, use_errno=True)

_Result = TypeVar("_Result")
_Work = tuple[Future[Any], Callable[[], Any]]

_lock = threading.Lock()
_queue: queue.SimpleQueue[_Work] | None = None
_owner = 0
"""The process whose thread it is: a fork does not copy it."""


@functools.cache
def abi() -> int:
    """The kernel's Landlock ABI; 0 when it has none, or has it switched off."""
    return max(0, int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_GET_VERSION))))


def scoped() -> bool:
    """Whether what is started here is kept from the host's abstract sockets."""
    return abi() >= _SCOPED_SINCE


def start(work: Callable[[], _Result]) -> _Result:
    """What ``work``, which starts a program, gives in the confined thread; in this one where there is no Landlock.

    Raises what ``work`` raises, and OSError when the kernel has Landlock and refuses it.
    """
    if not scoped():
        return work()
    future: Future[_Result] = Future()
    _confined_thread().put((future, work))
    return future.result()


def _confined_thread() -> queue.SimpleQueue[_Work]:
    global _owner, _queue
    with _lock:
        if _queue is None or _owner != os.getpid():
            _queue, _owner = queue.SimpleQueue(), os.getpid()
            ready: Future[None] = Future()
            # It never ends: what it starts is told to end with the thread that it was started by (prctl(2)).
            threading.Thread(target=_serve, args=(_queue, ready), name="execute-launcher", daemon=True).start()
            try:
                ready.result()
            except OSError:
                _queue = None
                raise
        return _queue


def _serve(work: queue.SimpleQueue[_Work], ready: Future[None]) -> None:
    try:
        _restrict_this_thread()
    except OSError as error:
        ready.set_exception(error)
        return
    ready.set_result(None)
    while True:
        future, call = work.get()
        try:
            future.set_result(call())
        except BaseException as error:  # raised again in the thread that asked
            future.set_exception(error)
        del future, call


def _restrict_this_thread() -> None:
    attributes = struct.pack("=QQQ", 0, 0, _ABSTRACT_SOCKETS)  # handled_access_fs, handled_access_net, scoped
    rules = _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if rules < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    try:
        if _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or _LIBC.syscall(_RESTRICT_SELF, rules, ctypes.c_uint(0)):
            raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(rules)


def reset_after_fork() -> None:
    """A child made by fork has neither the thread nor, maybe, the lock in a state to take."""
    global _lock, _queue
    _lock, _queue = threading.Lock(), None


os.register_at_fork(after_in_child=reset_after_fork)
