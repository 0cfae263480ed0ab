"""Which modules a job's workers are forked with: those of the framework that its program imports, and ours on it.

`python -m elasticdl.places.preload SPECIFICATION` tells the agent of a place, which itself imports next to nothing, how workers are
started, as JSON: what `how_to_start` returns.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from elasticdl.common.front_ends import FRONT_ENDS, RUN_MODULE
from elasticdl.common.template import CannotFork
from elasticdl.job.spec import JobSpec

# A command line that runs Python, taken apart.


class NoSuchProgram(CannotFork):
    """The script does not exist."""


def program_of(argv: Sequence[str]) -> Path | str:
    """The script that a command runs, or the name of the module (-m).

    Raises:
        CannotFork: the command runs another Python, or has options besides ``-u`` and ``-m``.
    """
    if not _is_this_python(argv[0]):
        raise CannotFork(f"{argv[0]} is not {sys.executable}")
    words = list(itertools.dropwhile(lambda word: word == "-u", argv[1:]))
    match words:
        case []:
            raise CannotFork("Python is given no program")
        case ["-m", module, *_]:
            return str(module)
    if words[0].startswith("-"):
        raise CannotFork(f"option {words[0]} of Python")
    path = Path(words[0])
    if not path.exists():
        raise NoSuchProgram(f"there is no {path.absolute()}")
    if path.is_dir() and not any(path.glob("__main__.py*")):  # or .pyc
        raise NoSuchProgram(f"{path.absolute()} is a folder without __main__.py")
    if not path.is_file():
        raise CannotFork(f"{path} is no file")
    return path


def _is_this_python(name: str) -> bool:
    """Whether it is this file in this folder: the Python of an environment is a link to another Python."""
    path, other = os.path.abspath(shutil.which(name) or name), os.path.abspath(sys.executable)
    return os.path.dirname(path) == os.path.dirname(other) and os.path.realpath(path) == os.path.realpath(other)


# What a program would import, read from its text.
#
# Nothing of the program is run or imported here.


MOST_FILES = 500
PACKAGE = "elasticdl"
# A program that sets one of these means the import that follows. Which it only reads is not told apart.
_READ_AT_IMPORT = re.compile(
    r"(OMP|MKL|KMP|GOMP|OPENBLAS|NUMEXPR|TF|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|KERAS|XLA|GRPC|CUBLAS|NVIDIA|LD|MALLOC)_\w+"
)


def imports_of(program: Path | str) -> frozenset[str]:
    """Names of the modules outside of the program's own folder that it imports anywhere, as they stand in its text.

    Raises:
        CannotFork: it is not to be found or read.
    """
    here = Path.cwd()
    if isinstance(program, str):
        return imports_of_module(program, [here, *map(Path, sys.path)], here)
    path = program.resolve()
    return _followed(path, "", path.parent)


def imports_of_module(name: str, path: Sequence[Path], own: Path) -> frozenset[str]:
    """``path``: folders in which the module is looked for. ``own``: the folder of the program's own modules."""
    for module in (name, f"{name}.__main__"):
        for folder in path:
            if found := _file_of(module, folder):
                return _followed(found, module, own)
    raise CannotFork(f"module {name} is not found")


def _file_of(module: str, folder: Path) -> Path | None:
    path = folder.joinpath(*module.split("."))
    files = path / "__init__.py", path.with_name(f"{path.name}.py")
    return next((each for each in files if each.is_file()), None)


def _followed(program: Path, name: str, folder: Path) -> frozenset[str]:
    """What a file imports, itself or by modules in the folder, that is not in the folder."""
    outside, seen, due = set[str](), {program}, [(program, name)]
    while due:
        file, name = due.pop()
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for imported in _imported(_parsed(file), package):
            parts = imported.split(".")
            # A program beside the package itself is in no need of being followed into it.
            modules = [] if parts[0] == PACKAGE else [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
            own = {each: path for each in modules if (path := _file_of(each, folder))}
            if parts[0] not in own:
                outside.add(imported)
            for each, path in own.items():
                if path not in seen and len(seen) < MOST_FILES:
                    seen.add(path)
                    due.append((path, each))
    return frozenset(outside)


def _parsed(file: Path) -> ast.AST:
    """
    Raises:
        CannotFork: it can't be read, or names a variable that is read during imports: perhaps it sets that.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except OSError as error:
        raise CannotFork(f"{file} can't be read: {error.strerror}") from None
    except (SyntaxError, ValueError):
        raise CannotFork(f"{file} is not Python") from None
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)) if _READ_AT_IMPORT.fullmatch(name):
                raise CannotFork(f"{file}:{node.lineno} may set {name}, which is read during imports")
    return tree


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """What import statements name; of ``from a import b`` both ``a`` and ``a.b``, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(part for part in [*above, node.module or ""] if part)
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


# By what a script imports.
OF_SCRIPTS = {name: modules for each in FRONT_ENDS for name, modules in each.libraries.items()} | {
    each.module: (*each.first, each.module) for each in FRONT_ENDS
}
_OF_WORKERS = ("elasticdl.worker.trainer", "elasticdl.elastic.link.session")
_KERAS = ("elasticdl.worker.keras_learner", *_OF_WORKERS)
OF_ZOO_MODULES = {
    "torch": ("elasticdl.worker.torch_learner", "torch._dynamo", *_OF_WORKERS),
    "tensorflow": _KERAS,
    "keras": _KERAS,
}


def modules_to_preload(spec: JobSpec) -> Sequence[str]:
    """In the order in which they are to be imported, as `elasticdl.common.template` takes them.

    Raises:
        CannotFork: the workers can't be forked.
    """
    if spec.command:
        table, names = OF_SCRIPTS, imports_of(program_of(spec.command))
    else:
        folder = Path(spec.model_zoo).resolve()
        # A function may stand at its end.
        module = spec.model_def if _file_of(spec.model_def, folder) else spec.model_def.rpartition(".")[0]
        table, names = OF_ZOO_MODULES, imports_of_module(module, [folder], folder)
    wanted = [key for key in table if any(name == key or name.startswith(f"{key}.") for name in names)]
    return list(dict.fromkeys(module for key in wanted for module in table[key]))


WORKER_GROUP = (*RUN_MODULE, "elasticdl.places.worker_group")


def how_to_start(spec: JobSpec, *, within: bool = False) -> tuple[Sequence[str], Sequence[str], str]:
    """The workers' command line, the modules that they are forked with, and, if there are none, why, where a person should know.

    ``within``: of the processes of a worker that has several, which itself starts them.
    """
    if spec.processes_per_worker > 1 and not within:
        return WORKER_GROUP, (), ""
    argv = spec.command or (*RUN_MODULE, "elasticdl.worker.main")
    try:
        return argv, modules_to_preload(spec) if spec.start_method != "spawn" else (), ""
    except CannotFork as error:
        return argv, (), str(error)


if __name__ == "__main__":
    print(json.dumps(how_to_start(JobSpec.from_json(Path(sys.argv[1]).read_text()))))
