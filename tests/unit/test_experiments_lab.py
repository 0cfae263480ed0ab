"""The experiments' command line, series, gang scheduler, pace and files, without a cluster."""

from __future__ import annotations

import contextlib
import json
import time
from argparse import Namespace

import pytest
import torch
from kubernetes import client

from benchmarks import experiment1
from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.gang import SCHEDULER, SIZE, GangScheduler, place
from benchmarks.experiments.lab import job_is_over, require_free_gpus
from benchmarks.experiments.options import make_parser, read
from benchmarks.experiments.pods import GpuSeries, held_gpus, read_series
from benchmarks.experiments.zoo.pace import VARIABLE, at_pace, updated_at_pace
from benchmarks.experiments.zoo.step_log import StepLog, logged_steps
from benchmarks.processes import Failed
from elasticdl.common.errors import UserError


def pod(name, *, job="j", gpus=1, node=None, phase="Pending", **metadata):
    container = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    labels = {"elasticdl.org/job": job, "elasticdl.org/role": "worker" if gpus else "master"}
    spec = {"containers": [container], "schedulerName": SCHEDULER, **({"nodeName": node} if node else {})}
    whole = {"name": name, "namespace": "n", "labels": labels, "annotations": {SIZE: "2"}, **metadata}
    return {"metadata": whole, "spec": spec, "status": {"phase": phase}}


# ---- the command line ----


def options_of(tmp_path, *argv):
    return read(make_parser("x", None, 2.5, 0.1), [*argv, "--out", str(tmp_path / "out")])[0]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--cluster", "kubeconfig"], "--cluster kubeconfig needs --image"),
        (["--image", "i"], "--image is for --cluster kubeconfig"),
        (["--scale", "0"], "argument --scale: must be above 0"),
        (["--scale", "fast"], "argument --scale: 'fast' is not a number of at least 0"),
        (["--seconds_per_sample", "nan"], "argument --seconds_per_sample: 'nan' is not a number of at least 0"),
        (["--cluster", "kubeconfig", "--image", "i", "--training_data", "d", "--queue", "q"], "--queue q: "),
        (["--cluster", "moon"], "argument --cluster: invalid choice: 'moon'"),
    ],
)
def test_a_wrong_option_is_one_line_and_code_2(tmp_path, capsys, argv, says):
    with pytest.raises(SystemExit) as ended:
        options_of(tmp_path, *argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m benchmarks.x: {says}")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number of at least 0"),
        (["--seed", "x"], "argument --seed: 'x' is not a whole number of at least 0"),
        (["--seconds_per_sample", "1e-320"], "--seconds_per_sample 9.99989e-321: at least 1e-06, or 0 for real GPUs"),
        (["--seconds_per_sample", "0"], "--cluster tier1 has no real GPUs: --seconds_per_sample must be above 0"),
        (["--steps", "-5"], "--steps -5: must be above 0"),
        (["--global_batch_size", "-3"], "--global_batch_size -3: must be above 0"),
    ],
)
def test_what_is_wrong_is_one_line_and_costs_nothing(tmp_path, monkeypatch, capsys, argv, line):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "out" / "experiment1" / "summary.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(SystemExit) as ended:
        experiment1.main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"python -m benchmarks.experiment1: {line}\n"
    assert kept.exists()


