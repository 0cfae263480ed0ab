"""How a job's master bears many worker pods on a real control plane: its requests, its reaction, its memory.

    python -m benchmarks.kubernetes_scale [--workers 10,100,1000] [--repetitions 1] [--steady 60]

The job is submitted by the command line, and its master is a real pod. The workers' pods are real objects, bound by the
real scheduler to nodes that only report them as running (`benchmarks.hollow_nodes`); sessions are simulated. Then, one
after the other: nothing for a while; the range grows by a tenth; one pod ends by itself; a tenth is deleted at once.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import counted_master
from benchmarks.counted_master import MOUNT, NODES, REQUESTS
from benchmarks.experiments.lab import Lab, open_lab
from benchmarks.experiments.options import Options, add_cluster, read_cluster, run
from benchmarks.experiments.training import Followed
from benchmarks.harness import Parser, Results, add_out, show_summaries, show_table, summarise, summarise_fields
from benchmarks.hollow_nodes import PODS_PER_NODE
from benchmarks.job import flags_of
from benchmarks.master_scale import add_sizes, cpu_of, memory_of, repeat
from benchmarks.processes import Failed, Processes, wait_until
from elasticdl.job.journal import Entry
from elasticdl.kube.manifests.names import CONTAINER

JOB = "scale"
MINUTE = 60.0
THREADS = 8
REACTIONS = ("start", "grow", "one_end", "deletion")
ONE_IN = 10  # joins, and is deleted
TIMEOUT = 600.0
# The simulated workers share one process, and all of it one machine: none shall be taken for frozen because of that.
HEARTBEAT_TIMEOUT = 30.0

Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Reaction:
    """Seconds from a cause to what the master does about it, and what that took.

    ``first`` and ``last``: pods asked for; ``world``: the world decided that is the whole answer, which includes what the
    scheduler and the nodes need for new pods. ``cpu``: seconds of the master's.
    """

    first: float
    last: float
    world: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Sample:
    """``memory`` in MiB, ``steady_cpu`` in cores while only heartbeats come. ``start`` is counted from the master's own."""

    start: Reaction
    grow: Reaction
    one_end: Reaction
    deletion: Reaction
    steady_cpu: float
    memory: float
    worlds: int  # until the first of all workers
    requests: Mapping[str, Counts]  # by what led to them; a steady minute's are per minute


