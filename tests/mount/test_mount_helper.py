"""mount(8) and fstab(5): ``mount -t fuse.vfsd NAME MOUNTPOINT``, in a mount namespace where the helper is installed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

if os.geteuid() != 0:
    pytest.skip("mount(8) needs root", allow_module_level=True)

VFSD = f"{shlex.quote(sys.executable)} -m vfsd"
SECONDS = 50

_WORLD = """
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mkdir -p {base}/upper {base}/work {base}/etc {base}/etcwork {base}/etc/vfsd {base}/mnt
{vfsd} service install --system --root {base}/root >/dev/null
cp {base}/root/sbin/mount.fuse.vfsd {base}/upper/
mount -t overlay overlay -o lowerdir={base}/upper:/usr/sbin /usr/sbin
mount -t overlay overlay -o lowerdir={base}/etc:/etc /etc
cd /
{script}
"""


def run(base: Path, script: str, fstab: str = "") -> subprocess.CompletedProcess[str]:
    """A shell script where ``/sbin/mount.fuse.vfsd``, ``/etc/vfsd`` and an fstab are; ends with all of it."""
    (base / "etc/vfsd").mkdir(parents=True)
    (base / "etc/vfsd/agent.toml").write_text('[routes."/"]\nkind = "state"\n')
    (base / "etc/fstab").write_text(fstab.format(base=base))
    text = _WORLD.format(base=base, vfsd=VFSD, script=script.format(base=base, vfsd=VFSD))
    return subprocess.run(
        ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child", "bash", "-c", text],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def test_mount_and_umount(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        export XDG_RUNTIME_DIR=/tmp XDG_STATE_HOME=/tmp
        mount -t fuse.vfsd agent {base}/mnt
        echo x > {base}/mnt/kept
        {vfsd} --system status agent | head -1
        umount {base}/mnt
        while {vfsd} --system status agent >/dev/null 2>&1; do sleep 0.1; done
        ls -A {base}/mnt; ls /var/lib/vfsd/agent
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"agent: {tmp_path}/mnt running\nthreads\nvfsd.log\n"


def test_a_line_of_fstab(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        mount -a -T {base}/etc/fstab
        touch {base}/mnt/x || true
        {vfsd} --system status --json | grep -e '"thread"' -e '"name"'
        {vfsd} --system umount {base}/mnt
        """,
        "agent {base}/mnt fuse.vfsd ro,nofail,_netdev,x-systemd.automount,thread=t2,allow_other 0 0\n",
    )
    assert done.returncode == 0
    assert done.stderr == f"touch: cannot touch '{tmp_path}/mnt/x': Read-only file system\n"
    assert '"name": "agent"' in done.stdout and '"thread": "t2"' in done.stdout


def test_refused_by_name(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        ! mount -t fuse.vfsd agent {base}/mnt -o ro,colour=red
        ! mount -t fuse.vfsd agent {base}/mnt -o noexec
        ! mount -t fuse.vfsd agent {base}/mnt -o name=a/b
        ! mount -t fuse.vfsd nobody {base}/mnt
        ! mount -t fuse.vfsd agent {base}/nowhere
        """,
    )
    known = "(known: name=, thread=, config=, engine=, log_level=, ro, allow_other; all else belongs into vfsd.toml)"
    said = done.stderr.splitlines()
    assert (done.returncode, len(said)) == (0, 5), done
    assert said[0] == f"vfsd: unknown mount option 'colour=red' {known}"
    assert said[1] == f"vfsd: unknown mount option 'noexec' {known}"
    assert said[2].startswith("vfsd: --name 'a/b': use 1 to 64 letters")
    assert said[3].startswith("vfsd: /etc/vfsd/nobody.toml does not exist: write it (an empty file will do)")
    assert said[4] == f"vfsd: mountpoint {tmp_path}/nowhere does not exist: mkdir -p {tmp_path}/nowhere"


def test_a_file_by_its_path_and_only_a_look(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        mount -t fuse.vfsd -f /etc/vfsd/agent.toml {base}/mnt
        {vfsd} --system status
        mount.fuse.vfsd /etc/vfsd/agent.toml {base}/mnt -v -s -o colour=red,rw
        {vfsd} --system umount agent
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[0] == "no mounts" and said[1].startswith(f"mounted agent on {tmp_path}/mnt") and len(said) == 3
