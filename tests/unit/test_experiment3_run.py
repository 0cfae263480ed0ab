"""What is left of experiment 3 when it does not come to its end."""

from __future__ import annotations

import json

import pytest

from benchmarks import experiment3
from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.convergence.course import Result
from benchmarks.experiments.convergence.plan import DIGITS, Policy, Step, make_jobs
from benchmarks.processes import Failed

JOBS = make_jobs(DIGITS, [Policy.BATCH], [0, 1], 5, 2)


class FakeCourse:
    """Three jobs succeed at once, then the user interrupts; one beside that ends when it is given up."""

    def __init__(self, lab, recipe, shared, given_up):
        self._given_up = given_up
        self._run = 0

    def run(self, job):
        self._run += 1
        if self._run == 4:
            raise KeyboardInterrupt
        if self._run > 4:
            assert self._given_up.wait(60)
            raise Failed("given up")
        steps = tuple(Step(number, 2, 1.0, 0.001) for number in range(1, 4))
        accuracies = [{"event": "evaluation", "epoch": epoch, "metrics": {"accuracy": 0.5}} for epoch in range(5)]
        return Result(job, steps, tuple(accuracies))


def test_what_is_done_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment3, "Course", FakeCourse)
    experiment = experiment3.Experiment(JOBS, DIGITS, Artefacts(tmp_path, {"seed": 0}))
    with pytest.raises(KeyboardInterrupt):
        experiment.run(None, tmp_path, at_once=2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["jobs_done"], summary["jobs_planned"]) == (3, 6)
    assert len((tmp_path / "accuracy.csv").read_text().splitlines()) == 1 + 3 * 5
    assert len((tmp_path / "losses.csv").read_text().splitlines()) == 1 + 3 * 3
    assert {path.stem for path in tmp_path.glob("*.jsonl")} == {job.name for job in JOBS[:3]}
    assert (tmp_path / "experiment3.png").stat().st_size > 10_000
    assert not list(tmp_path.glob(".*"))
