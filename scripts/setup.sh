#!/usr/bin/env bash
# Makes .venv at the root, by scripts/make_environment.py, which says of what and for what. This finds the interpreter, and, if
# there is something to make, what of Debian's packages is missing.
#
#   PYTHON  the interpreter to start from; 3.11.2 or newer. Without it: that of .venv, else python3
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

# Who names no interpreter keeps the one that there is an environment of.
[ -n "${PYTHON:-}" ] || { .venv/bin/python -c '' 2>/dev/null && PYTHON=.venv/bin/python; } || PYTHON=python3

missing_packages() {
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    "$PYTHON" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
        2>/dev/null || echo python3-dev
    command -v g++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
}

command -v "$PYTHON" >/dev/null || {
    say "$PYTHON is not found: install Python 3.11.2 or newer, or set PYTHON to it"
    exit 1
}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11, 2))' || {
    say "$PYTHON is $("$PYTHON" --version); 3.11.2 or newer is needed: set PYTHON to one"
    exit 1
}
made=0
"$PYTHON" scripts/make_environment.py --is-made "$@" || made=$?
[ "$made" = 1 ] || exit "$made"

missing=$(missing_packages | paste -sd ' ')
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $missing"
        { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing; } || {
            say "$missing could not be installed; apt-get says why above"
            exit 1
        }
    else
        say "these are missing: $missing; install them, as with: sudo apt-get install $missing"
        exit 1
    fi
fi
exec "$PYTHON" scripts/make_environment.py "$@"
