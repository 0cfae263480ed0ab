"""Where one worker's training stands, and what of it is safe.

Parameters change only after every gradient of a step has arrived from every worker. So a worker whose step failed
stands exactly before that step, and saving need not copy parameters or optimizer slots. If a step was made since all was
saved, weights can't go back, and so nothing does: all parts of a state are of one moment.
"""

from __future__ import annotations

from elasticdl.elastic.core.progress import Progress, SampleOrder, StepPlan
from elasticdl.elastic.core.protocol import Instruction, Restore, Save, SaveScope, Voted, Warn
from elasticdl.elastic.core.vote import Vote

_ORDER_WARNING = (
    "the optimizer's learning rate (or momentum, ...) is changed after state.commit(): a change of workers there loses it; "
    "call scheduler.step() before state.commit()"
)


class Position:
    """Of one training state. ``copies_parameters``: each commit copies them, so that a torn step goes back to it."""

    def __init__(
        self,
        progress: Progress | None = None,
        *,
        has_state: bool = False,
        order: SampleOrder | None = None,
        copies_parameters: bool = False,
    ) -> None:
        self.progress = self.saved = progress or Progress()
        self.has_state = has_state
        self.synced_in = 0  # version of the world in which it last stood where rank 0 stood
        self.order = order
        self.batch: StepPlan | None = None  # that the present step is made on
        self.vote: Vote | None = None  # of the last step
        self.unsaved = False  # a step was made since all was saved
        self.given = self.made = self.commits = 0  # batches, steps and commits, by this process
        self._copies_parameters = copies_parameters
        self._committed = False  # the last thing that was done
        self._warned = False

    def at_end(self, workers: int) -> bool:
        """Whether no step is left of the present epoch."""
        return self.order is not None and not self.order.remaining_steps(self.progress, workers)

    def ends_epoch(self, workers: int) -> bool:
        """Whether the step that was made last is the last of its epoch."""
        return self.at_end(workers) or (self.batch is not None and self.batch.ends_epoch)

    def begin(self, plan: StepPlan, *, settings_changed: bool) -> list[Instruction]:
        """From here on a step may be torn: save what no commit has saved and can't be done again."""
        out: list[Instruction] = []
        changed_after_commit = settings_changed and self._committed and self.progress == self.saved
        if self.unsaved or changed_after_commit:
            if not self.unsaved and self.progress.position and not self._warned:
                self._warned = True
                out.append(Warn(_ORDER_WARNING))
            out += self._save()
        self._committed = False
        self.batch = plan
        self.given += 1
        return out

    def step_made(self) -> list[Instruction]:
        assert self.vote is not None, "a step is made after its vote"
        self.progress = self.batch.after if self.batch else self.progress.after(self.vote.samples)
        self.made += 1
        if self._copies_parameters:
            return []
        self.unsaved = True
        self.saved = self.progress
        return [Save(SaveScope.WITH_PARAMETERS)]

    def commit(self, workers: int, *, step_was_reduced: bool) -> list[Instruction]:
        """``step_was_reduced``: and not made, as a GradScaler does with one whose gradients are not finite."""
        out: list[Instruction] = []
        if step_was_reduced and self.batch is not None:
            self.progress = self.batch.after
            out.append(Save(SaveScope.WITH_PARAMETERS))
        elif self.batch is None and self.at_end(workers):
            self.progress = self.progress.next_epoch()
        self._committed = True
        self.commits += 1
        return [*out, *self._save()]

    def leave(self) -> list[Instruction]:
        """The world, or the training, is left between two steps: a batch in hand is given again."""
        self.batch = self.vote = None
        return self._save() if self.unsaved else []

    def restore(self) -> list[Instruction]:
        """Drop a torn step: back to what was saved, or to where the torn step began if others came in between."""
        out = self.leave()
        self.progress = self.saved
        self._committed = False
        return [*out, Restore(self.saved)]

    def loaded(self, progress: Progress) -> list[Instruction]:
        """All parts of the state are others now; the world may break before this is told as a moment of its own."""
        self.progress = progress
        return [Save(SaveScope.WITH_PARAMETERS), *self._save()]

    def synced(self, progress: Progress, world_version: int) -> list[Instruction]:
        self.progress, self.synced_in = progress, world_version
        self.has_state = True
        self.batch = self.vote = None
        self._committed = False
        return [Save(SaveScope.WITH_PARAMETERS), *self._save()]

    def disagreement(self, event: Voted, workers: int) -> str:
        """Why no step can be made of these votes."""
        vote, batch, step = event.vote, self.batch, self.progress.step
        if event.difference:
            return event.difference
        if vote.ended or batch is None:
            remedy = (
                "the training function must return" if self.order is not None else "the scripts must leave their loops"
            )
            return (
                f"{vote.ended} of {workers} workers ended their training after step {step} and the others go on: "
                f"{remedy} after the same step on all workers"
            )
        remedy = f": {event.remedy}" if event.remedy else ""
        return f"step {batch.step} was made on {vote.samples} samples instead of {batch.batch}{remedy}"

    def oversights(self, planned_epochs: int, workers: int) -> list[str]:
        """What looks forgotten in a training that has ended, a line each. ``planned_epochs``: 0 if not known."""
        found = []
        if self.progress.step == 0:
            found.append(
                "training has ended without a step: no optimizer.step() of the optimizer that the state was given"
            )
        elif self.made and not self.commits:
            found.append(
                f"{self.made} steps were made without a state.commit(): no worker could join or leave meanwhile; call it "
                "after each step"
            )
        epoch = self.progress.epoch
        if self.progress.step and self.order and epoch + self.at_end(workers) < planned_epochs:
            found.append(
                f"training has ended in epoch {epoch + 1} of the {planned_epochs} that its loop plans, after step "
                f"{self.progress.step}"
            )
        return found

    def _save(self) -> list[Instruction]:
        self.unsaved = False
        self.saved = self.progress
        return [Save(SaveScope.AT_COMMIT)]
