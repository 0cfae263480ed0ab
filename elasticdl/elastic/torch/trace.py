"""Which tensors come of a batch: whether the script works on the one that it was given last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.common.tree import leaves as leaves_of
from elasticdl.elastic.torch.loop_faults import works_on_another_batch


class Trace:
    """Of one batch."""

    def __init__(self, sample: Any, unused: Sequence[Trace]) -> None:
        """``unused``: of batches before it in the same loop, of which no gradients were made."""
        leaves = leaves_of(sample)
        self._made = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.unused = list(unused)
        self.is_untouched = True  # nothing was called
        self.is_for_model = False  # which was called
        self.looks_at_size = ""  # where the script has looked last at the number of samples, and has done nothing since

    def look_at_size(self, tensor: torch.Tensor, place: str) -> None:
        if id(tensor) in self._made:
            self.looks_at_size = place

    def follow(self, given: Sequence[Any], result: Any, is_new: Callable[[torch.Tensor], bool]) -> None:
        """The script has called something. ``is_new``: of a tensor that was not there before the batch."""
        self.is_untouched, self.looks_at_size = False, ""
        if any(id(leaf) in self._made for leaf in given):
            for leaf in leaves_of(result):
                if isinstance(leaf, torch.Tensor) and is_new(leaf):
                    self._made[id(leaf)] = leaf

    def require_present(self, given: Sequence[Any], place: Callable[[], str]) -> None:
        """Raises:
        UserError: the script calls something with a batch that it was given before, and not with this one.
        """
        ids = {id(leaf) for leaf in given if isinstance(leaf, torch.Tensor)}
        if any(not ids.isdisjoint(each._made) for each in self.unused) and ids.isdisjoint(self._made):
            raise UserError(works_on_another_batch(place()))
