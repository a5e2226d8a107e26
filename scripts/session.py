"""What ``make run`` plays: one session in a fresh tree, by the commands a person would type, each answer checked.

Clones this repository into the tree through the mount, works on the clone with the tools, runs its tests in the tree,
and looks at the results from the other door each time. Ends with status 1 at the first thing that is not as it should
be. Everything is in a temporary directory, which is removed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SHOWN_LINES = 9
STEP_SECONDS = 180
OLD = '__version__ = "'
NEW = '__version__ = "1000.'


class Wrong(Exception):
    """A step did not do what it should."""


class Session:
    """Runs commands with the tree in ``base`` as their world and shows them as they would look in a terminal."""

    def __init__(self, base: Path) -> None:
        self.mountpoint = base / "vfs"
        self.mountpoint.mkdir()
        (base / "run").mkdir(mode=0o700)
        self.env = os.environ | {
            "XDG_STATE_HOME": str(base / "state"),
            "XDG_RUNTIME_DIR": str(base / "run"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            # The checkout may belong to somebody else than who runs this; git refuses to clone from it otherwise.
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            "NO_COLOR": "1",
        }
        self.env.pop("VFSD_SOCKET", None)

    def note(self, text: str) -> None:
        print(f"\n# {text}", flush=True)

    def run(self, *command: str | Path, expect: str | None = None, code: int = 0) -> str:
        """Run ``command`` and return its output; Wrong unless it exits with ``code`` and prints ``expect``."""
        words = [str(word) for word in command]
        print(f"$ {shlex.join(words)}", flush=True)
        begin = time.monotonic()
        try:
            done = subprocess.run(
                words,
                env=self.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=STEP_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Wrong(f"no answer in {STEP_SECONDS} s") from None
        output = done.stdout.decode(errors="replace")
        lines = output.splitlines()
        for line in lines[:SHOWN_LINES]:
            print(f"  {line[:150]}")
        if len(lines) > SHOWN_LINES:
            print(f"  ... {len(lines) - SHOWN_LINES} more lines")
        print(f"  [{(time.monotonic() - begin) * 1000:.0f} ms]", flush=True)
        if done.returncode != code:
            raise Wrong(f"exit code {done.returncode} instead of {code}:\n{output[-3000:]}")
        if expect is not None and expect not in output:
            raise Wrong(f"{expect!r} is not in the answer:\n{output[-3000:]}")
        return output

    def play(self) -> None:
        mountpoint, clone = self.mountpoint, self.mountpoint / "repo"
        self.note("Mount a tree: SQLite under the state directory, a FUSE mount, a socket for tools.")
        self.run("vfsd", "mount", mountpoint, expect="mounted default")

        self.note("The shell's door: git clones this repository into the tree.")
        self.run("git", "clone", "-q", "--no-hardlinks", REPOSITORY, clone)
        self.run("git", "-C", clone, "log", "--oneline", "-3")

        self.note("The tools' door: the same files by their path in the tree, over the socket.")
        self.run("agenttools", "ls", "/repo/vfsd", expect="cli.py")
        self.run("agenttools", "glob", "**/types.py", "/repo", expect="/repo/vfsd/core/types.py")
        self.run("agenttools", "grep", "class Caller", "/repo", expect="/repo/vfsd/core/types.py")
        self.run(
            "agenttools", "read", "/repo/vfsd/core/types.py", "--offset", "0", "--limit", "5", expect="plain types"
        )

        self.note("A tool edits a source file; the shell sees it at once, with the mode and the links it had.")
        before = (clone / "vfsd" / "__init__.py").read_text()
        if OLD not in before:
            raise Wrong(f"the clone's vfsd/__init__.py has no {OLD!r}")
        self.run("agenttools", "edit", "/repo/vfsd/__init__.py", OLD, NEW)
        if (clone / "vfsd" / "__init__.py").read_text() != before.replace(OLD, NEW):
            raise Wrong("the edited file reads otherwise through the mount")
        self.run("git", "-C", clone, "diff", "--stat", expect="1 file changed, 1 insertion(+), 1 deletion(-)")
        self.run("git", "-C", clone, "diff", "-U0", expect=f"+{NEW}")

        self.note("execute runs a command whose / is the tree: the clone imports its edited self, and its tests pass.")
        self.run(
            "agenttools", "execute", "cd /repo && python -c 'import vfsd; print(vfsd.__version__)'", expect="1000."
        )
        tests = [
            name for name in ("tests/core", "tests/test_text.py", "tests/test_config.py") if (clone / name).exists()
        ]
        pytest = f"cd /repo && python -m pytest -q --junitxml=/repo/report.xml {' '.join(tests)}"
        self.run("agenttools", "execute", pytest, expect=" passed")

        self.note("What the test run wrote, read by a tool; what git thinks of it all.")
        self.run("agenttools", "grep", 'errors="0" failures="0"', "/repo/report.xml", expect="report.xml")
        self.run("git", "-C", clone, "status", "--short", expect="?? report.xml")

        self.note("A shell whose / is the tree, and a file written before the tool looks.")
        self.run("vfsd", "run", "--", "sh", "-c", "echo 'written in /' > /note.txt; ls /", expect="repo")
        self.run("agenttools", "read", "/note.txt", expect="written in /")

        self.note("The end: unmount, and check what was stored.")
        self.run("vfsd", "status", expect="default")
        self.run("vfsd", "umount", "default", expect="unmounted")
        if os.path.ismount(mountpoint) or any(mountpoint.iterdir()):
            raise Wrong(f"{mountpoint} is not an empty directory again")
        self.run("vfsd", "check", expect="clean")
        self.run("agenttools", "ls", "/", code=3, expect="no daemon")

    def clean(self) -> None:
        """After a failure: show the daemon's last words and leave no mount behind."""
        log = Path(self.env["XDG_STATE_HOME"]) / "vfsd" / "default" / "vfsd.log"
        if log.exists():
            print("the daemon's log ends with:", *log.read_text().splitlines()[-15:], sep="\n  ", file=sys.stderr)
        subprocess.run(
            ["vfsd", "umount", "--force", "default"], env=self.env, stderr=subprocess.DEVNULL, timeout=90, check=False
        )


def main() -> int:
    if not (REPOSITORY / ".git").exists():
        print(f"session: {REPOSITORY} is no git checkout, there is nothing to clone", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="vfsd-session-") as scratch:
        session = Session(Path(scratch))
        try:
            session.play()
        except Wrong as exc:
            print(f"\nsession: WRONG: {exc}", file=sys.stderr)
            session.clean()
            return 1
        except BaseException:
            session.clean()
            raise
    print("\nThe session went as it should: one tree, two doors.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
