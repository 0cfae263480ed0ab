"""The loop of every tutorial with PyTorch: alone, elastic, with the usual ways of reducing gradients, and of a model in shards."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.loops.records import REPLICA, Team, Work, run, team_of_job
from benchmarks.models import worker_batch
from benchmarks.torch_models import make_dataset, make_model, make_optimizer, warm_up
from elasticdl.common.credentials import PROCESS
from elasticdl.elastic.torch_kit.tensors import GPU, choose_device, wait_for


def team_of_torch() -> Team:
    def agree(number: int) -> int:
        told = torch.tensor([number])
        dist.broadcast(told, 0)
        return int(told)

    return Team(agree, dist.get_rank, lambda: ("1", dist.get_world_size()))


@dataclass(slots=True)
class Setup:
    """What differs between the ways. ``passes_by``: whether a step was made before, and is only caught up with."""

    model: Any
    optimizer: Any
    loader: Any
    team: Team = field(default_factory=Team)
    device: torch.device = field(default_factory=functools.partial(torch.device, "cpu"))
    reduce: Callable[[], object] | None = None
    update: Callable[[], object] | None = None
    zero: Callable[[], object] | None = None
    passes_by: Callable[[], bool] = bool
    begin: Callable[[], object] = bool  # of a step
    may_step: Callable[[], bool] | None = None


def alone(work: Work) -> Setup:
    device = choose_device()
    model = make_model(work.model).to(device)
    loader = _loader(work, None)
    return Setup(model, make_optimizer(model), loader, Team(settle=functools.partial(wait_for, device)), device=device)


def elastic(work: Work) -> Setup:
    import elasticdl.elastic.torch as library

    if work.record.warm:
        warm_up(work.model)
    device = choose_device()
    model = make_model(work.model).to(device)
    if PROCESS in os.environ:
        share(model)
    model, optimizer, loader = library.prepare(model, make_optimizer(model), _loader(work, None))
    work.record.watch_checks()
    team = team_of_job(library.context, functools.partial(wait_for, device))
    if PROCESS in os.environ:
        team = _team_of_all(team)
    return Setup(model, optimizer, loader, team, device, passes_by=library.catching_up)


def _team_of_all(workers: Team) -> Team:
    """Of the processes of all workers, each of which has as many."""
    inside = team_of_torch()

    def agree(number: int) -> int:
        return inside.agree(workers.agree(number))

    return replace(workers, agree=agree, rank=lambda: workers.rank() * inside.world()[1] + inside.rank())


def share(model: torch.nn.Module, mesh: Sequence[int] = ()) -> None:
    """Among the processes of this worker, by FSDP2, or as the ``mesh`` of all processes says; layer by layer."""
    dist.init_process_group("nccl" if choose_device().type == GPU else "gloo")
    how: dict[str, Any] = (
        {"mesh": init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("across", "within")[-len(mesh) :])}
        if mesh
        else {}
    )
    layers = [each for each in model.modules() if isinstance(each, torch.nn.TransformerEncoderLayer)]
    for each in [*layers, *model.children()]:
        if any(True for _ in each.parameters()):
            fully_shard(each, **how)
    fully_shard(model, **how)


def shared(work: Work) -> Setup:
    """FSDP2 over all processes, or native HSDP: over two and two of them."""
    model = make_model(work.model)
    share(model, (2, work.workers // 2) if work.way == "hsdp" else (work.workers,))
    team = team_of_torch()
    return Setup(model, make_optimizer(model), _loader(work, team), team)


def torchft(work: Work) -> Setup:
    """HSDP of two replica groups. Between them torchft sums, and decides whether a step counts."""
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]

    model = make_model(work.model)
    share(model)
    optimizer, replica, limit = make_optimizer(model), int(os.environ[REPLICA]), timedelta(seconds=30)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=2,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        use_async_quorum=False,
        timeout=limit,
        init_sync=False,  # both begin with the same weights
        replica_id=f"replica-{replica}",
        hostname="127.0.0.1",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradient: manager.allreduce(gradient).wait())
    inside, size = team_of_torch(), dist.get_world_size()

    def agree(steps: int) -> int:
        told = torch.tensor([inside.agree(steps) if replica == 0 else 0])
        manager.allreduce(told, reduce_op=dist.ReduceOp.SUM).wait()
        return int(told)

    team = Team(agree, lambda: replica * size + inside.rank(), lambda: ("1", work.workers))
    begin, may_step = manager.start_quorum, manager.should_commit
    return Setup(model, optimizer, _loader(work, team), team, begin=begin, may_step=may_step)


def ddp(work: Work) -> Setup:
    dist.init_process_group("gloo")
    model = make_model(work.model)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    team = team_of_torch()
    return Setup(parallel, make_optimizer(model), _loader(work, team), team)


def gloo_flat(work: Work) -> Setup:
    """torch's Gloo on one flat bucket after the backward pass: the engine of DDP without its overlap."""
    dist.init_process_group("gloo")
    model, team = make_model(work.model), team_of_torch()
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    views = torch.split(flat, [parameter.numel() for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view.view_as(parameter)
    reduce = functools.partial(dist.all_reduce, flat)
    return Setup(model, make_optimizer(model), _loader(work, team), team, reduce=reduce, zero=flat.zero_)


def horovod(work: Work) -> Setup:
    """The plainest Horovod loop: a tensor at a time."""
    import horovod.torch as hvd

    hvd.init()
    model = make_model(work.model)
    parameters = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=parameters, op=hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def agree(number: int) -> int:
        return int(hvd.broadcast(torch.tensor([number]), 0, name="steps"))

    def update() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    team = Team(agree, hvd.rank, lambda: ("1", hvd.size()))
    return Setup(model, optimizer, _loader(work, team), team, reduce=optimizer.synchronize, update=update)


def _loader(work: Work, team: Team | None) -> DataLoader[Any]:
    """All of each batch; a rank's share of it, where the ranks share it by themselves."""
    data, batch = make_dataset(work.model, work.samples), worker_batch(work.model)
    if team is None:
        pinned = choose_device().type == GPU
        return DataLoader(data, batch_size=work.workers * batch, shuffle=True, pin_memory=pinned)
    _, size = team.world()
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=size, rank=team.rank())
    return DataLoader(data, batch_size=batch, sampler=sampler)


def kept(model: torch.nn.Module, optimizer: torch.optim.Optimizer, before: int) -> dict[str, int]:
    """Bytes in this process, its own shards alone; ``grown``: of all its private memory, since that was ``before``."""
    parameters = list(model.parameters())
    state = [each for one in optimizer.state.values() for each in one.values() if isinstance(each, torch.Tensor)]
    gradients = [each.grad for each in parameters if each.grad is not None]
    own = {"parameters": _bytes(parameters), "gradients": _bytes(gradients), "optimizer": _bytes(state)}
    return {**own, "grown": private_bytes() - before}


def private_bytes() -> int:
    """Of this process's memory, what no other process shares."""
    memory = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in memory if line.startswith("Private"))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each once."""
    own = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = [each.untyped_storage() for each in own]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


WAYS = {
    "alone": alone,
    "elastic": elastic,
    "ddp": ddp,
    "gloo-flat": gloo_flat,
    "horovod": horovod,
    "fsdp": shared,
    "hsdp": shared,
    "torchft": torchft,
}


def loop(work: Work) -> None:
    torch.set_num_threads(1)
    before = private_bytes()
    record, setup = work.record, WAYS[work.way](work)
    model, optimizer = setup.model, setup.optimizer
    record.watch_memory(functools.partial(kept, model, optimizer, before))
    zero, update = setup.zero or optimizer.zero_grad, setup.update or optimizer.step
    number = 0
    for _ in count():
        for images, labels in setup.loader:
            if record.team is None:  # a job has its place once training has begun
                record.begin(setup.team)
            record.lap("load")
            setup.begin()
            zero()
            if setup.device.type == GPU:
                images, labels = (each.to(setup.device, non_blocking=True) for each in (images, labels))
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            record.lap("compute")
            if setup.reduce:
                setup.reduce()
                record.lap("reduce")
            if setup.may_step is None or setup.may_step():
                update()
            record.lap("update")
            number += 1
            if setup.passes_by():
                continue
            record.made(number)
            if record.over():
                return


if __name__ == "__main__":
    run({"loop": loop})
