"""``python -m vfsd``: the same as the command ``vfsd``."""

from vfsd.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
