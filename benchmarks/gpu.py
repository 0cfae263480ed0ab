"""What elastic training costs on a GPU: steps beside plain PyTorch's, and changes of workers that share it.

    python -m benchmarks.gpu [--small] [--parts overhead,rescale] [--rounds 5] [--seconds 20] [--repetitions 5] [--nccl]

A machine without a GPU runs it in small on the CPU, which shows that it works and nothing else. Torch's engine is used, whose
tensors travel by Gloo where workers share a GPU. ``--nccl`` has NCCL take each of them for a host of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass

import torch

from benchmarks.experiments.options import counting, positive
from benchmarks.harness import Parser, Results, add_out, names
from benchmarks.ladders import TORCH, Ladder, Loop, Setting
from benchmarks.loops.library import OF_ALL
from benchmarks.models import RESNET50, TINY, worker_batch
from benchmarks.rescale import HEARTBEAT_TIMEOUT, Key, measure_all
from benchmarks.throughput import climb, report
from elasticdl.elastic.torch_kit.tensors import GPU, choose_device

PARTS = ("overhead", "rescale")
OPTIONAL = ("rounds", "seconds", "repetitions")
ONE_WORKER = Ladder(
    "one worker",
    "torch",
    workers=1,
    references=("plain",),
    loops={
        "plain": Loop("plain", "loop", "alone"),
        "elastic": Loop("library", "library", options=TORCH),
        "prepared": Loop("plain", "loop", options=TORCH),
    },
)


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
    device = torch.cuda.get_device_name() if choose_device().type == GPU else "CPU"
    results.add("device", device=device, small=args.small, nccl=args.nccl)
    print(device)
    if args.small:
        print("in small: this shows that it works; no figure of it says anything about a GPU")
    sizes: Sizes = args.sizes
    if args.nccl:
        os.environ |= OF_ALL
    if "overhead" in args.parts:
        setting = Setting(sizes.resnet, 1, 10, sizes.seconds, 2 * worker_batch(sizes.resnet))
        runs = climb(ONE_WORKER, list(ONE_WORKER.loops), setting, sizes.rounds, results)
        report(ONE_WORKER, sizes.resnet, runs, results)
    if "rescale" in args.parts:
        keys = [Key(e, n, sizes.model, "torch", "torch") for n in sizes.shared for e in ("grow", "sigkill")]
        measure_all(keys, results, sizes.repetitions, 1.0, HEARTBEAT_TIMEOUT, slots=str(max(sizes.shared)))
    print(f"results: {results.path}")
    return 0


def parse() -> argparse.Namespace:
    parser = Parser("gpu", __doc__)
    parser.add_argument("--small", action="store_true", help="as without a GPU: a tiny model, few steps")
    parser.add_argument("--parts", type=names, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--rounds", type=counting, help=f"of plain and elastic steps; default: {FULL.rounds}")
    parser.add_argument("--seconds", type=positive, help=f"that each of them is measured; default: {FULL.seconds:g}")
    parser.add_argument("--repetitions", type=counting, help=f"of each change of workers; default: {FULL.repetitions}")
    parser.add_argument("--nccl", action="store_true", help="workers that share the GPU reduce by NCCL, over sockets")
    add_out(parser)
    args = parser.parse_args()
    parser.require_known(args, parts=PARTS)
    args.small = args.small or choose_device().type == "cpu"
    base = asdict(SMALL if args.small else FULL)
    given = {name: value for name in OPTIONAL if (value := getattr(args, name))}
    if args.nccl and choose_device().type != GPU:
        parser.error("--nccl: there is no GPU")
    args.sizes = Sizes(**base | given)
    return args


if __name__ == "__main__":
    sys.exit(main())
