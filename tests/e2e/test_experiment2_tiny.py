"""Experiment 2 in small: the whole command on a real control plane, serving and training share three GPUs."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes import client

from benchmarks.experiments.pods import read_series
from model_zoo.cifar10.generate import generate
from tests.cluster.kit import shell, until

pytestmark = pytest.mark.slow

pytest.importorskip("tensorflow")
pytest_plugins = ["tests.cluster.fixtures"]
ROOT = Path(__file__).parents[2]
DEADLINE = 280
PLAN = ["--gpus", "3", "--curve", "0:1,30:2,120:1,300", "--scale", "10", "--seed", "0"]
RATES = ["--requests_per_replica", "8", "--request_seconds", "0.05", "--seconds_per_sample", "0.03"]


@pytest.fixture
def experiment(own_cluster, namespace, pods, tmp_path):
    """Starts it; half of the cluster's GPUs are somebody else's, who can't be preempted for serving."""
    pods.create("others", shell("exec sleep infinity"), gpus=3, priorityClassName="system-cluster-critical")
    pods.running("others")
    data = generate(tmp_path / "data", "binary", 1200)
    command = [sys.executable, "-m", "benchmarks.experiment2", "--cluster", "kubeconfig", "--namespace", namespace]
    command += ["--image", "local/host", "--repository", str(ROOT), "--training_data", str(data)]
    command += ["--serving_model", str(tmp_path / "model"), "--out", str(tmp_path / "out"), *PLAN, *RATES]
    env = {**os.environ, "KUBECONFIG": str(own_cluster.kubeconfig)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)
    yield process
    process.kill()
    process.wait(10)


def nothing_is_left(cluster, namespace) -> None:
    """Of what the experiment made: Deployment and job are being deleted or gone, the others' pod stays alone."""
    api = cluster.client()
    until(lambda seen: set(seen) == {"others"}, "only the others", client.CoreV1Api(api).list_namespaced_pod, namespace)
    classes = client.SchedulingV1Api(api).list_priority_class().items
    assert not [each.metadata.name for each in classes if namespace in each.metadata.name]


@pytest.mark.timeout(300)
def test_serving_takes_a_gpu_from_training_and_gives_it_back(experiment, own_cluster, namespace, tmp_path):
    said, complaints = experiment.communicate(timeout=DEADLINE)
    assert experiment.returncode == 0, said + complaints
    assert "a request a replica 0.05 s" in said
    out = tmp_path / "out"
    made = {"gpus.csv", "gpus.pdf", "gpus.png", "gpus.svg", "summary.json", "events.jsonl", "events.log", "logs.log"}
    made |= {"pods.csv", "requests.csv", "rotation.csv", "scalings.jsonl", "steps.csv"}
    assert {path.name for path in out.iterdir()} == made
    scalings = [json.loads(line) for line in (out / "scalings.jsonl").read_text().splitlines()]
    assert [(each["time"], each["replicas"]) for each in scalings] == [(5.0, 2), (16.0, 1)], "they follow from the seed"
    held = {
        owner: [change.gpus for change in read_series(out / "gpus.csv") if change.owner == owner]
        for owner in ("serving", "training")
    }
    assert held["serving"] == [1, 2, 1]
    assert held["training"] == [2, 1, 2]
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


def test_interrupted_it_cleans_up(experiment, own_cluster, namespace, tmp_path):
    core = client.CoreV1Api(own_cluster.client())
    listing = (core.list_namespaced_pod, namespace)
    until(lambda seen: any(name.startswith("training-master") for name in seen), "a master", *listing)
    experiment.send_signal(signal.SIGINT)
    said, complaints = experiment.communicate(timeout=DEADLINE)
    assert experiment.returncode == 130, said + complaints
    assert complaints.splitlines()[-1].endswith("interrupted; what was measured so far is in --out")
    assert (tmp_path / "out" / "pods.csv").read_text().count("\nserving-") == 1
    assert not (tmp_path / "out" / "summary.json").exists()
    nothing_is_left(own_cluster, namespace)
