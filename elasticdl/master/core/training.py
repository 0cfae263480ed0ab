"""What the job has achieved so far, from what rank 0 reports, for status lines and the summary."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from elasticdl.master.core import events as e
from elasticdl.master.core.instructions import Record
from elasticdl.master.core.snapshot import TrainingSnapshot
from elasticdl.master.core.steps import StepFilter

# Samples per second are counted over this long.
WINDOW_SECONDS = 5.0


@dataclass(slots=True)
class Training:
    """Numbers of the training. ``step`` and ``samples`` are the model's since its first step, in this job or before."""

    started: float
    epoch: int = 0
    total_epochs: int = 0
    step: int = 0
    total_steps: int = 0
    samples: int = 0
    loss: float = math.nan
    epochs_done: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    _counted: int = 0  # the last step whose loss is in the sum: steps that are made again count once
    _epoch_loss: tuple[float, int] = (0.0, 0)  # sum over the samples of the epoch that were reported, and their number
    _diverged: bool = False
    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)  # time, steps, samples
    _steps: StepFilter = field(default_factory=StepFilter)

    @classmethod
    def go_on(cls, started: float, past: TrainingSnapshot) -> Training:
        """Where an earlier master was."""
        return cls(
            started=started,
            epoch=past.epoch,
            total_epochs=past.total_epochs,
            step=past.step,
            total_steps=past.total_steps,
            samples=past.samples,
            loss=past.loss,
            epochs_done=past.epochs_done,
            metrics=dict(past.metrics),
            _counted=past.counted,
            _epoch_loss=past.epoch_loss,
            _diverged=past.diverged,
            _steps=StepFilter(past.newest),
        )

    def memory(self) -> TrainingSnapshot:
        return TrainingSnapshot(
            epoch=self.epoch,
            total_epochs=self.total_epochs,
            step=self.step,
            total_steps=self.total_steps,
            samples=self.samples,
            loss=self.loss,
            epochs_done=self.epochs_done,
            metrics=dict(self.metrics),
            counted=self._counted,
            epoch_loss=self._epoch_loss,
            diverged=self._diverged,
            newest=self._steps.newest,
        )

    def news(self, event: e.ProgressReported) -> e.ProgressReported:
        """The event without the steps that are known."""
        return self._steps.news(event)

    def observe(self, event: e.Event, now: float) -> list[Record]:
        """Take note of an event; returns what it adds to the journal."""
        match event:
            case e.ProgressReported():
                return self._progress(event, now)
            case e.NoticeReported(_, "evaluation", fields):
                self._take_metrics(fields.get("metrics"))
            case e.NoticeReported(_, "resumed", fields):
                self.step, self.epoch = int(fields.get("step", self.step)), int(fields.get("epoch", self.epoch))
                self.samples = int(fields.get("samples", self.samples))
                self.epochs_done = self.epoch
            case e.WorkerFinished():
                self._take_metrics(event.metrics)
                self.step = max(self.step, event.step)
                return self._finish_epochs(event.epochs)
        return []

    def elapsed(self, now: float) -> float:
        return now - self.started

    def samples_per_second(self, now: float) -> float:
        return self._per_second(now, column=2)

    def time_left(self, now: float) -> float:
        """Seconds; negative if not known."""
        rate = self._per_second(now, column=1)
        return (self.total_steps - self.step) / rate if rate > 0 and self.total_steps else -1.0

    def _progress(self, event: e.ProgressReported, now: float) -> list[Record]:
        out: list[Record] = []
        self.total_steps, self.total_epochs = event.total_steps, event.total_epochs
        for report in event.steps:
            out += self._finish_epochs(report.epoch)
            self.step, self.epoch, self.loss = report.step, report.epoch, report.loss
            self.samples = report.total_samples
            out += self._note_divergence(report)
            if report.step > self._counted:
                self._counted = report.step
                total, samples = self._epoch_loss
                self._epoch_loss = (total + report.loss * report.samples, samples + report.samples)
            if report.ends_epoch:
                out += self._finish_epochs(report.epoch + 1)
        self._recent.append((now, len(event.steps), sum(report.samples for report in event.steps)))
        while now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()
        return out

    def _note_divergence(self, report: e.StepReport) -> list[Record]:
        if self._diverged or math.isfinite(report.loss):
            return []
        self._diverged = True
        message = (
            f"the loss of step {report.step} is {report.loss}: training has diverged, and will not come back by itself"
        )
        return [Record("warning", {"message": message})]

    def _finish_epochs(self, done: int) -> list[Record]:
        """Every epoch before ``done`` is finished, if that was not known before."""
        finished = range(self.epochs_done, done)
        if not finished:
            return []
        self.epochs_done = done
        (total, samples), self._epoch_loss = self._epoch_loss, (0.0, 0)
        loss = total / samples if samples else math.nan
        return [Record("epoch_finished", {"epoch": n, "step": self.step, "loss": loss}) for n in finished]

    def _take_metrics(self, metrics: Any) -> None:
        if metrics:
            self.metrics = dict(metrics)

    def _per_second(self, now: float, column: int) -> float:
        """The first report in the window only marks where counting begins, unless it is the only one."""
        recent = [entry for entry in self._recent if now - entry[0] <= WINDOW_SECONDS]
        if len(recent) < 2:
            return 0.0
        return sum(entry[column] for entry in recent[1:]) / max(now - recent[0][0], 1e-9)
