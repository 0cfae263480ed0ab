"""Experiment 3 in small: a job whose workers change makes the steps of one with fixed workers, to the bit."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from kubernetes import client

from benchmarks.experiments.convergence.course import Course, Shared
from benchmarks.experiments.convergence.curves import Curve, difference
from benchmarks.experiments.convergence.plan import DIGITS, Change, Job, Kind
from benchmarks.experiments.convergence.settings import Policy
from benchmarks.experiments.lab import Lab
from benchmarks.experiments.options import make_parser, read

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# Four steps an epoch, in micro-batches of two.
TINY = replace(DIGITS, samples=96, worker_batch=8, micro_batch=2)
JOBS = [
    Job(Policy.BATCH, Kind.ELASTIC, 0, epochs=1, changes=(Change(2, 4),)),
    Job(Policy.BATCH, Kind.TWO, 0, epochs=1),
]


@pytest.fixture
def lab(own_cluster, namespace, tmp_path):
    options, _ = read(make_parser("experiment3", None, 1, 0), ["--out", str(tmp_path / "out")])
    own = {"KUBECONFIG": str(own_cluster.kubeconfig), "ELASTICDL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    core = client.CoreV1Api(own_cluster.client())
    return Lab(options, core, namespace, tmp_path, {**os.environ, **own})


def test_an_elastic_job_makes_the_steps_of_a_fixed_one(lab, tmp_path):
    course = Course(lab, TINY, Shared.on_host(tmp_path), threading.Event())
    with ThreadPoolExecutor() as lanes:
        elastic, fixed = (Curve.of(result) for result in lanes.map(course.run, JOBS))
    assert elastic.workers == (2, 2, 4, 4)
    assert fixed.workers == (2, 2, 2, 2)
    found = difference([elastic, fixed])
    # Parameters are the same to the bit; the mean loss that is told is a sum in another order.
    assert found.loss == pytest.approx(0, abs=1e-6)
    assert found.accuracy == 0
    assert elastic.losses[0] != elastic.losses[1]
