"""How soon a GPU that is freed trains, and how soon one that is taken away is free; on a real control plane.

    python -m benchmarks.reclaim_lag [--workers 2] [--repetitions 20] [--model 1m]
                                     [--cluster kubeconfig --node NAME --image IMAGE]

A job trains on all GPUs of a node. A pod of higher priority that needs one GPU comes, whereupon the scheduler preempts a
worker; it stays for a while and goes, whereupon the worker's replacement, which has waited, gets the GPU and joins.
With --cluster kubeconfig the node must have exactly as many free GPUs as there are to be workers, and its clock
must be right: the times are the watch's, the journal's and the workers' own.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from benchmarks.cluster_job import ClusterJob, started_in
from benchmarks.clusters import GPU, KUBECONFIG, Place, add_cluster, end_cleanly, free_gpus, opened, priority_class
from benchmarks.harness import Results, add_out, busy_cores, describe_machine, show_table, summarise
from benchmarks.models import LAYERS
from benchmarks.pod_times import Fact, PodTimes, Times
from benchmarks.processes import Failed, Processes, wait_until
from elasticdl.kube.manifests.names import worker_name
from tests.cluster.build import Unavailable
from tests.cluster.control_plane import ControlPlaneError

JOB = NODE = "lag"
PRIORITY = 1000
START_SECONDS = 180.0  # to import, warm up and join, several at once
EVENT_SECONDS = 90.0
HOST_LABEL = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds from a worker's notice until its GPU is free, and its pod's object gone."""

    step: float  # from the notice to the end of its last step
    leave: float  # until it has left its world and taken leave of the master
    exit: float  # until its process has ended, and its node has told of it
    object: float  # to the end of its pod's object
    total: float


@dataclass(frozen=True, slots=True)
class Given:
    """Seconds from a GPU's being free, which it is when its pod has ended, to the first step of its new worker."""

    scheduler: float  # until the scheduler has bound the worker's pod
    start: float  # until its process is started
    warm_up: float  # until it is ready: imports, connecting, a step on a model that is thrown away
    join: float  # until its first step in a world is done
    total: float


KINDS: dict[str, type[Taken] | type[Given]] = {"taken": Taken, "given": Given}
TITLES = {
    "taken": "From a preemption's notice until the GPU is free",
    "given": "From a freed GPU to its new worker's first step",
}


@dataclass(frozen=True, slots=True)
class Intruder:
    """The pod of higher priority that takes a GPU of a node."""

    place: Place
    priority_class: str
    node: str

    def come(self, name: str) -> None:
        one = {"name": "main", "image": self.place.image, "command": ["sleep", "3600"]}
        spec = {
            "restartPolicy": "Never",
            "priorityClassName": self.priority_class,
            "nodeSelector": {HOST_LABEL: self.node},
            "containers": [{**one, "resources": {"limits": {GPU: "1"}}}],
        }
        self.place.core.create_namespaced_pod(self.place.namespace, {"metadata": {"name": name}, "spec": spec})

    def go(self, name: str) -> None:
        self.place.core.delete_namespaced_pod(name, self.place.namespace, grace_period_seconds=1)


@dataclass(frozen=True, slots=True)
class Run:
    """One job that trains, what happens to the pods, and who disturbs it."""

    job: ClusterJob
    times: PodTimes
    intruder: Intruder
    workers: int

    def disturb(self, number: int, hold: float) -> tuple[Taken, Given]:
        """Take one GPU away and give it back after ``hold`` seconds.

        Raises:
            Failed: something of it did not come in time.
        """
        since, name = time.time(), f"intruder-{number}"
        self.intruder.come(name)
        victim = self._pod(lambda times: times.get(Fact.NOTICE, 0.0) > since, "a worker is told to leave")
        self._wait(victim, Fact.GONE)
        self._wait(name, Fact.RUNNING)
        taken = self._taken(victim)
        time.sleep(hold)
        self.intruder.go(name)
        self._wait(name, Fact.GONE)
        newcomer = self._pod(lambda times: times.get(Fact.RUNNING, 0.0) > since, "a new worker runs")
        return taken, self._given(newcomer, self.times.of(name)[Fact.ENDED])

    def settle(self) -> None:
        """Wait for the world of all.

        Raises:
            Failed: it did not come in time.
        """

        def whole() -> bool:
            self.job.raise_if_over()
            worlds = [entry for entry in self.job.journal.read() if entry["event"] == "world_formed"]
            return bool(worlds) and len(worlds[-1]["members"]) == self.workers

        wait_until(whole, START_SECONDS, f"a world of {self.workers}")

    def _wait(self, pod: str, fact: Fact) -> None:
        self.times.wait(lambda name, times: name == pod and fact in times, EVENT_SECONDS, f"{pod} is {fact}")

    def _pod(self, wanted: Callable[[Times], bool], what: str) -> str:
        """The name of the first pod for workers of which it is so."""
        prefix = worker_name(JOB, 0).removesuffix("0")
        return self.times.wait(lambda name, times: name.startswith(prefix) and wanted(times), EVENT_SECONDS, what)

    def _worker(self, pod: str) -> int:
        """The last that was started there, so far."""
        self.job.journal.wait(started_in(pod), 0, START_SECONDS, f"a worker is started in {pod}")
        return int([entry for entry in self.job.journal.read() if started_in(pod)(entry)][-1]["worker"])

    def _taken(self, pod: str) -> Taken:
        times, victim = self.times.of(pod), self._worker(pod)
        step, left = (self.job.mark(name, victim, EVENT_SECONDS)["time"] for name in ("last_step", "left"))
        notice, ended, gone = times[Fact.NOTICE], times[Fact.ENDED], times[Fact.GONE]
        return Taken(step - notice, left - step, ended - left, gone - ended, gone - notice)

    def _given(self, pod: str, freed: float) -> Given:
        newcomer = self._worker(pod)

        def ready(entry: dict[str, Any]) -> bool:
            return bool(entry["event"] == "worker_ready" and entry["worker"] == newcomer)

        warm = self.job.journal.wait(ready, 0, START_SECONDS, f"worker {newcomer} is ready")["time"]
        step = self.job.mark("first_step", newcomer, START_SECONDS)["time"]
        times = self.times.of(pod)
        bound, running = times[Fact.BOUND], times[Fact.RUNNING]
        return Given(bound - freed, running - bound, warm - running, step - warm, step - freed)


