"""What a user of Run:AI's library writes for PyTorch: a loop over micro-batches."""

import os
import sys
import time

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic

EPOCHS, WEIGHTS = int(sys.argv[1]), sys.argv[2]

elastic.init(64, 16)
random = torch.Generator().manual_seed(0)
inputs = torch.randn(300, 8, generator=random)
labels = inputs[:, :3].argmax(1)
loader = elastic.DataLoader(torch.utils.data.TensorDataset(inputs, labels))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = elastic.optim.Optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


@elastic.run
def train(state):
    count = 0
    for _ in loader.epochs(EPOCHS):
        for images, wanted in optimizer.micro_batches(state):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), wanted)
            loss.backward()
            optimizer.step(loss=loss)
            count += 1
            if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
                time.sleep(min(0.5, 0.02 * 1.02**count))  # what a test waits for comes before the last step


train(state)
torch.save(model.state_dict(), f"{WEIGHTS}.{os.getpid()}.pt")
