"""A job in a storm: pods, processes, nodes, the API server and the master are disturbed, and the training does not show it.

The storm is made from a seed. `make test-all` has a short one; the whole one, or another, is had with

    ELASTICDL_STORM=60 ELASTICDL_STORM_SEED=2 make test-all ARGS="-k storm"
"""

from __future__ import annotations

import os
import random
import signal
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import STEPS_PER_EPOCH, WatchedJob, objects_in, priority_classes, wait_for

from benchmarks.storm.driver import each_kind_first
from benchmarks.storm.training import check_journal
from tests.cluster.cluster import Cluster
from tests.cluster.kit import Pods, is_running

pytest_plugins = ["tests.cluster.fixtures"]

COUNT = int(os.environ.get("ELASTICDL_STORM", "6"))
SEED = int(os.environ.get("ELASTICDL_STORM_SEED", "2659"))
WORKERS = 4
GPUS = 3  # of each of the two nodes
STEPS_PER_DISTURBANCE = 100  # more than are made at the pace of a storm
LONGEST_OUTAGE = 2.0


class Disturbance(StrEnum):
    PREEMPT = "something urgent takes a node's GPUs for a while"
    DELETE = "a worker's pod is deleted"
    DELETE_NOW = "a worker's pod is deleted without grace"
    KILL = "a worker gets SIGKILL"
    KILL_POD = "a worker's pod gets SIGKILL"
    TERM_POD = "a worker's pod gets SIGTERM"
    FREEZE_NODE = "a node is cut off until it counts as not ready"
    LOSE_NODE = "a node loses its power, and another comes in its place"
    RESTART_API_SERVER = "the API server crashes and comes back"
    KILL_MASTER = "the master gets SIGKILL"
    DELETE_MASTER = "the master's pod is deleted"
    DELETE_MASTER_NOW = "the master's pod is deleted without grace"


# The rare ones take long: until a node counts as lost, or, with each death more, until a Job starts the next master.
WEIGHTS = dict.fromkeys(Disturbance, 6) | {
    Disturbance.FREEZE_NODE: 2,
    Disturbance.LOSE_NODE: 2,
    Disturbance.KILL_MASTER: 1,
}


