"""The whole command of the second experiment in small, on a real control plane."""

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
SECOND = ["--gpus", "3", "--curve", "0:1,30:2,120:1,300", "--scale", "10", "--seed", "0"]
SECOND += ["--requests_per_replica", "8", "--request_seconds", "0.05", "--seconds_per_sample", "0.03"]


def test_serving_takes_a_gpu_from_training_and_gives_it_back(own_cluster, namespace, pods, tmp_path):
    """Half of the cluster's GPUs are somebody else's, who can't be preempted."""
    pytest.importorskip("tensorflow")
    pods.create("others", shell("exec sleep infinity"), gpus=3, priorityClassName="system-cluster-critical")
    pods.running("others")
    data, out = generate(tmp_path / "data", "binary", 1200), tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.experiment2", "--cluster", "kubeconfig", "--namespace", namespace]
    command += ["--image", "local/host", "--repository", str(ROOT), "--training_data", str(data), "--out", str(out)]
    options = {"env": {**os.environ, "KUBECONFIG": str(own_cluster.kubeconfig)}, "timeout": DEADLINE, "check": False}
    done = subprocess.run([*command, *SECOND], cwd=ROOT, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
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
