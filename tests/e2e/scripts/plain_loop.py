"""A loop of plain PyTorch that knows nothing of elasticdl, as a trainer of another library runs one."""

import torch
from torch.nn.functional import cross_entropy

STEPS = 20


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), inputs[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
