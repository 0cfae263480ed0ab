"""The same loop, elastic: `elasticdl run --num_workers 2-4 -- python examples/from_torchrun/elastic_ddp.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.torch as elastic

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
dataset = TensorDataset(images[:1536], torch.tensor(digits.target[:1536]))
loader = DataLoader(dataset, batch_size=128)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = elastic.prepare(model, optimizer, loader)

for epoch in range(10):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(images).argmax(1) == torch.tensor(digits.target)).float().mean()
    if elastic.rank() == 0:
        print(f"epoch {epoch + 1}: accuracy {right:.3f}")
