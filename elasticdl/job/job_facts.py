"""The state of a job as a whole, by its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticdl.job.fields import Fields

MOST_SLOW = 2000


@dataclass(slots=True, kw_only=True)
class JobFacts:
    """The state of the job as a whole, by what its journal has told so far."""

    job: str = ""
    phase: str = "pending"
    reason: str = ""
    over: bool = False
    wanted: str = ""  # number of workers asked for
    step: int = 0
    resumed: int = 0  # the step that it went on from
    loss: float | None = None  # of the last steps that were told, as the rate
    rate: float | None = None  # samples per second
    learning_rate: float | None = None
    steps_made: int = 0  # one that is made again counts again
    samples_made: int = 0
    collective: str = ""
    compared: tuple[int, int] = (0, 0)  # the step after which states were compared last, and how many workers were one
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    checkpoint: tuple[int, str] = (0, "")  # the last: its step and path
    no_checkpoint: tuple[int, str] = (0, "")  # the last that failed: its step, and why
    wants_checkpoint: bool = False  # it was stopped, and is to be kept
    advice: str = ""
    speedup: tuple[tuple[float, float, bool], ...] = ()  # workers, speedup, whether it was measured
    target: int = 0  # workers that the job wants by its own decision; 0: it decides nothing
    decision: str = ""  # why
    replaced: int = 0  # workers that took the place of one that left
    slow: dict[int, tuple[str, str, float]] = field(default_factory=dict)  # host, phase and factor, by worker

    def take(self, told: Fields) -> None:
        """To be called with every entry, except those on steps: some of these are told twice."""
        match told.event:
            case "job_started":
                self.job, self.wanted = told.job or self.job, told.workers
                # What an earlier job of the same training has told of its end.
                self.phase, self.reason, self.over, self.wants_checkpoint = "pending", "", False, False
            case "scale_requested":
                self.wanted = told.workers
            case "collective":
                self.collective = told.engine
            case "resumed":
                self.step = self.resumed = told.step
            case "evaluation":
                self.metrics = told.metrics or self.metrics
            case "epoch_finished":
                self.compared = (told.compared, told.compared_workers)
            case "checkpoint":
                self.checkpoint = (told.step, told.path)
            case "checkpoint_failed":
                self.no_checkpoint = (told.step, told.reason)
            case "stop_requested":
                self.wants_checkpoint = told.checkpoint
            case "advice":
                self.advice = told.text
                self.speedup = tuple((each.workers, each.speedup, each.measured) for each in told.curve)
            case "decision":
                self.target, self.decision = int(told.workers) if told.workers.isdecimal() else 0, told.reason
            case "phase":
                self.phase, self.reason = told.phase or self.phase, told.reason
            case "job_finished":
                self.over = True
                self.phase, self.reason = told.phase or self.phase, told.reason
                self.step = told.steps or self.step
                self.metrics = told.metrics or self.metrics
            case "worker_launched":
                self.replaced += told.replaces
            case "master_restarted":
                self.slow.clear()  # a new master finds them anew, and never says of the others that they recovered
            case "worker_slow" | "worker_recovered" | "worker_left" if told.worker is not None:
                self.slow.pop(told.worker, None)
                if told.event == "worker_slow" and len(self.slow) < MOST_SLOW:
                    self.slow[told.worker] = (told.host, told.phase, told.factor)
