"""A training loop that prints when it made its first step in each world, and when it ended: a JSON line each.

What `benchmarks.reclaim_lag` runs in its pods. Times are seconds since the epoch, so that they compare with the journal's.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import time

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic
from benchmarks.models import worker_batch
from benchmarks.torch_models import make_dataset, make_model, make_optimizer, warm_up
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState

SAMPLES = 65536
MARK = "mark"


class Marks:
    """What this process prints; at its end when its last step was done."""

    def __init__(self) -> None:
        self._world = 0
        self._last = time.time()
        atexit.register(self._ended)  # registered before the session's own, so called after it

    def step(self, world: int, seconds: float) -> None:
        """A step was made; returns when it has taken so long since the last, as on a device that computes it."""
        time.sleep(max(0.0, self._last + seconds - time.time()))
        self._last = time.time()
        if world != self._world:
            self._world = world
            self._print("first_step", self._last)

    def _ended(self) -> None:
        self._print("last_step", self._last)
        self._print("left", time.time())

    def _print(self, mark: str, when: float) -> None:
        line = {MARK: mark, "worker": int(os.environ["ELASTICDL_WORKER_ID"]), "world": self._world, "time": when}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--step", type=float, required=True, help="seconds that a step takes at least")
    args = parser.parse_args()
    marks = Marks()
    torch.set_num_threads(1)
    job = elastic.init(batch_size_per_worker=worker_batch(args.model))
    warm_up(args.model)
    model = make_model(args.model)
    optimizer = make_optimizer(model)
    loader = elastic.DataLoader(make_dataset(args.model, SAMPLES))
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @elastic.run
    def train(state: TorchState) -> None:
        for _ in loader.epochs(10**9):
            for batch in loader:
                for images, labels in batch:
                    batch.backward(cross_entropy(model(images), labels))
                optimizer.step()
                marks.step(job.world.version, args.step)
                state.commit()

    train(state)


if __name__ == "__main__":
    main()
