"""PyTorch's compiler is imported when somebody compiles, not when somebody makes an optimizer.

``torch.optim`` imports ``torch._dynamo``, and SymPy with it, to tell the compiler what to leave alone. That is two
fifths of the processor time that a worker needs before it can train, and a growing job waits for its newcomers. So a
module stands in its place that answers these calls itself and gives way to the real one at any other use.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import Lock
from types import FunctionType, ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


def import_dynamo_late() -> None:
    """From now on ``torch._dynamo`` is imported at its first real use; nothing changes if it has been imported."""
    spec = None if NAME in sys.modules else find_spec(NAME)
    if spec is not None:
        late = _LateDynamo(spec)
        sys.modules[NAME] = torch._dynamo = late
        sys.meta_path.insert(0, late.submodules)


class _LateDynamo(ModuleType):
    """Two of the module's functions, for as long as nothing is compiled; it gives way when it is asked for more.

    Whoever has kept it reads and writes the real module's attributes through it from then on.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(NAME)
        own = {"__spec__": spec, "__loader__": spec.loader, "__package__": NAME, "__file__": spec.origin}
        path = spec.submodule_search_locations or []
        vars(self).update(own, __path__=path, submodules=_Submodules(self), _lock=Lock())

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        if not isinstance(fn, FunctionType):  # a class, a module, an argument of a decorator
            return self.give_way().disable(fn, recursive, **options)
        return _disabled_later(fn, lambda dynamo: dynamo.disable(fn, recursive, **options))

    def graph_break(self, msg: str = "") -> None:
        if sys.modules.get(NAME) is not self:  # there is a compiler, which may be tracing
            self.give_way().graph_break(msg)

    def give_way(self) -> Any:
        """The real module, imported by the first who asks."""
        with self._lock:
            if sys.modules.get(NAME) is self:
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self.submodules]
                del sys.modules[NAME]
                vars(torch).pop("_dynamo", None)
        return import_module(NAME)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # what looks through all modules asks them, such as `inspect`
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        return getattr(self.give_way(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.give_way(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.give_way(), name)

    def __dir__(self) -> list[str]:
        return dir(self.give_way())


def _disabled_later(fn: FunctionType, disable: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """``fn`` as it is until the compiler is there, and from then on as the compiler disables it."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        dynamo = sys.modules.get(NAME)
        if disabled is None and not isinstance(dynamo, _LateDynamo) and hasattr(dynamo, "disable"):
            disabled = disable(dynamo)
        return (disabled or fn)(*args, **kwargs)

    return call


class _Submodules(MetaPathFinder):
    """Has the real module imported before one of its submodules is, and that only once, though the real module imports
    most of them itself."""

    def __init__(self, late: _LateDynamo) -> None:
        self._late = late

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{NAME}."):
            return None
        self._late.give_way()
        there = sys.modules.pop(fullname, None)  # where the import system would find it, and load it anew
        return ModuleSpec(fullname, _Loaded(there)) if there else None


class _Loaded(Loader):
    """Of a module that has run: the import system is given it as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__spec__=self._spec)  # past the `__setattr__` of configuration modules
