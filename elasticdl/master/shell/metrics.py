"""A job's numbers for Prometheus, and where it collects them: HTTPS, for the job's certificate of role metrics or owner.

What is so at the moment is asked of the job's status when it is collected. What has happened is counted from the journal,
the entries of earlier masters included, so that a master that is started again counts on. Steps are counted as they are told: the
journal of a long job has them late.

Each connection has a thread, of which there are few, and little time: whoever connects and says nothing keeps nobody
waiting. The certificate is read anew for each, so that it may be renewed while the job runs.
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticdl.common.bounded_http import BoundedHTTPServer
from elasticdl.common.channel import identify
from elasticdl.common.credentials import Identity, Role, TlsFolder
from elasticdl.job import fields as f
from elasticdl.job.job_history import JobHistory
from elasticdl.job.journal import STEPS, Entry
from elasticdl.job.records import Doing
from elasticdl.master.shell.observer import PAUSE_PARTS, Observer
from elasticdl.master.shell.step_log import StepLog
from elasticdl.master.state.instructions import Phase
from elasticdl.master.state.values import Pace, StepReport
from elasticdl.proto import elasticdl_pb2 as pb

PAUSE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)
STATES = ("pending", "starting", "standby", "member", "draining")
READERS = frozenset({Role.METRICS, Role.OWNER})
CONNECTIONS = 16
SILENCE_SECONDS = 10.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_log = logging.getLogger(__name__)


class Prometheus(Observer, Collector):
    """``status`` is called by whoever collects, in its thread; ``past`` are the entries of earlier masters.

    ``clock``: seconds since the epoch. Where the time went is told as far as nothing can change it any more: training up to
    the last but one report of steps, waiting and starting up to now.
    """

    def __init__(
        self,
        status: Callable[[], pb.JobStatus],
        past: Iterable[Entry] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._status = status
        self._clock = clock
        self._history = JobHistory()
        self._taking = threading.Lock()  # the history is told by one thread and asked by others
        self._learning_rate = math.nan
        self._slow: dict[int, tuple[tuple[str, str, str], float]] = {}  # labels and factor, by worker
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._launched = self._counter("elasticdl_workers_launched", "Workers that were asked for")
        self._restarts = self._counter("elasticdl_worker_restarts", "Workers that took the place of one that left")
        self._left = self._counter("elasticdl_workers_left", "Workers that are gone, by cause", ("cause",))
        self._worlds = self._counter("elasticdl_worlds_formed", "Worlds that were formed")
        self._steps = self._counter("elasticdl_steps", "Steps that were made; one that is made again counts again")
        self._samples = self._counter("elasticdl_samples", "Samples of these steps")
        self._masters = self._counter("elasticdl_master_restarts", "How often another master took the job over")
        self._pauses = Histogram(
            "elasticdl_pause_seconds",
            "Time that a worker did not train, by what changed (grow, shrink, failure) and phase of the change",
            ("kind", "phase"),
            buckets=PAUSE_BUCKETS,
            registry=self._registry,
        )
        counted = 0
        for entry in past:
            self._history.take(entry)
            self._count(entry["event"], entry)
            if entry["event"] == STEPS:
                counted = max(counted, f.count(entry, "step"))
                self._steps.inc(f.count(entry, "steps"))
                self._samples.inc(f.count(entry, "samples"))
        self._bunches = StepLog(self._take, clock, clock(), counted, share=0)

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == STEPS:  # these it hears of sooner
            return
        self._bunches.recorded(event, fields)
        self._take(event, fields)
        self._count(event, fields)

    def _take(self, event: str, fields: Mapping[str, Any]) -> None:
        with self._taking:
            self._history.take({"time": self._clock(), **fields, "event": event})

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        self._bunches.trained(steps, pace)
        self._steps.inc(len(steps))
        self._samples.inc(sum(step.samples for step in steps))
        for step in steps:
            self._learning_rate = step.learning_rate if step.samples else math.nan

    def _count(self, event: str, fields: Mapping[str, Any]) -> None:
        match event:
            case "worker_launched":
                self._launched.inc()
                self._restarts.inc(fields.get("replaces") is True)
            case "worker_slow":
                labels = (str(fields["worker"]), str(fields.get("host", "")), str(fields.get("phase", "")))
                self._slow[fields["worker"]] = labels, fields.get("factor", 0.0)
            case "worker_recovered":
                self._slow.pop(fields["worker"], None)
            case "worker_left":
                self._slow.pop(fields.get("worker", -1), None)
                self._left.labels(fields.get("cause", "")).inc()
            case "world_formed":
                self._worlds.inc()
            case "master_restarted":
                self._masters.inc()
                self._slow.clear()  # the new master finds them anew, and never says of the others that they recovered
            case "pause":
                for part in PAUSE_PARTS:
                    if isinstance(seconds := fields.get(part), int | float):
                        self._pauses.labels(fields.get("kind", ""), part).observe(seconds)

    def exposition(self) -> bytes:
        """The text that Prometheus reads. From any thread; raises what ``status`` raises."""
        return generate_latest(self._registry)

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
        yield GaugeMetricFamily(
            "elasticdl_step", "Steps that are in the model; fewer when it goes on from a checkpoint", now.step
        )
        rate = now.samples_per_second
        yield GaugeMetricFamily("elasticdl_samples_per_second", "Samples per second over the last seconds", rate)
        yield GaugeMetricFamily("elasticdl_epoch", "Epoch of the last step, from 0", now.epoch)
        yield GaugeMetricFamily("elasticdl_loss", "Loss of the last step, the mean over its global batch", now.loss)
        yield GaugeMetricFamily("elasticdl_learning_rate", "Learning rate of the last step", self._learning_rate)
        text = "1 and more: how many times the median worker's time a slow worker takes"
        slow = GaugeMetricFamily("elasticdl_worker_slow", text, labels=["worker", "host", "phase"])
        for labels, factor in tuple(self._slow.values()):
            slow.add_metric(labels, factor)
        yield slow
        yield from self._time_spent()

    def _time_spent(self) -> Iterator[Metric]:
        with self._taking:
            spent = self._history.settled(self._clock())
        productive = spent.wall[Doing.PRODUCTIVE]
        text = "Seconds of the job in which it made steps that it had not made before"
        yield CounterMetricFamily("elasticdl_productive_seconds", text, productive)
        text = "Seconds of the job that went to something else, by what"
        lost = {str(doing): seconds for doing, seconds in spent.wall.items() if doing is not Doing.PRODUCTIVE}
        yield _counters("elasticdl_lost_seconds", text, "cause", lost)
        text = "Seconds of all workers that had a place together, by what they went to"
        by_worker = {str(doing): seconds for doing, seconds in spent.workers.items()}
        yield _counters("elasticdl_worker_seconds", text, "spent", by_worker)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


class MetricsServer(Observer):
    """Listens from the moment it is made until it is closed, which is all that it hears of a job.

    ``exposition`` is called in a thread of the server's.

    Raises:
        OSError: the address is not to be had.
        UserError: the certificate is not one to serve with.
    """

    def __init__(self, address: tuple[str, int], tls: TlsFolder, exposition: Callable[[], bytes]) -> None:
        self._server = _Server(address, tls, exposition)
        self.port: int = self._server.server_address[1]
        self._server.start("metrics")

    def close(self) -> None:
        self._server.stop()


class _Server(BoundedHTTPServer):
    def __init__(self, address: tuple[str, int], tls: TlsFolder, exposition: Callable[[], bytes]) -> None:
        job = identify(tls, serves=True).job
        self.readers = {Identity(role, job).dns_name for role in READERS}
        self.exposition = exposition
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.load_cert_chain(tls.certificate, tls.key)
        self._context.load_verify_locations(tls.ca)
        super().__init__(address, _Handler, CONNECTIONS)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(SILENCE_SECONDS)
        with self._context.wrap_socket(request, server_side=True) as connection:
            super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection from %s to the metrics came to nothing", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    connection: ssl.SSLSocket

    def do_GET(self) -> None:
        certificate: dict[str, Any] = self.connection.getpeercert() or {}
        names = {name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"}
        if names.isdisjoint(self.server.readers):
            self._answer(HTTPStatus.FORBIDDEN, b"it takes the certificate of the metrics or the owner\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"there is only /metrics\n")
        else:
            try:
                text = self.server.exposition()
            except (TimeoutError, CancelledError, RuntimeError):  # the master is too busy, or ends
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the master does not answer\n")
            else:
                self._answer(HTTPStatus.OK, text)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
