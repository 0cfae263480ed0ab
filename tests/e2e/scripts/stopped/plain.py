"""Prints each step on rank 0; which is printed once, whoever is killed and stopped."""

import os
import time

import torch

import elasticdl.elastic.torch as elastic

SLOW = os.environ.get("TEST_SLOW_WHILE", "")
torch.manual_seed(0)
x = torch.randn(160, 4)
y = x.sum(1, keepdim=True)


def wait():
    """Between two steps, while somebody is to come between."""
    if SLOW and os.path.exists(SLOW):
        time.sleep(0.1)


data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = elastic.prepare(model, optimizer, loader)
step = 0
for _ in range(6):
    for inputs, labels in loader:
        loss = ((model(inputs) - labels) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if elastic.rank() == 0:
            print(f"step {step} loss {elastic.mean(loss):.4f}")
        else:
            elastic.mean(loss)
        wait()
if elastic.rank() == 0:
    print("final", [round(value, 4) for value in torch.cat([each.flatten() for each in model.parameters()]).tolist()])
