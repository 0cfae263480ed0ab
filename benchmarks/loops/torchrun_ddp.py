"""The loop that `benchmarks.rescale` runs under torchrun: DDP, with a checkpoint on disk as its recovery point."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.loops.peer_common import Batches, parse
from benchmarks.loops.steplog import StepLog
from benchmarks.models import recovery_steps
from benchmarks.torch_models import make_model, make_optimizer


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(args.model)
    optimizer = make_optimizer(model)
    checkpoint: Path = args.folder / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    parallel = DistributedDataParallel(model)
    batches, log = Batches(args.model), StepLog(args.folder)
    while True:
        images, labels = batches.of(step, rank, size)
        optimizer.zero_grad()
        cross_entropy(parallel(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        log.step(step, str(size), size)
        if step % recovery_steps(args.model) == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)


if __name__ == "__main__":
    main()
