"""The shape of Run:AI's own examples for PyTorch, with their package's name replaced: a loop over torch's loader.

    runai_example_torch.py CURVE EPOCHS [bare]

``bare``: without the line that makes the loop elastic. A line per batch in CURVE: what the script's own counters say, the mean loss, the learning rate.
"""

import os
import sys
import time

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic
import elasticdl.elastic.torch
import elasticdl.ga.torch


def train(model, loader, optimizer, curve):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        mean = elasticdl.elastic.torch.mean(loss)
        train.batches += 1
        if elasticdl.elastic.torch.rank() == 0:
            with open(curve, "a") as file:
                file.write(
                    f"{train.batches} {len(loader)} {int(optimizer.stepped)} {mean:.9g} {optimizer.param_groups[0]['lr']:.9g}\n"
                )
        if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")) and not elasticdl.elastic.torch.catching_up():
            time.sleep(0.1)


def main(curve, epochs, *how):
    torch.manual_seed(0)
    elasticdl.elastic.torch.init(64, 16)
    inputs = torch.randn(328, 8)  # accumulations lie over the ends of epochs
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    loader = DataLoader(data, batch_size=elasticdl.elastic.batch_size, shuffle=True)
    model = torch.nn.DataParallel(torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = elasticdl.ga.torch.optim.Optimizer(optimizer, elasticdl.elastic.steps)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    if how != ("bare",):
        model, optimizer, loader = elasticdl.elastic.torch.prepare(model, optimizer, loader)
    train.batches = 0
    for _ in range(int(epochs)):
        train(model, loader, optimizer, curve)
        scheduler.step()
    print("elasticdl.elastic.steps", elasticdl.elastic.steps, elasticdl.elastic.batch_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
