"""Which modules a job's workers are forked with: those of the framework that its program imports, and ours on it.

`python -m elasticdl.places.preload SPECIFICATION` tells the agent of a place, which itself imports next to nothing, how workers are
started, as JSON: what `how_to_start` returns; or one line, what is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from pydantic import ValidationError

from elasticdl.common.errors import first_finding
from elasticdl.common.front_ends import FRONT_ENDS
from elasticdl.common.python_command import UnclearCommand, program_of
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job.spec import JobSpec
from elasticdl.places.fork_server import CannotFork
from elasticdl.places.program import imports_of, imports_of_module

# By what a script imports.
OF_SCRIPTS = {name: modules for each in FRONT_ENDS for name, modules in each.libraries.items()} | {
    each.module: (*each.first, each.module) for each in FRONT_ENDS
}
_OF_WORKERS = ("elasticdl.worker.trainer", "elasticdl.elastic.link.connection")
_KERAS = ("elasticdl.worker.frameworks:import_keras", *_OF_WORKERS)
OF_ZOO_MODULES = {
    "torch": ("elasticdl.worker.frameworks:import_torch", "torch._dynamo", *_OF_WORKERS),
    "tensorflow": _KERAS,
    "keras": _KERAS,
}


def modules_to_preload(spec: JobSpec) -> Sequence[str]:
    """In the order in which they are to be imported, as `elasticdl.common.template` takes them.

    Raises:
        CannotFork: nothing is known to be imported, or the workers can't be forked.
    """
    if spec.command:
        try:
            program = program_of(spec.command)
        except UnclearCommand as error:
            raise CannotFork(str(error)) from None
        found = _among(OF_SCRIPTS, imports_of(program))
    else:
        folder = Path(spec.model_zoo).resolve()
        found = _among(OF_ZOO_MODULES, imports_of_module(_module(spec.model_def, folder), [folder], folder))
    if not found:
        raise CannotFork("")
    return found


def _among(table: dict[str, tuple[str, ...]], names: Collection[str]) -> Sequence[str]:
    wanted = [key for key in table if any(name == key or name.startswith(f"{key}.") for name in names)]
    return list(dict.fromkeys(module for key in wanted for module in table[key]))


def _module(model_def: str, folder: Path) -> str:
    """Without the function that may stand at its end."""
    path = folder.joinpath(*model_def.split("."))
    is_module = path.is_dir() or path.with_name(f"{path.name}.py").is_file()
    return model_def if is_module else model_def.rpartition(".")[0]


def how_to_start(spec: JobSpec) -> tuple[Sequence[str], Sequence[str], str]:
    """The workers' command line, the modules that they are forked with, and, if there are none, why, where a person should know."""
    argv = spec.command or (*RUN_MODULE, "elasticdl.worker.main")
    try:
        return argv, modules_to_preload(spec) if spec.start_method != "spawn" else (), ""
    except CannotFork as error:
        return argv, (), str(error)


def main(path: str) -> object:
    try:
        spec = JobSpec.from_json(Path(path).read_text())
    except OSError as error:
        return f"can't read the job's specification {path}: {error.strerror}"
    except ValidationError as error:
        return f"{path} is no specification of a job: {first_finding(error)}"
    return how_to_start(spec)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
