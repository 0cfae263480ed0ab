"""The front ends of `elasticdl.elastic` that scripts import, each once: for what must know all of them, and imports none."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TRITON = "elasticdl.triton_first:import_triton"
TORCH = ("torch", "torch._dynamo")  # PyTorch's first optimizer would import its compiler


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """One that scripts import.

    ``name``: of its package. ``use``: by which a script trains, for messages. ``packages``: its libraries, each by the names under which it is
    published. ``libraries``: for each name that a script may import, what its workers are forked with. ``first``: what they import before the
    front end itself.
    """

    name: str
    use: str
    packages: tuple[tuple[str, ...], ...]
    libraries: Mapping[str, tuple[str, ...]]
    first: tuple[str, ...] = TORCH

    @property
    def module(self) -> str:
        return f"elasticdl.elastic.{self.name}"


FRONT_ENDS = (
    FrontEnd("torch", "torch.prepare() for a plain loop", (("torch",),), {"torch": TORCH}),
    FrontEnd(
        "keras",
        "keras.models.Model for Keras's fit",
        (("tensorflow", "tensorflow-cpu", "tensorflow-rocm"), ("keras",)),
        {"tensorflow": (TRITON, "tensorflow"), "keras": (TRITON, "keras")},
        first=(),
    ),
    FrontEnd(
        "lightning",
        'Trainer(strategy="elastic") of Lightning',
        (("lightning", "pytorch-lightning"),),
        {"lightning": (*TORCH, "lightning.pytorch"), "pytorch_lightning": (*TORCH, "pytorch_lightning")},
    ),
    FrontEnd("transformers", "transformers.Trainer", (("transformers",),), {"transformers": ("transformers",)}),
)


# The folder whose code runs first in every Python that a user's own program starts.
#
# The folder holds a ``sitecustomize.py``, which Python imports by itself at its start, whatever the script: the only way
# into a script that knows nothing of this package.


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


def environment_of_workers(environ: Mapping[str, str]) -> dict[str, str]:
    """What all workers have in common: what the user has set goes first. A crash leaves its stacks in the log."""
    defaults = {"PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": HASH_SEED}
    return {**defaults, **environ, "PYTHONUNBUFFERED": "1", **python_path(environ)}
