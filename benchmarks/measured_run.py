"""One run of one loop that `benchmarks.throughput` measures: its workers started, and what they have measured read."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from benchmarks.job import ElasticJob, JobSettings
from benchmarks.ladders import Loop
from benchmarks.models import worker_batch
from benchmarks.processes import Failed, Processes, free_port

SAMPLES = 8192
TIMEOUT = 120.0  # beyond the measured seconds: start, imports, warm-up


@dataclass(frozen=True, slots=True)
class Setting:
    """What all loops of a ladder have in common; ``warm_up``: steps before the measured ``seconds``; ``samples``: of an epoch."""

    model: str
    workers: int
    warm_up: int
    seconds: float
    samples: int = SAMPLES


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one loop; times in milliseconds per step, mean over the ranks."""

    samples_per_second: float
    step_ms: float
    cpu_ms: float
    laps_ms: dict[str, float]
    laps_median_ms: dict[str, float]


def measure(loop: Loop, setting: Setting) -> Sample:
    """Run one loop once.

    Raises:
        Failed: it did not come to its end.
    """
    with tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as scratch, Processes(Path(scratch)) as processes:
        arguments = ["--model", setting.model, "--samples", str(setting.samples), "--warm_up", str(setting.warm_up)]
        arguments += ["--seconds", str(setting.seconds), "--folder", scratch]
        if loop.name:
            arguments += ["--loop", loop.name]
        program = f"benchmarks.loops.{loop.program}"
        if loop.elastic:
            command = [sys.executable, "-m", program, *arguments]
            ElasticJob("throughput", JobSettings(str(setting.workers), command, loop.options), processes).start()
            processes.wait_all(TIMEOUT + setting.seconds)
        else:
            with _transport(loop, setting.workers, processes.folder) as env:
                for rank in range(setting.workers):
                    of_rank = {**env, **_place(rank, setting.workers), **loop.env}
                    processes.start_module(f"rank-{rank}", program, *arguments, env=of_rank)
                processes.wait_all(TIMEOUT + setting.seconds)
        return _read(Path(scratch), setting)


@contextmanager
def _transport(loop: Loop, workers: int, folder: Path) -> Iterator[dict[str, str]]:
    """The environment by which workers that no master leads find each other."""
    if not loop.horovod:
        free = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # for `env://`, as trainers want it
        yield {"BENCHMARK_STORE": f"file://{folder}/store", "GLOO_SOCKET_IFNAME": "lo", **free}
        return
    server = RendezvousServer()
    port = server.start()
    try:
        server.init(get_host_assignments(parse_hosts(f"127.0.0.1:{workers}"), workers))
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_HOSTNAME": "127.0.0.1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
        }
    finally:
        server.stop()


def _place(rank: int, workers: int) -> dict[str, str]:
    """As torch and as Horovod want to be told."""
    local = {"RANK": rank, "SIZE": workers, "LOCAL_RANK": rank, "LOCAL_SIZE": workers, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    horovod = {f"HOROVOD_{name}": str(value) for name, value in local.items()}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers), **horovod}


def _read(folder: Path, setting: Setting) -> Sample:
    ranks: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    if len(ranks) != setting.workers:
        raise Failed(f"{len(ranks)} of {setting.workers} workers reported")
    step = statistics.fmean(rank["seconds"] / rank["steps"] for rank in ranks)
    return Sample(
        samples_per_second=setting.workers * worker_batch(setting.model) / step,
        step_ms=1e3 * step,
        cpu_ms=statistics.fmean(rank["cpu_ms_per_step"] for rank in ranks),
        laps_ms=_mean_laps([rank["laps_ms"] for rank in ranks]),
        laps_median_ms=_mean_laps([rank["laps_median_ms"] for rank in ranks]),
    )


def _mean_laps(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(rank[name] for rank in ranks) for name in ranks[0]}
