"""The loop of every tutorial with PyTorch: alone, elastic, and with the usual ways of reducing gradients."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.loops.records import Team, Work, run, team_of_job
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
    return Setup(model, optimizer, loader, team, device, passes_by=library.catching_up)


def share(model: torch.nn.Module) -> None:
    """Among the processes of this worker, by FSDP2."""
    dist.init_process_group("nccl" if choose_device().type == GPU else "gloo")
    for each in model.children():
        if any(True for _ in each.parameters()):
            fully_shard(each)
    fully_shard(model)


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


WAYS = {"alone": alone, "elastic": elastic, "ddp": ddp, "gloo-flat": gloo_flat, "horovod": horovod}


def loop(work: Work) -> None:
    torch.set_num_threads(1)
    record, setup = work.record, WAYS[work.way](work)
    model, optimizer = setup.model, setup.optimizer
    zero, update = setup.zero or optimizer.zero_grad, setup.update or optimizer.step
    number = 0
    for _ in count():
        for images, labels in setup.loader:
            if record.team is None:  # a job has its place once training has begun
                record.begin(setup.team)
            record.lap("load")
            zero()
            if setup.device.type == GPU:
                images, labels = (each.to(setup.device, non_blocking=True) for each in (images, labels))
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            record.lap("compute")
            if setup.reduce:
                setup.reduce()
                record.lap("reduce")
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
