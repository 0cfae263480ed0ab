"""The loops that `benchmarks.throughput` compares with: no elasticity, one way of reducing gradients each."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.loops.meter import Meter
from benchmarks.loops.options import parse_measured
from benchmarks.models import worker_batch
from benchmarks.torch_models import make_dataset, make_model, make_optimizer


@dataclass(slots=True)
class Setup:
    """What differs between the loops."""

    model: torch.nn.Module
    update: Callable[[], object]
    reduce: Callable[[], object]
    zero: Callable[[], object]
    agree: Callable[[int], int]


def alone(name: str) -> Setup:
    """No reduction at all: what is left to be had."""
    model = make_model(name)
    optimizer = make_optimizer(model)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["BENCHMARK_STORE"], rank=rank, world_size=size)
    return Setup(model, optimizer.step, lambda: None, optimizer.zero_grad, _agree_by_torch)


def ddp(name: str) -> Setup:
    setup = alone(name)
    setup.model = torch.nn.parallel.DistributedDataParallel(setup.model)
    return setup


def gloo_flat(name: str) -> Setup:
    """torch's Gloo on one flat bucket after the backward pass: the engine of DDP without its overlap."""
    setup = alone(name)
    flat = _flatten_gradients(setup.model)
    setup.reduce, setup.zero = lambda: dist.all_reduce(flat), flat.zero_
    return setup


def horovod(name: str) -> Setup:
    """The plainest Horovod loop: a tensor at a time."""
    return _horovod(name)


def horovod_grouped(name: str) -> Setup:
    """All gradients in one group."""
    return _horovod(name, num_groups=1)


def horovod_flat(name: str) -> Setup:
    """One flat bucket, reduced after the backward pass."""
    return _horovod_flat(name, _spin)


def horovod_flat_sleep(name: str) -> Setup:
    """The same, but sleeping where Horovod spins."""
    return _horovod_flat(name, _sleep)


def horovod_buckets(name: str) -> Setup:
    """A flat bucket per layer, each reduced while the backward pass goes on."""
    import horovod.torch as hvd

    setup = _horovod_flat(name, _sleep)
    handles: list[int] = []

    def launch(number: int, bucket: torch.Tensor) -> None:
        handles.append(hvd.allreduce_async_(bucket, op=hvd.Sum, name=f"bucket.{number}"))

    def reduce() -> None:
        for handle in handles:
            _sleep(handle)
        handles.clear()

    layers = [layer for layer in setup.model.modules() if isinstance(layer, torch.nn.Linear)]
    for number, layer in enumerate(layers):
        _Bucket(list(layer.parameters()), functools.partial(launch, number))
    setup.reduce = reduce
    return setup


def _horovod_flat(name: str, wait: Callable[[int], object]) -> Setup:
    import horovod.torch as hvd

    hvd.init()
    model = make_model(name)
    optimizer = make_optimizer(model)
    flat = _flatten_gradients(model)

    def reduce() -> None:
        wait(hvd.allreduce_async_(flat, op=hvd.Sum, name="flat"))

    return Setup(model, optimizer.step, reduce, flat.zero_, _agree_by_horovod)


def _spin(handle: int) -> None:
    import horovod.torch as hvd

    hvd.synchronize(handle)


def _sleep(handle: int) -> None:
    import horovod.torch as hvd

    began = time.monotonic()
    while not hvd.poll(handle):
        time.sleep(min(max((time.monotonic() - began) / 16, 50e-6), 1e-3))
    hvd.synchronize(handle)


class _Bucket:
    """The gradients of one layer as one flat tensor; launched once a backward pass has made all of them."""

    def __init__(self, parameters: list[torch.nn.Parameter], launch: Callable[[torch.Tensor], None]) -> None:
        first = parameters[0].grad
        assert first is not None
        size = sum(parameter.numel() for parameter in parameters)
        self._flat = torch.as_strided(first, (size,), (1,), first.storage_offset())
        self._launch = launch
        self._count = self._missing = len(parameters)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _ready(self, _: torch.Tensor) -> None:
        self._missing -= 1
        if not self._missing:
            self._missing = self._count
            self._launch(self._flat)


def _horovod(name: str, **options: Any) -> Setup:
    import horovod.torch as hvd

    hvd.init()
    model = make_model(name)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(model), named_parameters=model.named_parameters(), op=hvd.Average, **options
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def update() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    return Setup(model, update, optimizer.synchronize, optimizer.zero_grad, _agree_by_horovod)


def _flatten_gradients(model: torch.nn.Module) -> torch.Tensor:
    """Make every gradient a view into one tensor, and return that."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    views = torch.split(flat, [parameter.numel() for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view.view_as(parameter)
    return flat


def _agree_by_torch(number: int) -> int:
    told = torch.tensor([number])
    dist.broadcast(told, 0)
    return int(told)


def _agree_by_horovod(number: int) -> int:
    import horovod.torch as hvd

    return int(hvd.broadcast(torch.tensor([number]), 0, name="steps"))


LOOPS = {
    "alone": alone,
    "ddp": ddp,
    "gloo-flat": gloo_flat,
    "horovod": horovod,
    "horovod-grouped": horovod_grouped,
    "horovod-flat": horovod_flat,
    "horovod-flat-sleep": horovod_flat_sleep,
    "horovod-buckets": horovod_buckets,
}


def batches(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def main() -> None:
    args = parse_measured(LOOPS)
    torch.set_num_threads(1)
    setup = LOOPS[args.loop](args.model)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dataset = make_dataset(args.model, args.samples)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=size, rank=rank)
    loader = DataLoader(dataset, batch_size=worker_batch(args.model), sampler=sampler)
    meter = Meter(args.warm_up, args.seconds, setup.agree)
    meter.begin()
    for images, labels in batches(loader, sampler):
        meter.lap("load")
        setup.zero()
        cross_entropy(setup.model(images), labels).backward()  # type: ignore[no-untyped-call]
        meter.lap("compute")
        setup.reduce()
        meter.lap("reduce")
        setup.update()
        meter.lap("update")
        if meter.done():
            break
    meter.write(args.folder, rank)


if __name__ == "__main__":
    main()
