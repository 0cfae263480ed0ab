"""The folder whose code runs first in every Python that a user's own program starts.

The folder holds a ``sitecustomize.py``, which Python imports by itself at its start, whatever the script: the only way
into a script that knows nothing of this package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
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
