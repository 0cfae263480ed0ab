"""Which tensors come of a batch: whether the script works on the one that it was given last."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from elasticdl.common.errors import UserError
from elasticdl.common.tree import leaves as leaves_of
from elasticdl.elastic.torch.loop_faults import works_on_another_batch


class Trace:
    """Of one batch."""

    def __init__(self, sample: Any, unused: Sequence[Trace]) -> None:
        """``unused``: of batches before it in the same loop, of which no gradients were made."""
        self._made: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary(
            {leaf: None for leaf in leaves_of(sample) if isinstance(leaf, torch.Tensor)}
        )
        self.unused = list(unused)
        self.is_untouched = True  # nothing was called
        self.is_for_model = False  # which was called
        self.looks_at_size = ""  # where the script has looked last at the number of samples, and has done nothing since

    def look_at_size(self, tensor: torch.Tensor, place: str) -> None:
        if tensor in self._made:
            self.looks_at_size = place

    def follow(self, given: Sequence[Any], result: Any, is_new: Callable[[torch.Tensor], bool]) -> None:
        """The script has called something. ``is_new``: of a tensor that was not there before the batch."""
        self.is_untouched, self.looks_at_size = False, ""
        if self._has_any(given):
            for leaf in leaves_of(result):
                if isinstance(leaf, torch.Tensor) and is_new(leaf):
                    self._made[leaf] = None

    def require_present(self, given: Sequence[Any], place: Callable[[], str]) -> None:
        """Raises:
        UserError: the script calls something with a batch that it was given before, and not with this one.
        """
        if any(each._has_any(given) for each in self.unused) and not self._has_any(given):
            raise UserError(works_on_another_batch(place()))

    def _has_any(self, leaves: Sequence[Any]) -> bool:
        return any(isinstance(leaf, torch.Tensor) and leaf in self._made for leaf in leaves)