def test_a_cluster_that_can_not_be_had_costs_no_results(tmp_path, monkeypatch, capsys):
    (tmp_path / "config").write_text("{{{")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    (tmp_path / "summary.json").touch()
    argv = ["--cluster", "kubeconfig", "--image", "i", "--training_data", "d", "--steps", "5", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        experiment1.main(argv)
    assert ended.value.code == 2
    assert f"the kubeconfig {tmp_path}/config can't be read: " in capsys.readouterr().err
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


def test_the_published_work_in_simulated_steps(tmp_path):
    parser = make_parser("x", None, 2.5, 0.3)
    options, _ = read(parser, ["--out", str(tmp_path)])
    args = Namespace(steps=0, global_batch_size=0, gpus=6, workers=4)
    setting = experiment1.make_setting(options, args)
    assert setting.training.steps == 200
    assert setting.plan.job_gpu_seconds * options.scale == pytest.approx(1800)
    assert setting.plan.second_after == 48
    with pytest.raises(UserError, match="one job has to fit, and two must not"):
        experiment1.make_setting(options, Namespace(steps=1, global_batch_size=0, gpus=8, workers=4))


# ---- a cluster's GPUs ----


class Answer:
    def __init__(self, items):
        self.data = json.dumps({"items": items, "metadata": {"resourceVersion": "1"}})


class Reply:
    status = 200

    def __init__(self, response):
        self.response = response


class FakeCore:
    """As much of CoreV1Api and its client as is asked for GPUs; the watch breaks after what it has to tell."""

    def __init__(self, nodes=(), pods=(), changes=()):
        self.nodes, self.pods, self.changes = nodes, pods, list(changes)
        self.bound: list[tuple[str, str]] = []

    def create_namespaced_binding(self, namespace, binding, **_):
        self.bound.append((binding.metadata.name, binding.target.name))

    def list_node(self, **_):
        return Answer(self.nodes)

    def list_pod_for_all_namespaces(self, **_):
        return Answer(self.pods)

    @property
    def api_client(self):
        return self

    configuration = client.Configuration(host="https://cluster")

    def param_serialize(self, method, path, query_params, **_):
        return method, path, dict(query_params)

    def call_api(self, method, path, query, *_, **__):
        assert (method, path) == ("GET", "/api/v1/namespaces/n/pods")
        if "watch" not in query:
            return Reply(Answer(self.pods))
        if not self.changes:
            raise client.ApiException(status=503, reason="later")
        change, self.changes = self.changes, []
        return Reply(Stream(change))


class Stream:
    def __init__(self, changes):
        self.lines = [json.dumps({"type": kind, "object": item}).encode() + b"\n" for kind, item in changes]

    def __iter__(self):
        yield from self.lines

    def close(self):
        pass

    shutdown = close


def node(name, gpus, **spec):
    return {"metadata": {"name": name}, "spec": spec, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}


def test_too_few_gpus_and_a_busy_cluster_are_told():
    tainted = node("t", 8, taints=[{"effect": "NoSchedule", "key": "k"}])
    with pytest.raises(UserError, match=r"the cluster has 3 GPUs .* the experiment needs 6"):
        require_free_gpus(FakeCore([node("a", 3), tainted, node("u", 8, unschedulable=True)]), 6)
    held = [pod("w", gpus=1, node="a"), pod("old", gpus=3, node="a", phase="Succeeded"), pod("waits", gpus=2)]
    with pytest.raises(UserError, match=r"busy: 5 of its 6 GPUs are free, the experiment needs 6; .* held by n/w"):
        require_free_gpus(FakeCore([node("a", 6)], held), 6)
    require_free_gpus(FakeCore([node("a", 6)], held), 5)


def test_a_series_is_written_as_it_comes(tmp_path):
    def seen(name, version, **more):
        return pod(name, resourceVersion=version, **more)

    changes = [
        ("ADDED", seen("b", "2", job="k")),
        ("MODIFIED", seen("b", "3", job="k", node="n")),
        ("MODIFIED", seen("a", "4", node="n", phase="Succeeded")),
        ("DELETED", seen("b", "5", job="k", node="n")),
    ]
    core = FakeCore(pods=[seen("a", "1", node="n")], changes=changes)
    path = tmp_path / "gpus.csv"
    with GpuSeries(core, "n", path) as series:
        series.wait(lambda pods: set(pods) == {"a"} and held_gpus(pods["a"]) == 0, 10, "the end")
        partial = read_series(path)
        with pytest.raises(Failed, match="something else: not within 0 s"):
            series.wait(lambda pods: False, 0, "something else")
    assert [(change.owner, change.gpus) for change in partial] == [("j", 1), ("k", 1), ("j", 0), ("k", 0)]
    assert [(c.owner, c.gpus) for c in series.changes] == [(c.owner, c.gpus) for c in partial]


def test_a_job_is_over_when_its_master_and_its_gpus_are():
    master, worker = pod("m", gpus=0, node="n", phase="Succeeded"), pod("w", node="n", phase="Running")
    assert not job_is_over({}, "j")
    assert not job_is_over({"m": {**master, "status": {"phase": "Running"}}}, "j")
    assert not job_is_over({"m": master, "w": worker}, "j")
    assert job_is_over({"m": master, "w": {**worker, "status": {"phase": "Succeeded"}}}, "j")


# ---- gangs ----


def test_a_gang_is_placed_whole_or_not_at_all():
    pods = [pod("a0"), pod("a1"), pod("b0", job="k", gpus=2), pod("b1", job="k", gpus=2)]
    assert place(pods, {"x": 1, "y": 1}) == {"a0": "x", "a1": "y"}
    assert place(pods, {"x": 3, "y": 3}) == {"a0": "x", "a1": "x"}
    assert place(pods, {"x": 2, "y": 4}) == {"a0": "x", "a1": "x", "b0": "y", "b1": "y"}
    assert place(pods[:1], {"x": 6}) == {}


def test_a_gang_that_does_not_fit_takes_nothing_from_the_next():
    pods = [pod("big0", job="big", gpus=3), pod("big1", job="big", gpus=3), pod("a0"), pod("a1")]
    assert place(pods, {"x": 3, "y": 2}) == {"a0": "x", "a1": "x"}


def test_what_is_held_is_not_free_and_what_is_over_is():
    waiting = [pod("a0"), pod("a1")]
    assert place([pod("o", job="o", gpus=2, node="x", phase="Running"), *waiting], {"x": 3}) == {}
    assert set(place([pod("o", job="o", gpus=2, node="x", phase="Succeeded"), *waiting], {"x": 3})) == {"a0", "a1"}


def test_one_that_is_lost_is_placed_again_and_one_that_goes_is_not():
    assert place([pod("a0", node="x", phase="Running"), pod("a2")], {"x": 3}) == {"a2": "x"}
    assert place([pod("a0"), pod("a1", deletionTimestamp="now")], {"x": 3}) == {}


def test_a_gang_gets_no_gpus_of_a_lost_node():
    lost = node("b", 3, taints=[{"effect": "NoExecute", "key": "node.kubernetes.io/unreachable"}])
    holders = [("x0", "a"), ("x1", "a"), ("y0", None), ("y1", None)]
    pods = {
        name: pod(name, job=name[0], node=at, creationTimestamp=f"2026-01-01T00:00:0{second}Z", uid=name)
        for second, (name, at) in enumerate(holders)
    }
    core = FakeCore([node("a", 3), lost])
    scheduler = GangScheduler(core, "n")
    scheduler.see(pods)
    assert core.bound == []
    pods["x1"]["status"]["phase"] = "Succeeded"
    scheduler.see(pods)
    assert core.bound == [("y0", "a"), ("y1", "a")]


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
    (slept,) = sleeps
    assert slept == pytest.approx(600, abs=5)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(paced.parameters(), plain.parameters(), strict=True))
    assert paced.state_dict().keys() == plain.state_dict().keys()


def test_a_warm_up_takes_no_time_and_an_evaluation_a_third(sleeps):
    model, inputs = at_pace(small_model()), torch.ones(6, 3)
    model(inputs).sum().backward()
    assert sleeps == []
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


def test_steps_are_found_in_logs(capsys):
    log = StepLog()
    log.on_world_change(3, 1)
    log.on_train_batch_end(1, {"loss": 0.5})
    log.on_world_change(2, 0)
    log.on_train_batch_end(2, {"loss": 0.25})
    lines = ["worker 0  | something", *(f"worker 0  | {line}" for line in capsys.readouterr().err.splitlines())]
    (step,) = logged_steps(lines)
    assert (step.step, step.workers, step.loss) == (2, 2, 0.25)


# ---- files ----


def test_a_summary_appears_whole(tmp_path):
    artefacts = Artefacts(tmp_path)
    artefacts.summary({"makespan": 1.23456789, "jobs": [{"ended": 2.00001}]})
    with contextlib.suppress(TypeError):
        artefacts.summary({"makespan": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"makespan": 1.23457, "jobs": [{"ended": 2.00001}]}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    artefacts.discard("*.json")
    assert not [*tmp_path.iterdir()]
