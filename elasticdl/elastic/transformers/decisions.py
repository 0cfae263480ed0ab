"""What a trainer does next, by ``TrainerControl``: a callback of any worker decides it for all.

A callback may go by this worker's own clock, or by its part of a batch. On one device a decision takes effect before the next
step, and here too.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.torch_kit.torch_job import ElasticContext

log = logging.getLogger(__name__)

STOPS = ("should_training_stop", "should_epoch_stop")
FLAGS = (*STOPS, "should_save", "should_evaluate", "should_log")


class Decisions:
    """Asked for after each step, each epoch, and what was done there."""

    def __init__(self, job: ElasticContext) -> None:
        self._job = job
        self._wishes: set[str] = set()  # to stop, which the others have not heard
        self._unheard_in = -1  # the world that broke while something was asked

    def put_off(self, control: Any) -> None:
        """In the middle of a step, which all workers end."""
        if self._job.size > 1:
            self._take_wishes(control)

    def settle(self, control: Any, *, is_catching_up: bool) -> None:
        """Have ``control`` say what any worker wishes. ``is_behind``: the others have made the step that this worker comes from."""
        version = self._job.world.version
        if self._job.size == 1:
            for name in self._wishes:
                setattr(control, name, True)
            self._wishes.clear()
            return
        self._take_wishes(control)
        if is_catching_up or self._job.is_told_to_leave:  # the others go on
            self._wishes.clear()
        if is_catching_up or self._unheard_in == version:
            return
        flags = torch.tensor([float(name in self._wishes or getattr(control, name)) for name in FLAGS])
        self._job.advance(Activity.WAIT)
        try:
            self._job.collective.sum_asked(flags, "the callbacks' decisions")
        except WorldBroken as failure:
            self._unheard_in = version
            log.info("whether to stop is asked again after the next step: %s", failure)
            return
        finally:
            self._job.advance(Activity.UPDATE)
        self._wishes.clear()
        for name, wishing in zip(FLAGS, flags.tolist(), strict=True):
            setattr(control, name, wishing > 0)

    def _take_wishes(self, control: Any) -> None:
        for name in STOPS:
            if getattr(control, name):
                self._wishes.add(name)
                setattr(control, name, False)
