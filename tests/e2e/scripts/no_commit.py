"""The loop of the README without its last line: ``state.commit()``."""

import os
import time

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic

EPOCHS = 2


def main():
    elastic.init(global_batch_size=16)
    inputs = torch.randn(160, 8)
    loader = elastic.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1)))
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @elastic.run
    def train(state):
        for _ in state.loader.epochs(EPOCHS):
            for batch in state.loader:
                for images, labels in batch:
                    batch.backward(cross_entropy(model(images), labels))
                optimizer.step()
                print(f"step {state.step} of worker {elastic.rank()} of {elastic.size()}", flush=True)
                if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
                    time.sleep(0.2)

    train(state)


if __name__ == "__main__":
    main()
