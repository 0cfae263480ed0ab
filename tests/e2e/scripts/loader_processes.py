"""``init`` at the top level, which the processes that load data run as well; the rest below a guard.

    loader_processes.py CURVE EPOCHS [--spawn]

Rank 0 appends a line per step to CURVE: step and loss.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic

elastic.init(global_batch_size=16, max_gpu_batch_size=4)
DEVICE = elastic.device()
SAMPLES = 96


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        # A process that is forked from a worker has all that the worker has imported.
        assert "--spawn" not in sys.argv or "torch._dynamo" not in sys.modules, "the compiler takes as long as PyTorch"
        inputs = torch.linspace(-1, 1, 8) * (index % 13)
        return inputs, index % 3


def main(curve, epochs, *options):
    torch.manual_seed(0)
    if "--spawn" in options:
        sampler = elastic.Sampler(SAMPLES)
        loader = torch.utils.data.DataLoader(
            Squares(), batch_sampler=sampler, num_workers=2, multiprocessing_context="spawn"
        )
        batches, given = (lambda: sampler.steps(loader)), {"sampler": sampler}
    else:
        loader = elastic.DataLoader(Squares(), num_workers=2)
        sampler, batches, given = loader.sampler, (lambda: iter(loader)), {"loader": loader}
    model = torch.nn.Linear(8, 3).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = elastic.TorchState(model=model, optimizer=optimizer, **given)

    @elastic.run
    def train(state):
        for _ in sampler.epochs(epochs):
            for batch in batches():
                for inputs, labels in batch:
                    batch.backward(cross_entropy(model(inputs), labels))
                optimizer.step()
                if elastic.rank() == 0:
                    with curve.open("a") as file:
                        file.write(f"{state.step} {state.loss:.9g}\n")
                state.commit()
                if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
                    time.sleep(min(5.0, 0.05 * 1.1**state.step))  # what a test waits for comes before the last step

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
