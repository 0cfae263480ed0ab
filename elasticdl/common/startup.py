"""What runs first in every Python that a user's own program starts.

The folder holds a ``sitecustomize.py``, which Python imports by itself at its start, whatever the script: the only way
into a script that knows nothing of this package.

``python -m elasticdl.common.startup PROGRAM [ARGUMENTS]`` becomes the program, with that set up: for places where the
folder's path is not known beforehand, as in an image.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STARTUP_FOLDER = Path(__file__).resolve().parents[1] / "elastic" / "horovod_scripts" / "startup"
_VARIABLE = "PYTHONPATH"
# ``PYTHONHASHSEED`` of all workers, unless the user gives one: a set of names has the same order on each.
HASH_SEED = "0"
# Runs a module of this package. Without -P the current folder would come first, and a checkout of the older ElasticDL has
# a package of the same name.
RUN_MODULE = (sys.executable, "-P", "-m")


def python_path(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that puts the folder before what the user has on the path."""
    # An empty entry would stand for the current directory.
    before = [entry for entry in environ.get(_VARIABLE, "").split(os.pathsep) if entry not in ("", str(STARTUP_FOLDER))]
    return {_VARIABLE: os.pathsep.join([str(STARTUP_FOLDER), *before])}


def main(command: Sequence[str]) -> int:
    """Returns only if there is no such program, with the exit code that a shell has for it."""
    try:
        os.execvpe(command[0], list(command), {**os.environ, **python_path(os.environ)})
    except OSError as error:
        print(f"elasticdl: can't run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
