"""The transformer of `fsdp2.py`, divided by tensor parallelism: the processes of a worker have the same samples, and each a part of every layer.

elasticdl run --num_workers 1-3 --processes_per_worker 2 -- python examples/groups/tensor_parallel.py
"""

import argparse

import torch
import torch.distributed as dist
from fsdp2 import WIDTH, Transformer, sequences
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from elasticdl.elastic import torch as elastic

HEADS = 4


class Attention(torch.nn.Module):
    """Of as many heads as its parts of the projections have."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.first, self.second = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.second(torch.nn.functional.gelu(self.first(self.between(x))))


COLUMNS, ROWS = ColwiseParallel, RowwiseParallel
PLAN = {
    **{f"attention.{each}": COLUMNS() for each in ("query", "key", "value")},
    "attention.out": ROWS(),
    "first": COLUMNS(),
    "second": ROWS(),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1100)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if has_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = Transformer(Block).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, foreach=False
    )  # some parameters are whole, and others divided
    loader = DataLoader(sequences(options.samples), batch_size=22, shuffle=True)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)

    for epoch in range(options.epochs):
        for tokens, following in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(tokens.to(device)), following.to(device).flatten())
            loss.backward()
            optimizer.step()
        mean = elastic.mean(loss)
        if elastic.rank() == dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
