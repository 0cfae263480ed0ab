"""Calls ``init`` and goes on with a loop of its own, outside of any function under ``@elastic.run``."""

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic

STEPS = 20


def main():
    elastic.init(global_batch_size=16)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), inputs[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
        print(f"step {step} of worker {elastic.rank()} of {elastic.size()}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
