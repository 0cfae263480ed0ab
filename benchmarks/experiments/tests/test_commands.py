"""The experiments in small, on a real control plane: the whole commands of the first two, one part of each of the others."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from kubernetes import client

from benchmarks.experiments.convergence.course import Course
from benchmarks.experiments.convergence.curves import Curve, difference
from benchmarks.experiments.convergence.plan import DIGITS, Change, Job, Kind, Policy
from benchmarks.experiments.lab import Lab
from benchmarks.experiments.measures import Change as GpuChange
from benchmarks.experiments.options import make_parser, read
from model_zoo.cifar10.generate import generate
from tests.cluster.kit import shell, until

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
DEADLINE = 280
FIRST = ["--gpus", "3", "--workers", "2", "--queue", "own", "--seconds_per_sample", "0.02"]
FIRST += ["--global_batch_size", "12", "--steps", "40", "--scale", "60"]
SECOND = ["--gpus", "3", "--curve", "0:1,30:2,120:1,300", "--scale", "10", "--seed", "0"]
SECOND += ["--requests_per_replica", "8", "--request_seconds", "0.05", "--seconds_per_sample", "0.03"]


@pytest.fixture
def experiment(own_cluster, namespace, pods, tmp_path):
    """Starts one; half of the cluster's GPUs are somebody else's, who can't be preempted."""
    pods.create("others", shell("exec sleep infinity"), gpus=3, priorityClassName="system-cluster-critical")
    pods.running("others")
    started: list[subprocess.Popen[str]] = []

    def start(module: str, samples: int, *arguments: str) -> subprocess.Popen[str]:
        data = generate(tmp_path / "data", "binary", samples)
        command = [sys.executable, "-m", module, "--cluster", "kubeconfig", "--namespace", namespace, *arguments]
        command += ["--image", "local/host", "--repository", str(ROOT), "--training_data", str(data)]
        command += ["--out", str(tmp_path / "out")]
        env, pipe = {**os.environ, "KUBECONFIG": str(own_cluster.kubeconfig)}, subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def read_series(path: Path) -> list[GpuChange]:
    with path.open(newline="") as lines:
        return [GpuChange(float(row["time"]), row["owner"], int(row["gpus"])) for row in csv.DictReader(lines)]


def most_beside_the_first(out: Path, mode: str) -> int:
    """GPUs that the second job had while the first had all that it wants."""
    held = {"others": 0, f"{mode}-first": 0, f"{mode}-second": 0}
    most = 0
    for change in read_series(out / f"gpus-{mode}.csv"):
        held[change.owner] = change.gpus
        if held[f"{mode}-first"] == 2:
            most = max(most, held[f"{mode}-second"])
    return most


def test_both_modes_of_the_first_and_what_they_leave(experiment, own_cluster, namespace, tmp_path):
    process = experiment("benchmarks.experiment1", 120, *FIRST)
    said, complaints = process.communicate(timeout=DEADLINE)
    out = tmp_path / "out"
    assert process.returncode == 0, "\n".join([said, complaints, *(path.read_text() for path in out.glob("*.log"))])
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
    assert [most_beside_the_first(out, mode) for mode in ("gang", "elastic")] == [0, 1]
    assert gang["first"]["last_loss"] == pytest.approx(gang["second"]["last_loss"], rel=1e-4)
    jobs = client.BatchV1Api(own_cluster.client()).list_namespaced_job(namespace).items
    assert not [job for job in jobs if not job.metadata.deletion_timestamp]


def nothing_is_left(cluster, namespace):
    """Deployment and job are being deleted or gone, the others' pod stays alone."""
    api = cluster.client()
    until(lambda seen: set(seen) == {"others"}, "only the others", client.CoreV1Api(api).list_namespaced_pod, namespace)
    classes = client.SchedulingV1Api(api).list_priority_class().items
    assert not [each.metadata.name for each in classes if namespace in each.metadata.name]


