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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Parser, Results, Summary, add_out, names, show_table, summarise
from benchmarks.ladders import TORCH, Loop, Setting, measure
from benchmarks.loops.own_host import OF_ALL
from benchmarks.models import RESNET50, TINY, worker_batch
from benchmarks.processes import Processes, scratch, wait_until
from benchmarks.rescale import Change, ElasticRun
from elasticdl.elastic.torch_kit.gpu import GPU, choose_device

PARTS = ("overhead", "rescale", "memory", "state")
OPTIONAL = ("rounds", "seconds", "repetitions", "worlds")
START_SECONDS = 300.0  # imports and the first kernels
MIB = 1 << 20
Row = tuple[str, Summary, str]  # what, and in which unit


@dataclass(frozen=True, slots=True)
class Sizes:
    """``resnet``: the model; ``seconds`` that each run of it is measured."""

    resnet: str
    seconds: float
    rounds: int
    shared: tuple[int, ...]  # workers on the GPU
    repetitions: int
    model: str  # whose workers come and go
    worlds: int  # after which the memory is compared with that of the first
    state: str  # the model whose state is large


FULL = Sizes(RESNET50, 20.0, 5, (2, 3), 5, "25m", 50, "126m")
SMALL = Sizes(TINY, 0.5, 1, (2,), 1, "1m", 2, "1m")


def main() -> int:
    args = parse()
    results = Results("gpu", args.out)
    chosen = choose_device()
    device = torch.cuda.get_device_name(chosen) if chosen.type == GPU else "CPU"
    if args.small:
        print(f"in small, on {device}: this shows that it works; no figure of it says anything about a GPU")
    sizes: Sizes = args.sizes
    if args.nccl:
        os.environ |= OF_ALL
    rng = random.Random(0)
    parts: dict[str, Callable[[], list[Row]]] = {
        "overhead": lambda: overhead(sizes),
        "rescale": lambda: list(
            chain.from_iterable(rescale(n, sizes, sizes.model, rng, results) for n in sizes.shared)
        ),
        "memory": lambda: memory(sizes, rng, results),
        "state": lambda: state(sizes, rng, results),
    }
    rows: list[Row] = []
    for part in args.parts:
        for what, summary, unit in parts[part]():
            where = {"device": device, "small": args.small, "nccl": args.nccl}
            results.add("summary", part=part, what=what, value=summary, unit=unit, **where)
            rows.append((what, summary, unit))
    show_table(
        f"{device}: median (range)",
        ("", "n", "value", "unit"),
        [(what, str(each.n), each.show(2), unit) for what, each, unit in rows],
    )
    print(f"results: {results.path}")
    return 0


def parse() -> argparse.Namespace:
    parser = Parser("gpu", __doc__)
    parser.add_argument("--small", action="store_true", help="as without a GPU: a tiny model, few steps")
    parser.add_argument("--parts", type=names, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--rounds", type=int, help=f"of plain and elastic steps; default: {FULL.rounds}")
    parser.add_argument("--seconds", type=float, help=f"that each of them is measured; default: {FULL.seconds:g}")
    parser.add_argument("--repetitions", type=int, help=f"of each change of workers; default: {FULL.repetitions}")
    parser.add_argument("--nccl", action="store_true", help="workers that share the GPU reduce by NCCL, over sockets")
    parser.add_argument("--worlds", type=int, help=f"until memory is compared; default: {FULL.worlds}")
    add_out(parser)
    args = parser.parse_args()
    parser.require_known(args, parts=PARTS)
    args.small = args.small or choose_device().type == "cpu"
    base = asdict(SMALL if args.small else FULL)
    given = {name: value for name in OPTIONAL if (value := getattr(args, name)) is not None}
    if given and min(given.values()) <= 0:
        parser.error(f"--{', --'.join(OPTIONAL)}: above 0")
    if args.nccl and choose_device().type != GPU:
        parser.error("--nccl: there is no GPU")
    args.sizes = Sizes(**base | given)
    return args


# -- one worker beside plain PyTorch --


def overhead(sizes: Sizes) -> list[Row]:
    """Interleaved; the ratio is that of each round."""
    loops = {
        "plain": Loop("plain", "loop", "alone"),
        "elastic": Loop("library", "library", options=TORCH),
        "prepared": Loop("plain", "loop", options=TORCH),
    }
    setting = Setting(sizes.resnet, 1, 10, sizes.seconds, 2 * worker_batch(sizes.resnet))
    runs: dict[str, list[float]] = {loop: [] for loop in loops}
    for _ in range(sizes.rounds):
        for name, loop in loops.items():
            runs[name].append(measure(loop, setting).step_ms)
    rows = [(f"step of {sizes.resnet}, {loop}", summarise(each), "ms") for loop, each in runs.items()]
    for own in ("elastic", "prepared"):
        ratios = [100 * (ours / plain - 1) for ours, plain in zip(runs[own], runs["plain"], strict=True)]
        rows.append((f"one worker over plain PyTorch, {own}", summarise(ratios), "%"))
    return rows


# -- workers that share the GPU --


def rescale(workers: int, sizes: Sizes, model: str, rng: random.Random, results: Results) -> list[Row]:
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


def memory(sizes: Sizes, rng: random.Random, results: Results) -> list[Row]:
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


def state(sizes: Sizes, rng: random.Random, results: Results) -> list[Row]:
    """Commit and checkpoint of one worker alone; the pause when a second one joins it, which receives the state."""
    with tempfile.TemporaryDirectory(prefix="elasticdl-bench-") as folder, Processes(Path(folder)) as processes:
        flags = ["--record", "meter", "--model", sizes.state, "--folder", folder]
        processes.start_module("state", "benchmarks.loops.library", "state", *flags)
        processes.wait_all(START_SECONDS)
        found: dict[str, Any] = json.loads((Path(folder) / "state.json").read_text())
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
