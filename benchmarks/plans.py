"""What the division of batches takes: as an epoch begins, in each step, and within a pause, where many samples are left.

python -m benchmarks.plans --samples 100000,10000000 --batch 256
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.harness import Parser, Results, add_out, numbers, show_summaries, summarise
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.progress import Progress, SampleOrder
from elasticdl.elastic.core.world import Member, World
from elasticdl.elastic.torch_kit.data.own_loader import GlobalBatch, OwnCursor, OwnLoader

WORLDS = 100
MEASURES = ("order, once an epoch", "first batch of a world", "batch")
Measured = tuple[float, list[float], list[float]]


def world_of(version: int) -> World:
    """Of two or three workers, in turn."""
    return World.of(version, tuple(Member(each, "host", 0, True) for each in range(2 + version % 2)), 1)


def measure_ordered(samples: int, batch: int) -> Measured:
    """By an order of ours."""
    order = SampleOrder(samples, BatchPolicy(batch, None, batch), seed=1)
    drawn = _seconds(next, order.batches(Progress(), 2))
    firsts, steps = [], []
    for number in range(WORLDS):
        world = world_of(number)
        progress = Progress(position=number * batch, step=number)
        plans = order.steps(progress, world.rank, world.size)
        firsts.append(_seconds(next, plans))
        steps.append(_seconds(next, plans))
    return drawn, firsts, steps


def measure_own_loader(samples: int, batch: int) -> Measured:
    """By a script's own loader, which shuffles; a sample is its number."""
    loader = OwnLoader(DataLoader(range(samples), batch, shuffle=True, collate_fn=len))  # type: ignore[arg-type]
    order: list[GlobalBatch] = []
    drawn = _seconds(lambda: order.extend(loader.of_epoch(0)))
    cursor = OwnCursor(loader, order, GlobalBatch.plan)
    firsts, steps = [], []
    for number in range(WORLDS):
        world = world_of(number)
        firsts.append(_seconds(cursor.take, 2 * number, world))
        steps.append(_seconds(cursor.take, 2 * number + 1, world))
    return drawn, firsts, steps


def _seconds(run: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - began


def main() -> None:
    parser = Parser("plans", __doc__)
    parser.add_argument("--samples", type=numbers, default=[100_000, 10_000_000], help="of an epoch, comma-separated")
    parser.add_argument("--batch", type=int, default=256, help="samples of a global batch")
    add_out(parser)
    args = parser.parse_args()
    results = Results("plans", args.out)
    found = {}
    for samples in args.samples:
        for kind, measure in (("ours", measure_ordered), ("a script's", measure_own_loader)):
            drawn, firsts, steps = measure(samples, args.batch)
            first, step = summarise(firsts), summarise(steps)
            results.add("plans", cursor=kind, samples=samples, batch=args.batch, order=drawn, first=first, step=step)
            parts = (summarise([drawn]), first, step)
            found[f"{samples:,}, {kind}"] = dict(zip(MEASURES, parts, strict=True))
    show_summaries("dividing batches, seconds", found, digits=6)
    print(f"results: {results.path}")


if __name__ == "__main__":
    main()
