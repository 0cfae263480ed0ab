"""A job's numbers for Prometheus, and where it collects them: HTTPS, for every certificate of the job with which one may call.

Gauges come from the job's status at the moment of collection. Counters come from the journal, entries of earlier masters
included, so a master that is started again counts on. Steps are counted when the step log tells observers of them: the journal
of a long job has them later.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from elasticdl.common.credentials import TlsFolder
from elasticdl.job.facts import PAUSE_BOUNDS, Facts, TimeSpent, TimeUse
from elasticdl.master.core.values import Phase
from elasticdl.master.shell.observers import Observer
from elasticdl.proto import elasticdl_pb2 as pb

STATES = ("pending", "starting", "standby", "member", "draining")
SILENCE_SECONDS = 10.0
LOOP_SECONDS = 5.0  # for the master's own task to tell its numbers to a collector's thread
_log = logging.getLogger(__name__)


class Prometheus(Collector):
    """Where the time went is told as far as it is final: training up to the last report of steps but one, waiting and
    starting up to now.

    ``loop``: the event loop on which the master knows what it does. ``clock``: seconds since the epoch.
    """

    def __init__(
        self,
        status: Callable[[], pb.JobStatus],
        facts: Facts,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._status = status
        self._facts = facts
        self._loop = loop
        self._clock = clock

    def collect(self) -> list[Metric]:
        """Called by whoever collects, in its thread."""
        return asyncio.run_coroutine_threadsafe(self.told(), self._loop).result(LOOP_SECONDS)

    async def told(self) -> list[Metric]:
        facts = self._facts
        facts.advance(self._clock())
        return [*_of_status(self._status()), *_of_facts(facts), *_of_time(facts.spent)]


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
    counts = facts.counts
    rate = math.nan if facts.learning_rate is None else facts.learning_rate
    yield GaugeMetricFamily("elasticdl_learning_rate", "Learning rate of the last step", rate)
    text = "1 and more: how many times the median worker's time a slow worker takes"
    slow = GaugeMetricFamily("elasticdl_worker_slow", text, labels=["worker", "host", "phase"])
    for worker, (host, phase, factor) in facts.slow.items():
        slow.add_metric([str(worker), host, phase], factor)
    yield slow
    counters: tuple[tuple[str, str, int], ...] = (
        ("elasticdl_workers_launched", "Workers that were asked for", counts["worker_launched"]),
        ("elasticdl_worker_restarts", "Workers that took the place of one that left", facts.replaced),
        ("elasticdl_worlds_formed", "Worlds that were formed", counts["world_formed"]),
        ("elasticdl_steps", "Steps that were made; one that is made again counts again", facts.steps_made),
        ("elasticdl_samples", "Samples of these steps", facts.samples_made),
        ("elasticdl_master_restarts", "How often another master took the job over", counts["master_restarted"]),
    )
    for name, text, number in counters:
        yield CounterMetricFamily(name, text, number)
    yield _labelled(
        CounterMetricFamily, "elasticdl_workers_left", "Workers that are gone, by cause", "cause", facts.causes
    )
    text = "Time that a worker did not train, by what changed (grow, shrink, failure) and phase of the change"
    pauses = HistogramMetricFamily("elasticdl_pause_seconds", text, labels=["kind", "phase"])
    bounds = [*map(str, PAUSE_BOUNDS), "+Inf"]
    for labels, times in facts.pause_times.items():
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


class MetricsServer(ThreadingWSGIServer, Observer):
    """Listens from its creation until `close`; it ignores what else an observer is told.

    `prometheus_client.start_wsgi_server` does not do: it makes the handshakes in the one thread that takes connections, where a
    caller that says nothing would be waited for for ever.

    Raises:
        OSError: the address is not to be had, or the certificate can't be read.
    """

    def __init__(self, address: tuple[str, int], tls: TlsFolder, metrics: Collector) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(tls.certificate, tls.key)
        context.load_verify_locations(tls.ca)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        # With the first bytes that are read, so in the thread of the connection.
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        registry = CollectorRegistry()
        registry.register(metrics)
        self.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is served any more, and the port is free."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection from %s to the metrics came to nothing", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
