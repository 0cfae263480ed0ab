"""What a storm has shown: tables for people, results as JSON lines, and the history around a failure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.harness import Results, show_table
from benchmarks.storm.driver import Brought, Line, Story
from benchmarks.storm.schedule import Kind
from benchmarks.storm.training import Agreement
from elasticdl.job.journal import Entry

BEFORE, AFTER = 15.0, 10.0  # seconds of history around a failure
LINES = 80
WIDTH = 160


@dataclass(frozen=True, slots=True)
class Pauses:
    """Of survivors, seconds; percentiles interpolate linearly."""

    n: int
    median: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Pauses:
        median, p90, p99 = (float(np.percentile(seconds, share)) for share in (50, 90, 99))
        return cls(len(seconds), median, p90, p99, max(seconds))


def pauses_by_change(journal: Iterable[Entry], brought: Sequence[Brought]) -> dict[str, Pauses]:
    """By what the worker says of the change; a failure by what was done then, too."""
    found: dict[str, list[float]] = defaultdict(list)
    for entry in journal:
        if entry["event"] == "pause":
            change = entry["kind"]
            found[change].append(entry["total"])
            if change == "failure":
                found[f"{change}: {_cause(entry['time'], brought)}"].append(entry["total"])
    return {change: Pauses.of(seconds) for change, seconds in sorted(found.items())}


def _cause(at: float, brought: Sequence[Brought]) -> str:
    last = next((each for each in reversed(brought) if each.at <= at), None)
    return " and ".join(kind.name for kind in last.kinds) if last else "none"


def show(story: Story, journal: Sequence[Entry], agreement: Agreement, results: Results) -> None:
    rows = [[kind.name, kind.value, str(story.counts[kind])] for kind in Kind]
    rows.append(["", "all", str(story.counts.total())])
    show_table("Disturbances", ["kind", "", "n"], rows)
    for moment in story.brought:
        kinds = [kind.name for kind in moment.kinds]
        results.add("moment", disturbances=kinds, at=round(moment.at, 3), recovery=round(moment.recovery, 3))
    pauses = pauses_by_change(journal, story.brought)
    for change, each in pauses.items():
        results.add("pauses", change=change, **asdict(each))
    values = [[change, str(p.n), *(f"{v:.2f}" for v in (p.median, p.p90, p.p99, p.maximum))] for change, p in pauses.items()]  # fmt: skip
    show_table("Pauses of the survivors, s", ["change", "n", "median", "p90", "p99", "max"], values)
    print(
        f"{agreement.steps} steps, {agreement.samples} samples in {agreement.epochs} epochs, each once; "
        f"{agreement.losses_compared} losses seen by workers are those of an undisturbed run (largest difference "
        f"{agreement.difference:.1e}, relative)"
    )


def history(story: Story, journal: Iterable[Entry], moment: float) -> list[str]:
    """What was done and what the job says happened around a moment."""
    told = [entry for entry in journal if entry["event"] not in ("checkpoint", "evaluation", "epoch_finished")]
    lines = [*story.lines, *(Line(entry["time"], _describe(entry)) for entry in told)]
    near = [line for line in sorted(lines, key=lambda line: line.time) if -BEFORE <= line.time - moment <= AFTER]
    return [f"{line.time - moment:+8.3f} s  {line.text[:WIDTH]}" for line in near[-LINES:]]


def _describe(entry: Entry) -> str:
    if entry["event"] == "pause":
        return f"    pause: worker {entry['worker']}, world {entry['world']}, {entry['kind']}, {entry['total']:.2f} s"
    fields = ", ".join(f"{name} {value}" for name, value in entry.items() if name not in ("time", "event"))
    return f"    {entry['event']}: {fields}"
