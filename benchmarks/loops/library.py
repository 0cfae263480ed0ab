"""Loops on elasticdl's library, with PyTorch: vote, commit and reporting at every step; and one with a large state, alone."""

import time

BEGAN = time.time()

# ruff: noqa: E402
import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic
from benchmarks.loops.own_host import take_own_host
from benchmarks.loops.records import StepLog, Work, run, team_of_job
from benchmarks.models import worker_batch
from benchmarks.torch_models import make_dataset, make_model, make_optimizer, warm_up
from elasticdl.elastic.torch_kit.gpu import GPU, wait_for
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState

SETTLED_STEPS = 3  # until what the first steps of a world need is there
COMMITS = 20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """In bytes."""

    allocated: int  # by tensors, now
    peak: int  # by tensors, since `forget_peak`
    reserved: int  # by torch's allocator, which keeps what was freed
    used: int  # of the whole device, by all processes


def memory_of(device: torch.device) -> DeviceMemory | None:
    """None on a CPU."""
    if device.type != GPU:
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        torch.cuda.memory_allocated(device),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.memory_reserved(device),
        total - free,
    )


def forget_peak(device: torch.device) -> None:
    if device.type == GPU:
        torch.cuda.reset_peak_memory_stats(device)


class MemoryLog:
    """A line of JSON for each world, in a file of this process."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._path = folder / f"memory-{os.getpid()}.jsonl"
        self._device = device
        self._world = self._steps = 0

    def step(self, world: int, size: int) -> None:
        self._world, self._steps = world, self._steps + 1 if world == self._world else 1
        if self._steps != SETTLED_STEPS:
            return
        on_device = memory_of(self._device)
        line = {"world": world, "size": size, "host": psutil.Process().memory_info().rss} | (
            asdict(on_device) if on_device else {}
        )
        forget_peak(self._device)
        with self._path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def library(work: Work) -> None:
    record = work.record
    take_own_host()
    torch.set_num_threads(1)
    job = elastic.init(batch_size_per_worker=worker_batch(work.model))
    if record.warm:
        warm_up(work.model, job.device)
    model = make_model(work.model).to(job.device)
    optimizer = make_optimizer(model)
    loader = elastic.DataLoader(make_dataset(work.model, work.samples))
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    memory = MemoryLog(work.folder, job.device) if isinstance(record, StepLog) else None
    record.watch_checks()

    @elastic.run
    def train(state: TorchState) -> None:
        record.begin(team_of_job(elastic.context, functools.partial(wait_for, job.device)))
        for _ in loader.epochs(10**9):
            for batch in loader:
                for images, labels in batch:
                    record.lap("load")
                    batch.backward(cross_entropy(model(images), labels))
                record.lap("compute")  # as with DistributedDataParallel: what is reduced meanwhile included
                optimizer.step()
                record.lap("update")
                record.made(state.step)
                if memory:
                    memory.step(job.world.version, job.size)
                state.commit()
                record.lap("commit")
                if record.over():
                    return

    train(state)


def state(work: Work) -> None:
    """How long a commit and a checkpoint hold up training, and what they take of the device."""
    torch.set_num_threads(1)
    elastic.init(batch_size_per_worker=1)
    device = elastic.device()
    model = make_model(work.model).to(device)
    optimizer = make_optimizer(model)
    loader = elastic.DataLoader(make_dataset(work.model, COMMITS))
    held_state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    commits: list[float] = []

    @elastic.run
    def train(state: TorchState) -> None:
        for _ in loader.epochs(1):
            for batch in loader:
                for images, labels in batch:
                    batch.backward(cross_entropy(model(images), labels))
                optimizer.step()
                wait_for(device)
                before = time.perf_counter()
                state.commit()
                wait_for(device)
                commits.append(time.perf_counter() - before)

    train(held_state)
    forget_peak(device)
    held, path = memory_of(device), work.folder / "checkpoint"
    before = time.perf_counter()
    with path.open("wb") as file:
        held_state.write(file)
    seconds, after = time.perf_counter() - before, memory_of(device)
    result = {
        "state_bytes": path.stat().st_size,
        "commit_seconds": commits,
        "checkpoint_seconds": seconds,
        "device_bytes_of_checkpoint": after.peak - held.allocated if after and held else None,
    }
    (work.folder / "state.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run({"library": library, "state": state}, BEGAN)
