"""What elastic training costs on a GPU: steps beside plain PyTorch's, and changes of workers that share it.

    python -m benchmarks.gpu [--small] [--parts overhead,rescale] [--rounds 5] [--seconds 20] [--repetitions 5] [--nccl]

A machine without a GPU runs it in small on the CPU, which shows that it works and nothing else. Torch's engine is used, whose
tensors travel by Gloo where workers share a GPU. ``--nccl`` has NCCL take each of them for a host of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from benchmarks.harness import Parser, Results, Summary, add_out, names, show_table, summarise
from benchmarks.ladders import TORCH, Loop, Setting, measure
from benchmarks.loops.own_host import OF_ALL
from benchmarks.models import RESNET50, TINY, worker_batch
from benchmarks.processes import scratch
from benchmarks.rescale import Change, ElasticRun
from elasticdl.elastic.torch_kit.gpu import GPU, choose_device

PARTS = ("overhead", "rescale")
OPTIONAL = ("rounds", "seconds", "repetitions")
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


FULL = Sizes(RESNET50, 20.0, 5, (2, 3), 5, "25m")
SMALL = Sizes(TINY, 0.5, 1, (2,), 1, "1m")


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
        "rescale": lambda: [row for workers in sizes.shared for row in rescale(workers, sizes, rng, results)],
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


def rescale(workers: int, sizes: Sizes, rng: random.Random, results: Results) -> list[Row]:
    """The survivors' pauses when workers come and go."""
    changes: dict[str, list[Change]] = {}
    with scratch(results.path.parent / f"failed-gpu-{workers}") as processes:
        options = {"collective": "torch", "slots": str(workers)}
        run = ElasticRun("torch", sizes.model, workers, processes, options)
        run.start()
        for number in range(sizes.repetitions):
            for event in ("grow", "sigkill"):
                for change in run.repeat(event, number, 1.0, rng):
                    changes.setdefault(change.event, []).append(change)
                    results.add("change", workers=workers, model=sizes.model, **asdict(change))
        run.stop()
    return [
        (f"{event}, {workers} workers, {sizes.model}", summarise(1e3 * max(c.gap.pauses) for c in found), "ms")
        for event, found in changes.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
