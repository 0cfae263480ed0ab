"""The state of a job as a whole, by its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticdl.job import fields as f
from elasticdl.job.journal import Entry

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

    def take(self, entry: Entry) -> None:
        """To be called with every entry, except those on steps: some of these are told twice."""
        match entry["event"]:
            case "job_started":
                self.job, self.wanted = f.text(entry, "job") or self.job, f.text(entry, "workers")
                # What an earlier job of the same training has told of its end.
                self.phase, self.reason, self.over, self.wants_checkpoint = "pending", "", False, False
            case "scale_requested":
                self.wanted = f.text(entry, "workers")
            case "collective":
                self.collective = f.text(entry, "engine")
            case "resumed":
                self.step = self.resumed = f.count(entry, "step")
            case "evaluation":
                self.metrics = f.numbers(entry, "metrics") or self.metrics
            case "epoch_finished":
                self.compared = (f.count(entry, "compared"), f.count(entry, "compared_workers"))
            case "checkpoint":
                self.checkpoint = (f.count(entry, "step"), f.text(entry, "path"))
            case "checkpoint_failed":
                self.no_checkpoint = (f.count(entry, "step"), f.text(entry, "reason"))
            case "stop_requested":
                self.wants_checkpoint = entry.get("checkpoint") is True
            case "advice":
                self.advice, self.speedup = f.text(entry, "text"), _speedup(entry.get("curve"))
            case "decision":
                self.target, self.decision = f.count(entry, "workers"), f.text(entry, "reason")
            case "phase":
                self.phase, self.reason = f.text(entry, "phase") or self.phase, f.text(entry, "reason")
            case "job_finished":
                self.over = True
                self.phase, self.reason = f.text(entry, "phase") or self.phase, f.text(entry, "reason")
                self.step = f.count(entry, "steps") or self.step
                self.metrics = f.numbers(entry, "metrics") or self.metrics
            case "worker_launched":
                self.replaced += entry.get("replaces") is True
            case "master_restarted":
                self.slow.clear()  # a new master finds them anew, and never says of the others that they recovered
            case "worker_slow" | "worker_recovered" | "worker_left":
                self._take_slow(entry)

    def _take_slow(self, entry: Entry) -> None:
        worker = f.whole(entry, "worker")
        if worker is None:
            return
        self.slow.pop(worker, None)
        if entry["event"] == "worker_slow" and len(self.slow) < MOST_SLOW:
            self.slow[worker] = (f.text(entry, "host"), f.text(entry, "phase"), f.seconds(entry, "factor"))


def _speedup(curve: object) -> tuple[tuple[float, float, bool], ...]:
    rows = [row for row in curve if isinstance(row, dict)] if isinstance(curve, list) else []
    found = [(f.number(row, "workers"), f.number(row, "speedup"), row.get("measured") is True) for row in rows]
    return tuple(
        (workers, speedup, how) for workers, speedup, how in found if workers is not None and speedup is not None
    )
