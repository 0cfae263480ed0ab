"""A script in the style of Horovod's elastic examples for PyTorch; nothing in it is ours."""

import os
import time

import horovod.torch as hvd
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

hvd.init()
torch.manual_seed(1)
inputs = torch.randn(512, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def enough():
    """Rank 0 says so for all."""
    return hvd.broadcast_object(not os.path.exists(os.environ["TEST_GO_ON_WHILE"]), root_rank=0)


@hvd.elastic.run
def train(state):
    while not state.enough:
        for index, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            sampler.record_batch(index, len(x))
            state.batches += 1
            if state.batches % 2:
                state.check_host_updates()
            else:
                print(f"commit {state.batches} size {hvd.size()} loss {loss.item():.6f}", flush=True)
                state.enough = enough()
                state.commit()
            if state.enough:
                return
            time.sleep(0.1)
        state.epoch += 1
        sampler.set_epoch(state.epoch)


def on_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batches=0, enough=False)
state.register_reset_callbacks([on_reset])
train(state)
print(f"done {state.batches} rank {hvd.rank()} weight {model[0].weight.sum().item():.6f}", flush=True)
