"""A job's numbers for Prometheus.

What is so at the moment is asked of the job's status when it is collected. What has happened is counted from the journal,
the entries of earlier masters included, so that a master that is started again counts on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticdl.common.journal import Entry
from elasticdl.master.core.instructions import Phase
from elasticdl.master.observers.observer import PAUSE_PARTS, Observer
from elasticdl.proto import elasticdl_pb2 as pb

PAUSE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)
STATES = ("pending", "starting", "standby", "member", "draining")


class Prometheus(Observer):
    """``status`` is called by whoever collects, in its thread; ``past`` are the entries of earlier masters."""

    def __init__(self, status: Callable[[], pb.JobStatus], past: Iterable[Entry] = ()) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(status))
        self._launched = self._counter("elasticdl_workers_launched", "Workers that were asked for")
        self._restarts = self._counter("elasticdl_worker_restarts", "Workers that took the place of one that left")
        self._left = self._counter("elasticdl_workers_left", "Workers that are gone, by cause", ("cause",))
        self._worlds = self._counter("elasticdl_worlds_formed", "Worlds that were formed")
        self._masters = self._counter("elasticdl_master_restarts", "How often another master took the job over")
        self._pauses = Histogram(
            "elasticdl_pause_seconds",
            "Time that a worker did not train, by what changed (grow, shrink, failure) and phase of the change",
            ("kind", "phase"),
            buckets=PAUSE_BUCKETS,
            registry=self._registry,
        )
        for entry in past:
            self.recorded(entry["event"], entry)

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        match event:
            case "worker_launched":
                self._launched.inc()
                self._restarts.inc(fields.get("replaces") is True)
            case "worker_left":
                self._left.labels(fields.get("cause", "")).inc()
            case "world_formed":
                self._worlds.inc()
            case "master_restarted":
                self._masters.inc()
            case "pause":
                for part in PAUSE_PARTS:
                    if isinstance(seconds := fields.get(part), int | float):
                        self._pauses.labels(fields.get("kind", ""), part).observe(seconds)

    def exposition(self) -> bytes:
        """The text that Prometheus reads. From any thread; raises what ``status`` raises."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)


class _Now(Collector):
    def __init__(self, status: Callable[[], pb.JobStatus]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # else the registry collects once to find out, before there is anything to ask

    def collect(self) -> Iterator[Metric]:
        now = self._status()
        phases = {str(phase): float(phase == now.phase) for phase in Phase}
        yield _gauges("elasticdl_job_phase", "1 for the phase that the job is in", "phase", phases)
        states = [worker.state for worker in now.workers]
        counts = {state: float(states.count(state)) for state in STATES}
        yield _gauges("elasticdl_workers", "Workers that are there or asked for, by state", "state", counts)
        members = sum(worker.rank >= 0 for worker in now.workers)
        yield GaugeMetricFamily("elasticdl_world_size", "Members of the world", members)
        yield GaugeMetricFamily("elasticdl_workers_wanted_min", "The fewest workers to train with", now.min_workers)
        yield GaugeMetricFamily("elasticdl_workers_wanted_max", "The most workers to train with", now.max_workers)
        yield CounterMetricFamily("elasticdl_steps", "Steps of the model since its first", now.step)
        yield CounterMetricFamily("elasticdl_samples", "Samples the model was trained on since its first", now.samples)
        rate = now.samples_per_second
        yield GaugeMetricFamily("elasticdl_samples_per_second", "Samples per second over the last seconds", rate)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
