"""What elastic training costs on a GPU: steps beside plain PyTorch's, changes of workers that share it, memory, 1 GB of state.

    python -m benchmarks.gpu [--small] [--parts overhead,rescale,memory,state] [--rounds 5] [--seconds 20] [--worlds 50] [--nccl]

A machine without a GPU runs it in small on the CPU, which shows that it works and nothing else. Torch's engine is used, whose
tensors travel by Gloo where workers share a GPU. ``--nccl`` has NCCL take each of them for a host of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.elastic_run import Change, ElasticRun
from benchmarks.harness import Results, Summary, add_out, describe_machine, names, show_table, summarise
from benchmarks.job import ElasticJob, JobSettings
from benchmarks.loops.own_host import OF_ALL
from benchmarks.processes import Processes, scratch, wait_until
from elasticdl.elastic.torch_kit.gpu import GPU, choose_device

PARTS = ("overhead", "rescale", "memory", "state")
OPTIONAL = ("rounds", "seconds", "repetitions", "worlds")
WORKER = "benchmarks.loops.gpu_worker"
START_SECONDS = 300.0  # imports and the first kernels
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """``resnet``: the model, samples of a step, pixels; ``seconds`` that each run of it is measured."""

    resnet: tuple[str, int, int]
    seconds: float
    rounds: int
    shared: tuple[int, ...]  # workers on the GPU
    repetitions: int
    model: str  # whose workers come and go
    worlds: int  # after which the memory is compared with that of the first
    state: str  # the model whose state is large


FULL = Sizes(("resnet50", 256, 224), 20.0, 5, (2, 3), 5, "25m", 50, "126m")
SMALL = Sizes(("tiny", 4, 32), 0.5, 1, (2,), 1, "1m", 2, "1m")


def main() -> int:
    args = parse()
    results = Results("gpu", args.out)
    chosen = choose_device()
    device = torch.cuda.get_device_name(chosen) if chosen.type == GPU else "CPU"
    if args.small:
        print(f"in small, on {device}: this shows that it works; no figure of it says anything about a GPU")
    print(describe_machine(results.machine))
    sizes: Sizes = args.sizes
    if args.nccl:
        os.environ |= OF_ALL
    rng = random.Random(0)
    measure = {
        "overhead": lambda: overhead(sizes),
        "rescale": lambda: [
            row for workers in sizes.shared for row in rescale(workers, sizes, sizes.model, rng, results)
        ],
        "memory": lambda: memory(sizes, rng, results),
        "state": lambda: state(sizes, rng, results),
    }
    rows: list[tuple[str, Summary, str]] = []
    for part in args.parts:
        for what, summary, unit in measure[part]():
            results.add(
                "summary",
                part=part,
                what=what,
                value=summary,
                unit=unit,
                device=device,
                small=args.small,
                nccl=args.nccl,
            )
            rows.append((what, summary, unit))
    show_table(f"{device}: median (range)", ("", "n", "value", "unit"), [show(*row) for row in rows])
    print(f"results: {results.path}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="as without a GPU: a tiny model, few steps")
    parser.add_argument("--parts", type=names, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--rounds", type=int, help=f"of plain and elastic steps; default: {FULL.rounds}")
    parser.add_argument("--seconds", type=float, help=f"that each of them is measured; default: {FULL.seconds:g}")
    parser.add_argument("--repetitions", type=int, help=f"of each change of workers; default: {FULL.repetitions}")
    parser.add_argument("--nccl", action="store_true", help="workers that share the GPU reduce by NCCL, over sockets")
    parser.add_argument("--worlds", type=int, help=f"until memory is compared; default: {FULL.worlds}")
    add_out(parser)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    args.small = args.small or choose_device().type == "cpu"
    base = asdict(SMALL if args.small else FULL)
    given = {name: value for name in OPTIONAL if (value := getattr(args, name)) is not None}
    if given and min(given.values()) <= 0:
        parser.error(f"--{', --'.join(OPTIONAL)}: above 0")
    if args.nccl and choose_device().type != GPU:
        parser.error("--nccl: there is no GPU")
    args.sizes = Sizes(**base | given)
    return args


def show(what: str, summary: Summary, unit: str) -> tuple[str, ...]:
    return what, str(summary.n), summary.show(2), unit


# -- one worker beside plain PyTorch --


def overhead(sizes: Sizes) -> list[tuple[str, Summary, str]]:
    """Interleaved; the ratio is that of each round."""
    runs: dict[str, list[float]] = {"plain": [], "elastic": [], "prepared": []}
    for _ in range(sizes.rounds):
        for loop, seconds in runs.items():
            found = run_worker(loop, sizes)
            seconds.append(found["seconds"] / found["steps"])
    ratios = {
        loop: [100 * (own / plain - 1) for own, plain in zip(runs[loop], runs["plain"], strict=True)]
        for loop in runs
        if loop != "plain"
    }
    rows = [
        (f"step of {sizes.resnet[0]}, {loop}", summarise(1e3 * s for s in each), "ms") for loop, each in runs.items()
    ]
    return rows + [(f"one worker over plain PyTorch, {loop}", summarise(each), "%") for loop, each in ratios.items()]


def run_worker(loop: str, sizes: Sizes) -> dict[str, Any]:
    """One run of `benchmarks.loops.gpu_worker`; the elastic one as a job of one worker."""
    with tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as folder, Processes(Path(folder)) as processes:
        model, batch, pixels = sizes.resnet
        arguments = ["--loop", loop, "--folder", folder, "--model", sizes.state if loop == "state" else model]
        arguments += [
            "--batch",
            str(batch),
            "--pixels",
            str(pixels),
            "--seconds",
            str(sizes.seconds),
            "--warm_up",
            "10",
        ]
        if loop in ("elastic", "prepared"):
            program = [sys.executable, "-m", WORKER, *arguments]
            ElasticJob("gpu", JobSettings("1", program, {"collective": "torch"}), processes).start()
        else:
            processes.start_module(loop, WORKER, *arguments)
        processes.wait_all(START_SECONDS + sizes.seconds)
        found: dict[str, Any] = json.loads(
            (Path(folder) / ("state.json" if loop == "state" else "rank-0.json")).read_text()
        )
        return found


# -- workers that share the GPU --


def rescale(
    workers: int, sizes: Sizes, model: str, rng: random.Random, results: Results
) -> list[tuple[str, Summary, str]]:
    """The survivors' pauses when workers come and go."""
    changes: dict[str, list[Change]] = {}
    with scratch(results.path.parent / f"failed-gpu-{model}-{workers}") as processes:
        run = start_shared(workers, model, processes)
        for number in range(sizes.repetitions):
            for event in ("grow", "sigkill"):
                for change in run.repeat(event, number, 1.0, rng):
                    changes.setdefault(change.event, []).append(change)
                    results.add("change", workers=workers, model=model, **asdict(change))
        run.stop()
    return [
        (f"{event}, {workers} workers, {model}", summarise(1e3 * max(c.gap.pauses) for c in found), "ms")
        for event, found in changes.items()
    ]


