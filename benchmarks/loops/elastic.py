"""The elasticdl loop that `benchmarks.throughput` measures: vote, commit and reporting at every step."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic
from benchmarks.loops.check_timer import time_checks
from benchmarks.loops.meter import Meter
from benchmarks.loops.options import parse_measured
from benchmarks.models import worker_batch
from benchmarks.torch_models import make_dataset, make_model, make_optimizer
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState
from elasticdl.elastic.torch_kit.reduction import buckets

# How the gradients are cut, by the names of the loops.
BUCKET_BYTES = {"elastic": buckets.BUCKET_BYTES, **{f"elastic-{size}mb": size << 20 for size in (1, 16, 64)}}


def agree(number: int) -> int:
    return int(elastic.context().collective.broadcast_bytes(str(number).encode(), "benchmark.steps"))


def main() -> None:
    args = parse_measured(BUCKET_BYTES)
    buckets.BUCKET_BYTES = BUCKET_BYTES[args.loop]
    torch.set_num_threads(1)
    elastic.init(batch_size_per_worker=worker_batch(args.model))
    model = make_model(args.model).to(elastic.device())
    optimizer = make_optimizer(model)
    loader = elastic.DataLoader(make_dataset(args.model, args.samples))
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    meter = Meter(args.warm_up, args.seconds, agree)
    time_checks(meter)

    @elastic.run
    def train(state: TorchState) -> None:
        meter.begin()
        for _ in loader.epochs(10**9):
            for batch in loader:
                for images, labels in batch:
                    meter.lap("load")
                    batch.backward(cross_entropy(model(images), labels))
                meter.lap("compute")  # as with DistributedDataParallel: what is reduced meanwhile included
                optimizer.step()
                meter.lap("update")
                state.commit()
                meter.lap("commit")
                if meter.done():
                    return

    train(state)
    meter.write(args.folder, elastic.rank())


if __name__ == "__main__":
    main()
