"""One worker with a large state: how long a commit and a checkpoint hold up training, and what they take of the device."""

from __future__ import annotations

import json
import time

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic
from benchmarks.loops.memory import forget_peak, memory_of
from benchmarks.loops.records import Work, run
from benchmarks.torch_models import make_dataset, make_model, make_optimizer
from elasticdl.elastic.torch_kit.gpu import wait_for
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState

COMMITS = 20


def measure(work: Work) -> None:
    elastic.init(batch_size_per_worker=1)
    device = elastic.device()
    model = make_model(work.model).to(device)
    optimizer = make_optimizer(model)
    loader = elastic.DataLoader(make_dataset(work.model, COMMITS))
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
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

    train(state)
    forget_peak(device)
    held, path = memory_of(device), work.folder / "checkpoint"
    before = time.perf_counter()
    with path.open("wb") as file:
        state.write(file)
    seconds, after = time.perf_counter() - before, memory_of(device)
    result = {
        "state_bytes": path.stat().st_size,
        "commit_seconds": commits,
        "checkpoint_seconds": seconds,
        "device_bytes_of_checkpoint": after.peak - held.allocated if after and held else None,
    }
    (work.folder / "state.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run({"state": measure})
