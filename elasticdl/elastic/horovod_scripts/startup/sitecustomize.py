"""Run by Python at its start, in every process of a user's own program: waits for Horovod to be imported, and for triton,
which crashes a process after TensorFlow; and seeds the random numbers of Python, NumPy, PyTorch and TensorFlow, which workers that
split or shuffle data must draw alike.

Until then it costs one look-up in a set per import, and it imports next to nothing itself. Whatever other
``sitecustomize`` there is on the path is run as it would have been.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
# As in elasticdl.common.credentials; importing that would cost every process.
MASTER = "ELASTICDL_MASTER"
CONNECTED = "ELASTICDL_CONNECTED"
TEMPLATE = "ELASTICDL_TEMPLATE"  # as in elasticdl.common.template
TRITON = "triton"
# With the function that seeds each.
RANDOM = {"random": "seed", "numpy.random": "seed", "torch": "manual_seed", "tensorflow": "random.set_seed"}
SEED = 0  # as in elasticdl.elastic.training.runtime
SEEDED = "ELASTICDL_SEEDED"  # set by the first Python of a worker, to its master and process: its children draw what they like
PATCHED = frozenset(
    {
        "horovod._keras",
        "horovod.common.basics",
        "horovod.common.elastic",
        "horovod.tensorflow.elastic",
        "horovod.tensorflow.keras.callbacks",
        "horovod.torch.elastic.state",
    }
)


class PatchingFinder:
    """Finds Horovod's modules as the other finders would, and has them patched as soon as they have run. Random generators are
    seeded then; triton it has looked at before. ``names``: which of these it finds."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._patches: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:  # a mere folder of that name has none
                spec.loader = PatchingLoader(spec.loader, self)  # type: ignore[assignment]  # it need not be a subclass
                return spec
        return None

    def look_at(self, module: ModuleType) -> None:
        """Before it runs."""
        if module.__name__ == TRITON and "tensorflow" in sys.modules:
            from elasticdl.triton_first import refuse_triton

            refuse_triton()

    def patch(self, module: ModuleType) -> None:
        if module.__name__ == TRITON:
            return
        if module.__name__ in RANDOM:
            if is_seeded():
                seed_module(module)
            return
        if self._patches is None:
            try:
                from elasticdl.elastic.horovod_scripts.patches import Patches
            except ImportError as error:
                raise ImportError(
                    f"{sys.executable} imports Horovod under `elasticdl run` and can't import elasticdl ({error}): "
                    "install it there, too"
                ) from error
            self._patches = Patches()
        self._patches.apply(module)


class PatchingLoader:
    """Runs a module by its own loader, has it patched, and leaves no trace of itself."""

    def __init__(self, loader: Any, finder: PatchingFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.look_at(module)
        self._loader.exec_module(module)
        self._finder.patch(module)


def run_next(path: Sequence[str]) -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    others = [entry for entry in path if os.path.abspath(entry) != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def become_template(arguments: str) -> None:
    """Returns in the workers that are forked from this process, which itself must never go on to the user's program."""
    try:
        from elasticdl.common.template import serve
    except BaseException as error:  # noqa: BLE001 - Python would go on with the user's program
        os.write(2, f"elasticdl: no process to fork workers from: {error}\n".encode())
        os._exit(1)
    serve(arguments)


def is_seeded() -> bool:
    """Whether this is a worker, or what a worker has become, and not a child that it has started."""
    return os.environ.get(SEEDED, "") == f"{os.environ.get(MASTER)} {os.getpid()}"


def seed_module(module: ModuleType) -> None:
    *within, name = RANDOM[module.__name__].split(".")
    holder: Any = module
    for each in within:
        holder = getattr(holder, each, None)
    if function := getattr(holder, name, None):  # a script may have a module of that name
        function(SEED)


def seed() -> None:
    """Before the program has drawn anything: what it seeds itself stays."""
    master = os.environ[MASTER]
    if os.environ.get(SEEDED, "").startswith(f"{master} ") and not is_seeded():
        return
    os.environ[SEEDED] = f"{master} {os.getpid()}"
    for name in RANDOM:
        if name in sys.modules:  # as in a fork of a process that has imported it
            seed_module(sys.modules[name])


def main() -> None:
    if MASTER in os.environ:
        # A child of a worker is no worker: it may use Horovod for purposes of its own.
        is_child = os.environ.get(CONNECTED) == os.environ[MASTER]
        names = frozenset({TRITON}) if is_child else PATCHED | {TRITON, *RANDOM}
        sys.meta_path.insert(0, PatchingFinder(names))
    try:
        run_next(sys.path)
    finally:  # whatever another project's hook raises, Python says so and goes on
        if template := os.environ.get(TEMPLATE):
            become_template(template)
        if os.environ.get(MASTER) and os.environ[MASTER] != os.environ.get(CONNECTED):
            seed()


if __name__ == "sitecustomize":
    main()
