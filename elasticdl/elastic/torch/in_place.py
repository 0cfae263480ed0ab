"""What a script changes in place while it works on a batch, kept as it was before: a step that is torn is made again from there.

A counter that is a tensor, a weight decay of one's own, a table of features: whatever was there before the batch, and was not made of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from elasticdl.elastic.training.tree import leaves as leaves_of

_OF_NUMBERS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "div", "mod", "pow")
_OF_BITS = ("and", "or", "xor", "lshift", "rshift")
_OPERATORS = frozenset(f"__i{name}__" for name in (*_OF_NUMBERS, *_OF_BITS))
_OTHERS = frozenset({"__setitem__", *_OPERATORS})
_OF_RUNNING_STATISTICS = frozenset({"batch_norm", "instance_norm"})  # which come behind the input
_ATTRIBUTES = ("data", "requires_grad")
_HARMLESS = frozenset({"requires_grad_", "retain_grad", "share_memory_", "rename_"})


class _Was(Protocol):
    """How something was."""

    @property
    def storage(self) -> int:
        """Whose it is; 0 for none."""

    def put_back(self) -> None: ...

    def at_present(self) -> Self:
        """How the same is now."""


@dataclass(frozen=True, slots=True)
class _Values:
    alias: torch.Tensor  # of the same memory, without a version that a backward pass has noted
    copy: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        alias = tensor.data
        return cls(alias, alias.clone())

    @property
    def storage(self) -> int:
        return storage_of(self.alias)

    def put_back(self) -> None:
        self.alias.copy_(self.copy)

    def at_present(self) -> Self:
        return self.of(self.alias)


@dataclass(frozen=True, slots=True)
class _Attribute:
    tensor: torch.Tensor
    name: str
    value: Any
    storage: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> Self:
        return cls(tensor, name, getattr(tensor, name))

    def put_back(self) -> None:
        setattr(self.tensor, self.name, self.value)

    def at_present(self) -> Self:
        return self.of(self.tensor, self.name)


@dataclass(frozen=True, slots=True)
class Changes:
    """How something is that was changed."""

    every: Sequence[_Was] = ()

    @torch.no_grad()
    def put_back(self, besides: Container[int] = ()) -> None:
        """All but what has one of these storages."""
        for was in self.every:
            if was.storage not in besides:
                was.put_back()


class InPlace:
    """What was changed from the time that a batch is given, until the next one is."""

    def __init__(self, sample: Any) -> None:
        self._was: dict[Any, _Was] = {}
        # Memory of what is made of the batch. What takes its place when that is gone was not there before the batch either.
        self._made = {storage_of(leaf) for leaf in leaves_of(sample) if isinstance(leaf, torch.Tensor)}

    def before(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The script calls this next."""
        name = getattr(function, "__name__", "")
        if name == "requires_grad_":
            self._keep_attribute(args[0], "requires_grad")
        elif (attribute := attribute_set_by(function)) in _ATTRIBUTES:
            self._keep_attribute(args[0], attribute)
        elif (name.endswith("_") and not name.endswith("__") and name not in _HARMLESS) or name in _OTHERS:
            self._keep(args[:1])
        elif name in _OF_RUNNING_STATISTICS:
            self._keep((args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")))
        elif kwargs.get("out") is not None:
            self._keep(kwargs["out"])

    def after(self, args: Any, result: Any) -> None:
        """It has returned."""
        given = {storage_of(leaf) for leaf in args if isinstance(leaf, torch.Tensor)}
        for leaf in leaves_of(result):
            if isinstance(leaf, torch.Tensor) and (storage := storage_of(leaf)) not in given:
                self._made.add(storage)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Of the batch, or since it was given."""
        return storage_of(tensor) in self._made

    def is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether it may be changed."""
        storage = storage_of(tensor)
        return storage in self._made or any(was.storage == storage for was in self._was.values())

    def undo(self, later: Sequence[InPlace], settled: Container[int]) -> Changes:
        """All is as before this batch. Returns how it was changed.

        ``later``: of the batches that were given since. ``settled``: storages of what is put back otherwise.
        """
        every = [was for each in (self, *later) for was in each._was.values() if was.storage not in settled]
        with torch.no_grad():
            changes = Changes([was.at_present() for was in every])
        Changes(every[::-1]).put_back()
        return changes

    @contextlib.contextmanager
    def undone(self, later: Sequence[InPlace], settled: Container[int]) -> Iterator[None]:
        """Within, all is as before this batch; afterwards it is as it is now."""
        changes = self.undo(later, settled)
        try:
            yield
        finally:
            changes.put_back()

    def _keep(self, given: Any) -> None:
        for tensor in leaves_of(given):
            if isinstance(tensor, torch.Tensor) and (storage := storage_of(tensor)) not in self._made:
                place = (
                    (tensor.storage_offset(), tensor.shape, tensor.stride()) if tensor.layout is torch.strided else ()
                )
                if (storage, place) not in self._was:
                    self._was[storage, place] = _Values.of(tensor)

    def _keep_attribute(self, tensor: torch.Tensor, name: str) -> None:
        if storage_of(tensor) not in self._made and (id(tensor), name) not in self._was:
            self._was[id(tensor), name] = _Attribute.of(tensor, name)


def attribute_set_by(function: Callable[..., Any]) -> str:
    """Of a tensor, as in ``tensor.data = ...``; empty for any other function."""
    if getattr(function, "__name__", "") not in ("__set__", "__delete__"):
        return ""
    return str(getattr(getattr(function, "__self__", None), "__name__", ""))


def storage_of(tensor: torch.Tensor) -> int:
    """By which views of one another are known."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse one has none
        return id(tensor)
