#!/bin/bash
# The adapters' tests with the oldest versions that pyproject.toml allows of what they adapt, one extra after the other:
#   scripts/oldest.sh [deepagents|mcp|fsspec|langchain]...
# These go into a directory of their own that is looked into before .venv (which make test fills), and are gone after.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
export PATH=$PWD/.venv/bin:$PATH
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
[ $# -gt 0 ] || set -- deepagents mcp fsspec langchain

versions() {
    "$python" - "$1" <<'END'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]])
END
}

for extra; do
    packages=$(versions "$extra" | sed 's/>=/==/g')
    case $extra in
        deepagents)
            tests=(test_deepagents.py test_deepagents_agent.py test_permissions.py)
            tests+=(test_timetravel.py::test_files_go_back_with_the_conversation) ;;
        mcp) tests=(test_mcp.py) packages="$packages ${packages/mcp/mcp-types}" ;;
        fsspec) tests=(test_fsspec.py -k "not pandas") ;;    # a new pandas asks for a newer one
        langchain)    # with an agent of that time, for newer ones need a newer core
            tests=(test_langchain_tools.py)
            packages="$packages langchain==1.0.0 langgraph==1.0.0 langgraph-prebuilt==1.0.0 langgraph-checkpoint==3.0.0" ;;
    esac
    echo "oldest: $packages"
    "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$place/$extra" $packages
    (cd tests/adapters && PYTHONPATH=$place/$extra "$python" -m pytest -q -n 4 --dist loadfile -W "ignore:Class-scoped fixtures" "${tests[@]}")
done
