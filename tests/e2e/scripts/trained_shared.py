"""As `trained.py`, of a model that the processes of a worker share; alone it is whole.

trained_shared.py fsdp | tensor FOLDER
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.torch as elastic

folder, is_shared = Path(sys.argv[2]), "RANK" in os.environ
if is_shared:
    dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(154, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
width = 7 if sys.argv[1] == "fsdp" else 8  # FSDP takes shards that are not equal
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
if is_shared and sys.argv[1] == "fsdp":
    fully_shard(model[0])
    fully_shard(model)
elif is_shared:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
# The last batch of an epoch has fewer samples than some worlds have processes.
loader = DataLoader(data, batch_size=9, shuffle=True)
model, optimizer, loader = elastic.prepare(model, optimizer, loader)
step = 0
for _ in range(6):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = ((model(inputs) - labels) ** 2).mean()
        loss.backward()
        if sys.argv[1] == "fsdp":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        step += 1
        mean = elastic.mean(loss)
        if elastic.rank() == 0 and os.environ.get("RANK", "0") == "0":
            with (folder / "curve").open("a") as curve:
                curve.write(f"{step} {mean:.6g} {scheduler.get_last_lr()[0]:.6g}\n")
        if (folder / "slow").exists() and not elastic.catching_up():
            time.sleep(min(2.0, 0.05 * 1.05**step))
    scheduler.step()
whole = [getattr(each, "full_tensor", each.detach)() for each in model.parameters()]
if elastic.rank() == 0 and os.environ.get("RANK", "0") == "0":
    (folder / "end").write_text(str([round(value, 4) for each in whole for value in each.flatten().tolist()]))
