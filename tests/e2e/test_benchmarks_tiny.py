"""The benchmarks run, with the smallest settings, and give results that make sense. No speeds are asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from running_job import QUICK_KERAS

from benchmarks.steps import Step, gap_between, split_at

ROOT = Path(__file__).parents[2]


def run(out: Path, benchmark: str, *arguments: str) -> list[dict]:
    """Run a benchmark and return what it wrote."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments, "--out", str(out)]
    env = {**os.environ, **QUICK_KERAS}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [entry for entry in entries if entry["kind"] in ("failure",)]
    assert all(entry["machine"]["cores"] for entry in entries)
    return entries


def summaries(entries: list[dict]) -> list[dict]:
    return [entry for entry in entries if entry["kind"] == "summary"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_throughput(tmp_path):
    loops = "elasticdl-torch,elasticdl-horovod,horovod,ddp"
    arguments = ["--models", "1m", "--rounds", "1", "--seconds", "0.5", "--warm_up", "3", "--loops", loops]
    found = {entry["loop"]: entry for entry in summaries(run(tmp_path / "out.jsonl", "throughput", *arguments))}
    assert list(found) == loops.split(",")
    assert found["horovod"]["over_horovod"]["median"] == 1
    assert all(entry["rate"]["median"] > 0 for entry in found.values())
    laps = found["elasticdl-torch"]["laps_ms"]
    assert laps["commit"] < laps["compute"]
    assert sum(laps.values()) == pytest.approx(found["elasticdl-torch"]["step_ms"], rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("own", "reference", "workers"), [("keras-1-fit", "fit", 1), ("keras-2-torch", "horovod-tf", 2)]
)
def test_throughput_with_keras(tmp_path, own, reference, workers):
    pytest.importorskip("tensorflow")
    arguments = [
        "--models",
        "1m",
        "--rounds",
        "1",
        "--seconds",
        "0.3",
        "--warm_up",
        "4",
        "--loops",
        f"{own},{reference}",
    ]
    found = {entry["loop"]: entry for entry in summaries(run(tmp_path / "out.jsonl", "throughput", *arguments))}
    assert list(found) == [own, reference]
    for entry in found.values():
        assert entry["workers"] == workers
        assert sum(entry["laps_ms"].values()) == pytest.approx(entry["step_ms"], rel=0.1)
    ratio = found[own]["rate"]["median"] / found[reference]["rate"]["median"]
    assert found[own][f"over_{reference}"]["median"] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_throughput_with_trainers(tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    loops = "transformers-elastic-2,lightning-ddp-2"
    arguments = ["--models", "1m", "--rounds", "1", "--seconds", "0.3", "--warm_up", "4", "--loops", loops]
    found = {entry["loop"]: entry for entry in summaries(run(tmp_path / "out.jsonl", "throughput", *arguments))}
    assert list(found) == loops.split(",")
    assert all(entry["workers"] == 2 and entry["rate"]["median"] > 0 for entry in found.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_rescale(tmp_path, framework):
    pytest.importorskip({"torch": "torch", "keras": "tensorflow"}[framework])
    arguments = ["--repetitions", "1", "--workers", "2", "--models", "1m", "--events", "sigkill"]
    entries = run(tmp_path / "out.jsonl", "rescale", "--frameworks", framework, *arguments)
    found = {(entry["event"], entry["collective"]): entry for entry in summaries(entries)}
    assert set(found) == set(product(("sigkill", "rejoin"), ("horovod", "torch")))
    traced = (
        dict.fromkeys(("differentiate", "micro", "add", "update", "apply", "whole"), 1) if framework == "keras" else {}
    )
    for collective in ("horovod", "torch"):
        assert found["rejoin", collective]["worlds_seen"] >= 3
        assert found["rejoin", collective]["traces"] == traced
    for entry in found.values():
        assert (entry["redone"], entry["lost"]) == (0, 0)
        parts = sum(part["median"] for part in entry["parts"].values())
        assert parts == pytest.approx(entry["reported"]["median"], rel=0.01)  # one survivor: medians add up
        assert entry["pause"]["median"] == pytest.approx(entry["reported"]["median"], abs=0.5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_start(tmp_path):
    arguments = ["--repetitions", "1", "--frameworks", "torch", "--jobs", "0"]
    entries = run(tmp_path / "out.jsonl", "start", *arguments)
    assert [(entry["kind"], entry["framework"], entry["method"]) for entry in entries] == [
        ("worker", "torch", "fork"),
        ("worker", "torch", "spawn"),
    ]
    for entry in entries:
        seconds = {name: summary["median"] for name, summary in entry["seconds"].items()}
        assert 0 < seconds["first_line"] < seconds["first_step"]
        assert seconds["cpu"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpu_in_small(tmp_path):
    """On a machine without one; the same program measures on a GPU."""
    found = {entry["what"]: entry for entry in summaries(run(tmp_path / "out.jsonl", "gpu", "--small"))}
    assert {entry["part"] for entry in found.values()} == {"overhead", "rescale"}
    assert all(entry["small"] for entry in found.values())
    assert found["step of tiny, plain"]["value"]["median"] > 0


@pytest.mark.slow
def test_master_scale(tmp_path):
    arguments = ["--workers", "20", "--repetitions", "1", "--steady", "0.5"]
    (entry,) = summaries(run(tmp_path / "out.jsonl", "master_scale", *arguments))
    assert entry["workers"] == 20
    assert entry["form"]["median"] > 0
    assert entry["reform"]["median"] > 0


def steps(world: str, first: int, *times: float) -> list[Step]:
    return [Step(time, first + index, world, 2) for index, time in enumerate(times)]


def test_a_gap_is_the_pause_less_an_ordinary_step():
    survivor = [*steps("1", 1, 0.0, 0.1, 0.2), *steps("2", 4, 1.3, 1.4)]
    gap = gap_between([split_at(survivor, 0.25, [step.world == "2" for step in survivor])], 0.25)
    assert gap.pauses == (pytest.approx(1.0),)
    assert gap.ordinary == pytest.approx(0.1)
    assert (gap.redone, gap.lost) == (0, 0)
    assert gap.from_event == pytest.approx(1.05)


@pytest.mark.parametrize(("first", "redone", "lost"), [(2, 2, 0), (3, 1, 0), (4, 0, 0), (6, 0, 2)])
def test_steps_redone_and_lost_are_counted(first, redone, lost):
    halves = [(steps("1", 1, 0.0, 0.1, 0.2), steps("2", first, 1.0))]
    gap = gap_between(halves, 0.25)
    assert (gap.redone, gap.lost) == (redone, lost)


def test_a_survivor_that_is_a_step_behind_has_lost_nothing():
    ahead, behind = steps("1", 1, 0.0, 0.1, 0.2), steps("1", 1, 0.0, 0.1)
    gap = gap_between([(ahead, steps("2", 4, 1.0)), (behind, steps("2", 4, 1.0))], 0.25)
    assert (gap.redone, gap.lost) == (0, 0)


def test_a_survivor_without_steps_after_the_change_is_no_measurement():
    with pytest.raises(ValueError, match="no step"):
        gap_between([(steps("1", 1, 0.0, 0.1), [])], 0.25)
