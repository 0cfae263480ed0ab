"""A CNN on handwritten digits: batches of 256, of which 64 at a time go through the model. No cluster is needed."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import elasticdl.ga.torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--steps", type=int, default=4, help="micro-batches per optimizer step")
options = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
train, test = torch.utils.data.random_split(data, [1500, len(data) - 1500])
convolutions = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))
optimizer = elasticdl.ga.torch.optim.Adam(options.steps, model.parameters(), lr=0.01)

for epoch in range(options.epochs):
    for inputs, labels in torch.utils.data.DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step(samples=len(inputs))  # the last micro-batch of an epoch is smaller
    optimizer.flush()  # and so is the last batch
    with torch.no_grad():
        inputs, labels = test[:]
        accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
    print(f"epoch {epoch}: accuracy {accuracy:.1%}")
