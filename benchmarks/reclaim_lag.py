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
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.experiments.lab import Lab, open_lab, refusals
from benchmarks.experiments.options import ClusterKind, Options, add_cluster, read_cluster, run
from benchmarks.experiments.pods import Fact, PodTimes, Times, gpu_capacity, held_gpus
from benchmarks.experiments.training import Followed
from benchmarks.harness import Parser, Results, add_out, busy_cores, show_summaries, summarise_fields
from benchmarks.job import flags_of
from benchmarks.models import LAYERS
from benchmarks.processes import Failed, Processes, wait_until
from elasticdl.common.errors import UserError
from elasticdl.job.journal import Entry
from elasticdl.job.quantities import GPU
from elasticdl.kube.manifests.names import worker_name

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


TITLES = {
    "taken": "From a preemption's notice until the GPU is free",
    "given": "From a freed GPU to its new worker's first step",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One job that trains on a node, what happens to the pods, and a pod of higher priority that takes a GPU."""

    lab: Lab
    job: Followed
    times: PodTimes
    node: str
    priority_class: str

    def disturb(self, number: int, hold: float) -> tuple[Taken, Given]:
        """Take one GPU away and give it back after ``hold`` seconds.

        Raises:
            Failed: something of it did not come in time.
        """
        since, intruder = time.time(), f"intruder-{number}"
        self._intrude(intruder)
        victim = self._worker_pod(lambda times: times.get(Fact.NOTICE, 0.0) > since, "a worker is told to leave")
        self._wait(victim, Fact.GONE)
        self._wait(intruder, Fact.RUNNING)
        taken = self._taken(victim)
        time.sleep(hold)
        self.lab.core.delete_namespaced_pod(intruder, self.lab.namespace, grace_period_seconds=1)
        self._wait(intruder, Fact.GONE)
        newcomer = self._worker_pod(lambda times: times.get(Fact.RUNNING, 0.0) > since, "a new worker runs")
        return taken, self._given(newcomer, self.times.all()[intruder][Fact.ENDED])

    def _intrude(self, name: str) -> None:
        image, gpu = self.lab.options.image, {"limits": {GPU: "1"}}
        pod: Any = {
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "priorityClassName": self.priority_class,
                "nodeSelector": {HOST_LABEL: self.node},
                "containers": [{"name": "main", "image": image, "command": ["sleep", "3600"], "resources": gpu}],
            },
        }
        self.lab.core.create_namespaced_pod(self.lab.namespace, pod)

    def _wait(self, pod: str, fact: Fact) -> None:
        self.times.find(lambda name, times: name == pod and fact in times, EVENT_SECONDS, f"{pod} is {fact}")

    def _worker_pod(self, wanted: Callable[[Times], bool], what: str) -> str:
        """The name of the first pod for workers of which it is so."""
        prefix = worker_name(JOB, 0).removesuffix("0")
        return self.times.find(lambda name, times: name.startswith(prefix) and wanted(times), EVENT_SECONDS, what)

    def _worker(self, pod: str) -> int:
        """The last that was started there, so far."""

        def started(entry: Entry) -> bool:
            return bool(entry["event"] == "worker_started" and entry["place"] == pod)

        self.job.journal.wait(started, 0, START_SECONDS, f"a worker is started in {pod}")
        return int([entry for entry in self.job.journal.read() if started(entry)][-1]["worker"])

    def _mark(self, name: str, worker: int, seconds: float) -> float:
        """When a worker printed the first such mark (`benchmarks.loops.records.Marks`)."""
        found: list[float] = []

        def printed() -> bool:
            said = (line.partition("| ")[2] for line in self.job.log_lines())
            marks = (json.loads(text) for text in said if text.startswith('{"mark"'))
            found.extend(mark["time"] for mark in marks if (mark["mark"], mark["worker"]) == (name, worker))
            return bool(found)

        wait_until(printed, seconds, f"the {name.replace('_', ' ')} of worker {worker}")
        return found[0]

    def _taken(self, pod: str) -> Taken:
        times, victim = self.times.all()[pod], self._worker(pod)
        step, left = (self._mark(name, victim, EVENT_SECONDS) for name in ("last_step", "left"))
        notice, ended, gone = times[Fact.NOTICE], times[Fact.ENDED], times[Fact.GONE]
        return Taken(step - notice, left - step, ended - left, gone - ended, gone - notice)

    def _given(self, pod: str, freed: float) -> Given:
        newcomer = self._worker(pod)

        def ready(entry: Entry) -> bool:
            return bool(entry["event"] == "worker_ready" and entry["worker"] == newcomer)

        warm = self.job.journal.wait(ready, 0, START_SECONDS, f"worker {newcomer} is ready")["time"]
        step = self._mark("first_step", newcomer, START_SECONDS)
        times = self.times.all()[pod]
        bound, running = times[Fact.BOUND], times[Fact.RUNNING]
        return Given(bound - freed, running - bound, warm - running, step - warm, step - freed)


def main() -> int:
    parser = Parser("reclaim_lag", __doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--model", choices=list(LAYERS), default="1m")
    step = "seconds that a step takes at least, so that workers without GPUs leave the machine time for the newcomer"
    parser.add_argument("--step", type=float, default=0.1, help=step)
    parser.add_argument("--settle", type=float, default=2.0, help="seconds of training before each disturbance")
    hold = "seconds, half as long to half as long again, for which the GPU is taken away"
    parser.add_argument("--hold", type=float, default=5.0, help=hold)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--node", default=NODE, help="of the given cluster")
    add_cluster(parser)
    add_out(parser)
    args = parser.parse_args()
    if args.workers < 2:
        parser.error("--workers: at least 2, since one is taken away")
    return run(parser, lambda: measure(args))


def measure(args: argparse.Namespace) -> None:
    """Raises:
    UserError: there is no such cluster, or its node has other free GPUs.
    Failed: it did not come to its end; what was measured before is in the results.
    """
    options = Options(**read_cluster(args))
    results = Results("reclaim_lag", args.out)
    samples: dict[str, list[Any]] = {kind: [] for kind in TITLES}
    rng = random.Random(args.seed)
    try:
        with open_lab(options, args.workers, {NODE: args.workers}) as lab, running(lab, args) as course:
            for number in range(args.repetitions):
                course.job.wait_for_world(args.workers, START_SECONDS)
                time.sleep(args.settle * (0.5 + rng.random()))
                before = busy_cores(0.2)
                found: tuple[Taken | Given, ...] = course.disturb(number, args.hold * (0.5 + rng.random()))
                for kind, sample in zip(TITLES, found, strict=True):
                    samples[kind].append(sample)
                    results.add("lag", event=kind, repetition=number, busy_cores_before=before, **asdict(sample))
                    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in asdict(sample).items())
                    print(f"{kind} #{number + 1}: {parts} s", flush=True)
    except Failed as failure:
        results.add("failure", reason=str(failure))
        raise
    finally:
        report(samples, results)


@contextmanager
def running(lab: Lab, args: argparse.Namespace) -> Iterator[Run]:
    """The job, deleted at the end.

    Raises:
        UserError: the node's free GPUs are not as many as there are to be workers.
    """
    if lab.options.cluster is ClusterKind.KUBECONFIG and (free := free_gpus(lab, args.node)) != args.workers:
        raise UserError(f"node {args.node} has {free} free GPUs: give --workers {free}, or another --node")
    times = PodTimes(lab.core, lab.namespace)
    with tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as folder, Processes(Path(folder)) as processes, times:
        template = Path(folder) / "template.yaml"
        template.write_text(yaml.safe_dump({"spec": {"nodeSelector": {HOST_LABEL: args.node}}}))
        given = {
            "num_workers": f"1-{args.workers}",
            "worker_resource_request": "cpu=0.1,memory=256Mi,gpu=1",
            "pod_template": template,
        }
        program = ["python", "-m", "benchmarks.loops.library", "library", "--record", "marks"]
        program += flags_of({"model": args.model, "step": args.step, "folder": "/tmp"})
        lab.submit(JOB, [*flags_of(given), "--", *program], "run")
        job = Followed(lab, JOB, processes)
        job.follow_logs()
        yield Run(lab, job, times, args.node, lab.make_priority_class(JOB, PRIORITY))
        lab.delete(JOB)


def free_gpus(lab: Lab, node: str) -> int:
    """Of a node, those that no pod has."""
    with refusals(f"look at node {node}"):
        listed: Any = lab.core.list_pod_for_all_namespaces(
            field_selector=f"spec.nodeName={node}", _preload_content=False
        )
        return gpu_capacity(lab.core).get(node, 0) - sum(map(held_gpus, json.loads(listed.data)["items"]))


def report(samples: dict[str, list[Any]], results: Results) -> None:
    for kind, found in samples.items():
        if found:
            summaries = summarise_fields(found)
            results.add("summary", event=kind, **summaries)
            show_summaries(TITLES[kind], {"seconds": summaries})
    print(f"results: {results.path}")


if __name__ == "__main__":
    sys.exit(main())
