"""A host for containers: mount and pid namespaces of its own, in which ``/`` is shared as systemd has it.

All that a test mounts or starts is in it, and is gone with it. It also lets an ordinary user in to the Python and the
checkout that the tests run from, wherever these are, and has accounts of its own: nothing of the machine is changed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
"""No command takes longer."""

USER = 4242
SUBUIDS = 200_000

ETC = {
    "passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{USER}:{USER}::{{base}}/home:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{USER}:\n",
    "subuid": f"agent:{SUBUIDS}:65536\n",
    "subgid": f"agent:{SUBUIDS}:65536\n",
    "fuse.conf": "user_allow_other\n",
}
"""Files of /etc that the host has instead of the machine's."""

Done = subprocess.CompletedProcess[str]


def toolchain() -> list[str]:
    """What this Python needs besides the system's directories."""
    found: list[str] = []
    for path in map(os.path.abspath, (str(ROOT), sys.prefix, sys.base_prefix, *sys.path[1:])):
        if os.path.isdir(path) and not any(f"{path}/".startswith(f"{above}/") for above in ("/usr", *found)):
            found.append(path)
    return found


def _closed(path: str) -> str | None:
    """The topmost directory on the way to ``path`` that other users may not pass."""
    above = [str(p) for p in reversed(Path(path).parents)]
    return next((place for place in above if not os.stat(place).st_mode & 1), None)


class NoHost(Exception):
    """It cannot be made on this machine; the argument says why."""


class Host:
    """``run`` runs a command on it, as root or as an ordinary user. ``base`` is a directory that both may enter.

    Raises NoHost.
    """

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="vc-"))
        self.base.chmod(0o755)
        self._keeper = subprocess.Popen(
            ["unshare", "--mount-proc", "--pid", "--fork", "--kill-child", "/bin/sh", "-ec", self._script()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "ready\n":
            said = self._keeper.communicate(timeout=SECONDS)[1]
            shutil.rmtree(self.base, ignore_errors=True)
            raise NoHost(said.strip())
        keeper = self._keeper.pid
        self._first = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text())

    def directory(self, name: str, user: int = 0) -> Path:
        path = self.base / name
        path.mkdir()
        os.chown(path, user, user)
        return path

    def _script(self) -> str:
        """Makes the namespace, says so, and keeps it."""
        for name, text in ETC.items():
            (self.base / name).write_text(text.format(base=self.base))
        for name, user in (("home", USER), ("run", USER), ("root", 0), ("rootrun", 0)):
            self.directory(name, user).chmod(0o700)
        lines = ["mount --make-rshared /"]
        lines += [f"mount --bind {self.base}/{name} /etc/{name}" for name in ETC]
        # As udev makes it; on a file system of its own, for that of the base may not allow devices.
        dev = self.directory("dev")
        lines.append(f"mount -t tmpfs -o mode=755 dev {dev}; mknod -m 666 {dev}/fuse c 10 229")
        lines.append(f"mount --bind {dev}/fuse /dev/fuse")
        hidden = {path: place for path in toolchain() if (place := _closed(path)) is not None}
        for number, path in enumerate(hidden):
            stage = self.directory(f"tools{number}")
            lines.append(f"mount --bind {shlex.quote(path)} {stage}")
        for place in sorted(set(hidden.values())):
            lines.append(f"mount -t tmpfs -o mode=755 tools {shlex.quote(place)}")
        for number, path in enumerate(hidden):
            lines.append(f"mkdir -p {shlex.quote(path)}; mount --bind {self.base}/tools{number} {shlex.quote(path)}")
        return "\n".join([*lines, "echo ready", "cat"])

    def environ(self, user: int = 0) -> dict[str, str]:
        """As after a login, with this Python first."""
        home = self.base / "home" if user else self.base / "root"
        return {
            "PATH": f"{os.path.dirname(sys.executable)}:{os.defpath}:/usr/sbin:/sbin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "XDG_RUNTIME_DIR": str(self.base / "run" if user else self.base / "rootrun"),
            "XDG_STATE_HOME": str(home / "state"),
        }

    def command(self, argv: Sequence[str | Path], user: int = 0) -> list[str]:
        enter = ["nsenter", f"--target={self._first}", "--mount", "--pid", "--wd=/"]
        if user:
            enter += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all"]
        return [*enter, *map(str, argv)]

    def run(
        self, *argv: str | Path, user: int = 0, code: int | None = 0, stdin: str = "", env: dict[str, str] | None = None
    ) -> Done:
        """One command to its end; ``code`` is what it must exit with, None for anything."""
        done = subprocess.run(
            self.command(argv, user),
            env=self.environ(user) | (env or {}),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert code is None or done.returncode == code, done
        return done

    def close(self) -> None:
        self._keeper.communicate(timeout=SECONDS)
        shutil.rmtree(self.base, ignore_errors=True)
