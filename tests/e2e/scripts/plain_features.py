"""A plain loop with what people's loops have, with one line for elasticdl.

    plain_features.py CURVE EPOCHS

A line per step in CURVE: what the script's own counters say, the norm of the gradients, the mean loss and the scale.
After each epoch it writes CURVE.pt, from which it goes on if the file is there; CURVE.begun has a line for each time it did.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import elasticdl.elastic.torch as elastic


class Digits(Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, index):
        pixels = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return {"pixels": pixels, "label": int(pixels[:7].argmax())}


def stack(samples):
    return {
        "pixels": torch.stack([each["pixels"] for each in samples]),
        "label": torch.tensor([each["label"] for each in samples]),
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh())
        self.head = nn.Linear(24, 7)
        self.unused = nn.Linear(3, 3)

    def forward(self, pixels):
        return self.head(checkpoint(self.body, pixels, use_reentrant=False))


def report(curve, *values):
    if elastic.rank() == 0:
        with open(curve, "a") as file:
            file.write(" ".join(f"{value:.9g}" for value in values) + "\n")
    if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")) and not elastic.catching_up():
        time.sleep(min(2.0, 0.02 * 1.05 ** values[0]))  # what a test waits for comes before the last step


def go_on(curve, **parts):
    """From the script's own checkpoint: the epoch and the step with which it begins."""
    if not os.path.exists(f"{curve}.pt"):
        return 0, 0
    saved = torch.load(f"{curve}.pt")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    with open(f"{curve}.begun", "a") as file:
        file.write(f"{saved['epoch']}\n")
    return saved["epoch"], saved["step"]


def keep(curve, epoch, step, **parts):
    if elastic.rank() == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "epoch": epoch, "step": step}, f"{curve}.new")
        os.replace(f"{curve}.new", f"{curve}.pt")


def train(curve, epochs):
    """A GradScaler, autocast, clipping, recomputed activations, a layer without gradients, processes that load data."""
    loader = DataLoader(Digits(), batch_size=40, shuffle=True, num_workers=2, collate_fn=stack)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    begins, step = go_on(curve, **parts)
    model, optimizer, loader, scaler = elastic.prepare(model, optimizer, loader, scaler, start_epoch=begins)
    for epoch in range(begins, epochs):
        for i, batch in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                output = model(batch["pixels"])
                loss = cross_entropy(output, batch["label"])
            factor = float("inf") if (epoch, i) in ((0, 4), (2, 12)) else 1.0  # these steps are skipped
            scaler.scale(loss * factor).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
            report(curve, step, epoch, i, min(norm.nan_to_num(posinf=0.0), 1e6), elastic.mean(loss), scaler.get_scale())
        keep(curve, epoch + 1, step, **parts)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(sys.argv[1], int(sys.argv[2]))
