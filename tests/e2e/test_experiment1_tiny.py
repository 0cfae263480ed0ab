"""Experiment 1 in small: the whole command on a real control plane, two jobs of two workers on three GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kubernetes import client

from benchmarks.experiments.pods import read_series
from model_zoo.cifar10.generate import generate
from tests.cluster.kit import shell, until

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
DEADLINE = 280


@pytest.fixture
def experiment(own_cluster, namespace, pods, tmp_path):
    """Starts it; half of the cluster's GPUs are somebody else's."""
    pods.create("others", shell("exec sleep infinity"), gpus=3)
    pods.running("others")
    data = generate(tmp_path / "data", "binary", 120)
    command = [sys.executable, "-m", "benchmarks.experiment1", "--cluster", "kubeconfig", "--namespace", namespace]
    command += ["--image", "local/host", "--repository", str(ROOT), "--training_data", str(data), "--queue", "own"]
    command += ["--seconds_per_sample", "0.02", "--global_batch_size", "12", "--steps", "40", "--scale", "60"]
    command += ["--out", str(tmp_path / "out")]
    env = {**os.environ, "KUBECONFIG": str(own_cluster.kubeconfig)}
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen([*command, *arguments], cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.fixture
def jobs(own_cluster, namespace):
    """The jobs that are there and stay."""

    def find() -> list[str]:
        found = client.BatchV1Api(own_cluster.client()).list_namespaced_job(namespace).items
        return [job.metadata.name for job in found if not job.metadata.deletion_timestamp]

    return find


@pytest.mark.timeout(300)
def test_both_modes_and_what_they_leave(experiment, jobs, tmp_path):
    process = experiment("--gpus", "3", "--workers", "2")
    said, complaints = process.communicate(timeout=DEADLINE)
    out = tmp_path / "out"
    traces = [path.read_text() for path in sorted(out.glob("*.log")) + sorted(out.glob("events-*.jsonl"))]
    assert process.returncode == 0, "\n".join([said, complaints, *traces])
    assert "simulated: a sample takes a worker 0.02 s" in said
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["gpus.pdf", "gpus.png", "gpus.svg", "summary.json"]
        + [f"{what}-{mode}.csv" for what in ("gpus", "steps") for mode in ("gang", "elastic")]
        + [f"events-{mode}-{job}.jsonl" for mode in ("gang", "elastic") for job in ("first", "second")]
    )
    summary = json.loads((out / "summary.json").read_text())
    gang, elastic = summary["gang"], summary["elastic"]
    assert [mode[job]["steps"] for mode in (gang, elastic) for job in ("first", "second")] == [40] * 4
    # The second gang has nothing until the first is over; an elastic job takes what is free, and the rest later.
    assert most_beside_the_first(out, "gang") == 0
    assert most_beside_the_first(out, "elastic") == 1
    for mode in ("gang", "elastic"):
        assert max(change.gpus for change in read_series(out / f"gpus-{mode}.csv") if change.owner != "others") == 2
    assert gang["first"]["last_loss"] == pytest.approx(gang["second"]["last_loss"], rel=1e-4)
    assert jobs() == []


def most_beside_the_first(out: Path, mode: str) -> int:
    """GPUs that the second job had while the first had all that it wants."""
    held = {"others": 0, f"{mode}-first": 0, f"{mode}-second": 0}
    most = 0
    for change in read_series(out / f"gpus-{mode}.csv"):
        held[change.owner] = change.gpus
        if held[f"{mode}-first"] == 2:
            most = max(most, held[f"{mode}-second"])
    return most


def test_interrupted_it_cleans_up_and_keeps_the_series(experiment, jobs, own_cluster, namespace, tmp_path):
    process = experiment("--gpus", "3", "--workers", "2")
    core = client.CoreV1Api(own_cluster.client())
    listing = (core.list_namespaced_pod, namespace)
    until(lambda seen: any("gang-first-worker" in name for name in seen), "a worker", *listing)
    series = tmp_path / "out" / "gpus-gang.csv"
    deadline = time.monotonic() + 60
    while not any(change.owner == "gang-first" and change.gpus == 2 for change in read_series(series)):
        assert time.monotonic() < deadline, series.read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, complaints = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, said + complaints
    assert complaints.splitlines()[-1].endswith("interrupted; what was measured so far is in --out")
    assert jobs() == []
    assert read_series(series)
    assert not (tmp_path / "out" / "summary.json").exists()


def test_a_busy_cluster_is_told_before_anything_starts(experiment, jobs, namespace):
    process = experiment()
    said, complaints = process.communicate(timeout=DEADLINE)
    (line,) = complaints.splitlines()
    assert process.returncode == 2, said
    assert line.startswith("python -m benchmarks.experiment1: the cluster is busy: 3 of its 6 GPUs are free, ")
    assert line.endswith(f"the others are held by {namespace}/others")
    assert jobs() == []