class Requests:
    """What the master has asked of the API server so far; times in seconds since the epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def master(self) -> tuple[float, int] | None:
        """When it was started and its process id, once it is there."""
        lines = self._lines()
        return (float(lines[0]["time"]), int(lines[0]["pid"])) if lines else None

    def between(self, start: float, end: float) -> list[dict[str, Any]]:
        return [request for request in self._lines()[1:] if start <= request["time"] < end]

    def counts(self, start: float, end: float) -> Counts:
        found = Counter(f"{request['verb']} {request['resource']}" for request in self.between(start, end))
        return dict(sorted(found.items()))

    def creations(self, start: float, end: float) -> tuple[float, float]:
        """When the first pod was asked for, and when the last had been taken.

        Raises:
            Failed: none was.
        """
        found = [each for each in self.between(start, end) if (each["verb"], each["resource"]) == ("create", "pods")]
        if not found:
            raise Failed("the master asked for no pod")
        return found[0]["time"], max(each["time"] + each["seconds"] for each in found)

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().rpartition("\n")[0].splitlines()]


class Run:
    """One job of ``workers`` workers and then a tenth more."""

    def __init__(self, lab: Lab, processes: Processes, workers: int) -> None:
        self._lab = lab
        self._workers = workers
        self._tenth = max(1, workers // ONE_IN)
        self._requests = Requests(processes.folder / REQUESTS)
        self._took: dict[str, Counts] = {}
        nodes = -(-(workers + self._tenth) // PODS_PER_NODE)
        arguments = [lab.namespace, JOB, str(nodes), lab.options.kube_context]
        processes.start("nodes", [sys.executable, "-m", "benchmarks.hollow_nodes", *arguments], lab.env)
        options = {
            "num_workers": f"{max(1, workers // 2)}-{workers}",
            "worker_resource_request": "cpu=0.1,memory=1Mi",
            "heartbeat_timeout": f"{HEARTBEAT_TIMEOUT:g}",
            "cluster_spec": counted_master.__file__,
            "volume": f"host_path={processes.folder},mount_path={MOUNT}",
        }
        lab.submit(JOB, [*flags_of(options), "--", "simulated"], "run")
        self._journal = Followed(lab, JOB, processes).journal

    def measure(self, steady: float) -> Sample:
        """Raises:
        Failed: something did not come about in time.
        """
        wait_until(lambda: self._requests.master() is not None, TIMEOUT, "the master's start")
        began, pid = self._requests.master() or (0.0, 0)
        master = psutil.Process(pid)
        start = self._react("start", began, master, 0.0, self._workers)
        worlds, steady_cpu, memory = (
            len(self._journal.of("world_formed")),
            self._rest(steady, master),
            memory_of(master),
        )
        grow, one_end, deletion = self._grow(master), self._end_one(master), self._delete(master)
        return Sample(start, grow, one_end, deletion, steady_cpu, memory, worlds, self._took)

    def _rest(self, seconds: float, master: psutil.Process) -> float:
        """The master's share of a core while nothing happens."""
        began, cpu = time.time(), cpu_of(master)
        time.sleep(seconds)
        lasted = time.time() - began
        counts = self._requests.counts(began, began + lasted)
        self._took["steady"] = {name: round(count * MINUTE / lasted) for name, count in counts.items()}
        return (cpu_of(master) - cpu) / lasted

    def _grow(self, master: psutil.Process) -> Reaction:
        all_now, cpu, mark = self._workers + self._tenth, cpu_of(master), self._journal.mark()
        self._lab.elasticdl("scale", JOB, f"{max(1, self._workers // 2)}-{all_now}")
        asked = self._journal.wait(lambda entry: entry["event"] == "scale_requested", mark, TIMEOUT, "the request")
        return self._react("grow", asked["time"], master, cpu, all_now)

    def _end_one(self, master: psutil.Process) -> Reaction:
        victims = self._victims(1)
        ((worker, pod),) = victims.items()
        container = {"name": CONTAINER, "image": "hollow", "imageID": "", "restartCount": 0, "ready": False}
        container["state"] = {"terminated": {"exitCode": 137, "reason": "Error"}}
        change: Any = {"status": {"phase": "Failed", "containerStatuses": [container]}}
        began, cpu = time.time(), cpu_of(master)
        self._lab.core.patch_namespaced_pod_status(pod, self._lab.namespace, change)
        return self._react("one_end", began, master, cpu, self._workers + self._tenth, {worker})

    def _delete(self, master: psutil.Process) -> Reaction:
        victims = self._victims(self._tenth)
        began, cpu = time.time(), cpu_of(master)

        def delete(pod: str) -> None:
            self._lab.core.delete_namespaced_pod(pod, self._lab.namespace, _preload_content=False)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(delete, victims.values()))
        return self._react("deletion", began, master, cpu, self._workers + self._tenth, set(victims))

    def _victims(self, count: int) -> dict[int, str]:
        """Every so-manieth of the newest world's members, and their pods."""
        members = self._journal.of("world_formed")[-1]["members"]
        pods = {entry["worker"]: entry["place"] for entry in self._journal.of("worker_started")}
        return {worker: pods[worker] for worker in members[:: len(members) // count][:count]}

    def _react(
        self,
        name: str,
        cause: float,
        master: psutil.Process,
        cpu: float,
        size: int,
        without: Sequence[int] | set[int] = (),
    ) -> Reaction:
        """Until there is a world of this size, ``without`` those workers."""

        def wanted(entry: Entry) -> bool:
            answers = entry["event"] == "world_formed" and entry["time"] > cause
            return bool(answers and len(entry["members"]) == size and not {*without} & {*entry["members"]})

        world = self._journal.wait(wanted, 0, TIMEOUT, f"the world after {name}")["time"]
        self._took[name] = self._requests.counts(cause, time.time())
        first, last = self._requests.creations(cause, world)
        return Reaction(first - cause, last - cause, world - cause, cpu_of(master) - cpu)


def main() -> int:
    parser = Parser("kubernetes_scale", __doc__)
    add_sizes(parser, repetitions=1)
    parser.add_argument("--steady", type=float, default=MINUTE, help="seconds of nothing but heartbeats")
    add_cluster(parser)
    add_out(parser)
    args = parser.parse_args()
    return run(parser, lambda: measure_all(args))


def measure_all(args: argparse.Namespace) -> None:
    """Raises:
    Failed: a run did; the others were measured.
    """
    options = Options(**read_cluster(args))
    results = Results("kubernetes_scale", args.out)
    measured = functools.partial(measure, options=options, steady=args.steady)
    told = "all in a world {:.1f} s after the master's start".format
    runs = repeat(args, results, measured, lambda sample: told(sample.start.world))
    report(runs, results)
    print(f"results: {results.path}")
    if any(len(samples) < args.repetitions for samples in runs.values()):
        raise Failed("not all runs came to their end")


def measure(workers: int, options: Options, steady: float) -> Sample:
    """On a cluster of its own, unless one is given: what is left of a thousand pods would slow down the next.

    Raises:
        Failed: something did not come about in time; and all that `open_lab` raises.
    """
    with (
        tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as scratch,
        open_lab(options, 0, {"master": 0}) as opened,
        Processes(Path(scratch)) as processes,
    ):
        lab = replace(opened, env={**opened.env, NODES: opened.namespace})
        sample = Run(lab, processes, workers).measure(steady)
        lab.delete(JOB)
        return sample


def report(runs: Mapping[int, Sequence[Sample]], results: Results) -> None:
    reactions, requests = {}, []
    for workers, samples in runs.items():
        if not samples:
            continue
        for name in REACTIONS:
            parts = summarise_fields([getattr(sample, name) for sample in samples])
            results.add("summary", workers=workers, event=name, **parts)
            reactions[f"{workers} {name.replace('_', ' ')}"] = parts
        steady = {name: summarise(getattr(each, name) for each in samples) for name in ("memory", "steady_cpu")}
        results.add("summary", workers=workers, event="steady", **steady)
        reactions[f"{workers} steady"] = steady
        for name, counts in samples[0].requests.items():
            text = ", ".join(f"{count} {what}" for what, count in counts.items())
            requests.append([f"{workers} {name.replace('_', ' ')}", text])
    show_summaries("The master's reactions, s; memory, MiB", reactions)
    show_table("Its requests (steady: a minute's), of the first run", ["workers", "requests"], requests)


if __name__ == "__main__":
    sys.exit(main())
