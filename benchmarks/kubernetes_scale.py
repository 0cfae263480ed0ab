"""How a job's master bears many worker pods on a real control plane: its requests, its reaction, its memory.

    python -m benchmarks.kubernetes_scale [--workers 10,100,1000] [--repetitions 1] [--steady 60]

The job is submitted by the command line, and its master is a real pod. The workers' pods are real objects, bound by the
real scheduler to nodes that only report them as running (`benchmarks.hollow_nodes`); sessions are simulated. Then, one
after the other: nothing for a while; the range grows by a tenth; one pod ends by itself; a tenth is deleted at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
from kubernetes import client, config

from benchmarks.cluster_job import ClusterJob
from benchmarks.clusters import Place, add_cluster, end_cleanly, opened
from benchmarks.counted_master import MOUNT, REQUESTS
from benchmarks.harness import Results, add_out, busy_cores, describe_machine, numbers, show_table, summarise
from benchmarks.hollow_nodes import NODES, PODS_PER_NODE
from benchmarks.master_scale import cpu_of, memory_of
from benchmarks.processes import Failed, Processes, wait_until
from elasticdl.kube.manifests.names import CONTAINER
from tests.cluster.build import Unavailable
from tests.cluster.control_plane import ControlPlaneError

JOB = "scale"
MINUTE = 60.0
THREADS = 8
FAILURES = (Failed, Unavailable, ControlPlaneError, client.ApiException, config.ConfigException, OSError)
REACTIONS = ("start", "grow", "one_end", "deletion")
ONE_IN = 10  # joins, and is deleted
TIMEOUT = 600.0
# The simulated workers share one process, and all of it one machine: none shall be taken for frozen because of that.
HEARTBEAT_TIMEOUT = 30.0
CLUSTER_SPEC = Path(__file__).parent / "hollow_cluster.py"

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

    def __init__(self, place: Place, processes: Processes, workers: int) -> None:
        self._place = place
        self._processes = processes
        self._workers = workers
        self._tenth = max(1, workers // ONE_IN)
        self._requests = Requests(processes.folder / REQUESTS)
        self._job = ClusterJob(JOB, place, processes)
        self._took: dict[str, Counts] = {}

    def measure(self, steady: float) -> Sample:
        """Raises:
        Failed: something did not come about in time.
        """
        began, master = self._start()
        start = self._react("start", began, master, 0.0, self._is_world(self._workers, set()))
        worlds = sum(entry["event"] == "world_formed" for entry in self._job.journal.read())
        steady_cpu = self._rest(steady, master)
        memory = memory_of(master)
        return Sample(
            start,
            self._grow(master),
            self._end_one(master),
            self._delete(master),
            steady_cpu,
            memory,
            worlds,
            self._took,
        )

    def close(self) -> None:
        self._job.delete()

    def _start(self) -> tuple[float, psutil.Process]:
        nodes = -(-(self._workers + self._tenth) // PODS_PER_NODE)
        arguments = [str(self._place.kubeconfig), self._place.namespace, JOB, str(nodes)]
        self._processes.start_module("nodes", "benchmarks.hollow_nodes", *arguments)
        options = {
            "num_workers": f"{max(1, self._workers // 2)}-{self._workers}",
            "worker_resource_request": "cpu=0.1,memory=1Mi",
            "heartbeat_timeout": f"{HEARTBEAT_TIMEOUT:g}",
            "cluster_spec": str(CLUSTER_SPEC),
            "volume": f"host_path={self._processes.folder},mount_path={MOUNT}",
        }
        self._job.submit(options, ["simulated"])
        wait_until(lambda: self._requests.master() is not None, TIMEOUT, "the master's start")
        began, pid = self._requests.master() or (0.0, 0)
        return began, psutil.Process(pid)

    def _rest(self, seconds: float, master: psutil.Process) -> float:
        """The master's share of a core while nothing happens."""
        began, cpu = time.time(), cpu_of(master)
        time.sleep(seconds)
        lasted = time.time() - began
        counts = self._requests.counts(began, began + lasted)
        self._took["steady"] = {name: round(count * MINUTE / lasted) for name, count in counts.items()}
        return (cpu_of(master) - cpu) / lasted

    def _grow(self, master: psutil.Process) -> Reaction:
        all_now, cpu = self._workers + self._tenth, cpu_of(master)
        mark = self._job.journal.mark()
        workers = f"{max(1, self._workers // 2)}-{all_now}"
        self._job.command("scale", JOB, workers, "--namespace", self._place.namespace)
        asked = self._job.journal.wait(lambda entry: entry["event"] == "scale_requested", mark, TIMEOUT, "the request")
        return self._react("grow", asked["time"], master, cpu, self._is_world(all_now, set()))

    def _end_one(self, master: psutil.Process) -> Reaction:
        (victim,) = self._victims(1)
        state = {"terminated": {"exitCode": 137, "reason": "Error"}}
        container = {
            "name": CONTAINER,
            "image": "hollow",
            "imageID": "",
            "restartCount": 0,
            "ready": False,
            "state": state,
        }
        change = {"status": {"phase": "Failed", "containerStatuses": [container]}}
        began, cpu = time.time(), cpu_of(master)
        (pod,) = self._pods([victim])
        self._place.core.patch_namespaced_pod_status(pod, self._place.namespace, change)
        return self._react("one_end", began, master, cpu, self._is_world(self._workers + self._tenth, {victim}))

    def _delete(self, master: psutil.Process) -> Reaction:
        victims = self._victims(self._tenth)
        pods = self._pods(victims)
        began, cpu = time.time(), cpu_of(master)
        with ThreadPoolExecutor(THREADS) as threads:
            list(
                threads.map(
                    lambda pod: self._place.core.delete_namespaced_pod(
                        pod, self._place.namespace, _preload_content=False
                    ),
                    pods,
                )
            )
        return self._react("deletion", began, master, cpu, self._is_world(self._workers + self._tenth, set(victims)))

    def _victims(self, count: int) -> list[int]:
        """Every so-manieth of the newest world's members."""
        members = [entry for entry in self._job.journal.read() if entry["event"] == "world_formed"][-1]["members"]
        return list(members[:: len(members) // count][:count])

    def _pods(self, workers: list[int]) -> list[str]:
        """The names of those in which they are."""
        started = {e["worker"]: e["place"] for e in self._job.journal.read() if e["event"] == "worker_started"}
        return [started[worker] for worker in workers]

    def _is_world(self, size: int, without: set[int]) -> Callable[[dict[str, Any]], bool]:
        def wanted(entry: dict[str, Any]) -> bool:
            return bool(
                entry["event"] == "world_formed"
                and len(entry["members"]) == size
                and without.isdisjoint(entry["members"])
            )

        return wanted

    def _react(
        self, name: str, cause: float, master: psutil.Process, cpu: float, wanted: Callable[[dict[str, Any]], bool]
    ) -> Reaction:
        def after(entry: dict[str, Any]) -> bool:
            return bool(entry["time"] > cause) and wanted(entry)

        world = self._job.journal.wait(after, 0, TIMEOUT, f"the world after {name}")["time"]
        self._took[name] = self._requests.counts(cause, time.time())
        first, last = self._requests.creations(cause, world)
        return Reaction(first - cause, last - cause, world - cause, cpu_of(master) - cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=numbers, default=[10, 100, 1000])
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--steady", type=float, default=MINUTE, help="seconds of nothing but heartbeats")
    add_cluster(parser)
    add_out(parser)
    args = parser.parse_args()
    results = Results("kubernetes_scale", args.out)
    print(describe_machine(results.machine))
    end_cleanly()
    runs: dict[int, list[Sample]] = {workers: [] for workers in args.workers}
    failed = False
    for workers in args.workers:
        for number in range(args.repetitions):
            before = busy_cores(0.5)
            try:
                sample = measure(workers, args)
            except FAILURES as failure:
                failed, reason = True, " ".join(str(failure).split())
                results.add("failure", workers=workers, repetition=number, reason=reason)
                print(f"{workers} workers: FAILED: {reason}", file=sys.stderr, flush=True)
                continue
            runs[workers].append(sample)
            results.add("run", workers=workers, repetition=number, busy_cores_before=before, **asdict(sample))
            print(f"{workers} workers: all in a world {sample.start.world:.1f} s after the master's start", flush=True)
    report(runs, results)
    print(f"results: {results.path}")
    return 1 if failed else 0


def measure(workers: int, args: argparse.Namespace) -> Sample:
    """On a cluster of its own, unless one is given: what is left of a thousand pods would slow down the next.

    Raises:
        Failed: something did not come about in time; and all that `opened` raises.
    """
    with (
        tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as scratch,
        opened(args, {"master": 0}) as place,
        Processes(Path(scratch), {NODES: place.namespace}) as processes,
        closing(Run(place, processes, workers)) as run,
    ):
        return run.measure(args.steady)


def report(runs: Mapping[int, Sequence[Sample]], results: Results) -> None:
    reactions, requests = [], []
    for workers, samples in runs.items():
        if not samples:
            continue
        for name in REACTIONS:
            found = [getattr(sample, name) for sample in samples]
            parts = {part.name: summarise(getattr(each, part.name) for each in found) for part in fields(Reaction)}
            results.add("summary", workers=workers, event=name, **parts)
            times = [f"{parts[each].median:.2f}" for each in ("first", "last", "world", "cpu")]
            reactions.append([f"{workers} {name.replace('_', ' ')}", str(len(samples)), *times])
        memory, cpu = (summarise(getattr(each, name) for each in samples) for name in ("memory", "steady_cpu"))
        results.add("summary", workers=workers, event="steady", memory=memory, steady_cpu=cpu)
        for name, counts in samples[0].requests.items():
            text = ", ".join(f"{count} {what}" for what, count in counts.items())
            requests.append([f"{workers} {name.replace('_', ' ')}", text])
        requests.append([f"{workers} memory, CPU", f"{memory.median:.0f} MiB, {100 * cpu.median:.0f} % of a core"])
    columns = ["workers", "n", "first request s", "last s", "world s", "master's CPU s"]
    show_table("The master's reactions, medians", columns, reactions)
    show_table("Its requests (steady: a minute's), of the first run", ["workers", "requests"], requests)


if __name__ == "__main__":
    sys.exit(main())
