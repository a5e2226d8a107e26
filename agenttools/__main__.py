"""``python -m agenttools``: the same as the command ``agenttools``."""

from agenttools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
