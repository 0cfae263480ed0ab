"""A batch that stands in for one that the job has trained on already, for a script that must not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.data import Dataset

from elasticdl.elastic.training.tree import leaves as leaves_of

# Batch norm needs two.
SAMPLES_LOADED = 2


class Repeated(Dataset[Any]):
    """Gives a few samples of a data set, repeated to so many: a script may take the largest losses of a batch."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self._dataset = dataset
        self._samples = samples

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        few = fetch(indices) if fetch else [self._dataset[index] for index in indices]
        if type(few) is not list:
            return few
        return [*few, *(_copied(few[number % len(few)]) for number in range(len(few), self._samples))]


class StandIn:
    """A batch that is given again and again. The script may change it: then it is made anew."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample
        self._given: Any = None
        self._versions: list[int] = []

    def take(self) -> Any:
        if self._given is None or self._versions_now() != self._versions:
            self._given = map_tensors(torch.Tensor.clone, self._sample)
            self._versions = self._versions_now()
        return map_tensors(torch.Tensor.detach, self._given)  # of the same memory and count of changes

    def _versions_now(self) -> list[int]:
        leaves = [leaf for leaf in leaves_of(self._given) if isinstance(leaf, torch.Tensor)]
        return [0 if leaf.is_inference() else leaf._version for leaf in leaves]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with each tensor in it replaced by what ``function`` makes of the tensor."""
    return _pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def _copied(sample: Any) -> Any:
    # A deep copy of a tensor is one of all that it is a view of: of the whole data set, perhaps.
    return _pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), sample
    )