def main() -> int:
    args = parse()
    results = Results("reclaim_lag", args.out)
    print(describe_machine(results.machine))
    end_cleanly()
    samples: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    try:
        with opened(args, {NODE: args.workers}) as place:
            check_node(place, args)
            with priority_class(place, PRIORITY) as urgent, running(place, urgent, args) as run:
                measure(run, args, results, samples)
    except (Failed, Unavailable, ControlPlaneError, client.ApiException, config.ConfigException, OSError) as error:
        reason = " ".join(str(error).split())
        results.add("failure", reason=reason)
        print(f"reclaim_lag: {reason}", file=sys.stderr)
    report(samples, results)
    print(f"results: {results.path}")
    return 0 if len(samples["given"]) == args.repetitions else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--model", choices=list(LAYERS), default="1m")
    parser.add_argument(
        "--step",
        type=float,
        default=0.1,
        help="seconds that a step takes at least, so that workers without GPUs leave the machine time for the newcomer",
    )
    parser.add_argument("--settle", type=float, default=2.0, help="seconds of training before each disturbance")
    parser.add_argument(
        "--hold",
        type=float,
        default=5.0,
        help="seconds, half as long to half as long again, for which the GPU is taken away",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--node", default=NODE, help="of the given cluster")
    add_cluster(parser)
    add_out(parser)
    args = parser.parse_args()
    if args.workers < 2:
        parser.error("--workers: at least 2, since one is taken away")
    return args


def check_node(place: Place, args: argparse.Namespace) -> None:
    """Raises:
    Failed: its free GPUs are not as many as there are to be workers.
    """
    if args.cluster == KUBECONFIG and (free := free_gpus(place.core, args.node)) != args.workers:
        raise Failed(f"node {args.node} has {free} free GPUs: give --workers {free}, or another --node")


@contextmanager
def running(place: Place, urgent: str, args: argparse.Namespace) -> Iterator[Run]:
    """The job, deleted at the end."""
    times = PodTimes(time.time)
    with (
        tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as scratch,
        Processes(Path(scratch)) as processes,
        times.watching(place.api, place.namespace),
    ):
        template = Path(scratch) / "template.yaml"
        template.write_text(yaml.safe_dump({"spec": {"nodeSelector": {HOST_LABEL: args.node}}}))
        options = {
            "num_workers": f"1-{args.workers}",
            "worker_resource_request": "cpu=0.1,memory=256Mi,gpu=1",
            "pod_template": str(template),
        }
        job = ClusterJob(JOB, place, processes)
        program = ["python", "-m", "benchmarks.loops.marked_steps", "--model", args.model, "--step", str(args.step)]
        job.submit(options, program)
        job.follow_logs()
        yield Run(job, times, Intruder(place, urgent, args.node), args.workers)
        job.delete()


def measure(run: Run, args: argparse.Namespace, results: Results, samples: dict[str, list[Any]]) -> None:
    """Raises:
    Failed: it did not come to its end; ``samples`` has what was measured before.
    """
    rng = random.Random(args.seed)
    for number in range(args.repetitions):
        run.settle()
        time.sleep(args.settle * (0.5 + rng.random()))
        before = busy_cores(0.2)
        found: tuple[Taken | Given, ...] = run.disturb(number, args.hold * (0.5 + rng.random()))
        for kind, sample in zip(KINDS, found, strict=True):
            samples[kind].append(sample)
            results.add("lag", event=kind, repetition=number, busy_cores_before=before, **asdict(sample))
            parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.2f}" for name, seconds in asdict(sample).items())
            print(f"{kind} #{number + 1}: {parts} s", flush=True)


def report(samples: dict[str, list[Any]], results: Results) -> None:
    for kind, found in samples.items():
        if not found:
            continue
        summaries = {part.name: summarise(getattr(each, part.name) for each in found) for part in fields(KINDS[kind])}
        results.add("summary", event=kind, **summaries)
        rows = [
            [
                name.replace("_", " "),
                str(part.n),
                *(f"{value:.2f}" for value in (part.median, part.p95, part.minimum, part.maximum)),
            ]
            for name, part in summaries.items()
        ]
        show_table(TITLES[kind], ["seconds", "n", "median", "p95", "min", "max"], rows)


if __name__ == "__main__":
    sys.exit(main())
