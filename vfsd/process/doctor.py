"""Can FUSE and ``execute`` be used here, and what exactly to type if not.

Owns the knowledge of what goes wrong on fresh machines and in containers. Each check looks at the one fact it names;
the last one, a real mount of a memory tree, is the proof.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

FUSE_DEVICE = Path("/dev/fuse")
_CAP_SYS_ADMIN = 21
_CONTAINER_FLAGS = "--device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined"


class Finding(NamedTuple):
    """``fix`` is empty when all is well; ``fatal`` when nothing can be mounted without it."""

    what: str
    says: str
    fix: str = ""
    fatal: bool = False

    @property
    def ok(self) -> bool:
        return not self.fix

    def sentence(self) -> str:
        return f"{self.says}: {self.fix}" if self.fix else self.says


def _sudo(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo {command}"


def in_container() -> bool:
    """True inside Docker, Podman or a container that says so to its processes."""
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    return Path("/run/systemd/container").exists()


def device(path: Path = FUSE_DEVICE) -> Finding:
    """Whether the FUSE device can be opened by us."""
    what = "FUSE device"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        if in_container():
            return Finding(what, f"{path} is missing", f"start the container with {_CONTAINER_FLAGS}", True)
        if "\tfuse\n" in Path("/proc/filesystems").read_text():
            return Finding(what, f"{path} is missing", _sudo(f"mknod -m 666 {path} c 10 229"), True)
        return Finding(what, f"{path} is missing", _sudo("modprobe fuse"), True)
    except OSError as exc:
        # A container's device policy answers EPERM whatever the mode; the file's mode answers EACCES.
        if exc.errno == errno.EPERM:
            fix = f"start the container with {_CONTAINER_FLAGS}"
        elif exc.errno == errno.ENODEV or exc.errno == errno.ENXIO:
            fix = _sudo("modprobe fuse")
        else:
            fix = _permission_fix(path)
        return Finding(what, f"{path} can't be opened ({exc.strerror})", fix, True)
    return Finding(what, f"{path} opens")


def _permission_fix(path: Path) -> str:
    info = path.stat()
    grouped = info.st_mode & stat.S_IRGRP and info.st_mode & stat.S_IWGRP and info.st_gid != 0
    if in_container():
        group = f"--group-add {info.st_gid}, " if grouped else ""
        return f"start the container with {group}a user who may open it, or chmod 666 {path} on the host"
    if grouped:
        try:
            name = grp.getgrgid(info.st_gid).gr_name
        except KeyError:
            name = str(info.st_gid)
        return f"sudo usermod -aG {name} $USER, then log in again"
    rule = """echo 'KERNEL=="fuse", MODE="0666"'"""
    for_good = f"{rule} | {_sudo('tee /etc/udev/rules.d/99-fuse.rules')}"
    return f"{_sudo(f'chmod 666 {path}')} until the next boot, and for good, by udev: {for_good}"


def helper() -> Finding:
    """Whether fusermount3, which mounts for ordinary users, is there and set up."""
    what = "fusermount3"
    found = shutil.which(what)
    if found is None:
        return Finding(what, "fusermount3 is missing", _sudo("apt-get install -y fuse3"), os.geteuid() != 0)
    if os.geteuid() != 0 and not os.stat(found).st_mode & stat.S_ISUID:
        return Finding(what, f"{found} is not setuid root", _sudo(f"chmod u+s {found}"), True)
    return Finding(what, found)


def capability() -> Finding:
    """Whether root here may mount at all: a plain container's root may not."""
    what = "right to mount"
    if os.geteuid() != 0:
        return Finding(what, "through fusermount3")
    status = Path("/proc/self/status").read_text()
    effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    if effective >> _CAP_SYS_ADMIN & 1:
        return Finding(what, "root with CAP_SYS_ADMIN")
    return Finding(what, "root here lacks CAP_SYS_ADMIN", f"start the container with {_CONTAINER_FLAGS}", True)


def binding() -> Finding:
    """Whether the FUSE library can be loaded."""
    what = "FUSE library"
    # Another process: the import is slow, and a broken shared library may end it.
    run = subprocess.run(
        [sys.executable, "-c", "import vfsd.doors.engines.pyfuse3"], capture_output=True, text=True, check=False
    )
    if run.returncode == 0:
        return Finding(what, "pyfuse3 loads")
    last = run.stderr.strip().rpartition("\n")[2] or f"exit {run.returncode}"
    packages = _sudo("apt-get install -y fuse3 libfuse3-dev pkg-config gcc python3-dev")
    fix = f"{packages} && pip install --force-reinstall pyfuse3"
    return Finding(what, f"pyfuse3 does not load ({last})", fix, True)


