"""A job on a real control plane: submitted, followed, looked at and removed with the command line alone."""

import json
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
from cluster_kit import DEADLINE, CommandLine, objects_in, priority_class, wait_for
from kubernetes import client
from running_job import ELASTICDL

from benchmarks.sample_records import consumed
from tests.cluster.kit import Pods, is_running, shell, until

pytest_plugins = ["tests.cluster.fixtures"]

ROOT = Path(__file__).resolve().parents[2]
MODULE = ["--image", "local/host", "--job_name", "digits", "--model_def", "digits.mlp_torch"]
MODULE += ["--model_zoo", str(ROOT / "model_zoo")]
TRAIN = ["train", *MODULE, "--num_workers", "1-2", "--global_batch_size", "64"]
# For a third worker there is no place then.
ONE_A_NODE = ["--num_workers", "1-3", "--worker_resource_request", "cpu=0.1,memory=256Mi,gpu=3"]


@pytest.fixture
def elasticdl(own_cluster, namespace, tmp_path):
    """Nothing is left in the namespace of what its commands have made there."""
    before = objects_in(own_cluster, namespace)
    yield CommandLine(own_cluster.kubeconfig, namespace, tmp_path / "home")
    assert objects_in(own_cluster, namespace) == before


@pytest.fixture
def core(own_cluster):
    return client.CoreV1Api(own_cluster.client())


def wait_until(condition, elasticdl):
    """Asks now and then: each time is a process, in whose way the job's own would be."""
    return wait_for("what the test waits for", condition, lambda: elasticdl("logs", "digits").stdout, poll=2)


