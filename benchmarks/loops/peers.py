"""The loops of other elastic frameworks: torchrun, horovodrun and torchft, each with its own way back after a loss."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.loops.records import Team, Work, run
from benchmarks.models import recovery_steps, worker_batch
from benchmarks.torch_models import make_dataset, make_model, make_optimizer

POOL_BATCHES = 64
TIMEOUT = timedelta(seconds=30)  # of torchft


class Batches:
    """The batch of each step and rank, out of a pool in memory."""

    def __init__(self, model: str) -> None:
        size = worker_batch(model)
        images, labels = make_dataset(model, POOL_BATCHES * size).tensors
        self._pairs = list(zip(torch.split(images, size), torch.split(labels, size), strict=True))

    def of(self, step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pairs[(step * size + rank) % POOL_BATCHES]


def torchrun(work: Work) -> None:
    """DDP, with a checkpoint on disk as its recovery point."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(work.model)
    optimizer = make_optimizer(model)
    checkpoint = work.folder / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    parallel, batches = torch.nn.parallel.DistributedDataParallel(model), Batches(work.model)
    work.record.begin(Team(world=lambda: (str(size), size)))
    while True:
        images, labels = batches.of(step, rank, size)
        optimizer.zero_grad()
        cross_entropy(parallel(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        work.record.made(step)
        if step % recovery_steps(work.model) == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)


def horovodrun(work: Work) -> None:
    """Horovod's own elastic state, committed every some steps."""
    import horovod.torch as hvd

    hvd.init()
    model = make_model(work.model)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
    batches = Batches(work.model)
    work.record.begin(Team(world=lambda: (str(hvd.size()), hvd.size())))

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while True:
            images, labels = batches.of(state.step, hvd.rank(), hvd.size())
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state.step += 1
            work.record.made(state.step)
            if state.step % recovery_steps(work.model) == 0:
                state.commit()
            else:
                state.check_host_updates()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


def torchft(work: Work) -> None:
    """One process per replica group; a failed step is made again."""
    from torchft import (  # type: ignore[import-not-found]
        DistributedDataParallel,
        Manager,
        ProcessGroupGloo,
    )

    model = make_model(work.model)
    optimizer = make_optimizer(model)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=save,
        use_async_quorum=False,
        timeout=TIMEOUT,
        replica_id=f"replica-{os.getpid()}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    parallel, batches = DistributedDataParallel(manager, model), Batches(work.model)
    size = 0
    work.record.begin(Team(world=lambda: (str(size), size)))
    while True:
        manager.start_quorum()
        size = manager.num_participants()
        images, labels = batches.of(manager.current_step(), manager.participating_rank() or 0, size)
        optimizer.zero_grad()
        cross_entropy(parallel(images), labels).backward()  # type: ignore[no-untyped-call]
        if manager.should_commit():
            optimizer.step()
            work.record.made(manager.current_step())


if __name__ == "__main__":
    torch.set_num_threads(1)
    run({"torchrun": torchrun, "horovodrun": horovodrun, "torchft": torchft})
