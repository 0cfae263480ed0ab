"""A job's numbers for Prometheus, and where it collects them: HTTPS, for the job's certificate of role metrics or owner.

Gauges come from the job's status at the moment of collection. Counters come from the journal, entries of earlier masters
included, so a master that is started again counts on. Steps are counted when the step log tells observers of them: the journal
of a long job has them later.

Each connection has a thread and a time limit, and there are few: a caller that connects and says nothing delays nobody.
"""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticdl.common.bounded_http import BoundedHTTPServer
from elasticdl.common.channel import identify
from elasticdl.common.credentials import Identity, Role, TlsFolder
from elasticdl.job.facts import Facts
from elasticdl.job.history import TimeSpent, TimeUse
from elasticdl.master.shell.live_facts import LiveFacts
from elasticdl.master.shell.observer import Observer
from elasticdl.master.state.instructions import Phase
from elasticdl.proto import elasticdl_pb2 as pb

STATES = ("pending", "starting", "standby", "member", "draining")
READERS = frozenset({Role.METRICS, Role.OWNER})
CONNECTIONS = 16
SILENCE_SECONDS = 10.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_log = logging.getLogger(__name__)


class Prometheus(Collector):
    """``status`` is called by whoever collects, in its thread.

    Where the time went is told as far as it is final: training up to the last report of steps but one, waiting and
    starting up to now.
    """

    def __init__(self, status: Callable[[], pb.JobStatus], facts: LiveFacts) -> None:
        self._status = status
        self._facts = facts
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """The text that Prometheus reads. From any thread; raises what ``status`` raises."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # else the registry collects once to find out, before there is anything to ask

    def collect(self) -> Iterator[Metric]:
        yield from _of_status(self._status())
        with self._facts.now() as (facts, now):
            yield from [*_of_facts(facts), *_of_time(facts.settled(now))]


def _of_status(now: pb.JobStatus) -> Iterator[Metric]:
    phases = {str(phase): float(phase == now.phase) for phase in Phase}
    yield _labelled(GaugeMetricFamily, "elasticdl_job_phase", "1 for the phase that the job is in", "phase", phases)
    states = [worker.state for worker in now.workers]
    counts = {state: float(states.count(state)) for state in STATES}
    yield _labelled(
        GaugeMetricFamily, "elasticdl_workers", "Workers that are there or asked for, by state", "state", counts
    )
    gauges: tuple[tuple[str, str, float], ...] = (
        ("elasticdl_world_size", "Members of the world", sum(worker.rank >= 0 for worker in now.workers)),
        ("elasticdl_workers_wanted_min", "The fewest workers to train with", now.min_workers),
        ("elasticdl_workers_wanted_max", "The most workers to train with", now.max_workers),
        ("elasticdl_step", "Steps that are in the model; fewer when it goes on from a checkpoint", now.step),
        ("elasticdl_samples_per_second", "Samples per second over the last seconds", now.samples_per_second),
        ("elasticdl_epoch", "Epoch of the last step, from 0", now.epoch),
        ("elasticdl_loss", "Loss of the last step, the mean over its global batch", now.loss),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(name, text, value)


def _of_facts(facts: Facts) -> Iterator[Metric]:
    state, counts = facts.state, facts.counts
    rate = math.nan if state.learning_rate is None else state.learning_rate
    yield GaugeMetricFamily("elasticdl_learning_rate", "Learning rate of the last step", rate)
    text = "1 and more: how many times the median worker's time a slow worker takes"
    slow = GaugeMetricFamily("elasticdl_worker_slow", text, labels=["worker", "host", "phase"])
    for worker, (host, phase, factor) in state.slow.items():
        slow.add_metric([str(worker), host, phase], factor)
    yield slow
    counters: tuple[tuple[str, str, int], ...] = (
        ("elasticdl_workers_launched", "Workers that were asked for", counts["worker_launched"]),
        ("elasticdl_worker_restarts", "Workers that took the place of one that left", state.replaced),
        ("elasticdl_worlds_formed", "Worlds that were formed", counts["world_formed"]),
        ("elasticdl_steps", "Steps that were made; one that is made again counts again", state.steps_made),
        ("elasticdl_samples", "Samples of these steps", state.samples_made),
        ("elasticdl_master_restarts", "How often another master took the job over", counts["master_restarted"]),
    )
    for name, text, number in counters:
        yield CounterMetricFamily(name, text, number)
    yield _labelled(
        CounterMetricFamily, "elasticdl_workers_left", "Workers that are gone, by cause", "cause", facts.causes
    )
    text = "Time that a worker did not train, by what changed (grow, shrink, failure) and phase of the change"
    pauses = HistogramMetricFamily("elasticdl_pause_seconds", text, labels=["kind", "phase"])
    for labels, times in facts.pause_times.items():
        bounds = [*map(str, times.bounds), "+Inf"]
        pauses.add_metric(labels, list(zip(bounds, accumulate(times.counts), strict=True)), times.sum)
    yield pauses


def _of_time(spent: TimeSpent) -> Iterator[Metric]:
    productive = spent.wall[TimeUse.PRODUCTIVE]
    text = "Seconds of the job in which it made steps that it had not made before"
    yield CounterMetricFamily("elasticdl_productive_seconds", text, productive)
    text = "Seconds of the job that went to something else, by what"
    lost = {str(use): seconds for use, seconds in spent.wall.items() if use is not TimeUse.PRODUCTIVE}
    yield _labelled(CounterMetricFamily, "elasticdl_lost_seconds", text, "cause", lost)
    text = "Seconds of all workers that had a place together, by what they went to"
    by_worker = {str(use): seconds for use, seconds in spent.workers.items()}
    yield _labelled(CounterMetricFamily, "elasticdl_worker_seconds", text, "spent", by_worker)


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    made = family(name, text, labels=[label])
    for value, number in values.items():
        made.add_metric([value], number)
    return made


class MetricsServer(BoundedHTTPServer, Observer):
    """Listens from its creation until `close`; it ignores what else an observer is told.

    ``exposition`` is called in a thread of the server's.

    Raises:
        OSError: the address is not to be had.
        UserError: the certificate is not one to serve with.
    """

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
        self.port: int = self.server_address[1]
        self.start("metrics")

    def close(self) -> None:
        self.stop()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(SILENCE_SECONDS)
        with self._context.wrap_socket(request, server_side=True) as connection:
            super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection from %s to the metrics came to nothing", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
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
