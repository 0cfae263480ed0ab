"""A loop on elasticdl's library, with PyTorch: vote, commit and reporting at every step."""

import time

BEGAN = time.time()

# ruff: noqa: E402
import functools
import os

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic
from benchmarks.loops.records import Work, run, team_of_job
from benchmarks.models import worker_batch
from benchmarks.torch_models import make_dataset, make_model, make_optimizer, warm_up
from elasticdl.common.credentials import SHARED_GPU, WORKER_ID
from elasticdl.elastic.torch_kit.tensors import wait_for
from elasticdl.elastic.torch_kit.torch_state import TorchState

# Workers that share a GPU reduce by NCCL all the same, each as if on a host of its own: NCCL takes two of them for one only on
# one host, and goes by sockets between hosts. For all workers alike: between hosts by the loopback device.
WANTED = "BENCHMARK_NCCL_ON_ONE_GPU"
OF_ALL = {WANTED: "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def library(work: Work) -> None:
    record = work.record
    if WANTED in os.environ:
        os.environ.pop(SHARED_GPU, None)
        os.environ["NCCL_HOSTID"] = f"worker-{os.environ[WORKER_ID]}"
    torch.set_num_threads(1)
    job = elastic.init(batch_size_per_worker=worker_batch(work.model))
    if record.warm:
        warm_up(work.model, job.device)
    model = make_model(work.model).to(job.device)
    optimizer = make_optimizer(model)
    loader = elastic.DataLoader(make_dataset(work.model, work.samples))
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
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
                state.commit()
                record.lap("commit")
                if record.over():
                    return

    train(state)


if __name__ == "__main__":
    run({"library": library}, BEGAN)
