"""A small transformer, sharded by FSDP2 over the processes of a worker; workers come and go as a whole.

    elasticdl run --num_workers 1-3 --processes_per_worker 2 -- python examples/groups/fsdp2.py

The loader's batches are the global batches: of each the processes of all workers have a part. With --checkpoint_dir the model and the optimizer
are written after each epoch, by the processes of rank 0's worker while the others train on; with --resume the newest is read. Workers of any number
of processes read it, as does a script without elasticdl.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.elastic import torch as elastic

VOCABULARY, LENGTH, WIDTH = 64, 16, 64


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.first, self.second = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.before(x)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = x + self.attention(seen, seen, seen, attn_mask=mask, need_weights=False)[0]
        return x + self.second(torch.nn.functional.gelu(self.first(self.between(x))))


class Transformer(torch.nn.Module):
    def __init__(self, block: Callable[[], torch.nn.Module] = Block, layers: int = 2) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(block() for _ in range(layers))
        self.out = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x.flatten(0, 1))


def sequences(number: int) -> TensorDataset:
    """Each token is the one before it and a step of the sequence's own."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(VOCABULARY, (number, 1), generator=generator)
    step = torch.randint(1, 8, (number, 1), generator=generator)
    tokens = (start + step * torch.arange(LENGTH + 1)) % VOCABULARY
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class Checkpoints:
    """In folders, one for each epoch. A folder with a ``.metadata`` is whole."""

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer
        # Of its own: it writes while the default group trains.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._writing = None

    def write(self, epochs: int) -> None:
        self.wait()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        content = {"model": model, "optimizer": optimizer, "epochs": epochs}
        self._writing = dcp.async_save(content, checkpoint_id=self._folder / str(epochs), process_group=self._group)

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def read(self) -> int:
        """The number of epochs that the newest has seen; 0 if there is none."""
        found = [int(path.parent.name) for path in self._folder.glob("*/.metadata")]
        if not found:
            return 0
        model, optimizer = get_state_dict(self._model, self._optimizer)
        content = {"model": model, "optimizer": optimizer, "epochs": 0}
        dcp.load(content, checkpoint_id=self._folder / str(max(found)), process_group=self._group)
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return max(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1100)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=22)
    parser.add_argument("--checkpoint_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    is_shared = "RANK" in os.environ  # a worker of one process holds the whole model
    if is_shared:
        dist.init_process_group("nccl" if has_gpu else "gloo")
    process = dist.get_rank() if is_shared else 0
    device = torch.device("cuda", process) if has_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = Transformer().to(device)
    if is_shared:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(sequences(options.samples), batch_size=options.batch_size, shuffle=True)
    checkpoints = Checkpoints(options.checkpoint_dir, model, optimizer) if options.checkpoint_dir else None
    first = checkpoints.read() if checkpoints and options.resume else 0
    model, optimizer, loader = elastic.prepare(model, optimizer, loader, start_epoch=first)

    for epoch in range(first, options.epochs):
        for tokens, following in loader:
            optimizer.zero_grad()
            scores = model(tokens.to(device))
            loss = torch.nn.functional.cross_entropy(scores, following.to(device).flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        mean = elastic.mean(loss)
        if elastic.rank() == process == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f}", flush=True)
        if checkpoints:
            elastic.on_one(checkpoints.write, epoch + 1)
    if checkpoints:
        checkpoints.wait()
    if is_shared:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
