"""What the storms train where a worker has several processes: `watched_softmax`, shared by FSDP2. Its arguments: BATCH EPOCHS."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import elasticdl.elastic.torch as elastic
from benchmarks.storm.zoo import watched_softmax
from elasticdl.elastic.torch_kit.torch_state import TorchState


def main(batch_size: str, epochs: str) -> None:
    torch.set_num_threads(1)
    watched_softmax.write_pid(os.environ["RANK"])
    dist.init_process_group("gloo")
    elastic.init(global_batch_size=int(batch_size))
    model = watched_softmax.custom_model()
    fully_shard(model)
    optimizer = watched_softmax.optimizer(model.parameters())
    loader = elastic.DataLoader(watched_softmax.dataset("training", ""))
    watched = watched_softmax.Watched(os.environ["RANK"])

    @elastic.run
    def train(state: TorchState) -> None:
        for _ in loader.epochs(int(epochs)):
            for batch in loader:
                for inputs, labels in batch:
                    loss = watched_softmax.loss(labels, model(inputs))
                    batch.backward(loss)
                optimizer.step()
                watched.on_train_batch_end(state.step, {"loss": state.loss})
                state.commit()

    watched.on_train_begin()
    train(elastic.TorchState(model=model, optimizer=optimizer, loader=loader))
    watched.on_train_end()


if __name__ == "__main__":
    main(*sys.argv[1:])
