"""The elasticdl loop that `benchmarks.rescale` disturbs."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic
from benchmarks.loops.memorylog import MemoryLog
from benchmarks.loops.options import parse_steps
from benchmarks.loops.own_host import take_own_host
from benchmarks.loops.steplog import StepLog
from benchmarks.models import worker_batch
from benchmarks.torch_models import make_dataset, make_model, make_optimizer, warm_up
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState


def main() -> None:
    args = parse_steps()
    take_own_host()
    torch.set_num_threads(1)
    job = elastic.init(batch_size_per_worker=worker_batch(args.model))
    warm_up(args.model, job.device)
    model = make_model(args.model).to(job.device)
    optimizer = make_optimizer(model)
    loader = elastic.DataLoader(make_dataset(args.model, args.samples))
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    log = StepLog(args.folder)
    memory = MemoryLog(args.folder, job.device)

    @elastic.run
    def train(state: TorchState) -> None:
        for _ in loader.epochs(10**9):
            for batch in loader:
                for images, labels in batch:
                    batch.backward(cross_entropy(model(images), labels))
                optimizer.step()
                log.step(state.step, str(job.world.version), job.size)
                memory.step(job.world.version, job.size)
                state.commit()

    train(state)


if __name__ == "__main__":
    main()
