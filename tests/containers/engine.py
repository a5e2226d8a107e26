"""Podman on runc, whose containers are made of the host's own files: nothing is built or fetched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hosts import Done, Host, toolchain

Words = Sequence[str | Path]

LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""Podman asks for more than the machine may allow."""

PLACES = {"root": "store", "runroot": "run", "tmpdir": "tmp"}
"""Where podman keeps what it knows: not with the machine's."""


class Podman:
    """The containers of one user of ``host``."""

    def __init__(self, host: Host, user: int = 0) -> None:
        self.host, self.user = host, user
        self.place = host.directory(f"podman{user}", user)
        self._count = 0
        self._started: list[str] = []
        self._podman = [
            "podman", *(f"--{name}={self.place}/{place}" for name, place in PLACES.items()), "--storage-driver=vfs",
            "--cgroup-manager=cgroupfs", "--runtime=runc", "--events-backend=none",
        ]  # fmt: skip

    def podman(self, *argv: str | Path, code: int | None = 0, stdin: str = "") -> Done:
        return self.host.run(*self._podman, *argv, user=self.user, code=code, stdin=stdin)

    def whole(self, *flags: str | Path, rootfs: Path | None = None, argv: Words = ()) -> list[str]:
        """``podman run`` of a container that has the host's /usr, and this Python at its place."""
        shown = [word for path in ("/usr", *toolchain()) for word in ("-v", f"{path}:{path}:ro")]
        path = self.host.environ()["PATH"]
        words = ["run", "--network=none", "--no-hosts", *LIMITS, "-e", f"PATH={path}", *shown, *flags]
        return [*self._podman, *map(str, [*words, "--rootfs", rootfs or self.rootfs(), *argv])]

    def run(
        self, *flags: str | Path, rootfs: Path | None = None, argv: Words, code: int | None = 0, stdin: str = ""
    ) -> Done:
        """One container to its end; ``code`` is what it must exit with."""
        whole = self.whole("--rm", "-i", *flags, rootfs=rootfs, argv=argv)
        return self.host.run(*whole, user=self.user, code=code, stdin=stdin)

    def start(self, name: str, *flags: str | Path, argv: Words = (), rootfs: Path | None = None) -> None:
        """A container that goes on, for ``inside``."""
        self._started.append(name)
        self.host.run(*self.whole("-d", "--name", name, *flags, rootfs=rootfs, argv=argv), user=self.user)

    def inside(self, name: str, *argv: str | Path, code: int | None = 0, stdin: str = "", **env: str) -> Done:
        """A command in a container that goes on."""
        given = [word for key, value in env.items() for word in ("-e", f"{key}={value}")]
        return self.podman("exec", "-i", *given, name, *argv, code=code, stdin=stdin)

    def rootfs(self) -> Path:
        """Directories for the engine to mount on, and no files but the accounts."""
        self._count += 1
        root = self.host.directory(f"podman{self.user}/root{self._count}", self.user)
        for name in ("proc", "dev", "sys", "run", "tmp", "usr", "etc", "var", "vfs"):
            (root / name).mkdir()
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            if os.path.islink(f"/{name}"):
                (root / name).symlink_to(os.readlink(f"/{name}"))
        (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nother:x:1000:1000::/:/bin/sh\n")
        (root / "etc/group").write_text("root:x:0:\nother:x:1000:\n")
        for path in (root, *root.rglob("*")):
            os.chown(path, self.user, self.user, follow_symlinks=False)
        return root

    def end(self, name: str) -> None:
        self._started.remove(name)
        self.podman("rm", "--force", "--time", "0", name)

    def close(self) -> None:
        """Ends what was started, the latest first: others may depend on the first."""
        while self._started:
            self.end(self._started[-1])
