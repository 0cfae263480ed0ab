"""A torn step of a plain loop is made again of what the tapes have noted."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from elasticdl.elastic.torch.in_place import Changes, storage_of
from elasticdl.elastic.torch.steps import Piece, Steps
from elasticdl.elastic.torch.tape import Tape
from elasticdl.elastic.torch.view_state import Given


class Replay:
    """As `elasticdl.elastic.torch.steps.Script` says."""

    def __init__(
        self,
        steps: Callable[[], Steps],
        scale: Callable[[], float],
        give_again: Callable[[Given, Given, Exception], None],
    ) -> None:
        """``scale``: by which losses are multiplied. ``give_again``: these batches, and those between them, to the script."""
        self._steps = steps
        self._scale = scale
        self._give_again = give_again
        self._changes: Changes | None = None  # in place, by the script in the step that is torn

    def new_tape(self, sample: Any) -> Tape:
        """Of a batch that the script is given next."""
        tape = Tape(sample, self._settled)
        for given in self._steps().hand:
            given.tape.followed_by(tape)
        return tape

    def take_back(self) -> None:
        changes = self._steps().hand[0].tape.undo()
        self._changes = self._changes or changes  # if the step is torn again, all is as before already

    def give_back(self) -> None:
        if self._changes is not None:
            state = self._steps().state
            groups = state.optimizer.param_groups if self._steps().is_behind else []
            received = [*state.model.parameters(), *(each for group in groups for each in group["params"])]
            self._changes.put_back({storage_of(each) for each in received} if groups else ())
            self._changes = None

    def begin_remake(self, hand: Sequence[tuple[Given, Sequence[Piece]]]) -> None:
        for given, _ in hand:
            given.tape.begin_remake()

    def remake(self, given: Given, sample: Any, weight: float) -> None:
        def backward(loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
            self._steps().weighed_backward(given, weight, loss, kwargs, self._scale())

        for each, tensor in given.tape.remake(sample, backward).items():
            if tensor.numel() == 1:
                given.remade[each] = given.remade.get(each, 0.0) + float(tensor.detach()) * weight

    def cannot_remake(self, first: Given, last: Given, error: Exception) -> None:
        self._changes = None  # which the script makes once more
        self._give_again(first, last, error)

    def _settled(self) -> Container[int]:
        """Storages of what a torn step puts back itself."""
        return {storage_of(each) for each in self._steps().state.moved_by_passes()}
