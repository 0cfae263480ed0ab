"""What a storm has shown: tables for people, results as JSON lines, and the story of one that failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Results, Summary, show_table, summarise
from benchmarks.storm.driver import Brought, Line, Story
from benchmarks.storm.schedule import Kind
from benchmarks.storm.training import Agreement
from elasticdl.job.journal import Entry, dump_entry


def pauses_by_change(journal: Iterable[Entry], brought: Sequence[Brought]) -> dict[str, Summary]:
    """By what the worker says of the change; a failure by what was done then, too."""
    found: dict[str, list[float]] = defaultdict(list)
    for entry in journal:
        if entry["event"] == "pause":
            change = entry["kind"]
            found[change].append(entry["total"])
            if change == "failure":
                found[f"{change}: {_cause(entry['time'], brought)}"].append(entry["total"])
    return {change: summarise(seconds) for change, seconds in sorted(found.items())}


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


def write_story(path: Path, story: Story, journal: Iterable[Entry]) -> None:
    """What was done beside what the job says happened, in the order of time."""
    lines = [*story.lines, *(Line(entry["time"], f"    {dump_entry(entry)}") for entry in journal)]
    ordered = sorted(lines, key=lambda line: line.time)
    path.write_text("".join(f"{line.time - ordered[0].time:9.3f} s  {line.text}\n" for line in ordered))