def start_shared(workers: int, model: str, processes: Processes) -> ElasticRun:
    run = ElasticRun("torch", model, workers, processes, {"collective": "torch", "slots": str(workers)})
    run.start()
    return run


def memory(sizes: Sizes, rng: random.Random, results: Results) -> list[tuple[str, Summary, str]]:
    """What the worker that stays through all worlds holds more in the last than in the first of the same size."""
    with scratch(results.path.parent / "failed-gpu-memory") as processes:
        run = start_shared(2, sizes.model, processes)
        repetitions = -(-sizes.worlds // 2)  # each is two worlds
        for number in range(repetitions):
            run.repeat("grow", number, 0.5, rng)
        wait_until(lambda: len(worlds_of_two(processes.folder)) > repetitions, START_SECONDS, "a settled world")
        first, *_, last = worlds_of_two(processes.folder)
        run.stop()
    results.add("memory", first=first, last=last)
    kinds = [kind for kind in ("host", "allocated", "reserved", "used") if kind in first]
    worlds = last["world"] - first["world"]
    return [
        (f"memory more after {worlds} worlds: {kind}", summarise([(last[kind] - first[kind]) / MIB]), "MiB")
        for kind in kinds
    ]


def worlds_of_two(folder: Path) -> list[dict[str, int]]:
    """What the worker that has been in most of them has noted in each."""
    logs = [[json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("memory-*.jsonl")]
    return max(([line for line in log if line["size"] == 2] for log in logs), key=len, default=[])


# -- a large state --


def state(sizes: Sizes, rng: random.Random, results: Results) -> list[tuple[str, Summary, str]]:
    """Commit and checkpoint of one worker alone; the pause when a second one joins it, which receives the state."""
    found = run_worker("state", sizes)
    results.add("state", **found)
    size = found["state_bytes"] / MIB
    rows = [
        (f"commit, {size:.0f} MiB of state", summarise(1e3 * each for each in found["commit_seconds"]), "ms"),
        (f"checkpoint, {size:.0f} MiB", summarise([found["checkpoint_seconds"]]), "s"),
    ]
    if (extra := found["device_bytes_of_checkpoint"]) is not None:
        rows.append(("device memory that a checkpoint takes", summarise([extra / MIB]), "MiB"))
    joins = rescale(2, sizes, sizes.state, rng, results)
    return rows + [row for row in joins if row[0].startswith(("grow", "rejoin"))]


if __name__ == "__main__":
    sys.exit(main())