def test_in_the_second_serving_takes_a_gpu_from_training_and_gives_it_back(
    experiment, own_cluster, namespace, tmp_path
):
    pytest.importorskip("tensorflow")
    process = experiment("benchmarks.experiment2", 1200, *SECOND)
    said, complaints = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said + complaints
    out = tmp_path / "out"
    scalings = [json.loads(line) for line in (out / "scalings.jsonl").read_text().splitlines()]
    assert [(each["time"], each["replicas"]) for each in scalings] == [(5.0, 2), (16.0, 1)], "they follow from the seed"
    series = read_series(out / "gpus.csv")
    held = {who: [each.gpus for each in series if each.owner == who] for who in ("serving", "training")}
    assert held == {"serving": [1, 2, 1], "training": [2, 1, 2]}
    summary = json.loads((out / "summary.json").read_text())
    with (out / "requests.csv").open(newline="") as lines:
        requests = list(csv.DictReader(lines))
    assert summary["requests"]["count"] == len(requests) > 100
    assert not [request for request in requests if request["failure"]]
    assert summary["steps"]["made"] > 20
    assert summary["steps"]["lost"] == summary["steps"]["twice"] == 0
    assert summary["reclaim_for_serving"]["n"] == 1
    taken = summary["reclaim_for_training"]  # on a busy machine the load is over before the worker has made a step
    assert taken["n"] + len(taken["unfinished"]) == 1
    assert summary["utilisation"] > 0.5
    nothing_is_left(own_cluster, namespace)


def test_one_that_is_interrupted_cleans_up(experiment, own_cluster, namespace, tmp_path):
    pytest.importorskip("tensorflow")
    process = experiment("benchmarks.experiment2", 1200, *SECOND)
    listing = (client.CoreV1Api(own_cluster.client()).list_namespaced_pod, namespace)
    until(lambda seen: any(name.startswith("training-master") for name in seen), "a master", *listing)
    process.send_signal(signal.SIGINT)
    said, complaints = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, said + complaints
    assert complaints.splitlines()[-1].endswith("interrupted; what was measured so far is in --out")
    assert (tmp_path / "out" / "pods.csv").read_text().count("\nserving-") == 1
    assert not (tmp_path / "out" / "summary.json").exists()
    nothing_is_left(own_cluster, namespace)


@pytest.fixture
def lab(own_cluster, namespace, tmp_path):
    def make(name: str, seconds_per_sample: float) -> Lab:
        options = read(make_parser(name, None, 1, seconds_per_sample), ["--out", str(tmp_path / "out")])
        own = {"KUBECONFIG": str(own_cluster.kubeconfig), "ELASTICDL_HOME": str(tmp_path / "home")}
        core = client.CoreV1Api(own_cluster.client())
        return Lab(options, core, namespace, tmp_path, {**os.environ, **own, "PYTHONPATH": str(ROOT)})

    return make


def test_in_the_third_an_elastic_job_makes_the_steps_of_a_fixed_one(lab, tmp_path):
    tiny = replace(DIGITS, samples=96, worker_batch=8, micro_batch=2)  # four steps an epoch, in micro-batches of two
    jobs = [
        Job(Policy.BATCH, Kind.ELASTIC, 0, epochs=1, changes=(Change(2, 4),)),
        Job(Policy.BATCH, Kind.TWO, 0, epochs=1),
    ]
    course = Course(lab("experiment3", 0), tiny, tmp_path, threading.Event())
    with ThreadPoolExecutor() as lanes:
        elastic, fixed = (Curve.of(result) for result in lanes.map(course.run, jobs))
    assert (elastic.workers, fixed.workers) == ((2, 2, 4, 4), (2, 2, 2, 2))
    found = difference([elastic, fixed])
    # Parameters are the same to the bit; the mean loss that is told is a sum in another order.
    assert found["loss"] == pytest.approx(0, abs=1e-6)
    assert found["accuracy"] == 0
    assert elastic.losses[0] != elastic.losses[1]
