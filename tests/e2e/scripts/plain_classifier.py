"""A classifier as PyTorch's own tutorials teach it, with one line for elasticdl.

    plain_classifier.py CURVE EPOCHS

Writes a line per step to CURVE: what the script's own counters say, the loss and the learning rate.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.torch as elastic

curve, epochs = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
pixels = torch.randn(1000, 64)
dataset = TensorDataset(pixels, pixels[:, :10].argmax(1))
train_loader = DataLoader(dataset, batch_size=96, shuffle=True)
model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

model, optimizer, train_loader = elastic.prepare(model, optimizer, train_loader)


is_other = os.path.exists(os.environ.get("TEST_OTHER_RATE", ""))  # when this worker begins


def wait_a_little(step):
    """Longer with each step: what a test waits for happens long before the last, however busy the machine."""
    if elastic.catching_up():
        time.sleep(0.2 if os.path.exists(os.environ.get("TEST_SLOW_TO_CATCH_UP", "")) else 0)
    elif os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
        time.sleep(min(2.0, 0.02 * 1.05**step))


step = 0
for epoch in range(epochs):
    for i, (inputs, labels) in enumerate(train_loader):
        if is_other:
            optimizer.param_groups[0]["lr"] = 0.3
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        step += 1
        mean = elastic.mean(loss)
        if elastic.rank() == 0:
            with open(curve, "a") as file:
                rate = scheduler.get_last_lr()[0]
                file.write(f"{step} {epoch} {i} {len(train_loader)} {mean:.9g} {rate}\n")
        wait_a_little(step)
    scheduler.step()
