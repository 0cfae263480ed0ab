"""Which modules a job's workers are forked with: those of the framework that its program imports, and ours on it.

`python -m elasticdl.places.preload SPECIFICATION` tells the agent of a place, which itself imports next to nothing, how workers are
started, as JSON: what `how_to_start` returns; or one line, what is wrong.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from pydantic import ValidationError

from elasticdl.common.errors import first_finding
from elasticdl.common.front_ends import FRONT_ENDS, RUN_MODULE
from elasticdl.job.spec import JobSpec
from elasticdl.places.fork_server import CannotFork, Program, UnclearCommand, program_of

# What a program would import, read from its text.
#
# Nothing of the program is run or imported here.


MOST_FILES = 500
PACKAGE = "elasticdl"
# A program that sets one of these means the import that follows.
_READ_AT_IMPORT = re.compile(
    r"(OMP|MKL|KMP|GOMP|OPENBLAS|NUMEXPR|TF|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|KERAS|XLA|GRPC|CUBLAS|NVIDIA|LD|MALLOC)_.*"
)


def imports_of(program: Program) -> frozenset[str]:
    """Names of the modules outside of the program's own folder that it imports anywhere, as they stand in its text.

    Raises:
        CannotFork: it is not to be found or read.
    """
    here = Path.cwd()
    if program.kind == "module":
        return imports_of_module(program.target, [here, *map(Path, sys.path)], here)
    if program.kind == "code":
        reader = _Reader(here)
        reader.read(program.target.encode(), "", "-c")
    else:
        path = Path(program.target).resolve()
        reader = _Reader(path.parent)
        reader.read_file(path, "")
    return frozenset(reader.outside)


def imports_of_module(name: str, path: Sequence[Path], own: Path) -> frozenset[str]:
    """``path``: folders in which the module is looked for. ``own``: the folder of the program's own modules."""
    reader, folders = _Reader(own), [str(each) for each in path]
    found = reader.find(name, folders) or reader.find(f"{name}.__main__", folders)
    if found is None:
        raise CannotFork(f"module {name} is not found")
    reader.read_file(found, name)
    return frozenset(reader.outside)


class _Reader:
    """Follows imports through the modules in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._seen: set[Path] = set()
        self.outside: set[str] = set()  # modules that are not in the folder

    def find(self, name: str, path: Sequence[str]) -> Path | None:
        """The file of a module; importing none of the packages that it is in, as the import system would."""
        package, _, last = name.rpartition(".")
        places = path
        for part in [part for part in package.split(".") if part]:
            spec = PathFinder.find_spec(part, places)
            if spec is None or spec.submodule_search_locations is None:
                return None
            places = list(spec.submodule_search_locations)
        spec = PathFinder.find_spec(last, places)
        return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None

    def read_file(self, path: Path, name: str) -> None:
        if path in self._seen or len(self._seen) >= MOST_FILES:
            return
        self._seen.add(path)
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        try:
            self.read(path.read_bytes(), package, str(path))
        except OSError as error:
            raise CannotFork(f"{path} can't be read: {error.strerror}") from None

    def read(self, text: bytes, package: str, shown: str) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            raise CannotFork(f"{shown} is not Python") from None
        for line, variable in _variables_set(tree):
            if _READ_AT_IMPORT.fullmatch(variable):
                raise CannotFork(f"{shown}:{line} sets {variable}, which is read during imports")
        for name in _imported(tree, package):
            parts = name.split(".")
            if parts[0] == PACKAGE:  # a program beside the package itself is in no need of being followed into it
                self.outside.add(name)
                continue
            own = [self.find(".".join(parts[:end]), [self._folder]) for end in range(1, len(parts) + 1)]
            if own[0] is None:
                self.outside.add(name)
            for end, path in enumerate(own, 1):
                if path is not None:
                    self.read_file(path, ".".join(parts[:end]))


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


def _variables_set(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Environment variables that are set, and where: ``os.environ[NAME] = ...``, ``|=``, ``.setdefault``, ``.update``, ``putenv``.

    Where the name is not there as text, it may be any text of the file.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del) and _is_environ(node.value):
            yield from _texts(node.lineno, node.slice if isinstance(node.slice, ast.Constant) else tree)
        elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
            yield from _texts(node.lineno, node.value if isinstance(node.value, ast.Dict) else tree)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _sets_variables(node.func):
            yield from _texts(node.lineno, *node.args)
            yield from ((node.lineno, keyword.arg) for keyword in node.keywords if keyword.arg)


def _sets_variables(called: ast.Attribute) -> bool:
    of_environ = called.attr in ("setdefault", "update", "pop") and _is_environ(called.value)
    return of_environ or called.attr in ("putenv", "unsetenv")


def _is_environ(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _texts(line: int, *nodes: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes:
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield line, each.value


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
