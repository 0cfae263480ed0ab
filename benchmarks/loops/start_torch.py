"""The PyTorch loop that `benchmarks.start` starts: says when it began and when it had made its first step."""

import time

BEGAN = time.time()

# ruff: noqa: E402

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic
from benchmarks.loops.startlog import rest, write_start
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState


def main() -> None:
    elastic.init(global_batch_size=64)
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model.to(elastic.device())
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(1024, 784), torch.randint(0, 10, (1024,)))
    loader = elastic.DataLoader(data)

    @elastic.run
    def train(state: TorchState) -> None:
        for _ in loader.epochs(10**9):
            for batch in loader:
                for images, labels in batch:
                    batch.backward(cross_entropy(model(images), labels))
                optimizer.step()
                write_start(BEGAN)
                state.commit()
                rest()

    train(elastic.TorchState(model=model, optimizer=optimizer, loader=loader))


if __name__ == "__main__":
    main()
