"""Which tensors come of a batch: whether the script works on the one that it was given last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, ref

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.loop_faults import works_on_another_batch
from elasticdl.elastic.training.tree import leaves as leaves_of

V = TypeVar("V")


class OfTensors(Generic[V]):
    """What belongs to tensors, of which this keeps none."""

    def __init__(self) -> None:
        # The id of one that is gone may be another's by now. (WeakIdKeyDictionary of torch takes four times as long.)
        self._known: dict[int, tuple[ReferenceType[torch.Tensor], V]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def put(self, tensor: torch.Tensor, value: V) -> None:
        self._known[id(tensor)] = ref(tensor), value

    def get(self, leaf: Any) -> V | None:
        known = self._known.get(id(leaf))
        return known[1] if known is not None and known[0]() is leaf else None

    def items(self) -> Iterator[tuple[torch.Tensor, V]]:
        """Of those that are still there."""
        return ((tensor, value) for of, value in self._known.values() if (tensor := of()) is not None)


class Trace:
    """Of one batch."""

    def __init__(self, sample: Any, unused: Sequence[Trace]) -> None:
        """``unused``: of batches before it in the same loop, of which no gradients were made."""
        self._made: OfTensors[bool] = OfTensors()
        for leaf in leaves_of(sample):
            if isinstance(leaf, torch.Tensor):
                self._made.put(leaf, True)
        self.unused = list(unused)
        self.is_untouched = True  # nothing was called
        self.is_for_model = False  # which was called
        self.looks_at_size = ""  # where the script has looked last at the number of samples, and has done nothing since

    def look_at_size(self, tensor: torch.Tensor, place: str) -> None:
        if self._made.get(tensor):
            self.looks_at_size = place

    def follow(self, given: Sequence[Any], result: Any, is_new: Callable[[torch.Tensor], bool]) -> None:
        """The script has called something. ``is_new``: of a tensor that was not there before the batch."""
        self.is_untouched, self.looks_at_size = False, ""
        if self._has_any(given):
            for leaf in leaves_of(result):
                if isinstance(leaf, torch.Tensor) and is_new(leaf):
                    self._made.put(leaf, True)

    def require_present(self, given: Sequence[Any], place: Callable[[], str]) -> None:
        """Raises:
        UserError: the script calls something with a batch that it was given before, and not with this one.
        """
        if any(each._has_any(given) for each in self.unused) and not self._has_any(given):
            raise UserError(works_on_another_batch(place()))

    def _has_any(self, leaves: Sequence[Any]) -> bool:
        return any(self._made.get(leaf) for leaf in leaves)
