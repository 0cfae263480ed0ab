"""Samples per second of an elasticdl job, of the plainest Horovod loop and of torch DDP: two workers, one run, interleaved.

    python -m benchmarks.throughput [--seconds 10] [--rounds 5] [--models 1m,25m] [--loops elasticdl,horovod,ddp]

``--loops all`` adds the loops that explain the difference between Horovod and DDP.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from benchmarks.harness import (
    Results,
    Summary,
    add_out,
    busy_cores,
    describe_machine,
    names,
    show_table,
    summarise,
)
from benchmarks.job import ElasticJob, JobSettings
from benchmarks.models import LAYERS, WORKER_BATCH
from benchmarks.processes import Failed, Processes

WORKERS = 2
SAMPLES = 8192
TIMEOUT = 120.0  # beyond the measured seconds: start, imports, warm-up
REFERENCES = ("horovod", "ddp")


@dataclass(frozen=True, slots=True)
class Loop:
    """``program``: the name in `benchmarks.loops.plain`; None for the elasticdl job."""

    program: str | None
    horovod: bool = False
    env: dict[str, str] = field(default_factory=dict)


LOOPS = {
    "elasticdl": Loop(None),
    "horovod": Loop("horovod", horovod=True),
    "ddp": Loop("ddp"),
    "horovod-grouped": Loop("horovod-grouped", horovod=True),
    "horovod-flat": Loop("horovod-flat", horovod=True),
    "horovod-flat-sleep": Loop("horovod-flat-sleep", horovod=True),
    "horovod-buckets": Loop("horovod-buckets", horovod=True),
    # Only to see what waiting for the background thread costs: an elastic job can't set it.
    "horovod-flat-0.1ms": Loop("horovod-flat-sleep", horovod=True, env={"HOROVOD_CYCLE_TIME": "0.1"}),
    "gloo-flat": Loop("gloo-flat"),
    "alone": Loop("alone"),
}
MAIN_LOOPS = "elasticdl,horovod,ddp"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one loop; times in milliseconds per step, mean over the ranks."""

    samples_per_second: float
    step_ms: float
    cpu_ms: float
    laps_ms: dict[str, float]
    laps_median_ms: dict[str, float]


