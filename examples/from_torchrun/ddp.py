"""A loop for torchrun: `torchrun --standalone --nproc-per-node 2 examples/from_torchrun/ddp.py`. What of it changes is in elastic_ddp.py."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
dataset = TensorDataset(images[:1536], torch.tensor(digits.target[:1536]))
sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=128 // dist.get_world_size(), sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(images).argmax(1) == torch.tensor(digits.target)).float().mean()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: accuracy {right:.3f}")

dist.destroy_process_group()
