"""The experiments' command line, gang scheduler and pace, without a cluster."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import experiment1
from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.gang import SCHEDULER, SIZE, place
from benchmarks.experiments.zoo.pace import VARIABLE, at_pace, updated_at_pace
from elasticdl.common.errors import UserError


def pod(name, *, job="j", gpus=1, node=None, phase="Pending", **metadata):
    container = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    labels = {"elasticdl.org/job": job, "elasticdl.org/role": "worker" if gpus else "master"}
    spec = {"containers": [container], "schedulerName": SCHEDULER, **({"nodeName": node} if node else {})}
    whole = {"name": name, "namespace": "n", "labels": labels, "annotations": {SIZE: "2"}, **metadata}
    return {"metadata": whole, "spec": spec, "status": {"phase": phase}}


# ---- the command line ----

GIVEN = ["--cluster", "kubeconfig", "--image", "i", "--training_data", "d"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--cluster", "kubeconfig"], "--cluster kubeconfig needs --image"),
        (["--image", "i"], "--image is for --cluster kubeconfig"),
        (["--cluster", "moon"], "argument --cluster: invalid choice: 'moon'"),
        ([*GIVEN, "--queue", "q"], "--queue q: "),
        (["--scale", "0"], "argument --scale: must be above 0"),
        (["--scale", "fast"], "argument --scale: 'fast' is not a number of at least 0"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number of at least 0"),
        (["--seconds_per_sample", "nan"], "argument --seconds_per_sample: 'nan' is not a number of at least 0"),
        (["--seconds_per_sample", "1e-320"], "--seconds_per_sample 9.99989e-321: at least 1e-06, or 0 for real GPUs"),
        (["--seconds_per_sample", "0"], "--cluster tier1 has no real GPUs: --seconds_per_sample must be above 0"),
        (["--steps", "-5"], "argument --steps: '-5' is not a whole number of at least 0"),
        (["--gpus", "8", "--workers", "4"], "--workers 4 --gpus 8: one job has to fit, and two must not"),
        ([*GIVEN, "--steps", "5"], "the kubeconfig"),  # is none
    ],
)
def test_what_is_wrong_is_one_line_and_code_2_and_costs_no_results(tmp_path, monkeypatch, capsys, argv, says):
    (tmp_path / "config").write_text("{{{")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    (tmp_path / "summary.json").touch()
    with pytest.raises(SystemExit, match="2"):
        experiment1.main([*argv, "--out", str(tmp_path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m benchmarks.experiment1: {says}")
    assert (tmp_path / "summary.json").exists()


def test_two_experiments_do_not_write_to_one_folder(tmp_path):
    with (
        Artefacts(tmp_path).claimed(),
        pytest.raises(UserError, match="an experiment that runs writes there"),
        Artefacts(tmp_path).claimed(),
    ):
        pass
    with Artefacts(tmp_path).claimed():
        pass


# ---- gangs ----


A, B = [pod("a0"), pod("a1")], [pod("b0", job="k", gpus=2), pod("b1", job="k", gpus=2)]
BIG = [pod("big0", job="big", gpus=3), pod("big1", job="big", gpus=3)]


def held(phase):
    return pod("o", job="o", gpus=2, node="x", phase=phase)


@pytest.mark.parametrize(
    ("pods", "capacity", "placed"),
    [
        pytest.param([*A, *B], {"x": 1, "y": 1}, {"a0": "x", "a1": "y"}, id="the first fits"),
        pytest.param([*A, *B], {"x": 2, "y": 4}, {"a0": "x", "a1": "x", "b0": "y", "b1": "y"}, id="both fit"),
        pytest.param(A[:1], {"x": 6}, {}, id="not all are there"),
        pytest.param([*BIG, *A], {"x": 3, "y": 2}, {"a0": "x", "a1": "x"}, id="who does not fit takes nothing"),
        pytest.param([held("Running"), *A], {"x": 3}, {}, id="held"),
        pytest.param([held("Succeeded"), *A], {"x": 3}, {"a0": "x", "a1": "x"}, id="over"),
        pytest.param([pod("a0", node="x", phase="Running"), pod("a2")], {"x": 3}, {"a2": "x"}, id="one was lost"),
        pytest.param([pod("a0"), pod("a1", deletionTimestamp="now")], {"x": 3}, {}, id="one is to go"),
    ],
)
def test_a_gang_is_placed_whole_or_not_at_all(pods, capacity, placed):
    assert place(pods, capacity) == placed


# ---- the model's pace ----


@pytest.fixture
def sleeps(monkeypatch):
    slept: list[float] = []
    monkeypatch.setenv(VARIABLE, "100")
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))


def test_a_simulated_gpu_takes_its_time_for_what_is_the_same_arithmetic(sleeps, monkeypatch):
    paced, inputs = at_pace(small_model(), free_first_step=False), torch.ones(6, 3)
    monkeypatch.delenv(VARIABLE)
    plain = at_pace(small_model())
    for model in (paced, plain):
        model(inputs).sum().backward()
    assert sleeps == [pytest.approx(600, abs=5)]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(paced.parameters(), plain.parameters(), strict=True))


def test_a_warm_up_takes_no_time_and_an_evaluation_a_third(sleeps):
    model, inputs = at_pace(small_model()), torch.ones(6, 3)
    model(inputs).sum().backward()
    model.eval()
    with torch.inference_mode():
        model(inputs)
    assert sleeps == [pytest.approx(200, abs=5)]


@pytest.mark.parametrize(("ago", "expected"), [(100, 500), (200, 600)])
def test_an_update_just_before_is_a_part_of_a_samples_time(sleeps, monkeypatch, ago, expected):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    model, inputs = at_pace(small_model(), free_first_step=False), torch.ones(6, 3)
    optimizer = updated_at_pace(torch.optim.SGD(model.parameters(), lr=0.1))

    def reduce(*_):  # registered as training begins, and it takes long
        clock[0] += 10_000

    optimizer.register_step_pre_hook(reduce)
    for _ in range(2):
        model(inputs).sum().backward()
        optimizer.step()
        clock[0] += ago
    model(inputs).sum().backward()
    assert sleeps == [600, expected, expected]
