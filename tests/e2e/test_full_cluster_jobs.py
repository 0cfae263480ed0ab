"""Jobs in real containers on two real kubelets, with the command line alone: their end, and what comes between."""

from __future__ import annotations

import pytest
from cluster_kit import CommandLine, priority_class, wait_for
from kubernetes import client
from kubernetes.stream import stream

from tests.cluster.full.images import REPOSITORY_INSIDE
from tests.cluster.kit import Pods, is_running, new_namespace, shell

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow

TRAIN = ["train", "--model_def", "digits.mlp_torch", "--model_zoo", f"{REPOSITORY_INSIDE}/model_zoo"]
# Of three GPUs of each node, so that no two workers are on one.
TRAIN += ["--worker_resource_request", "cpu=0.2,memory=256Mi,gpu=2", "--worker_resource_limit", "memory=1Gi,gpu=2"]
# A kubelet on a busy machine tells late that a worker has left. Of a job that is deleted they stay for most of this time.
TRAIN += ["--global_batch_size", "64", "--stop_grace", "15"]


class News:
    """What the journal of the job tells since it was last looked at."""

    def __init__(self, elasticdl):
        self._elasticdl = elasticdl
        self._seen = 0

    def next(self, event, size=None):
        """The first such entry after those that were waited for before; ``size``: of a world."""

        def told():
            entries = enumerate(self._elasticdl.journal("long")[self._seen :], self._seen + 1)
            found = ((number, entry) for number, entry in entries if entry["event"] == event)
            return next((each for each in found if size in (None, len(each[1].get("members", ())))), None)

        self._seen, entry = wait_for(event, told, lambda: self._elasticdl("events", "long").stdout[-3000:], poll=1)
        return entry

    def both(self):
        return self.next("world_formed", 2)


@pytest.fixture(scope="module")
def pods(full_cluster):
    with new_namespace(full_cluster.client()) as name:
        yield Pods(client.CoreV1Api(full_cluster.client()), name, full_cluster.image)


@pytest.fixture(scope="module")
def elasticdl(full_cluster, pods, tmp_path_factory):
    return CommandLine(full_cluster.kubeconfig, pods.namespace, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def journal(full_cluster, elasticdl):
    """That of a job which trains for ever, on a worker of each node."""
    long = ["--num_workers", "1-2", "--image", full_cluster.image, "--job_name", "long", "--num_epochs", "1000000"]
    done = elasticdl(*TRAIN, *long, "--detach")
    assert done.returncode == 0, done.stderr
    try:
        journal = News(elasticdl)
        journal.both()
        yield journal
    finally:
        elasticdl.delete("long")


def of_job(seen, job, role):
    labels = {"elasticdl.org/job": job, "elasticdl.org/role": role}
    return [pod for pod in seen.values() if labels.items() <= (pod.metadata.labels or {}).items()]


def workers(pods, job):
    """Those that run, by their node."""
    return {pod.spec.node_name: pod for pod in of_job(now(pods), job, "worker") if is_running(pod)}


def now(pods):
    return {pod.metadata.name: pod for pod in pods.core.list_namespaced_pod(pods.namespace).items}


def test_a_job_trains_on_both_nodes_and_leaves_nothing(elasticdl, pods):
    done = elasticdl(*TRAIN, "--num_workers", "2", "--image", pods.image, "--job_name", "short", "--num_epochs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""
    assert "world 1: 2 workers" in done.stderr
    assert "job short succeeded: 46 steps, epoch 2/2" in done.stderr
    workers = of_job(now(pods), "short", "worker")
    assert {pod.spec.node_name for pod in workers} == {"n0", "n1"}
    ended = {each.state.terminated.exit_code for pod in workers for each in pod.status.container_statuses}
    assert ended == {0}
    logs = elasticdl("logs", "short").stdout
    assert all(f"{name} | " in logs for name in ("master   ", "worker-0 ", "worker-1 "))
    elasticdl.delete("short")
    assert not of_job(now(pods), "short", "master") + of_job(now(pods), "short", "worker")


def test_a_preempted_worker_comes_back(journal, full_cluster, pods):
    before = workers(pods, "long")
    assert set(before) == {"n0", "n1"}
    assert len({pod.status.pod_ip for pod in before.values()}) == 2
    high = f"high-{pods.namespace}"
    with priority_class(full_cluster, high, 100_000):
        pods.create("important", shell("trap exit TERM; while :; do sleep 0.1; done"), gpus=2, priorityClassName=high)
        try:
            told, left = journal.next("worker_draining"), journal.next("worker_left")
            assert told["worker"] == left["worker"]  # it was heard to leave, and was not lost
            assert left["cause"] == "preempted", left
            pods.running("important")
        finally:
            pods.delete("important", grace_period_seconds=2)
    journal.both()


def test_a_worker_out_of_memory_is_told_and_replaced(journal, pods):
    pod = next(iter(workers(pods, "long").values()))
    fill = ["dd", "if=/dev/zero", "of=/dev/shm/fill", "bs=1M", "count=2000"]
    where = (pods.core.connect_get_namespaced_pod_exec, pod.metadata.name, pods.namespace)
    opened = stream(*where, command=fill, stdout=True, stderr=True, _preload_content=False)
    left = journal.next("worker_left")
    opened.close()
    assert left["cause"] == "out_of_memory", left
    journal.both()