def other_users(config: Path = Path("/etc/fuse.conf")) -> Finding:
    """Whether ``--allow-other`` can be asked for by an ordinary user (fuse.conf(5))."""
    what = "--allow-other"
    if os.geteuid() == 0:
        return Finding(what, "allowed for root")
    try:
        lines = [line.strip() for line in config.read_text().splitlines()]
    except OSError:
        lines = []
    if "user_allow_other" in lines:
        return Finding(what, f"allowed by {config}")
    return Finding(
        what, "--allow-other is not allowed for ordinary users", f"echo user_allow_other | sudo tee -a {config}"
    )


def sandbox() -> Finding:
    """Whether bubblewrap works, which the ``root`` view of execute needs; without it the ``mount`` view remains."""
    what = "execute"
    found = shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))
    if found is None:
        return Finding(what, "bubblewrap is missing, so only the view 'mount'", _sudo("apt-get install -y bubblewrap"))
    # A container's root without that capability needs a user namespace, of which bubblewrap does not think by itself.
    options = [] if capability().ok else ["--unshare-user"]
    argv = [found, *options, "--ro-bind", "/", "/", "--dev", "/dev", "--", "/bin/true"]
    run = subprocess.run(argv, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return Finding(what, f"{found} works: views 'root' and 'mount'")
    words = run.stderr.strip().rpartition("\n")[2]
    sysctl = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    clone = Path("/proc/sys/kernel/unprivileged_userns_clone")
    if sysctl.exists() and sysctl.read_text().strip() == "1":
        fix = "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    elif clone.exists() and clone.read_text().strip() == "0":
        fix = "sudo sysctl kernel.unprivileged_userns_clone=1"
    else:
        fix = "allow user namespaces here, in a container by --security-opt seccomp=unconfined"
    return Finding(what, f"bubblewrap does not work ({words}), so only the view 'mount'", fix)


def confinement() -> list[Finding]:
    """What execute can keep commands from here, as the clients, who run them, find it."""
    # A program of its own: nothing of vfsd may import agenttools.
    run = subprocess.run([sys.executable, "-m", "agenttools.abilities"], capture_output=True, text=True, check=False)
    if run.returncode:
        return [
            Finding("profiles of execute", "only 'open'", run.stderr.strip().rpartition("\n")[2] or "no reason given")
        ]
    return [Finding(found["what"], found["says"], found["fix"]) for found in json.loads(run.stdout)]


def trial() -> Finding:
    """Mount a memory tree in a temporary directory, write and read a file through it, unmount."""
    what = "trial mount"
    with tempfile.TemporaryDirectory(prefix="vfsd-doctor-") as scratch:
        base = Path(scratch)
        (base / "mnt").mkdir()
        env = os.environ | {"XDG_STATE_HOME": str(base / "state"), "XDG_RUNTIME_DIR": str(base / "run")}
        vfsd = [sys.executable, "-m", "vfsd"]
        start = [*vfsd, "mount", "--name", "doctor", "--route", "/=memory", str(base / "mnt")]
        run = subprocess.run(start, env=env, capture_output=True, text=True, check=False)
        if run.returncode:
            return Finding(what, "mounting failed", run.stderr.strip().rpartition("\n")[2] or "no reason given", True)
        try:
            (base / "mnt" / "probe").write_text("vfsd")
            problem = "" if (base / "mnt" / "probe").read_text() == "vfsd" else "read back something else"
        except OSError as exc:
            problem = f"{exc.strerror}"
        run = subprocess.run(
            [*vfsd, "umount", "--force", "doctor"], env=env, capture_output=True, text=True, check=False
        )
        problem = problem or (run.stderr.strip() if run.returncode else "")
    if problem:
        return Finding(what, "the mounted tree does not work", problem, True)
    return Finding(what, "mounted, wrote, read, unmounted")


def fuse_problem(*, allow_other: bool) -> str | None:
    """What keeps us from mounting, as one sentence with its remedy; None when nothing is known to."""
    for check in (device, helper, capability):
        finding = check()
        if finding.fatal:
            return finding.sentence()
    finding = other_users()
    return finding.sentence() if allow_other and not finding.ok else None


def examine() -> list[Finding]:
    """All checks; the trial mount only when nothing already rules it out."""
    findings = [device(), helper(), capability(), binding(), other_users(), sandbox(), *confinement()]
    if not any(finding.fatal for finding in findings):
        findings.append(trial())
    return findings
