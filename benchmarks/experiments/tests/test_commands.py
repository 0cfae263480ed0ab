"""The whole commands of the first two experiments in small, on a real control plane."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes import client

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
    assert gang["first"]["last_loss"] == pytest.approx(gang["second"]["last_loss"], rel=1e-4)
    jobs = client.BatchV1Api(own_cluster.client()).list_namespaced_job(namespace).items
    assert not [job for job in jobs if not job.metadata.deletion_timestamp]


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
    with (out / "gpus.csv").open(newline="") as lines:
        series = list(csv.DictReader(lines))
    held = {who: [int(each["gpus"]) for each in series if each["owner"] == who] for who in ("serving", "training")}
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
    # Deployment and job are being deleted or gone, the others' pod stays alone.
    api = own_cluster.client()
    until(lambda seen: set(seen) == {"others"}, "only the others", client.CoreV1Api(api).list_namespaced_pod, namespace)
    classes = client.SchedulingV1Api(api).list_priority_class().items
    assert not [each.metadata.name for each in classes if namespace in each.metadata.name]
