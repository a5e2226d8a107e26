"""A repository with a fault in it that its test shows, for agents to mend."""

from __future__ import annotations

import subprocess
from pathlib import Path

BROKEN = "def add(a, b):\n    return a - b\n"
MENDED = "def add(a, b):\n    return a + b\n"
TEST = """import unittest, calc

class T(unittest.TestCase):
    def test(self):
        self.assertEqual(calc.add(1, 2), 3)
"""
GIT = "git -c user.name=agent -c user.email=agent@example.org"


def bundle_in(place: Path) -> bytes:
    """The repository as one file that git clones from, branch main; made in an empty directory."""
    (place / "calc.py").write_text(BROKEN)
    (place / "test_calc.py").write_text(TEST)
    script = f"git init -q -b main . && git add . && {GIT} commit -q -m first && git bundle create -q all.bundle main"
    subprocess.run(["sh", "-ec", script], cwd=place, check=True, timeout=30)
    return (place / "all.bundle").read_bytes()
