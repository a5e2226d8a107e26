"""A real systemd user manager in a mount namespace of its own, for units that are installed into a home of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SYSTEMD = "/lib/systemd/systemd"
SECONDS = 30.0

_START = """
set -e
mkdir -p /run/systemd
mount -t tmpfs tmpfs /run/systemd
mkdir /run/systemd/system
trees=/sys/fs/cgroup
[ -e $trees/cgroup.procs ] || trees='/sys/fs/cgroup/*'
for tree in $trees; do
    if [ -e $tree/cgroup.procs ] && [ $tree != /sys/fs/cgroup/cpuset ]; then
        mkdir $tree/$CGROUP
        echo $$ > $tree/$CGROUP/cgroup.procs
        chown -R $AS_UID $tree/$CGROUP
    fi
done
exec setpriv --reuid=$AS_UID --regid=$AS_UID --clear-groups %s --user --unit=basic.target
"""
"""systemd runs only where it takes the machine to be booted with systemd (sd_booted(3)). It takes all processes of its
control group for its own, so it gets one, in each hierarchy there is (one, or with version 1 several below)."""


class UserManager:
    """The manager of user ``uid``, in namespaces that the command ``enter`` enters, or in one of its own.

    Its directories are made below ``base``.

    What root's services mount is seen below ``root``.
    """

    def __init__(self, base: Path, uid: int = 0, enter: Sequence[str] = ()) -> None:
        self.home, run = base / "home", base / "run"
        for directory in (self.home, run):
            directory.mkdir(mode=0o700)
            os.chown(directory, uid, uid)
        self._as = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        self._cgroup = f"vfsd-test-{os.getpid()}-{uid}"
        unwanted = ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "NOTIFY_SOCKET", "DBUS_SESSION_BUS_ADDRESS")
        self.env = {key: value for key, value in os.environ.items() if key not in unwanted}
        self.env |= {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(run), "SYSTEMD_LOG_TARGET": "console"}
        self.env |= {"CGROUP": self._cgroup, "SYSTEMD_LOG_LEVEL": "info", "AS_UID": str(uid)}
        self._log = base / "manager.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [*(enter or ["unshare", "--mount"]), "sh", "-c", _START % SYSTEMD],
                env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.root = Path(f"/proc/{self._process.pid}/root")
        self._enter = [*(enter or ["nsenter", f"--mount=/proc/{self._process.pid}/ns/mnt"])]
        try:
            self.wait(lambda: (run / "systemd/private").exists())
        except BaseException:
            self.stop()
            raise

    def run(self, *command: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """A command where the services are."""
        done = subprocess.run(
            [*self._enter, *self._as, *command],
            env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert code is None or done.returncode == code, (done, self.log())
        return done

    def systemctl(self, *args: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """A manager that is busy may drop the connection that asks; asking again does nothing twice."""
        deadline = time.monotonic() + SECONDS
        while True:
            done = self.run("systemctl", "--user", *args, code=None)
            if "Transport endpoint is not connected" not in done.stderr or time.monotonic() > deadline:
                break
            assert self._process.poll() is None, self.log()
            time.sleep(0.2)
        assert code is None or done.returncode == code, (done, self.log())
        return done

    def show(self, unit: str, what: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", unit, "--property", what, "--value").stdout.strip()

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline and self._process.poll() is None, self.log()
            time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        if self._process.poll() is None:
            self.run("systemctl", "--user", "exit", code=None)
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(SECONDS)
        for top in (*Path("/sys/fs/cgroup").glob(self._cgroup), *Path("/sys/fs/cgroup").glob(f"*/{self._cgroup}")):
            for group in (*sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True), top):
                with contextlib.suppress(OSError):
                    group.rmdir()