class Storm:
    """Brings disturbances about, each when it can be borne: one worker that holds the state is always left in peace.

    ``rng`` decides when they come, and whom they befall.
    """

    def __init__(self, rng: random.Random, job: WatchedJob, cluster: Cluster) -> None:
        self._rng = rng
        self._job = job
        self._cluster = cluster
        self._pods = Pods(job.core, job.namespace, cluster.image)
        self._urgent: dict[str, float] = {}  # those pods, and the step from which they are not needed
        self._hit: set[int] = set()  # workers that were disturbed
        self.story: list[str] = []

    def bring(self, kind: Disturbance) -> None:
        job, after, pick = self._job, self._rng.randint(1, 8), self._rng.random()
        job.wait_for_step(job.step() + after)
        whole = kind in (Disturbance.FREEZE_NODE, Disturbance.LOSE_NODE, Disturbance.PREEMPT)
        self.end_urgent(float("inf") if whole else job.step())
        workers = self._wait_for_standing(WORKERS if whole else 2)
        self.story.append(f"step {job.step()}: {kind}")
        match kind:
            case Disturbance.PREEMPT:
                self._preempt(job.step() + 5 * after)
            case Disturbance.FREEZE_NODE | Disturbance.LOSE_NODE:
                nodes = self._cluster.node_names
                self._cut_off(kind, nodes[int(pick * len(nodes))], workers)
            case Disturbance.RESTART_API_SERVER:
                self._cluster.restart_api_server(LONGEST_OUTAGE * pick)
            case Disturbance.KILL_MASTER | Disturbance.DELETE_MASTER | Disturbance.DELETE_MASTER_NOW:
                master = wait_for(
                    "a master", lambda: [pod for pod in job.running("master") if job.process(pod)], job.describe
                )
                self._end(kind, master[0])
            case _:
                number = sorted(workers)[int(pick * len(workers))]
                self._note(number)
                self._end(kind, workers[number], number)

    def end_urgent(self, step: float = float("inf")) -> None:
        for name in [name for name, until in self._urgent.items() if until <= step]:
            self._pods.delete(name, grace_period_seconds=0)
            del self._urgent[name]

    def _wait_for_standing(self, least: int) -> dict[int, Any]:
        """The pods of members that hold the state and were left in peace so far, once they are so many."""

        def standing() -> dict[int, Any] | None:
            together = self._job.together() - self._hit
            found = {number: pod for number, pod in self._job.workers().items() if number in together}
            return found if len(found) >= least else None

        return wait_for(f"{least} workers that train", standing, self._job.describe)

    def _end(self, kind: Disturbance, pod: Any, worker: int = -1) -> None:
        match kind:
            case Disturbance.DELETE | Disturbance.DELETE_MASTER:
                self._pods.delete(pod.metadata.name)
            case Disturbance.DELETE_NOW | Disturbance.DELETE_MASTER_NOW:
                self._pods.delete(pod.metadata.name, grace_period_seconds=0)
            case Disturbance.KILL:
                self._job.worker_process(worker).kill()
            case _:
                process = self._job.process(pod)
                assert process, f"there is no process of pod {pod.metadata.name}"
                process.send_signal(signal.SIGTERM if kind is Disturbance.TERM_POD else signal.SIGKILL)

    def _preempt(self, until_step: int) -> None:
        """All GPUs of a node are needed, on whichever the scheduler thinks best."""
        name, job = f"urgent-{len(self.story)}", self._job
        self._pods.create(name, {"command": ["sleep", "1000"]}, gpus=GPUS, priorityClassName=f"urgent-{job.namespace}")
        self._urgent[name] = until_step
        read = job.core.read_namespaced_pod
        wait_for("the urgent pod to run", lambda: is_running(read(name, job.namespace)), job.describe)
        self._note(*(job.together() - job.workers().keys()))

    def _cut_off(self, kind: Disturbance, node: str, workers: dict[int, Any]) -> None:
        """Of a frozen one the workers train on, and its master decides, until another one is there."""
        self._note(*(number for number, pod in workers.items() if pod.spec.node_name == node))
        freezes = kind is Disturbance.FREEZE_NODE
        self._cluster.freeze_node(node) if freezes else self._cluster.lose_node(node)
        try:
            wait_for(f"node {node} to be given up", lambda: self._is_given_up(node), self._job.describe)
        finally:
            self._cluster.thaw_node(node) if freezes else self._cluster.add_node(node, GPUS)
        self._cluster.wait_for_node(node)

    def _is_given_up(self, node: str) -> bool:
        found: Any = self._job.core.read_node(node)
        ready = next(each.status for each in found.status.conditions if each.type == "Ready")
        pods = [*self._job.running("worker"), *self._job.running("master")]
        return ready != "True" and not any(pod.spec.node_name == node for pod in pods)

    def _note(self, *workers: int) -> None:
        self._hit |= set(workers)
        if workers:
            self.story[-1] += f" (workers {', '.join(map(str, sorted(workers)))})"


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * COUNT)  # that long only on a machine that has much else to do
def test_a_storm_does_not_show_in_the_training(own_cluster: Cluster, namespace: str, tmp_path: Path):
    before = objects_in(own_cluster, namespace)
    job = WatchedJob(own_cluster, namespace, "storm", tmp_path, -(-COUNT * STEPS_PER_DISTURBANCE // STEPS_PER_EPOCH))
    rng = random.Random(SEED)
    storm = Storm(rng, job, own_cluster)
    with priority_classes(own_cluster, namespace, urgent=1000):
        job.submit("--num_workers", f"2-{WORKERS}", seconds_per_step=0.3)
        try:
            for kind in list(each_kind_first(rng, WEIGHTS, COUNT)):  # each before any a second time
                storm.bring(kind)
            storm.end_urgent()
            journal = job.finish()
            job.check_training()
            assert [entry["event"] for entry in journal].count("job_started") == 1
            check_journal(journal)
        except BaseException:  # a failure comes with all that is needed to understand it, and to bring it about again
            print(f"seed {SEED}, {len(storm.story)} of {COUNT} disturbances:", *storm.story, job.describe(), sep="\n")
            raise
        job.elasticdl.delete(job.name)
    assert objects_in(own_cluster, namespace) == before
