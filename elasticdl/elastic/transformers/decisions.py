"""What a trainer does next, by ``TrainerControl``: a callback of any worker decides it for all.

A callback may go by this worker's own clock, or by its part of a batch. On one device a decision takes effect before the next
step, and here too.
"""

from __future__ import annotations

from typing import Any

from elasticdl.elastic.torch_kit.participant.participant import Participant
from elasticdl.elastic.torch_kit.torch_job import ElasticContext

STOPS = ("should_training_stop", "should_epoch_stop")
FLAGS = (*STOPS, "should_save", "should_evaluate", "should_log")


class Decisions:
    """Asked for after each step, each epoch, and what was done there."""

    def __init__(self, job: ElasticContext) -> None:
        self._job = job
        self._wishes: set[str] = set()  # to stop, which the others have not heard

    def put_off(self, control: Any) -> None:
        """In the middle of a step, which all workers end."""
        if self._job.size > 1:
            self._take_wishes(control)

    def settle(self, control: Any, participant: Participant) -> None:
        """Have ``control`` say what any worker wishes."""
        if self._job.size == 1:
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
