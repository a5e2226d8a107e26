"""Getting a /dev/fuse descriptor behind a mountpoint, and getting rid of the mount.

Root uses mount(2) and umount2(2); everyone else the setuid helper ``fusermount3``, which mounts and passes the
descriptor over a socket (libfuse's util/fusermount.c: environment _FUSE_COMMFD, one byte with SCM_RIGHTS). Blocking;
to be called on a thread wherever a mount of this process may have to answer. Must not know the protocol or the door.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

FUSERMOUNT = "fusermount3"
DEVICE = "/dev/fuse"
_CONNECTIONS = "/sys/fs/fuse/connections"
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH = 2
_SECONDS = 30.0

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


def mount(mountpoint: str, *, allow_other: bool, read_only: bool, max_read: int) -> int:
    """Mounts; returns the non-blocking device descriptor. OSError says what is wrong."""
    if os.geteuid() == 0:
        try:
            return _mount_root(mountpoint, allow_other=allow_other, read_only=read_only, max_read=max_read)
        except OSError as e:
            if e.errno != errno.EPERM or shutil.which(FUSERMOUNT) is None:
                raise
    return _mount_helper(mountpoint, allow_other=allow_other, read_only=read_only, max_read=max_read)


def _mount_root(mountpoint: str, *, allow_other: bool, read_only: bool, max_read: int) -> int:
    kind = stat.S_IFMT(os.stat(mountpoint).st_mode)
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = f"fd={fd},rootmode={kind:o},user_id=0,group_id=0,default_permissions,max_read={max_read}"
        if allow_other:
            data += ",allow_other"
        flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if read_only else 0)
        if _libc.mount(b"vfsd", os.fsencode(mountpoint), b"fuse.vfsd", ctypes.c_ulong(flags), data.encode()) != 0:
            raise _error(mountpoint)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mount_helper(mountpoint: str, *, allow_other: bool, read_only: bool, max_read: int) -> int:
    options = f"fsname=vfsd,subtype=vfsd,default_permissions,nosuid,nodev,max_read={max_read}"
    if allow_other:
        options += ",allow_other"
    if read_only:
        options += ",ro"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_SECONDS)
        result = _helper(["-o", options, "--", mountpoint], theirs.fileno())
        theirs.close()
        if result:
            raise OSError(errno.EPERM, result, mountpoint)
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    if not fds:
        raise OSError(errno.EPROTO, f"{FUSERMOUNT} passed no descriptor", mountpoint)
    os.set_inheritable(fds[0], False)
    os.set_blocking(fds[0], False)
    return fds[0]


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmounts; EBUSY while files are open below it, unless ``lazy``. EINVAL: nothing is mounted there."""
    if os.geteuid() == 0:
        if _libc.umount2(os.fsencode(mountpoint), _MNT_DETACH if lazy else 0) == 0:
            return
        error = _error(mountpoint)
        if error.errno != errno.EPERM or shutil.which(FUSERMOUNT) is None:
            raise error
    result = _helper(["-u", *(["-z"] if lazy else []), "--", mountpoint])
    if result:
        busy = "busy" in result.lower()
        raise OSError(errno.EBUSY if busy else errno.EINVAL, result, mountpoint)


def _helper(args: list[str], comm: int | None = None) -> str:
    """What fusermount3 complained about; empty when it did its work."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    if comm is not None:
        environment["_FUSE_COMMFD"] = str(comm)
    try:
        done = subprocess.run(
            [FUSERMOUNT, *args],
            env=environment,
            pass_fds=() if comm is None else (comm,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise OSError(errno.ENOENT, f"{FUSERMOUNT} is not installed (Debian and Ubuntu: apt install fuse3)") from None
    except subprocess.TimeoutExpired:
        raise OSError(errno.ETIMEDOUT, f"{FUSERMOUNT} did not end in {_SECONDS:g} s") from None
    if done.returncode == 0:
        return ""
    return done.stdout.decode(errors="replace").strip() or f"{FUSERMOUNT} failed with status {done.returncode}"


class Seat(NamedTuple):
    """Which mount it is: its number in the table of mounts, its device, and its path, which another one may have later
    (of a directory above it that is renamed the kernel does not care)."""

    number: int
    device: int
    path: str

    def now(self) -> str:
        """The path that it has now. OSError(EINVAL) when it is there no more."""
        if not self.number:
            return self.path
        for other in _seats():
            # A number alone is given again, and a device alone may be mounted at several places.
            if other[:2] == self[:2]:
                return other.path
        raise OSError(errno.EINVAL, "it is mounted no more", self.path)


def _seats() -> Iterator[Seat]:
    """The mounts that this process sees, lowest first (proc_pid_mountinfo(5)). Asks no file system."""
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            fields = line.split(b" ")
            major, minor = fields[2].split(b":")
            yield Seat(int(fields[0]), os.makedev(int(major), int(minor)), os.fsdecode(_unescape(fields[4])))


def _seat_at(mountpoint: str) -> Seat | None:
    want = os.path.realpath(os.path.dirname(os.path.abspath(mountpoint)))
    want = os.path.join(want, os.path.basename(os.path.abspath(mountpoint)))
    return next((one for one in reversed(list(_seats())) if one.path == want), None)


def seat(mountpoint: str) -> Seat:
    """The topmost mount on exactly this path; one that can't be seen is taken to stay there."""
    return _seat_at(mountpoint) or Seat(0, 0, mountpoint)


def mounted(mountpoint: str) -> int | None:
    """The device number of the topmost mount on exactly this path, None when there is none."""
    found = _seat_at(mountpoint)
    return None if found is None else found.device


def _unescape(field: bytes) -> bytes:
    for code, char in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        field = field.replace(code, char)
    return field


def is_dead(mountpoint: str) -> bool:
    """A FUSE mount whose daemon is gone is left there ("Transport endpoint is not connected")."""
    try:
        os.stat(mountpoint)
    except OSError as e:
        return e.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def abort(mountpoint: str) -> None:
    """Ends the connection by force: every request waiting in the kernel fails. The mount itself stays, dead."""
    with open(abort_file(mountpoint), "w") as file:
        file.write("1")


def abort_file(mountpoint: str) -> str:
    """The file whose writing is ``abort``."""
    device = mounted(mountpoint)
    if device is None:
        raise OSError(errno.EINVAL, "nothing is mounted there", mountpoint)
    if os.geteuid() == 0 and not os.listdir(_CONNECTIONS):
        # Where systemd has not mounted it.
        _libc.mount(b"fusectl", os.fsencode(_CONNECTIONS), b"fusectl", ctypes.c_ulong(0), None)
    return f"{_CONNECTIONS}/{os.minor(device)}/abort"


def remove(at: Seat) -> None:
    """Takes a mount away whoever uses it: cuts the connection, then unmounts. What fails is logged."""
    for act in (abort, lambda path: unmount(path, lazy=True)):
        try:
            act(at.now())
        except OSError as e:
            if e.errno != errno.EINVAL:  # it is there no more
                log.warning("removing the mount %s: %s", at.path, e)


def read_ahead(mountpoint: str, kib: int) -> bool:
    """Lets the kernel read ahead as far as one READ reaches; only root may. True when done."""
    device = mounted(mountpoint)
    if device is None:
        return False
    try:
        with open(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb", "w") as file:
            file.write(str(kib))
    except OSError:
        return False
    return True


def _error(mountpoint: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), mountpoint)
