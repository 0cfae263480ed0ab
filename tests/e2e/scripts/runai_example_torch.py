"""The shape of Run:AI's own examples for PyTorch, with their package's name replaced: a loop over torch's loader."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic
import elasticdl.elastic.torch
import elasticdl.ga.torch

EPOCHS = 2


def train(model, loader, optimizer, epoch):
    model.train()
    for number, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if number % 10 == 0:
            print(f"epoch {epoch}: {number * len(images)} of {len(loader.dataset)}, loss {loss.item():.4f}", flush=True)


def main():
    torch.manual_seed(0)
    elasticdl.elastic.torch.init(64, 16)
    inputs = torch.randn(320, 8)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    loader = DataLoader(data, batch_size=elasticdl.elastic.batch_size)
    model = torch.nn.DataParallel(torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = elasticdl.ga.torch.optim.Optimizer(optimizer, elasticdl.elastic.steps)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, EPOCHS + 1):
        train(model, loader, optimizer, epoch)
        scheduler.step()


if __name__ == "__main__":
    main()
