"""A torn step of a plain loop is made again of what the tapes have noted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import ReferenceType

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.loop_faults import Changes, left_out_by_size, storage_of
from elasticdl.elastic.torch.tape import OfTensors, Tape, Trace
from elasticdl.elastic.torch_kit.host import OpenBatch
from elasticdl.elastic.torch_kit.participant import Participant


@dataclass(slots=True)
class NotedBatch(OpenBatch):
    """An open batch, and what the script has made of it."""

    tape: Tape = field(default_factory=lambda: Tape(None))
    loss: ReferenceType[torch.Tensor] | None = None  # of backward(), if it was called once
    # Numbers made again, weighed, by the script's.
    remade: OfTensors[float] = field(default_factory=OfTensors)

    def weighed(self, value: Any, own: float) -> float:
        """What this worker adds to the mean over the batch of a value, ``own`` over its part."""
        # It may have been made again, of another part than the script has seen.
        again = self.remade.get(value) if self.part.weight else None
        return own * self.part.weight if again is None else again

    def begin_again(self) -> None:
        OpenBatch.begin_again(self)
        self.remade = OfTensors()

    def forget(self) -> None:
        self.tape = _EMPTY


_EMPTY = Tape(None)


def weighed_backward(loss: torch.Tensor, kwargs: dict[str, Any], factor: float) -> None:
    """``loss.backward(**kwargs)``, whose gradients are multiplied by ``factor``."""
    if factor != 1.0:
        gradient = kwargs.get("gradient")
        kwargs = {**kwargs, "gradient": torch.ones_like(loss) * factor if gradient is None else gradient * factor}
    loss.backward(**kwargs)  # type: ignore[no-untyped-call]


class Replay:
    """The tapes of the open batches."""

    def __init__(self, participant: Callable[[], Participant], scale: Callable[[], float]) -> None:
        """``scale``: by which losses are multiplied."""
        self._participant = participant
        self._scale = scale
        self._unused: list[Trace] = []  # of batches of this loop since the last step, without gradients
        self._changes: Changes | None = None  # in place, by the script in the step that is torn

    @property
    def open_batches(self) -> Sequence[NotedBatch]:
        return cast(list[NotedBatch], self._participant().open_batches)

    def new_tape(self, sample: Any, kept: Container[int] = ()) -> Tape:
        """Of a batch that the script is given next. ``kept``: as `Tape`'s."""
        participant = self._participant()
        may_be_torn = participant.job.size > 1 or participant.is_torn
        tape = Tape(sample, self._settled, unused=self._unused, may_be_torn=may_be_torn, kept=kept)
        for given in self.open_batches:
            given.tape.followed_by(tape)
        return tape

    def turn(self, *, is_new_loop: bool = False) -> None:
        """The script is done with the batch that it was given last, if it was given one since the last step: it asks for another, or
        begins a new loop. One of which it has made nothing is no part of the step.

        Raises:
            UserError: it has left the batch out by the number of this worker's samples.
        """
        participant, open_batches = self._participant(), self.open_batches
        if is_new_loop:
            self._unused.clear()
        is_stepped = not open_batches or participant.is_reduced
        if is_stepped or open_batches[-1].backwards or not participant.job.under_master:
            return
        last, trace = open_batches[-1], open_batches[-1].tape.trace
        if not is_new_loop:
            if trace.looks_at_size and not trace.is_for_model and participant.job.size > 1:
                raise UserError(left_out_by_size(trace.looks_at_size, len(last.batch.indices), last.part.samples))
            self._unused.append(trace)
        if trace.is_untouched:
            participant.open_batches.pop()

    def step_made(self) -> None:
        self._unused.clear()

    def forget(self) -> None:
        """What was taken back is not given back."""
        self._changes = None

    # -- as `Host` has these --

    def take_back(self) -> None:
        changes = self.open_batches[0].tape.undo()
        self._changes = self._changes or changes  # if the step is torn again, all is as before already

    def give_back(self) -> None:
        if self._changes is None:
            return
        participant = self._participant()
        groups = participant.state.optimizer.param_groups if participant.is_catching_up else []
        received = [*participant.state.model.parameters(), *(each for group in groups for each in group["params"])]
        self._changes.put_back({storage_of(each) for each in received} if groups else ())
        self._changes = None

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        assert isinstance(given, NotedBatch)

        def backward(loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
            run = functools.partial(weighed_backward, loss, kwargs)
            self._participant().backward(given, weight, loss, run, scale=self._scale())

        for each, tensor in given.tape.remake(sample, backward):
            if tensor.numel() == 1:
                given.remade.put(each, (given.remade.get(each) or 0.0) + float(tensor.detach()) * weight)

    def _settled(self) -> Container[int]:
        """Storages of what a torn step puts back itself."""
        return {storage_of(each) for each in self._participant().state.moved_by_passes()}
