"""A newcomer's way to where the job stands, by its script's own loops.

The script is given a stand-in for each batch that the job has trained on. Most of the way it goes before this worker asks for a world, so that
nobody waits for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elasticdl.elastic.core.progress import Progress
from elasticdl.elastic.torch.beginning import Beginning, Moved, mark_of
from elasticdl.elastic.torch.from_memory import ModelFromMemory
from elasticdl.elastic.torch_kit.data.own_loader import GlobalBatch, OwnLoader
from elasticdl.elastic.torch_kit.data.stand_in import StandIn
from elasticdl.elastic.torch_kit.participant.script_position import ScriptPosition
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.job.messages import newest_marks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a script is in its loops, in batches and in samples of the epoch."""

    epoch: int = 0
    batches: int = 0
    samples: int = 0

    @classmethod
    def behind(cls, batch: GlobalBatch) -> Standing:
        return cls(batch.epoch + 1, 0, 0) if batch.is_last else cls(batch.epoch, batch.number + 1, batch.end)


class Approach:
    """Of one script."""

    def __init__(self, job: ElasticContext, model: torch.nn.Module, data: OwnLoader, began: Beginning) -> None:
        self.begins = Standing()  # the script, its first loop
        self.stands = self.begins  # behind the last batch that it was given, or a stand-in for that
        # Epochs, and batches of the next, that are passed by before this worker asks for a world.
        self.jobs_place = 0, 0
        self._job = job
        self._data = data
        self._began = began
        self._from_memory = ModelFromMemory(model)

    def begin(self) -> None:
        """The script begins its first loop."""
        marks = self._job.session.jobs_marks()
        # What was written since the newest mark only the job's state tells: others wait while this worker passes batches by.
        self.jobs_place = (0, 0) if self._began.is_newer(marks) else self._job.session.jobs_place()
        self.stands = self.begins = Standing(self._began.epoch(marks))

    def epoch_after(self, loops: int) -> int:
        """Of the job, that follows so many loops of the script."""
        return self.begins.epoch + loops

    def joins(self, position: ScriptPosition, start: tuple[int, int], states: Moved) -> tuple[int, int]:
        """This worker is in a world. Returns where the job has to be by now: at ``start``, unless the script has passed nothing by.

        ``states``: of the job's optimizers.

        Raises:
            UserError: it was another epoch, and the script has passed batches by already; or which one it was is not known.
        """
        epoch = self._began.epoch(position.marks)
        if self.stands == self.begins:
            self.stands = self.begins = Standing(epoch)
            start = 0, 0
        if epoch == 0 or epoch != self.begins.epoch:
            self._began.require_top(position.began_with)
        else:
            self._began.require_states(epoch, states)
        return start

    def epoch_begins(self, epoch: int, position: ScriptPosition, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The job begins this epoch. A worker that comes later may go on from a checkpoint which the script has written just before."""
        if self._job.under_master:
            self.note_mark(epoch, position, optimizers)
            self._tell(position)

    def note_mark(self, epoch: int, position: ScriptPosition, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """So the parameters are after the epoch before this one, also if that was the last: then a worker that comes later has an empty loop."""
        if math.isfinite(mark := mark_of(optimizers)):
            position.marks = newest_marks({**position.marks, epoch: mark})

    def _tell(self, position: ScriptPosition) -> None:
        if self._job.rank == 0 and position.marks:
            self._job.session.tell_marks(position.marks)

    def stand_ins(self, drawn: Sequence[GlobalBatch]) -> Generator[Any, None, int]:
        """One for each batch of this epoch that is passed by. Returns the number of the batch that comes next."""
        stand_in: StandIn | None = None
        number = 0
        while number < len(drawn) and (drawn[number].epoch, number) < self.jobs_place:
            batch = drawn[number]
            self.stands = Standing.behind(batch)
            self.pass_by()
            stand_in = stand_in or self._data.stand_in(batch, self._job.most_workers)
            yield stand_in.take()
            number += 1
        return number

    def pass_by(self) -> None:
        """The script is given a stand-in next."""
        self._from_memory.begin_batch()

    def ends(self, position: ScriptPosition) -> list[torch.Tensor]:
        """The worker stands where the job stands. Returns what the model has answered last, on a stand-in."""
        self._tell(position)  # of what an earlier job has kept the master has not heard
        log.info("has caught up: %d batches of others in %.3f s", self._from_memory.batches, self._from_memory.seconds)
        return self._from_memory.end()

    @property
    def is_short(self) -> bool:
        """Whether the script stands before the place at which this worker would have asked for a world. Not without any loop, as after
        reading the last checkpoint: then it waits for the others' end."""
        return self.stands != self.begins and (self.stands.epoch, self.stands.batches) < self.jobs_place

    def is_short_of(self, at: Progress) -> bool:
        return (at.epoch, at.position) > (self.stands.epoch, self.stands.samples)
