"""What stories about a file system are told with: each call's answer, to be compared with another's."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

ROOT = os.getuid() == 0
AT_FDCWD = -100
libc = ctypes.CDLL(None, use_errno=True)


class Told(list[str]):
    """What a file system answered."""

    def tell(self, what: object) -> None:
        self.append(str(what))

    def call(self, do: Callable[[], Any]) -> Any:
        """The result, or the name of the errno, which is told too."""
        try:
            result = do()
        except OSError as e:
            result = errno.errorcode.get(e.errno or 0, e)
        self.append(repr(result))
        return result


def libc_call(function: str, *args: Any) -> int:
    """Raises OSError as os's functions do."""
    result = int(getattr(libc, function)(*args))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def in_child(do: Callable[[], object]) -> int:
    """The errno ``do`` ends with in a process of its own, 0 for none, 128 + n when signal n ended it."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            do()
        except OSError as e:
            code = e.errno or 255
        except BaseException:
            code = 254
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return 128 - status if status < 0 else status


def make(path: str, data: bytes = b"", perm: int = 0o644) -> None:
    with open(path, "wb") as file:
        file.write(data)
    os.chmod(path, perm)


def compare(story: Callable[[str, Told], None], host: str, where: str) -> None:
    """The same answers in both directories."""
    told: list[list[str]] = []
    for at in (host, where):
        answers = Told()
        story(at, answers)
        told.append([line.replace(at, "AT") for line in answers])
    assert told[1] == told[0]
