"""Two jobs share six GPUs; something more urgent takes two of them, and gives them back. The training does not show it."""

from contextlib import contextmanager
from itertools import takewhile

import pytest
from cluster_kit import WatchedJob, objects_in, priority_classes, wait_for

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow

EPOCHS = 2
GPUS = 6  # of the cluster; each job would like four


@pytest.fixture
def jobs(own_cluster, namespace, tmp_path):
    """Three workers of each have a class that the fourth ones have not: no job can keep more from the other."""
    with priority_classes(own_cluster, namespace, firm=10, urgent=1000):
        made = [WatchedJob(own_cluster, namespace, name, tmp_path / name, EPOCHS) for name in ("red", "blue")]
        yield made


def training(job):
    """The processes of all workers that run, by id, once each has made a step in one world with the others."""
    together = job.together()
    pods = job.workers() if together else {}
    return {number: job.process(pod) for number, pod in pods.items()} if pods.keys() == together else {}


def everybody_trains(jobs):
    """The same of each job, once all GPUs are put to use."""
    found = {job: training(job) for job in jobs}
    return found if sum(map(len, found.values())) == GPUS else None


@contextmanager
def urgent_pod(job):
    """One that needs two GPUs of one node."""
    name, gpus = "urgent", {"limits": {"nvidia.com/gpu": "2"}}
    main = {"name": "main", "image": job.cluster.image, "command": ["sleep", "1000"], "resources": gpus}
    spec = {"containers": [main], "restartPolicy": "Never", "priorityClassName": f"urgent-{job.namespace}"}
    job.core.create_namespaced_pod(job.namespace, {"metadata": {"name": name}, "spec": spec})
    try:
        yield lambda: job.core.read_namespaced_pod(name, job.namespace).status.phase == "Running"
    finally:
        job.core.delete_namespaced_pod(name, job.namespace, grace_period_seconds=0)


def left(story):
    """The workers that are gone before the training was complete, and why."""
    before = takewhile(lambda entry: entry.get("phase") != "stopping", story)
    return {entry["worker"]: entry for entry in before if entry["event"] == "worker_left"}


@pytest.mark.timeout(600)  # eleven processes import PyTorch, which takes its time on a busy machine
def test_two_jobs_lose_two_workers_to_something_urgent_and_get_them_back(jobs, own_cluster, namespace):
    before = objects_in(own_cluster, namespace)
    for job in jobs:
        options = ("--worker_pod_priority", f"firm-{namespace}=0.75")
        job.submit("--num_workers", "2-4", *options, seconds_per_step=1.0)

    def describe():
        return "\n".join(job.describe() for job in jobs)

    first = wait_for("both jobs to train", lambda: everybody_trains(jobs), describe)
    assert [len(first[job]) for job in jobs] == [3, 3]
    with urgent_pod(jobs[0]) as has_come:
        wait_for("the urgent pod to run", has_come, describe)
        stayed = {job: first[job].keys() & job.workers().keys() for job in jobs}
        for job in jobs:
            if len(stayed[job]) >= 2:  # with fewer it waits for more, as it was told
                job.wait_for_step(job.step() + 2)
    again = wait_for("both jobs to train again", lambda: everybody_trains(jobs), describe)
    stories = {job: job.finish() for job in jobs}
    assert sum(map(len, stayed.values())) == GPUS - 2, "two GPUs were needed"
    for job in jobs:
        for worker in stayed[job]:
            assert again[job][worker] == first[job][worker], f"worker {worker} was started again without need"
        job.check_training()
        check_story(stories[job], first[job].keys() - stayed[job], set(again[job]))
    for job in jobs:
        job.delete()
    assert objects_in(own_cluster, namespace) == before


def check_story(story, preempted, came_back):
    """The journal tells of every worker that had no place, was sent away, was replaced, and let in."""
    of = {name: [entry for entry in story if entry["event"] == name] for name in {entry["event"] for entry in story}}
    gone = left(story)
    by_urgent = {number for number, entry in gone.items() if "urgent" in entry["reason"]}
    assert by_urgent == preempted
    assert {entry["cause"] for entry in gone.values()} <= {"preempted"}
    pending = [entry for entry in of["worker_pending"] if "Insufficient nvidia.com/gpu" in entry["reason"]]
    assert pending, "the fourth worker had no place"
    assert len(of["worker_launched"]) == 4 + len(gone), "nobody is started but for somebody who is gone"
    worlds = of["world_formed"]
    assert [entry["world"] for entry in worlds] == sorted({entry["world"] for entry in worlds})
    assert any(set(entry["members"]) == came_back for entry in worlds)
    if preempted:
        times = {number: entry["time"] for number, entry in gone.items() if number in preempted}
        assert {entry["worker"] for entry in of["worker_draining"]} >= preempted
        assert any(not preempted & set(e["members"]) for e in worlds if e["time"] > min(times.values()))
    assert len(of["job_started"]) == 1
