"""A torn step of a plain loop is made again of what the tapes have noted."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.in_place import Changes, storage_of
from elasticdl.elastic.torch.loop_faults import left_out_by_size
from elasticdl.elastic.torch.tape import Tape
from elasticdl.elastic.torch.trace import Trace
from elasticdl.elastic.torch_kit.participant.loop_state import OpenBatch
from elasticdl.elastic.torch_kit.participant.steps import Steps, SubBatch


class Replay:
    """As `elasticdl.elastic.torch_kit.participant.steps.Script` says."""

    def __init__(
        self,
        steps: Callable[[], Steps],
        scale: Callable[[], float],
        give_again: Callable[[OpenBatch, OpenBatch, Exception], None],
    ) -> None:
        """``scale``: by which losses are multiplied. ``give_again``: these batches, and those between them, to the script."""
        self._steps = steps
        self._scale = scale
        self._give_again = give_again
        self._unused: list[Trace] = []  # of batches of this loop since the last step, without gradients
        self._changes: Changes | None = None  # in place, by the script in the step that is torn

    def new_tape(self, sample: Any, kept: Container[int] = ()) -> Tape:
        """Of a batch that the script is given next. ``kept``: as `Tape`'s."""
        steps = self._steps()
        may_be_torn = steps.job.size > 1 or steps.is_torn
        tape = Tape(sample, self._settled, unused=self._unused, may_be_torn=may_be_torn, kept=kept)
        for given in steps.open_batches:
            given.tape.followed_by(tape)
        return tape

    def turn(self, *, is_new_loop: bool = False) -> None:
        """The script is done with the batch that it was given last, if it was given one since the last step: it asks for another, or
        begins a new loop. One of which it has made nothing is no part of the step.

        Raises:
            UserError: it has left the batch out by the number of this worker's samples.
        """
        steps = self._steps()
        if is_new_loop:
            self._unused.clear()
        if not steps.open_batches or steps.is_reduced or steps.open_batches[-1].backwards or not steps.job.under_master:
            return
        last, trace = steps.open_batches[-1], steps.open_batches[-1].tape.trace
        if not is_new_loop:
            if trace.looks_at_size and not trace.is_for_model and steps.job.size > 1:
                raise UserError(left_out_by_size(trace.looks_at_size, len(last.batch.indices), last.part.samples))
            self._unused.append(trace)
        if trace.is_untouched:
            steps.open_batches.pop()

    def step_made(self) -> None:
        self._unused.clear()

    def take_back(self) -> None:
        changes = self._steps().open_batches[0].tape.undo()
        self._changes = self._changes or changes  # if the step is torn again, all is as before already

    def give_back(self) -> None:
        if self._changes is not None:
            state = self._steps().state
            groups = state.optimizer.param_groups if self._steps().is_catching_up else []
            received = [*state.model.parameters(), *(each for group in groups for each in group["params"])]
            self._changes.put_back({storage_of(each) for each in received} if groups else ())
            self._changes = None

    def begin_remake(self, open_batches: Sequence[tuple[OpenBatch, Sequence[SubBatch]]]) -> None:
        for given, _ in open_batches:
            given.tape.begin_remake()

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        def backward(loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
            self._steps().weighed_backward(given, weight, loss, kwargs, self._scale())

        for each, tensor in given.tape.remake(sample, backward).items():
            if tensor.numel() == 1:
                given.remade[each] = given.remade.get(each, 0.0) + float(tensor.detach()) * weight

    def cannot_remake(self, first: OpenBatch, last: OpenBatch, error: Exception) -> None:
        self._changes = None  # which the script makes once more
        self._give_again(first, last, error)

    def _settled(self) -> Container[int]:
        """Storages of what a torn step puts back itself."""
        return {storage_of(each) for each in self._steps().state.moved_by_passes()}
