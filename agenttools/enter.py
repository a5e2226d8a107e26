"""``python -m agenttools.enter SOCKET VIEW PROFILE [CMD...]``: a program, or the user's shell, whose ``/`` is the tree.

What ``vfsd run`` becomes, since it is a client like any other. Exits as the program did; 3 with no daemon to ask and
125 when the view can't be made, so that neither looks like an answer of most programs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

from agenttools.client import Client
from agenttools.shell import Profile, View, run_interactive
from agenttools.wire import one_line

NO_DAEMON, NO_VIEW = 3, 125


def main(argv: Sequence[str]) -> int:
    """Run ``argv`` = [socket, view, profile, command...]; returns the exit code."""
    socket, view, profile, *command = argv
    with Client(socket=socket, client="vfsd run", timeout=None) as client:
        try:
            _ = client.hello
        except OSError as exc:
            _remark(exc.strerror or str(exc))
            return NO_DAEMON
        try:
            return run_interactive(
                client, command, view=cast(View, view), profile=cast(Profile, profile), remark=_remark
            )
        except OSError as exc:
            _remark(exc.strerror or str(exc))
            return NO_VIEW


def _remark(sentence: str) -> None:
    print(f"vfsd run: {one_line(sentence)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
