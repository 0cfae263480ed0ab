"""What the training has achieved so far, from what rank 0 reports, for status lines and the summary."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from elasticdl.job.messages import Finished, Notice, Progress, StepReport
from elasticdl.job.shared_values import newest_marks
from elasticdl.master.state.instructions import Record
from elasticdl.master.state.snapshot import TrainingSnapshot

# Samples per second are counted over this long, or over the last two reports if they are further apart.
WINDOW_SECONDS = 5.0
# More that are finished at once are made up; the last are told.
MOST_EPOCHS = 1000


@dataclass(slots=True)
class Training(TrainingSnapshot):
    """``step`` and ``samples`` are the model's since its first step."""

    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)  # time, steps, samples

    @classmethod
    def restore(cls, past: TrainingSnapshot) -> Training:
        """Where an earlier master was."""
        return cls(**_numbers(past))

    def snapshot(self) -> TrainingSnapshot:
        return TrainingSnapshot(**_numbers(self))

    # ---- what is told ----

    def report(self, told: Progress, now: float) -> tuple[tuple[StepReport, ...], list[Record]]:
        """Those steps that are new, and what they add to the journal.

        A new rank 0 reports its last steps again, in case its predecessor did not come to it. Steps that are trained
        again, since the state was lost, are those of a later world and count as new.
        """
        steps = tuple(step for step in told.steps if (step.world_version, step.step) > self.newest)
        out: list[Record] = []
        self.total_steps, self.total_epochs = told.total_steps, told.total_epochs
        for step in steps:
            out += self._take_step(step)
        if steps:
            self.begun = True
            self.newest = (steps[-1].world_version, steps[-1].step)
            if self._stood_still(now):
                self._recent.clear()
            self._recent.append((now, len(steps), sum(step.samples for step in steps)))
            while len(self._recent) > 2 and now - self._recent[0][0] > WINDOW_SECONDS:
                self._recent.popleft()
        return steps, out

    def notice(self, notice: Notice) -> None:
        told = notice.fields
        if notice.event == "evaluation":
            self._take_metrics(told.get("metrics"))
        elif notice.event == "collective":
            self.collective = str(told.get("engine", ""))
        elif notice.event == "epoch_began":
            self._take_marks(told.get("marks", {}))
        elif notice.event == "resumed":
            self.step, self.epoch = int(told.get("step", self.step)), int(told.get("epoch", self.epoch))
            self.epoch_steps = 0
            self.samples, self.epochs_done = int(told.get("samples", self.samples)), self.epoch

    def finish(self, told: Finished) -> list[Record]:
        self._take_metrics(told.metrics)
        self.step = max(self.step, told.step)
        return self._finish_epochs(told.epochs)

    def lose_state(self) -> int:
        """Nobody holds the state any more; the step that was lost. Who goes on tells where it begins."""
        lost, self.step, self.samples = self.step, 0, 0
        self.epoch = self.epoch_steps = 0
        self.marks = {}
        return lost

    # ---- what is asked ----

    @property
    def completion(self) -> str:
        """What there is to say of a training that is complete."""
        if self.counted and self.samples and not math.isfinite(self.loss):
            return f"training is complete, but has diverged: its last loss is {self.loss}"
        return "training is complete"

    def samples_per_second(self, now: float) -> float:
        return self._per_second(now, column=2)

    def time_left(self, now: float) -> float:
        """Seconds; negative if not known."""
        rate = self._per_second(now, column=1)
        return (self.total_steps - self.step) / rate if rate > 0 and self.total_steps else -1.0

    def _take_step(self, step: StepReport) -> list[Record]:
        out = self._finish_epochs(step.epoch)
        self.epoch_steps = self.epoch_steps + 1 if step.epoch == self.epoch else 1
        self.step, self.epoch, self.loss, self.samples = step.step, step.epoch, step.loss, step.total_samples
        if step.compared:
            self.compared_step, self.compared_workers = step.step - 1, step.compared
        if not self.diverged and not math.isfinite(step.loss):
            self.diverged = True
            state = "training has diverged, and will not come back by itself"
            out.append(Record("warning", {"message": f"the loss of step {step.step} is {step.loss}: {state}"}))
        if step.step > self.counted:  # a step that is made again counts once
            self.counted = step.step
            total, samples = self.epoch_loss
            self.epoch_loss = (total + step.loss * step.samples, samples + step.samples)
        return out + self._finish_epochs(step.epoch + 1) if step.ends_epoch else out

    def _finish_epochs(self, done: int) -> list[Record]:
        """Every epoch before ``done`` is finished, if that was not known before."""
        finished = range(max(self.epochs_done, done - MOST_EPOCHS), done)
        if not finished:
            return []
        self.epochs_done = done
        (total, samples), self.epoch_loss = self.epoch_loss, (0.0, 0)
        if not samples:  # another job, from whose checkpoint this one goes on, has finished them
            return []
        told = {"step": self.step, "loss": total / samples}
        if self.compared_workers:
            told |= {"compared": self.compared_step, "compared_workers": self.compared_workers}
        return [Record("epoch_finished", {"epoch": n, **told}) for n in finished]

    def _take_metrics(self, metrics: Any) -> None:
        if metrics:
            self.metrics = dict(metrics)

    def _take_marks(self, told: Mapping[str, float]) -> None:
        self.marks = newest_marks({**self.marks, **{int(epoch): float(mark) for epoch, mark in told.items()}})

    def _per_second(self, now: float, column: int) -> float:
        """The first report only marks where counting begins. Up to the last one, or up to now if the next is late."""
        if len(self._recent) < 2 or self._stood_still(now):
            return 0.0
        (first, *_), (last, *_) = self._recent[0], self._recent[-1]
        until = now if now - last > 2 * self._usual_gap() else last
        return sum(entry[column] for entry in list(self._recent)[1:]) / max(until - first, 1e-9)

    def _usual_gap(self) -> float:
        """Seconds between two reports, of which there are two at least."""
        return (self._recent[-1][0] - self._recent[0][0]) / (len(self._recent) - 1)

    def _stood_still(self, now: float) -> bool:
        """No step was told for so long that none is on its way."""
        if len(self._recent) < 2:
            return False
        return now - self._recent[-1][0] > max(WINDOW_SECONDS, 2 * self._usual_gap())


def _numbers(of: TrainingSnapshot) -> dict[str, Any]:
    return {each.name: getattr(of, each.name) for each in fields(TrainingSnapshot)}
