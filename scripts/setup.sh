#!/usr/bin/env bash
# Makes .venv at the root: pinned dependencies, the Horovod wheel built against them, elasticdl itself (editable).
# A second run ends at once unless something that the environment is made from has changed.
#
#   PYTHON                  the interpreter to start from; 3.11.2 or newer. Without it: that of .venv, else python3
#   HOROVOD_GPU_OPERATIONS  NCCL for a CUDA build of Horovod
set -euo pipefail
cd "$(dirname "$0")/.."

# pip leaves compiled modules behind only if it may; without them every start of a worker compiles torch again.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK=1

VENV=.venv
STAMP=$VENV/.stamp

say() { printf 'setup: %s\n' "$*" >&2; }

# The interpreter itself and its version, whether asked directly or through an environment made from it; nothing if there is none.
identity() {
    "$1" -c 'import os, sys; print(os.path.realpath(sys._base_executable), sys.version.split()[0])' 2>/dev/null || true
}

# Who names no interpreter keeps the one that there is an environment of.
[ -n "${PYTHON:-}" ] || { [ -n "$(identity $VENV/bin/python)" ] && PYTHON=$VENV/bin/python; } || PYTHON=python3

# Everything that the environment is made from, in one word.
inputs_hash() {
    {
        cat requirements/*.txt pyproject.toml scripts/setup.sh scripts/build_horovod.py
        echo "${HOROVOD_GPU_OPERATIONS:-}" "$PWD" "$(identity "$PYTHON")"
    } | sha256sum | cut -d' ' -f1
}

missing_packages() {
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    "$PYTHON" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
        2>/dev/null || echo python3-dev
    command -v g++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
}

require_system() {
    command -v "$PYTHON" >/dev/null || {
        say "$PYTHON is not found: install Python 3.11.2 or newer, or set PYTHON to it"
        exit 1
    }
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11, 2))' || {
        say "$PYTHON is $("$PYTHON" --version); 3.11.2 or newer is needed: set PYTHON to one"
        exit 1
    }
    local missing
    missing=$(missing_packages | paste -sd ' ')
    [ -z "$missing" ] && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $missing"
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
    else
        say "these are missing: $missing; install them, as with: sudo apt-get install $missing"
        exit 1
    fi
}

main() {
    if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(inputs_hash)" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
        return
    fi
    require_system
    local interpreter
    interpreter=$(identity "$PYTHON")
    if [ "$(identity $VENV/bin/python)" != "$interpreter" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making $VENV with $interpreter"
        "${interpreter% *}" -m venv --clear "$VENV"
    fi
    rm -f "$STAMP"

    local pip=("$VENV/bin/python" -m pip install -c requirements/lock.txt)
    say "1/3 installing the pinned dependencies"
    "${pip[@]}" -q setuptools wheel
    "${pip[@]}" --no-build-isolation -r requirements/dev.txt -e '.[dev]'

    say "2/3 building Horovod, or taking the wheel from the cache"
    local wheel
    wheel=$("$VENV/bin/python" scripts/build_horovod.py)

    say "3/3 installing $wheel"
    "$VENV/bin/python" -m pip install -q --no-deps --force-reinstall "$wheel"
    inputs_hash >"$STAMP"
    say "done: $VENV/bin/elasticdl --help"
}

main
