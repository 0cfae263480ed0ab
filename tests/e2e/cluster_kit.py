"""Jobs on a cluster under test: submitted by the command line, read from what their workers and pods leave behind."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from kubernetes import client
from running_job import last_commit, run_cli

from benchmarks.storm.training import BATCH, STEPS_PER_EPOCH, compare
from benchmarks.storm.zoo import watched_softmax
from elasticdl.cli.namespace_job import NamespaceJob
from elasticdl.job.journal import Entry
from elasticdl.kube.client import Client
from tests.cluster.cluster import Cluster
from tests.cluster.kit import is_running
from tests.waiting import wait_until

ZOO = Path(watched_softmax.__file__).parent
# Nothing should take this long, even on a busy machine; a test that waits for less would only be flaky.
DEADLINE = 200.0

# What a job consists of. Every namespace has some of its own: of those only the job's are meant.
KINDS = ("Pod", "Job", "Service", "Secret", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy")


class CommandLine:
    """Runs `elasticdl ARGUMENTS` in a namespace of a cluster, to its end."""

    def __init__(self, kubeconfig: Path, namespace: str, home: Path) -> None:
        self._where = ("--namespace", namespace)
        self._home = home
        self.env = {"KUBECONFIG": str(kubeconfig)}

    def __call__(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return run_cli(self._home, *argv, *self._where, timeout=DEADLINE, env=self.env)

    def journal(self, job: str, event: str = "") -> list[Entry]:
        """All entries, or those of one kind."""
        entries: list[Entry] = list(map(json.loads, self("events", job, "--json").stdout.splitlines()))
        return [entry for entry in entries if event in ("", entry["event"])]

    def delete(self, job: str) -> None:
        done = self("delete", job)
        assert done.stdout == f"job {job} deleted\n", done.stderr


def objects_in(cluster: Cluster, namespace: str) -> set[str]:
    """All that is in a namespace, by kind and name."""
    place = Client(cluster.client(), namespace)
    return {f"{kind}: {each['metadata']['name']}" for kind in KINDS for each in place.list(kind)}


@contextmanager
def priority_classes(cluster: Cluster, suffix: str, **values: int) -> Iterator[None]:
    """Priority classes NAME-SUFFIX; they belong to no namespace."""
    scheduling = client.SchedulingV1Api(cluster.client())
    made = []
    try:
        for name, value in values.items():
            scheduling.create_priority_class({"metadata": {"name": f"{name}-{suffix}"}, "value": value})
            made.append(f"{name}-{suffix}")
        yield
    finally:
        for name in made:
            scheduling.delete_priority_class(name)


def wait_for(what: str, condition: Callable[[], Any], describe: Callable[[], str] = str, poll: float = 0.1) -> Any:
    """What ``condition`` returns, once that is true."""
    return wait_until(condition, lambda: f"{what}\n{describe()}", DEADLINE, poll)


class WatchedJob:
    """A job that trains ``watched_softmax``; what it writes is in ``folder``, which is the job's alone."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, folder: Path, epochs: int) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.epochs = epochs
        self.core = client.CoreV1Api(cluster.client())
        self.elasticdl = CommandLine(cluster.kubeconfig, namespace, folder / "home")
        self._folder = folder
        self._record = folder / "record"
        self._slow = folder / "watched" / "slow"
        self._losses = folder / "watched" / "losses"

    def submit(self, *options: str, seconds_per_step: float) -> None:
        self._losses.mkdir(parents=True)
        self._slow.write_text(str(seconds_per_step))
        watched = f"host_path={self._folder / 'watched'},mount_path=/watched"
        done = self.elasticdl(
            *("train", "--detach", "--image", self.cluster.image, "--job_name", self.name),
            *("--model_zoo", str(ZOO), "--model_def", "watched_softmax", "--num_epochs", str(self.epochs)),
            *("--global_batch_size", str(BATCH), "--sample_record", str(self._record)),
            *("--volume", watched, "--envs", "WATCHED=/watched,OMP_NUM_THREADS=1"),
            *("--worker_resource_request", "cpu=1,memory=1Gi,gpu=1"),
            *options,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def workers(self) -> dict[int, Any]:
        """The pods of the workers that run and are not told to leave."""
        there = {entry["place"]: worker for worker, entry in self._started().items()}
        return {there[pod.metadata.name]: pod for pod in self.running("worker") if pod.metadata.name in there}

    def worker_process(self, worker: int) -> psutil.Process:
        """Its own, not that of its pod: a container of this cluster has no processes of its own."""
        return psutil.Process(self._started()[worker]["pid"])

    def running(self, role: str) -> list[Any]:
        """Pods that run and are not told to leave; for a while after a death there is no master."""
        selector = f"elasticdl.org/job={self.name},elasticdl.org/role={role}"
        found: Any = self.core.list_namespaced_pod(self.namespace, label_selector=selector)
        return list(filter(is_running, found.items))

    def process(self, pod: Any) -> psutil.Process | None:
        """The pod's own process, if it is still there."""
        mark = f"/{self.namespace}_{pod.metadata.name}_{pod.metadata.uid[:8]}/"
        found = []
        for process in psutil.process_iter():
            try:
                root = process.environ().get("ELASTICDL_POD_ROOT", "")
                if mark in root and not any(word.endswith("leash.py") for word in process.cmdline()):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return min(found, key=lambda process: process.create_time(), default=None)

    def commits(self) -> dict[int, Entry]:
        """The last step that each worker has made, those that are gone included."""
        paths = {int(path.stem.removeprefix("worker-")): path for path in self._record.glob("worker-*.jsonl")}
        return {worker: commit for worker, path in paths.items() if (commit := last_commit(path))}

    def together(self) -> set[int]:
        """The workers that have made a step in the newest world in which anybody has."""
        commits = self.commits()
        newest = max((commit["world"] for commit in commits.values()), default=0)
        return {number for number, commit in commits.items() if commit["world"] == newest}

    def step(self) -> int:
        """The newest that any worker has made."""
        return max((commit["commit"] for commit in self.commits().values()), default=0)

    def wait_for_step(self, step: int) -> None:
        wait_for(f"step {step} of job {self.name}", lambda: self.step() >= step, self.describe)

    def describe(self) -> str:
        """For a test that has failed: the end of the journal, and of what the masters said."""
        events = self.elasticdl("events", self.name).stdout.splitlines()[-60:]
        found = (self.cluster.logs / "pods").glob(f"{self.namespace}_{self.name}-master*/*.log")
        logs = sorted(found, key=os.path.getmtime)
        ends = [f"--- {path.parent.name}\n{path.read_text()[-3000:]}" for path in logs[-3:]]
        return "\n".join(["--- journal", *events, *ends])

    def finish(self) -> list[Entry]:
        """Wait until the job has ended, well; its whole journal."""
        self._slow.unlink()  # from now on it is as fast as it can
        master = (f"{self.name}-master", self.namespace)
        read: Any = client.BatchV1Api(self.core.api_client).read_namespaced_job

        def has_ended() -> bool:
            return any(each.type in ("Complete", "Failed") for each in read(*master).status.conditions or ())

        wait_for(f"end of job {self.name}", has_ended, self.describe)
        story = self.elasticdl.journal(self.name)
        end = story[-1]
        assert (end["event"], end["phase"]) == ("job_finished", "succeeded"), self.describe()
        assert end["steps"] == self.epochs * STEPS_PER_EPOCH
        return story

    def _started(self) -> dict[int, Entry]:
        """What the journal tells of the start of each worker that has not left."""
        lines = NamespaceJob(Client(self.core.api_client, self.namespace), self.name).journal()
        entries: list[Entry] = list(map(json.loads, lines))
        left = {entry["worker"] for entry in entries if entry["event"] == "worker_left"}
        return {e["worker"]: e for e in entries if e["event"] == "worker_started" and e["worker"] not in left}

    def check_training(self) -> None:
        """No step or sample was lost or made twice, and every loss that any worker has seen is that of PyTorch alone."""
        compare(self._losses.iterdir(), self._record.glob("worker-*.jsonl"), self.epochs)