def main() -> int:
    args = parse()
    results = Results("throughput", args.out)
    print(describe_machine(results.machine))
    for model in args.models:
        runs: dict[str, list[Sample]] = {loop: [] for loop in args.loops}
        for number in range(args.rounds):
            for name in args.loops:
                before = busy_cores(0.5)
                sample = measure(name, model, args)
                runs[name].append(sample)
                fields = {"model": model, "loop": name, "round": number, "busy_cores_before": before}
                results.add("run", **fields, **_record(sample))
                print(f"{model} round {number + 1}: {name} {sample.samples_per_second:.0f} samples/s", flush=True)
        report(model, runs, results)
    print(f"results: {results.path}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured part of each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm_up", type=int, default=30, help="steps before the measured part")
    parser.add_argument("--models", type=names, default=["1m", "25m"], help=",".join(LAYERS))
    parser.add_argument("--loops", type=names, default=names(MAIN_LOOPS), help=f"all, or some of {', '.join(LOOPS)}")
    add_out(parser)
    args = parser.parse_args()
    args.loops = list(LOOPS) if args.loops == ["all"] else args.loops
    for given, known in ((args.loops, LOOPS), (args.models, LAYERS)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    return args


def measure(name: str, model: str, args: argparse.Namespace) -> Sample:
    """Run one loop once.

    Raises:
        Failed: it did not come to its end.
    """
    loop = LOOPS[name]
    with tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as scratch, Processes(Path(scratch)) as processes:
        arguments = ["--model", model, "--samples", str(SAMPLES), "--warm_up", str(args.warm_up)]
        arguments += ["--seconds", str(args.seconds), "--folder", scratch]
        if loop.program is None:
            run_elasticdl(arguments, processes, args.seconds)
        else:
            run_plain(loop, arguments, processes, args.seconds)
        return read(Path(scratch), args.seconds)


def run_elasticdl(arguments: list[str], processes: Processes, seconds: float) -> None:
    program = [sys.executable, "-m", "benchmarks.loops.elastic", *arguments]
    ElasticJob("throughput", JobSettings(str(WORKERS), program, {}), processes).start()
    processes.wait_all(TIMEOUT + seconds)


def run_plain(loop: Loop, arguments: list[str], processes: Processes, seconds: float) -> None:
    assert loop.program is not None
    command = ["--loop", loop.program, *arguments]
    server = RendezvousServer() if loop.horovod else None
    shared = dict(loop.env)
    if server:
        port = server.start()
        server.init(get_host_assignments(parse_hosts(f"127.0.0.1:{WORKERS}"), WORKERS))
        shared |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    try:
        for rank in range(WORKERS):
            env = shared | (horovod_env(rank) if server else torch_env(processes.folder))
            env |= {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
            processes.start_module(f"rank-{rank}", "benchmarks.loops.plain", *command, env=env)
        processes.wait_all(TIMEOUT + seconds)
    finally:
        if server:
            server.stop()


def horovod_env(rank: int) -> dict[str, str]:
    places = {
        "RANK": rank,
        "SIZE": WORKERS,
        "LOCAL_RANK": rank,
        "LOCAL_SIZE": WORKERS,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
    }
    values = {**places, "HOSTNAME": "127.0.0.1", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
    return {f"HOROVOD_{name}": str(value) for name, value in values.items()}


def torch_env(folder: Path) -> dict[str, str]:
    return {"BENCHMARK_STORE": f"file://{folder}/store", "GLOO_SOCKET_IFNAME": "lo"}


def read(folder: Path, seconds: float) -> Sample:
    ranks: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    if len(ranks) != WORKERS:
        raise Failed(f"{len(ranks)} of {WORKERS} workers reported")
    step = statistics.fmean(rank["seconds"] / rank["steps"] for rank in ranks)
    return Sample(
        samples_per_second=WORKERS * WORKER_BATCH / step,
        step_ms=1e3 * step,
        cpu_ms=statistics.fmean(rank["cpu_ms_per_step"] for rank in ranks),
        laps_ms=_mean_laps([rank["laps_ms"] for rank in ranks]),
        laps_median_ms=_mean_laps([rank["laps_median_ms"] for rank in ranks]),
    )


def _mean_laps(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(rank[name] for rank in ranks) for name in ranks[0]}


def _record(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in Sample.__slots__}


def ratio(runs: dict[str, list[Sample]], name: str, reference: str) -> Summary | None:
    """Of throughputs within the same round, so that slow drifts of the machine cancel; None without the reference."""
    if reference not in runs:
        return None
    pairs = zip(runs[name], runs[reference], strict=True)
    return summarise(one.samples_per_second / other.samples_per_second for one, other in pairs)


def report(model: str, runs: dict[str, list[Sample]], results: Results) -> None:
    rows, parts = [], []
    for name, samples in runs.items():
        rate = summarise(sample.samples_per_second for sample in samples)
        ratios = {reference: ratio(runs, name, reference) for reference in REFERENCES}
        cpu = summarise(sample.cpu_ms for sample in samples)
        laps = {lap: statistics.median(sample.laps_ms[lap] for sample in samples) for lap in samples[0].laps_ms}
        step = statistics.median(sample.step_ms for sample in samples)
        results.add(
            "summary", model=model, loop=name, rate=rate, cpu_ms=cpu, step_ms=step, laps_ms=laps, **_over(ratios)
        )
        rows.append(
            [name, rate.show(0), *(_show(value) for value in ratios.values()), f"{step:.2f}", f"{cpu.median:.1f}"]
        )
        shown = [
            f"{laps[lap]:.3f}" if lap in laps else "-" for lap in ("load", "compute", "reduce", "update", "commit")
        ]
        commit = f"{100 * laps['commit'] / step:.2f} %" if "commit" in laps else "-"
        parts.append([name, *shown, commit])
    columns = ["loop", "samples/s", *(f"of {name}" for name in REFERENCES), "step ms", "CPU ms/step"]
    show_table(f"{model}: two workers, medians (range)", columns, rows)
    show_table(
        f"{model}: ms per step, mean", ["loop", "load", "compute", "reduce", "update", "commit", "of step"], parts
    )


def _over(ratios: dict[str, Summary | None]) -> dict[str, Summary | None]:
    return {f"over_{name}": value for name, value in ratios.items()}


def _show(value: Summary | None) -> str:
    return value.show(2) if value else "-"


if __name__ == "__main__":
    sys.exit(main())
