"""A loop of the library, whose schedule and own value go on."""

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


elastic.init(global_batch_size=8)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
loader = elastic.DataLoader(torch.utils.data.TensorDataset(x, y))
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, seen=0)


@elastic.run
def train(state):
    for _ in state.loader.epochs(6):
        for batch in state.loader:
            for inputs, labels in batch:
                batch.backward(((model(inputs) - labels) ** 2).mean())
            optimizer.step()
            scheduler.step()
            state.seen += 1
            wait()
            state.commit()


train(state)
if elastic.rank() == 0:
    print("final", state.seen, [round(value, 4) for each in model.parameters() for value in each.flatten().tolist()])