def test_a_job_from_its_submission_to_its_removal(elasticdl, namespace, tmp_path):
    kept = ("--checkpoint_dir", str(tmp_path / "kept"))
    done = elasticdl(*TRAIN, "--num_epochs", "1", "--output", str(tmp_path / "out"), *kept, *ONE_A_NODE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""
    # Once; at the end it may come to a place that another has left.
    assert len(re.findall(r"worker \d waits: 0/\d nodes .* Insufficient nvidia.com/gpu", done.stderr)) == 1, done.stderr
    assert f"job digits submitted to namespace {namespace} of the cluster at " in done.stderr
    assert "job digits succeeded: 23 steps, epoch 1/1" in done.stderr
    assert "metrics  accuracy" in done.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 23
    status = elasticdl("status", "digits")
    assert status.stdout.startswith("job digits: succeeded: training is complete\n"), status.stderr
    (finished,) = elasticdl.journal("digits", "job_finished")
    assert (finished["phase"], finished["steps"]) == ("succeeded", 23)
    assert "master    | " in elasticdl("logs", "digits").stdout
    assert elasticdl("stop", "digits").stderr == "elasticdl stop: job digits is not running: it has succeeded\n"
    elasticdl.delete("digits")
    predicted = tmp_path / "predicted.npz"
    done = elasticdl("predict", *MODULE, "--num_workers", "2", "--output", str(predicted), *kept)
    assert done.returncode == 0, done.stderr
    assert len(np.load(predicted)["predictions"]) == 360
    assert not [*tmp_path.glob(".*")], "a part is left"
    elasticdl.delete("digits")


def check_that_a_killed_worker_is_replaced_in_its_pod(elasticdl, core, namespace):
    def pods():
        found = core.list_namespaced_pod(namespace, label_selector="elasticdl.org/role=worker").items
        return {(pod.metadata.uid, pod.status.phase) for pod in found}

    def started():
        return {each["worker"]: each for each in elasticdl.journal("digits", "worker_started")}

    wait_until(lambda: {0, 1} <= started().keys(), elasticdl)
    before = pods()
    os.kill(started()[1]["pid"], signal.SIGKILL)  # a container of this cluster has no processes of its own
    wait_until(lambda: 2 in started(), elasticdl)
    assert pods() == before


def check_that_workers_that_are_all_deleted_at_once_lose_nothing(elasticdl, core, namespace):
    def worlds():
        return elasticdl.journal("digits", "world_formed")

    before = worlds()[-1]
    core.delete_collection_namespaced_pod(namespace, label_selector="elasticdl.org/role=worker")
    wait_until(lambda: not set(worlds()[-1]["members"]) & set(before["members"]), elasticdl)
    assert all(world["step"] > 0 for world in worlds()[worlds().index(before) + 1 :]), worlds()
    assert not elasticdl.journal("digits", "warning")


def check_the_dashboard(elasticdl, namespace):
    def jobs():
        with urllib.request.urlopen(f"{listed}data.json", timeout=DEADLINE) as answer:
            return {job["name"]: job["phase"] for job in json.load(answer).get("content", ())}

    command = [*ELASTICDL, "dashboard", "digits", "--namespace", namespace]
    with subprocess.Popen(command, env={**os.environ, **elasticdl.env}, stdout=subprocess.PIPE, text=True) as process:
        try:
            page = process.stdout.readline().strip()
            listed = page.partition("job/")[0]
            wait_for("a list of the job", lambda: jobs() == {"digits": "running"})
            with urllib.request.urlopen(page, timeout=DEADLINE) as answer:
                assert b"<title>digits" in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()


def test_a_job_outlives_its_master_and_the_command_line(elasticdl, own_cluster, core, namespace):
    patient = ("--stop_grace", "120")  # so long until replacements have started, however busy the machine is
    assert elasticdl(*TRAIN, *patient, "--num_epochs", "100000", "--detach").returncode == 0
    wait_until(lambda: "job digits: running" in elasticdl("status", "digits").stdout, elasticdl)
    check_the_dashboard(elasticdl, namespace)
    check_that_a_killed_worker_is_replaced_in_its_pod(elasticdl, core, namespace)
    check_that_workers_that_are_all_deleted_at_once_lose_nothing(elasticdl, core, namespace)
    masters = {"label_selector": "elasticdl.org/role=master"}
    (first,) = core.list_namespaced_pod(namespace, **masters).items
    core.delete_namespaced_pod(first.metadata.name, namespace, grace_period_seconds=0)

    def another_runs(seen):
        return any(is_running(pod) for name, pod in seen.items() if name != first.metadata.name)

    until(another_runs, "another master", core.list_namespaced_pod, namespace, **masters)
    wait_until(lambda: elasticdl.journal("digits", "master_restarted"), elasticdl)
    assert elasticdl.journal("digits", "master_restarted")[0]["missing"] == []
    assert len(elasticdl.journal("digits", "job_started")) == 1
    assert "workers now 1, before" in elasticdl("scale", "digits", "1").stdout
    assert elasticdl("stop", "digits", "--now").stdout.startswith("job digits stopped at step ")
    jobs = client.BatchV1Api(own_cluster.client()).list_namespaced_job
    until(lambda seen: seen["digits-master"].status.succeeded, "complete", jobs, namespace)
    (job,) = jobs(namespace).items
    assert not job.status.failed, "a master that was deleted is counted, so the next one would wait"
    elasticdl.delete("digits")


@pytest.mark.slow
@pytest.mark.timeout(900)  # that long only on a machine that has much else to do
def test_nodes_are_lost_and_the_api_server_and_no_sample_is(elasticdl, own_cluster, core, namespace, tmp_path):
    record = ("--sample_record", str(tmp_path / "record"), "--num_epochs", "100000")
    assert elasticdl(*TRAIN, *ONE_A_NODE, *record, "--detach").returncode == 0

    def wait_for_both(after=0):
        """Until the newest world has both workers; its number."""

        def formed():
            newest = elasticdl.journal("digits", "world_formed")[-1:]
            return [each["world"] for each in newest if len(each["members"]) == 2 and each["world"] > after]

        return wait_until(formed, elasticdl)[0]

    def wait_for_cause(cause):
        wait_until(lambda: cause in [left["cause"] for left in elasticdl.journal("digits", "worker_left")], elasticdl)

    def masters_node():
        pods = core.list_namespaced_pod(namespace, label_selector="elasticdl.org/role=master").items
        return next(pod.spec.node_name for pod in pods if is_running(pod))

    world = wait_for_both()
    own_cluster.restart_api_server(1.0)
    other = next(node for node in own_cluster.node_names if node != masters_node())
    own_cluster.lose_node(other)
    wait_for_cause("node_lost")
    own_cluster.add_node(other, 3)
    wait_for_both(world)
    frozen = masters_node()
    own_cluster.freeze_node(frozen)  # what runs there runs on
    wait_until(lambda: elasticdl.journal("digits", "master_restarted"), elasticdl)
    own_cluster.thaw_node(frozen)
    own_cluster.wait_for_node(frozen)
    world = wait_for_both()
    pods = Pods(core, namespace, own_cluster.image)
    with priority_class(own_cluster, namespace, 1000):
        pods.create("urgent", shell("sleep 1000"), gpus=3, priorityClassName=namespace)
        wait_for_cause("preempted")
        pods.delete("urgent", grace_period_seconds=0)
    wait_for_both(world)
    assert elasticdl("stop", "digits").returncode == 0
    epochs = consumed((tmp_path / "record").glob("*.jsonl"))
    assert all(set(counts.values()) == {1} for counts in epochs.values()), "a sample was made twice"
    assert len({len(epochs[epoch]) for epoch in range(max(epochs))}) == 1, "a sample was lost"
    elasticdl.delete("digits")


PROGRAM = """
import ctypes, os, sys, torch
import elasticdl.elastic.torch as elastic

def hold_pythons_lock():
    ctypes.PyDLL(None).sleep(1000)

print(sys.argv[1], os.environ["TOKEN"], os.environ["GIVEN"], os.environ["HOME"], flush=True)
data = torch.utils.data.TensorDataset(torch.ones(24, 2))
model = torch.nn.Linear(2, 1)
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = elastic.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for epoch in range(100000):
    for inputs, in loader:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
    if epoch == 20 and os.environ["ELASTICDL_WORKER_ID"] == "1":
        hold_pythons_lock()
"""


@pytest.mark.slow
def test_a_program_gets_what_it_is_given_and_a_worker_in_which_no_python_can_run_is_named(elasticdl, core, namespace):
    core.create_namespaced_secret(namespace, {"metadata": {"name": "hub"}, "stringData": {"token": "t0ken"}})
    options = ["--image", "local/host", "--job_name", "digits", "--num_workers", "2", "--heartbeat_timeout", "5"]
    options += ["--envs", "GIVEN=$(HOME)x", "--env_from_secret", "TOKEN=hub/token"]
    submitted = elasticdl("run", "--detach", *options, "--", "python", "-c", PROGRAM, "$(HOME) $$")
    assert submitted.returncode == 0, submitted.stderr
    wait_until(lambda: elasticdl.journal("digits", "worker_stuck"), elasticdl)
    stuck = elasticdl.journal("digits", "worker_stuck")[0]
    assert (stuck["worker"], stuck["where"]) == (1, "<string>:6 in hold_pythons_lock"), stuck  # as its pod has logged
    # HOME is elsewhere in a pod of the tests.
    assert "$(HOME) $$ t0ken $(HOME)x /tmp" in elasticdl("logs", "digits").stdout
    shown = [core.list_namespaced_pod(namespace), core.list_namespaced_config_map(namespace)]
    assert "$(HOME)x" not in str(shown)
    assert elasticdl("stop", "digits", "--now").returncode == 0
    elasticdl.delete("digits")
    core.delete_namespaced_secret("hub", namespace)


@pytest.mark.slow
def test_workers_of_two_processes_come_and_go_as_a_whole(elasticdl):
    def worlds(size):
        return [world["step"] for world in elasticdl.journal("digits", "world_formed") if len(world["members"]) == size]

    options = ["--image", "local/host", "--job_name", "digits", "--num_workers", "2", "--processes_per_worker", "2"]
    script = ["python", str(ROOT / "examples/groups/fsdp2.py"), "--epochs", "100000"]
    assert elasticdl("run", "--detach", *options, "--", *script).returncode == 0
    wait_until(lambda: "epoch 1: loss" in elasticdl("logs", "digits").stdout, elasticdl)
    psutil.Process(elasticdl.journal("digits", "worker_started")[1]["pid"]).children()[-1].kill()
    wait_until(lambda: len(worlds(2)) == 2, elasticdl)
    assert worlds(2)[1] > 0
    (left,) = elasticdl.journal("digits", "worker_left")
    assert left["reason"] == "killed: SIGKILL"
    assert "workers now 1, before 2" in elasticdl("scale", "digits", "1").stdout
    wait_until(lambda: worlds(1), elasticdl)
    assert elasticdl("stop", "digits").returncode == 0
    assert [left["cause"] for left in elasticdl.journal("digits", "worker_left")] == ["killed", "drained", "drained"]
    elasticdl.delete("digits")
