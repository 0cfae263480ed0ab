"""A job in a storm: pods, processes, nodes, the API server and the master are disturbed, and the training does not show it.

The storm is made from a seed. `make test-all` has a short one; the whole one, or another, is had with

    ELASTICDL_STORM=60 ELASTICDL_STORM_SEED=2 make test-all ARGS="-k storm"
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_kit import STEPS_PER_EPOCH, WatchedJob, objects_in, priority_classes, wait_for

from benchmarks.storm.schedule import each_kind_first
from benchmarks.storm.training import check_journal
from tests.cluster.cluster import Cluster

pytest_plugins = ["tests.cluster.fixtures"]

COUNT = int(os.environ.get("ELASTICDL_STORM", "6"))
SEED = int(os.environ.get("ELASTICDL_STORM_SEED", "2659"))
WORKERS = 4
GPUS = 3  # of each of the two nodes
STEPS_PER_DISTURBANCE = 100  # more than are made at the pace of a storm
LONGEST_OUTAGE = 2.0


class Kind(StrEnum):
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
WEIGHTS = dict.fromkeys(Kind, 6) | {Kind.FREEZE_NODE: 2, Kind.LOSE_NODE: 2, Kind.KILL_MASTER: 1}
OF_NODES = (Kind.FREEZE_NODE, Kind.LOSE_NODE)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """``after``: steps since the one before. ``pick``: from 0 to 1, chooses whom it befalls."""

    kind: Kind
    after: int
    pick: float

    def choose(self, options: list[Any]) -> Any:
        return options[int(self.pick * len(options))]


def schedule(seed: int, count: int) -> list[Disturbance]:
    """Each kind before any a second time, then in any order."""
    rng = random.Random(seed)
    return [Disturbance(kind, rng.randint(1, 8), rng.random()) for kind in each_kind_first(rng, WEIGHTS, count)]


def test_a_schedule_is_a_function_of_its_seed():
    assert schedule(1, 60) == schedule(1, 60) != schedule(2, 60)
    assert {each.kind for each in schedule(3, len(Kind))} == set(Kind)
    assert len(schedule(3, 60)) == 60


class Storm:
    """Brings disturbances about, each when it can be borne: one worker that holds the state is always left in peace."""

    def __init__(self, job: WatchedJob, cluster: Cluster) -> None:
        self._job = job
        self._cluster = cluster
        self._urgent: list[tuple[int, str]] = []  # those pods, and the step from which they are not needed
        self._hit: set[int] = set()  # workers that were disturbed
        self.story: list[str] = []

    def bring(self, disturbance: Disturbance) -> None:
        job, kind = self._job, disturbance.kind
        job.wait_for_step(job.step() + disturbance.after)
        self._end_urgent(job.step())
        if kind in OF_NODES or kind is Kind.PREEMPT:
            self._end_urgent()
            workers = self._wait_for_standing(WORKERS)
        else:
            workers = self._wait_for_standing(2)
        self.story.append(f"step {job.step()}: {kind}")
        match kind:
            case Kind.PREEMPT:
                self._preempt(job.step() + 5 * disturbance.after)
            case Kind.DELETE | Kind.DELETE_NOW | Kind.KILL | Kind.KILL_POD | Kind.TERM_POD:
                self._disturb_worker(kind, disturbance.choose(sorted(workers)), workers)
            case Kind.FREEZE_NODE:
                self._freeze(disturbance.choose(self._cluster.node_names), workers)
            case Kind.LOSE_NODE:
                self._lose(disturbance.choose(self._cluster.node_names), workers)
            case Kind.RESTART_API_SERVER:
                self._cluster.restart_api_server(LONGEST_OUTAGE * disturbance.pick)
            case _:
                self._disturb_master(kind)

    def end(self) -> None:
        self._end_urgent()

    def _wait_for_standing(self, least: int) -> dict[int, Any]:
        """The pods of members that hold the state and were left in peace so far, once they are so many."""

        def standing() -> dict[int, Any] | None:
            together = self._job.together() - self._hit
            if len(together) < least:
                return None
            found = {number: pod for number, pod in self._job.workers().items() if number in together}
            return found if len(found) >= least else None

        return wait_for(f"{least} workers that train", standing, self._job.describe)

    def _disturb_worker(self, kind: Kind, number: int, workers: dict[int, Any]) -> None:
        pod = workers[number]
        self._note(number)
        match kind:
            case Kind.DELETE:
                self._job.core.delete_namespaced_pod(pod.metadata.name, self._job.namespace)
            case Kind.DELETE_NOW:
                self._job.core.delete_namespaced_pod(pod.metadata.name, self._job.namespace, grace_period_seconds=0)
            case Kind.KILL:
                self._job.worker_process(number).kill()
            case _:
                process = self._job.process(pod)
                assert process, f"there is no process of worker {number}'s pod"
                process.send_signal(signal.SIGKILL if kind is Kind.KILL_POD else signal.SIGTERM)

    def _disturb_master(self, kind: Kind) -> None:
        job = self._job

        def found() -> tuple[Any, psutil.Process] | None:
            return next(((pod, process) for pod in job.masters() if (process := job.process(pod))), None)

        master, process = wait_for("a master", found, job.describe)
        if kind is Kind.KILL_MASTER:
            process.send_signal(signal.SIGKILL)
            return
        grace = {} if kind is Kind.DELETE_MASTER else {"grace_period_seconds": 0}
        job.core.delete_namespaced_pod(master.metadata.name, job.namespace, **grace)

    def _preempt(self, until_step: int) -> None:
        """All GPUs of a node are needed, on whichever the scheduler thinks best."""
        name, namespace = f"urgent-{len(self.story)}", self._job.namespace
        gpus = {"limits": {"nvidia.com/gpu": str(GPUS)}}
        main = {"name": "main", "image": self._cluster.image, "command": ["sleep", "1000"], "resources": gpus}
        spec = {"containers": [main], "restartPolicy": "Never", "priorityClassName": f"urgent-{namespace}"}
        self._job.core.create_namespaced_pod(namespace, {"metadata": {"name": name}, "spec": spec})
        self._urgent.append((until_step, name))

        def runs() -> bool:
            return self._job.core.read_namespaced_pod(name, namespace).status.phase == "Running"

        wait_for("the urgent pod to run", runs, self._job.describe)
        self._note(*(self._job.together() - self._job.workers().keys()))

    def _end_urgent(self, step: float = float("inf")) -> None:
        for each in [each for each in self._urgent if each[0] <= step]:
            self._job.core.delete_namespaced_pod(each[1], self._job.namespace, grace_period_seconds=0)
            self._urgent.remove(each)

    def _freeze(self, node: str, workers: dict[int, Any]) -> None:
        """Its workers train on meanwhile, and so does its master decide, until another one is there."""
        self._note(*_on(node, workers))
        self._cluster.freeze_node(node)
        try:
            self._wait_until_given_up(node)
        finally:
            self._cluster.thaw_node(node)
        self._cluster.wait_for_node(node)

    def _lose(self, node: str, workers: dict[int, Any]) -> None:
        self._note(*_on(node, workers))
        self._cluster.lose_node(node)
        try:
            self._wait_until_given_up(node)
        finally:
            self._cluster.add_node(node, GPUS)

    def _wait_until_given_up(self, node: str) -> None:
        def is_given_up() -> bool:
            found: Any = self._job.core.read_node(node)
            ready = next(each.status for each in found.status.conditions if each.type == "Ready")
            pods = [*self._job.running("worker"), *self._job.masters()]
            return ready != "True" and not any(pod.spec.node_name == node for pod in pods)

        wait_for(f"node {node} to be given up", is_given_up, self._job.describe)

    def _note(self, *workers: int) -> None:
        self._hit |= set(workers)
        if workers:
            self.story[-1] += f" (workers {', '.join(map(str, sorted(workers)))})"


def _on(node: str, workers: dict[int, Any]) -> list[int]:
    return [number for number, pod in workers.items() if pod.spec.node_name == node]


@contextmanager
def _told(storm: Storm, job: WatchedJob) -> Iterator[None]:
    """A failure comes with all that is needed to understand it, and to bring it about again."""
    try:
        yield
    except BaseException:
        print(f"seed {SEED}, {len(storm.story)} of {COUNT} disturbances:", *storm.story, job.describe(), sep="\n")
        raise


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * COUNT)  # that long only on a machine that has much else to do
def test_a_storm_does_not_show_in_the_training(own_cluster: Cluster, namespace: str, tmp_path: Path):
    before = objects_in(own_cluster, namespace)
    job = WatchedJob(own_cluster, namespace, "storm", tmp_path, -(-COUNT * STEPS_PER_DISTURBANCE // STEPS_PER_EPOCH))
    storm = Storm(job, own_cluster)
    with priority_classes(own_cluster, namespace, urgent=1000), _told(storm, job):
        job.submit("--num_workers", f"2-{WORKERS}", seconds_per_step=0.3)
        for disturbance in schedule(SEED, COUNT):
            storm.bring(disturbance)
        storm.end()
        journal = job.finish()
        job.check_training()
        assert [entry["event"] for entry in journal].count("job_started") == 1
        check_journal(journal)
        job.delete()
    assert objects_in(own_cluster, namespace) == before
