"""What a trainer does next, by ``TrainerControl``: a callback of any worker decides it for all.

A callback may go by this worker's own clock, or by its part of a batch. On one device a decision takes effect before the next
step, and here too.
"""

from __future__ import annotations

from typing import Any

from elasticdl.elastic.torch_kit.participant.participant import Participant
from elasticdl.elastic.torch_kit.torch_job import ElasticContext

STOPS = ("should_training_stop", "should_epoch_stop")
DECIDE_ALIKE = ("transformers", "elasticdl", "builtins")
BY_THE_CLOCK = ("JITCheckpointCallback",)
FLAGS = (*STOPS, "should_save", "should_evaluate", "should_log")


def may_wish(trainer: Any) -> bool:
    """Whether a callback or the trainer may decide after a step, by more than its number: those of the library that report, and what the arguments say,
    decide alike on all workers."""
    kinds: list[Any] = [*type(trainer).__mro__, *map(type, trainer.callback_handler.callbacks)]
    return any(each.__module__.partition(".")[0] not in DECIDE_ALIKE or each.__name__ in BY_THE_CLOCK for each in kinds)


class Decisions:
    """Asked for after each step, each epoch, and what was done there."""

    def __init__(self, job: ElasticContext) -> None:
        self.asks = True  # after a step; it was told with the step's gradients that some worker `may_wish`
        self._job = job
        self._wishes: set[str] = set()  # to stop, which the others have not heard

    def put_off(self, control: Any) -> None:
        """In the middle of a step, which all workers end."""
        if self._job.size > 1:
            self._take_wishes(control)

    def settle(self, control: Any, participant: Participant, *, evaluated: bool = False) -> None:
        """Have ``control`` say what any worker wishes. ``evaluated``: callbacks have seen this worker's own numbers."""
        if self._job.size == 1 or not (self.asks or evaluated or participant.is_catching_up):
            for name in self._wishes:
                setattr(control, name, True)
            self._wishes.clear()
            return
        self._take_wishes(control)
        if participant.is_catching_up or self._job.is_told_to_leave:  # the others go on
            self._wishes.clear()
        if participant.is_catching_up:
            return
        wished = [name in self._wishes or bool(getattr(control, name)) for name in FLAGS]
        answer = participant.agreements.any_of(wished, "the callbacks' decisions", wished)
        if answer is None:  # it is asked again after the next step
            return
        self._wishes.clear()
        for name, wishing in zip(FLAGS, answer, strict=True):
            setattr(control, name, wishing)

    def _take_wishes(self, control: Any) -> None:
        for name in STOPS:
            if getattr(control, name):
                self._wishes.add(name)
                setattr(control, name, False)
