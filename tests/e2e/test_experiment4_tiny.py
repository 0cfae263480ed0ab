"""Experiment 4 in small: two jobs on two GPUs, under the scheduler with AdaptDL's rule.

How jobs share by themselves is tested in `test_kubernetes_sharing`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kubernetes import client

from benchmarks import experiment4
from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.lab import Lab
from benchmarks.experiments.options import make_parser, read
from benchmarks.experiments.sharing.policies import POLICIES
from benchmarks.experiments.sharing.workload import BATCH, STEP_SECONDS, PlannedJob

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
KIND = experiment4.draw_jobs(0, 1.0)[0].kind
JOBS = [PlannedJob("first", 0.0, 60, KIND), PlannedJob("second", 1.0, 20, KIND)]


@pytest.fixture
def lab(own_cluster, namespace, tmp_path):
    parser = make_parser("experiment4", None, 1, STEP_SECONDS / BATCH)
    options, _ = read(parser, ["--out", str(tmp_path / "out")])
    own = {"KUBECONFIG": str(own_cluster.kubeconfig), "ELASTICDL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    core = client.CoreV1Api(own_cluster.client())
    return Lab(options, core, namespace, tmp_path, {**os.environ, **own})


def test_all_jobs_make_their_steps_and_are_measured(lab):
    policy = next(each for each in POLICIES if each.scheduled)
    setting = experiment4.Setting(lab.options, 2, JOBS, [policy])
    outcome = experiment4.measure(policy, lab, setting, Artefacts(lab.options.out))
    assert [each.job.name for each in outcome.jobs] == ["first", "second"]
    assert all(each.ended > each.submitted for each in outcome.jobs)
    assert {change.owner for change in outcome.changes} == {"adaptdl-first", "adaptdl-second"}
